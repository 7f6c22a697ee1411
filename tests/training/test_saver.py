"""What a run copies for its checkpoints, and when an elastic run writes them."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkhvd import Callback, Store
from sparkhvd.torch.context import use_engine
from sparkhvd.training import elastic
from sparkhvd.training.checkpoints.checkpoint import Checkpoint
from sparkhvd.training.checkpoints.files import Checkpoints
from sparkhvd.training.checkpoints.saver import Budget, RecordCopies
from sparkhvd.training.types import History
from tests.harness.ranks import run_ranks
from tests.training.ranks import Case, linear

pytestmark = pytest.mark.ranks


def case(tmp_path: Path, **user: Any) -> Case:
    model = linear()
    options = {"epochs": 6, "batch_size": 4, "least_ranks": 1, "checkpoint_interval_s": 0.01}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Case(
        Store.create(tmp_path / "store"), model, optimizer, rows=40, options=options, user=user
    )


def test_each_record_is_copied_once() -> None:
    copies = RecordCopies()
    history: History = [{"epoch": 1, "loss": math.nan}, {"epoch": 2, "loss": 1.0}]
    first = copies.of(history)
    history.append({"epoch": 3, "loss": 2.0})
    second = copies.of(history)
    assert len(first) == 2
    assert [a is b for a, b in zip(first, second, strict=False)] == [True, True]
    assert second[2] == history[2]
    assert second[2] is not history[2]


def test_custom_loop_copies_only_new_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[History] = []
    save = Checkpoints.save

    def saved(self: Checkpoints, checkpoint: Checkpoint, **options: Any) -> None:
        seen.append(checkpoint.history)
        save(self, checkpoint, **options)

    def loop(ctx: Any) -> None:
        for epoch in range(ctx.epochs):
            for batch in ctx.train_loader:
                ctx.backward(ctx.model(batch["x"]).square().mean())
                ctx.optimizer.step()
            ctx.log({"loss": float(epoch)})
            ctx.save_checkpoint()

    monkeypatch.setattr(Checkpoints, "save", saved)
    case(tmp_path, train_fn=loop).train(1, least_ranks=0, checkpoint_interval_s=300.0)
    assert [len(history) for history in seen] == list(range(1, 7))
    assert all(history[0] is seen[0][0] for history in seen)


def test_elastic_run_copies_only_new_records_for_the_copy_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def captured(spec: Any, state: Any, history: History, **_: Any) -> Checkpoint:
        return Checkpoint(len(history), {"w": torch.ones(1)}, {}, None, list(history), "")

    class Changes:
        def own_attributes(self, watch: Any) -> list[Any]:
            return []

    class State:
        changes, watch = Changes(), None

    monkeypatch.setattr(elastic, "capture", captured)

    def keep(engine: Any) -> list[Checkpoint]:
        training: Any = elastic._Training(case(tmp_path).spec())
        training.state = State()
        history: History = [{"epoch": 1, "loss": 2.0}]
        training.keep(history)
        first = training._held
        history.append({"epoch": 2, "loss": 1.0})
        training.keep(history)
        return [first, training._held]

    first, second = run_ranks(1, keep, using=use_engine)[0]
    assert [len(first.history), len(second.history)] == [1, 2]
    assert second.history[0] is first.history[0]
    assert second.model["w"] is not first.model["w"]


def test_elastic_run_writes_no_checkpoint_inside_an_epoch_but_keeps_the_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    positions = []
    save = Checkpoints.save

    def saved(self: Checkpoints, checkpoint: Checkpoint, **options: Any) -> None:
        positions.append(checkpoint.position)
        save(self, checkpoint, **options)

    class Slow(Callback):
        def on_step_end(self, ctx: Any, loss: float | None) -> None:
            time.sleep(0.005)

    monkeypatch.setattr(Budget, "BURST", 1)
    monkeypatch.setattr(Checkpoints, "save", saved)
    slow = case(tmp_path, callbacks=[Slow()])
    spec = slow.spec()
    training = run_ranks(1, lambda engine: elastic._Training(spec), using=use_engine)[0]
    slow.train(1, checkpoint_interval_s=training.spec.checkpoint_interval_s)
    assert positions == [(epoch, 0) for epoch in range(1, 7)]
