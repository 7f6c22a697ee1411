"""Summary of a training, and the representation of a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator import TorchModel
from sparkhvd.estimator.evaluation import TrainingSummary, horovod_history

pytestmark = pytest.mark.pure

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
def test_training_summary_has_spark_fields_and_one_line_of_text(
    history: list[dict[str, Any]], losses: list[float], text: str
) -> None:
    summary = TrainingSummary(history, TIMINGS, "run-1")
    assert summary.totalIterations == len(history)
    assert summary.objectiveHistory == losses
    assert str(summary) == text
    assert repr(summary) == f"TrainingSummary({text})"  # what a cell of a notebook shows
    assert str(TrainingSummary(history, {}, "run-1")) == text.removesuffix(", 3.8 s")


FLAT = {"epoch": 1, "loss": 2.0, "a_mse": 1.0, "b_mse": 3.0, "rows": 9, "val_loss": 4.0}


@pytest.mark.parametrize(
    ("record", "labels", "expected"),
    [
        (
            {**FLAT, "val_a_mse": 5.0, "val_b_mse": 6.0, "seconds": 0.5},
            2,
            {
                "epoch": 1,
                "train": {"loss": 2.0, "a_mse": 1.0, "b_mse": 3.0, "all_metrics": [[1.0, 3.0]]},
                "validation": {
                    "loss": 4.0,
                    "a_mse": 5.0,
                    "b_mse": 6.0,
                    "all_metrics": [[5.0, 6.0]],
                },
                "rows": 9,
                "seconds": 0.5,
            },
        ),
        (
            {"epoch": 1, "loss": 2.0, "mse": 1.0, "f1": 0.5, "lr": 0.1},
            1,
            {
                "epoch": 1,
                "lr": 0.1,
                "train": {"loss": 2.0, "mse": 1.0, "f1": 0.5, "all_metrics": [[1.0], [0.5]]},
            },
        ),
        ({"reward": 5.0}, 0, {"train": {"reward": 5.0, "all_metrics": [[5.0]]}}),
        ({"train": {"loss": 1.0}}, 1, {"train": {"loss": 1.0}}),
    ],
)
def test_history_converts_to_the_format_of_horovod(
    record: dict[str, Any], labels: int, expected: dict[str, Any]
) -> None:
    assert horovod_history([record], labels) == [expected]


def test_model_history_is_flat_nested_or_a_dataframe() -> None:
    history = [{"epoch": e, "loss": 1 / e, "val_loss": 2 / e} for e in (1, 2)]
    model = TorchModel(model=torch.nn.Linear(2, 1), history=history, label_cols=["y"])
    assert model.history == history
    nested = model.getHistory()
    assert (nested[-1]["train"]["loss"], nested[-1]["validation"]["loss"]) == (0.5, 1.0)
    assert model.setHistory(nested).getHistory() == nested
    frame = model.setHistory(history).history_frame()
    assert frame.index.tolist() == [1, 2]
    assert frame["val_loss"].tolist() == [2.0, 1.0]
    assert model.setHistory([]).history_frame().empty


def test_repr_of_a_model_summarizes_module_columns_and_training() -> None:
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
