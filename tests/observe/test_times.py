"""Times of a training by phase, and facts of this process, in the report of a fit."""

from __future__ import annotations

import time
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch import nn

from sparkhvd import Callback
from sparkhvd.data.store.store import Store
from sparkhvd.estimator.fitting.recorder import Recorder
from sparkhvd.training.types import History
from sparkhvd.training.user_code.callbacks import CallbackContext
from tests.training.ranks import Case

pytestmark = pytest.mark.ranks

EPOCHS = 3


class Sleeper(Callback):
    """Sleeps 0.1 s per epoch on one rank, and in a step on another."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_begin(self, ctx: CallbackContext) -> None:
        self._sleep(ctx, self.rank)

    def on_epoch_end(self, ctx: CallbackContext, record: object) -> None:
        self._sleep(ctx, self.rank)

    def on_step_end(self, ctx: CallbackContext, loss: float | None) -> None:
        self._sleep(ctx, 1 - self.rank)

    def on_train_end(self, ctx: CallbackContext, history: History) -> None:
        self._sleep(ctx, self.rank)

    def _sleep(self, ctx: CallbackContext, rank: int) -> None:
        if ctx.rank == rank:
            time.sleep(0.1)


@pytest.mark.parametrize("rank", [0, 1])
def test_callbacks_and_exchanges_between_epochs_have_their_own_phases(
    tmp_path: Path, rank: int
) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    user = {"callbacks": [Sleeper(rank)]}
    case = Case(Store.create(tmp_path), model, optimizer, rows=8, user=user)
    phases = [r["phases"] for r in case.train(2, batch_size=2, epochs=EPOCHS).profile["ranks"]]
    slow, other = phases[rank], phases[1 - rank]
    assert slow["callbacks"] >= (EPOCHS + 2) * 0.1
    # The other rank waits for the record of each epoch. Its own sleep in steps is part of the training.
    assert other["exchange"] >= EPOCHS * 0.1
    assert other.get("callbacks", 0.0) < 0.1 <= other["train"]


def test_versions_of_packages_are_read_once_per_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.create(tmp_path)
    first = Recorder()
    first.write(store, "runs/first", history=[])
    calls: list[str] = []
    monkeypatch.setattr(metadata, "version", calls.append)
    second = Recorder()
    second.write(store, "runs/second", history=[])
    assert calls == []
    assert second.document["versions"] == first.document["versions"]
    assert "torch" in first.document["versions"]
