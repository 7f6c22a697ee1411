"""Timelines of runs: one file with the first steps of every rank, whatever happens to a rank."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparkhvd.data.store.store import Store
from sparkhvd.errors import StoreError
from sparkhvd.training.train_fn import TrainFnContext
from tests.harness.ranks import RanksFailed
from tests.training.ranks import RUN_DIR, Case

pytestmark = pytest.mark.ranks

PATH = f"{RUN_DIR}/timeline.json"


def case_of(tmp_path: Path, **options: Any) -> Case:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Case(Store.create(tmp_path), model, optimizer, rows=64, **options)


def spans(events: list[dict[str, Any]], rank: int) -> dict[str, list[dict[str, Any]]]:
    """Return the spans of a rank's own work, by name."""
    found: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        if event.get("cat") == "training" and event["pid"] == rank:
            found.setdefault(event["name"], []).append(event)
    return found


def test_run_timeline_shows_the_work_of_every_rank_and_each_collective(tmp_path: Path) -> None:
    case = case_of(tmp_path)
    case.train(2, timeline=1000, batch_size=8, epochs=2, has_validation=True, validation=0.25)
    events = json.loads(case.store.read_bytes(PATH))
    for rank in range(2):
        found = spans(events, rank)
        steps = len(found["step"])
        assert steps >= 6
        for name in ("forward", "backward", "wait for gradients", "optimizer"):
            assert len(found[name]) == steps
        assert len(found["data"]) >= steps
        assert len(found["validate"]) == len(found["checkpoint"]) == 2
        assert {"load"} <= set(found)
        for step, forward in zip(found["step"][1:], found["forward"][1:], strict=True):
            assert step["ts"] <= forward["ts"] + 0.001
            assert forward["ts"] + forward["dur"] <= step["ts"] + step["dur"] + 0.001
        ends = Counter(e["ph"] for e in events if e["pid"] == rank and e["ph"] in "BE")
        assert ends["B"] == ends["E"] > steps  # operations, those of gradients among them
    lanes = [e["args"]["name"] for e in events if e.get("name") == "thread_name" and e["pid"] == 1]
    assert lanes.count("training") == 1


def test_run_timeline_ends_after_the_requested_steps(tmp_path: Path) -> None:
    case = case_of(tmp_path)
    case.train(2, timeline=3, batch_size=8, epochs=2)
    found = spans(json.loads(case.store.read_bytes(PATH)), 1)
    assert [len(found[name]) for name in ("step", "backward", "optimizer")] == [3, 3, 3]


def train_fn(ctx: TrainFnContext) -> None:
    for _ in range(ctx.start_epoch, ctx.epochs):
        for batch in ctx.train_loader:
            ctx.optimizer.zero_grad()
            ctx.backward(((ctx.model(batch["x"]) - batch["y"].reshape(-1, 1)) ** 2).mean())
            ctx.optimizer.step()
        ctx.log({"loss": 1.0})
        ctx.save_checkpoint()


def test_the_timeline_records_a_custom_training_loop(tmp_path: Path) -> None:
    case = case_of(tmp_path, loss=None, user={"train_fn": train_fn})
    case.train(2, timeline=1000, batch_size=8, epochs=1)
    found = spans(json.loads(case.store.read_bytes(PATH)), 1)
    assert [len(found[n]) for n in ("step", "forward", "backward", "optimizer")] == [4] * 4
    assert len(found["data"]) == 5


def test_a_fit_continues_if_its_timeline_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(tmp_path)
    write = Store.open_output

    def refuse(self: Store, path: str) -> Any:
        if path == PATH:
            raise StoreError("the store is full")
        return write(self, path)

    monkeypatch.setattr(Store, "open_output", refuse)
    with pytest.warns(UserWarning, match=r"no timeline of this run: the store is full"):
        assert len(case.train(2, timeline=1000, batch_size=8, epochs=1).history) == 1


def test_timeline_of_rank_0_is_kept_after_an_error(tmp_path: Path) -> None:
    def fail(ctx: TrainFnContext) -> None:
        next(iter(ctx.train_loader))
        raise ValueError("no")

    case = case_of(tmp_path, loss=None, user={"train_fn": fail})
    with pytest.raises(RanksFailed, match="train_fn raised ValueError: no"):
        case.train(2, timeline=1000, batch_size=8, epochs=1)
    assert {e["pid"] for e in json.loads(case.store.read_bytes(PATH))} == {0}
