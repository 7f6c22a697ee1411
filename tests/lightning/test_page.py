"""The programs of docs/lightning.md, run as a reader runs them, against a loop over whole batches in one process."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.runner import run_local
from sparkhvd.topology import topology
from tests.harness.pages import named

pytest.importorskip("lightning", reason="runs where lightning is: pip install '.[lightning]'")

from sparkhvd.lightning.strategy import check_size  # noqa: E402 - after importorskip

pytestmark = pytest.mark.processes

PAGE = "docs/lightning.md"
RANKS, BATCH, EPOCHS = 2, 32, 3


def trained_alone(*, shuffled: bool) -> nn.Module:
    """Train as the programs do, on the batches of both ranks together."""
    torch.manual_seed(1)
    inputs = torch.randn(512, 10)
    data = TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))
    net = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    # Lightning takes its seed.
    sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=1, shuffle=shuffled)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, RANKS * BATCH, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
    return net


def run_programs(folder: str) -> tuple[str, float, str]:
    """Run the programs on a rank, and return its place in both and the trainer's last loss."""
    torch.set_num_threads(1)
    os.chdir(folder)
    trainer = runpy.run_path("train.py")["trainer"]
    fabric = runpy.run_path("fabric.py")["fabric"]
    place, of_fabric = (f"{each.global_rank} of {each.world_size}" for each in (trainer, fabric))
    return place, trainer.callback_metrics["loss_epoch"].item(), of_fabric


@pytest.mark.usefixtures("zygote_has_torch")
def test_page_programs_give_the_results_of_one_process(tmp_path: Path) -> None:
    programs = [named(PAGE, name).text for name in ("trainer", "fabric")]
    for name, program in zip(("train.py", "fabric.py"), programs, strict=True):
        (tmp_path / name).write_text(program)
    found = run_local(run_programs, (str(tmp_path),), num_proc=RANKS)
    assert [(rank, same) for rank, _, same in found] == [("0 of 2",) * 2, ("1 of 2",) * 2]
    assert len({loss for _, loss, _ in found}) == 1
    state = torch.load(tmp_path / "regression.ckpt", weights_only=True)["state_dict"]
    of_fabric = torch.load(tmp_path / "fabric.ckpt", weights_only=True)["model"]
    for name, weights in trained_alone(shuffled=True).state_dict().items():
        torch.testing.assert_close(state[f"net.{name}"], weights, rtol=0, atol=1e-5)
    for name, weights in trained_alone(shuffled=False).state_dict().items():
        torch.testing.assert_close(of_fabric[name], weights, rtol=0, atol=1e-5)


ALONE, FOUR = topology(0, ["a"]), topology(0, ["a", "a", "b", "b"])


@pytest.mark.parametrize(
    ("devices", "hosts", "place"),
    [(1, 1, ALONE), (1, 1, FOUR), (1, 2, FOUR), (2, 2, FOUR), (4, 1, FOUR)],
)
def test_devices_and_nodes_that_match_the_job_are_accepted(
    devices: int, hosts: int, place: object
) -> None:
    check_size(devices, hosts, False, place)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("devices", "hosts", "place", "message"),
    [
        (
            4,
            1,
            ALONE,
            r"devices=4, num_nodes=1.* a job of one rank.*`sparkhvdrun -np 4 python script",
        ),
        (2, 2, ALONE, "Start 4 ranks"),
        (1, 2, ALONE, "Start 2 ranks"),
        (2, 1, FOUR, r"needs 2 ranks, but 4 were started, on 2 host\(s\)"),
        (1, 3, FOUR, "needs 3 ranks, but 4 were started"),
        (8, 1, FOUR, "needs 8 ranks"),
    ],
)
def test_devices_and_nodes_that_mismatch_the_job_raise(
    devices: int, hosts: int, place: object, message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        check_size(devices, hosts, False, place)  # type: ignore[arg-type]
