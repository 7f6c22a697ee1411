"""The user's view of the engine: `hvd.metrics`, timelines, and tuning that changes no bit."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sparkhvd
import sparkhvd.observe.autotune
import sparkhvd.torch as hvd
from sparkhvd.errors import NotInitializedError
from sparkhvd.settings import Settings
from tests.torch.on_ranks import on_ranks

pytestmark = pytest.mark.ranks


def test_engine_metrics_are_printed_and_returned(capfd: pytest.CaptureFixture[str]) -> None:
    def body() -> Any:
        hvd.allreduce(torch.ones(1000), name="x")
        return sparkhvd.metrics(show=hvd.rank() == 0)

    shown = on_ranks(2, body)
    assert shown[0].counters["collectives"][0]["operations"] == 1
    assert shown[1].counters["rank"] == 1
    printed = capfd.readouterr().out
    assert printed == f"{shown[0]}\n"
    assert "allreduce" in printed
    with pytest.raises(NotInitializedError):
        sparkhvd.metrics()


def settled_json(path: Path) -> Any:
    """Read a file that is being written. Neither a read nor a write is atomic, so an invalid text must soon change."""
    text = path.read_text()
    deadline = time.monotonic() + 5
    while True:
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            before, text = text, path.read_text()
            if text == before and time.monotonic() > deadline:
                raise


@pytest.mark.parametrize("all_ranks", [False, True])
def test_every_rank_can_start_and_stop_the_timeline(all_ranks: bool, tmp_path: Path) -> None:
    def body() -> None:
        for number in range(2):
            hvd.start_timeline(tmp_path / f"{number}.json", all_ranks=all_ranks)
            hvd.allreduce(torch.ones(10), name=f"x{number}")
            hvd.barrier()
            if hvd.rank() == 0:  # whole at any moment, also before the ranks' parts are joined
                assert settled_json(tmp_path / f"{number}.json")
            hvd.stop_timeline()
            hvd.stop_timeline()

    on_ranks(2, body)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.json", "1.json"]
    for number in range(2):
        events = json.loads((tmp_path / f"{number}.json").read_text())
        assert {event["pid"] for event in events} == ({0, 1} if all_ranks else {0})
        found = {e["args"]["name"] for e in events if e["ph"] == "B"}
        assert f"allreduce.x{number}" in found


def train(steps: int) -> tuple[torch.Tensor, set[int]]:
    """Train a net of 4 MiB for some steps, and return its weights and the number of buckets of each step."""
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(512, 1024), nn.Tanh(), nn.Linear(1024, 512))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.05)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    numbers = set()
    for step in range(steps):
        x = torch.randn(4, 512, generator=torch.Generator().manual_seed(1000 * step + hvd.rank()))
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
        numbers.add(len(optimizer._reducers[0].buckets))
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), numbers


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1]])
def test_autotune_changes_buckets_and_chunks_but_no_bit(
    hosts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Short windows, so that many settings are tried.
    kwdefaults = sparkhvd.observe.autotune.Tuner.__init__.__kwdefaults__
    monkeypatch.setitem(kwdefaults, "warmup_steps", 1)
    monkeypatch.setitem(kwdefaults, "window_steps", 1)
    settings = Settings(bucket_bytes=1 << 20)
    fixed = on_ranks(2, lambda: train(40), settings=settings, hosts=hosts)
    tuned = on_ranks(
        2, lambda: train(40), settings=Settings(bucket_bytes=1 << 20, autotune="on"), hosts=hosts
    )
    assert torch.equal(fixed[0][0], tuned[0][0])
    assert torch.equal(fixed[1][0], tuned[1][0])
    assert len(fixed[0][1]) < len(tuned[0][1]), "no other bucket size was tried"
    assert tuned[0][1] == tuned[1][1]
