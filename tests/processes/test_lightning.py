"""The program of docs/lightning.md, as a reader would run it, against a loop over whole batches in one process."""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.runner import run_local
from sparkhvd.topology import topology
from tests.harness.paths import ROOT

pytest.importorskip("lightning", reason="runs where lightning is: pip install '.[lightning]'")

from sparkhvd.lightning.devices import check_size  # noqa: E402 - after importorskip

PAGE = ROOT / "docs" / "lightning.md"
RANKS, BATCH, EPOCHS = 2, 32, 3


def trained_alone() -> nn.Module:
    """Train as the program does, on the batches of both ranks together."""
    torch.manual_seed(1)
    inputs = torch.randn(512, 10)
    data = TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))
    net = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=1)  # Lightning takes its seed
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, RANKS * BATCH, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
    return net


def run_program(folder: str) -> tuple[str, float]:
    """Run the program on a rank; return its place and the last loss."""
    torch.set_num_threads(1)
    os.chdir(folder)
    trainer = runpy.run_path("train.py")["trainer"]
    return f"{trainer.global_rank} of {trainer.world_size}", trainer.callback_metrics[
        "loss_epoch"
    ].item()


def test_program_of_the_page_trains_as_one_process(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    found = run_local(run_program, (str(tmp_path),), num_proc=RANKS)
    assert [rank for rank, _ in found] == ["0 of 2", "1 of 2"]
    assert len({loss for _, loss in found}) == 1
    state = torch.load(tmp_path / "regression.ckpt", weights_only=True)["state_dict"]
    for name, weights in trained_alone().state_dict().items():
        torch.testing.assert_close(state[f"net.{name}"], weights, rtol=0, atol=1e-5)


ALONE, FOUR = topology(0, ["a"]), topology(0, ["a", "a", "b", "b"])


@pytest.mark.parametrize(
    ("devices", "hosts", "place"),
    [(1, 1, ALONE), (1, 1, FOUR), (1, 2, FOUR), (2, 2, FOUR), (4, 1, FOUR)],
)
def test_numbers_that_agree_with_the_job(devices: int, hosts: int, place: object) -> None:
    check_size(devices, hosts, False, place)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("devices", "hosts", "place", "message"),
    [
        (4, 1, ALONE, r"devices=4, num_nodes=1.* started alone.*`sparkhvdrun -np 4 python script"),
        (2, 2, ALONE, "Start 4 ranks"),
        (1, 2, ALONE, "Start 2 ranks"),
        (2, 1, FOUR, r"makes 2 ranks, and 4 were started, on 2 host\(s\)"),
        (1, 3, FOUR, "makes 3 ranks, and 4 were started"),
        (8, 1, FOUR, "makes 8 ranks"),
    ],
)
def test_numbers_that_do_not(devices: int, hosts: int, place: object, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        check_size(devices, hosts, False, place)  # type: ignore[arg-type]
