"""Summary of a training, and the representation of a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator import TorchModel
from sparkhvd.estimator.summary import TrainingSummary

TIMINGS = {"materialize": 1.0, "launch": 0.5, "train": 2.25}


@pytest.mark.parametrize(
    ("history", "losses", "text"),
    [
        (
            [
                {"epoch": 1, "loss": 2.0, "val_loss": 3.0},
                {"epoch": 2, "loss": 0.1234, "val_loss": 1.5},
            ],
            [2.0, 0.1234],
            "2 epochs, loss 0.1234, val_loss 1.5, 3.8 s",
        ),
        ([{"epoch": 1, "reward": 5.0}], [], "1 epoch, 3.8 s"),
        ([{"epoch": 1, "loss": "none"}], [], "1 epoch, 3.8 s"),
        ([], [], "0 epochs, 3.8 s"),
    ],
)
def test_summary(history: list[dict[str, Any]], losses: list[float], text: str) -> None:
    summary = TrainingSummary(history, TIMINGS, "run-1")
    assert summary.totalIterations == len(history)
    assert summary.objectiveHistory == losses
    assert str(summary) == text


def test_a_model_shows_what_it_is() -> None:
    model = TorchModel()
    assert repr(model) == f"{model.uid}: no trained module"
    with pytest.raises(InvalidArgumentError, match="no trained module"):
        _ = model.summary
    columns = [SimpleNamespace(name="a"), SimpleNamespace(name="b")]
    fitted: Any = SimpleNamespace(
        module=torch.nn.Linear(2, 1),
        columns=columns,
        labels=("y",),
        history=[{"epoch": 1, "loss": 0.5}],
        timings=TIMINGS,
        run_id="r",
    )
    model._fitted = fitted
    assert (
        repr(model) == f"{model.uid}: Linear with 3 parameters, a, b -> y; 1 epoch, loss 0.5, 3.8 s"
    )
    assert model.summary.run_id == "r"
