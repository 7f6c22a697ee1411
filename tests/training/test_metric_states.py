"""Metrics of torchmetrics over ranks equal one process with all rows."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.training.metrics import Forward, StateMetric, Totals, resolve_metrics
from tests.harness.later import Later
from tests.harness.ranks import RanksFailed
from tests.training.ranks import Case, linear

pytestmark = pytest.mark.pure

reference = Later("sklearn.metrics")
torchmetrics = Later("torchmetrics")
classification = Later("torchmetrics.classification")
regression = Later("torchmetrics.regression")


def constant(tmp_path: Path, outputs: int, **fields: Any) -> Case:
    """Make a fit that does not change the model."""
    model = linear(outputs=outputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seed = secrets.randbits(32)
    print(f"data_seed={seed}")
    return Case(Store.create(tmp_path), model, optimizer, data_seed=seed, **fields)


def predictions(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        output = case.model(torch.from_numpy(case.values["x"]))
    return output, torch.from_numpy(case.values["y"])


@pytest.mark.parametrize(
    ("size", "rows"),
    [(1, 77), (3, 77), (3, 2)],  # the last: a rank without rows
)
def test_torchmetrics_class_metrics_over_ranks_equal_one_process(
    tmp_path: Path, size: int, rows: int
) -> None:
    metrics = {
        "accuracy": classification.MulticlassAccuracy(2, average="micro"),
        "f1": classification.MulticlassF1Score(2, average="macro"),
        "auroc": classification.MulticlassAUROC(2),  # keeps every row: concatenated
        "counts": classification.MulticlassConfusionMatrix(2),
        "each": torchmetrics.ClasswiseWrapper(
            classification.MulticlassRecall(2, average=None), labels=["no", "yes"]
        ),
        "built_in": "accuracy",
        "built_in_f1": "f1",
        "built_in_auc": "auc",
    }
    case = constant(
        tmp_path,
        2,
        rows=rows,
        loss=nn.CrossEntropyLoss(),
        label="class",
        metrics=metrics,
        options={"batch_size": 8, "epochs": 2},  # the second epoch begins with an empty state
    )
    history = case.train(size).history
    output, label = predictions(case)
    for record in history:
        for name in ("accuracy", "f1", "auroc"):
            assert record[name] == pytest.approx(float(metrics[name](output, label)), rel=1e-6)
        counts = metrics["counts"](output, label).reshape(-1).tolist()
        assert [record[f"counts_{i}"] for i in range(4)] == counts
        by_class = metrics["each"](output, label)
        assert {k: record[f"each_{k}"] for k in by_class} == pytest.approx(
            {k: float(v) for k, v in by_class.items()}, rel=1e-6
        )
        assert record["built_in"] == pytest.approx(record["accuracy"], rel=1e-6)
        assert record["built_in_f1"] == pytest.approx(
            reference.f1_score(label, output.argmax(1)), rel=1e-6
        )
        if len(set(label.tolist())) == 2:
            expected = reference.roc_auc_score(label, output[:, 1] - output[:, 0])
            assert record["built_in_auc"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("size", [1, 3])
def test_torchmetrics_regression_metrics_get_one_dimensional_values(
    tmp_path: Path, size: int
) -> None:
    """Pearson's coefficient refuses outputs of shape (rows, 1), and its state has its own merge."""
    metrics = {
        "r": regression.PearsonCorrCoef(),
        "r2": regression.R2Score(),
        "mse": regression.MeanSquaredError(),
    }
    case = constant(
        tmp_path,
        1,
        rows=53,
        metrics=torchmetrics.MetricCollection(metrics),
        options={"batch_size": 4},
    )
    record = case.train(size).history[0]
    output, label = predictions(case)
    for name, metric in metrics.items():
        metric.reset()
        expected = float(metric(output[:, 0], label))
        # r and r2 are differences of numbers near 1, so float32 may lose most of their digits.
        assert record[name] == pytest.approx(expected, rel=1e-4, abs=1e-5), name


def test_binary_accuracy_of_single_logits_accepts_float_labels() -> None:
    (metric,) = resolve_metrics([classification.BinaryAccuracy()], ["y"], ["sigmoid"])
    assert isinstance(metric, StateMetric)
    assert metric.name == "BinaryAccuracy"
    totals = Totals([metric])
    output, label = torch.tensor([[3.0], [-1.0], [2.0]]), torch.tensor([[1.0], [0.0], [0.0]])
    totals.add(Forward((output,), (label,), output.mean(), 3.0, False, 3))
    assert totals.means()["BinaryAccuracy"] == pytest.approx(2 / 3)
    assert metric.metric._update_count == 0  # the user's object is left alone
    assert Totals([metric]).means()["BinaryAccuracy"] != totals.means()["BinaryAccuracy"]


def test_torchmetrics_metric_gets_flat_numbers_and_must_not_broadcast() -> None:
    seen: list[tuple[int, ...]] = []

    class Squared(torchmetrics.Metric):  # type: ignore[misc]
        def __init__(self, axis: int | None = None) -> None:
            super().__init__()
            self.axis = axis
            self.add_state("total", default=torch.tensor(0.0), dist_reduce_fx="sum")

        def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
            seen.extend([tuple(output.shape), tuple(label.shape)])
            output = output if self.axis is None else output.unsqueeze(self.axis)
            self.total += nn.functional.mse_loss(output, label)

        def compute(self) -> torch.Tensor:
            result: torch.Tensor = self.total
            return result

    def add(metric: Any, width: int) -> None:
        o, t = torch.ones(3, width), torch.zeros(3, width)
        (made,) = resolve_metrics({"m": metric}, ["y"], ["value"])
        Totals([made]).add(Forward((o,), (t,), o.mean(), 3.0, False, 3))

    add(Squared(), 1)
    add(Squared(), 2)
    assert seen == [(3,), (3,), (3, 2), (3, 2)]
    with pytest.raises(
        InvalidArgumentError, match=r"^metric 'm' broadcasts: .* number per row as \(rows,\)\. Give"
    ):
        add(Squared(1), 1)


def test_a_saved_metric_state_resumes_exactly() -> None:
    metrics = resolve_metrics(
        {"auc": classification.BinaryAUROC(), "r": regression.PearsonCorrCoef()},
        ["y"],
        ["sigmoid"],
    )
    generator = torch.Generator().manual_seed(1)
    output = torch.rand(30, 1, generator=generator)
    label = (torch.rand(30, 1, generator=generator) + output > 1.0).float()

    def add(totals: Totals, rows: slice) -> None:
        o, t = output[rows], label[rows]
        totals.add(Forward((o,), (t,), o.mean(), float(len(o)), False, len(o)))

    whole, before, after = Totals(metrics), Totals(metrics), Totals(metrics)
    for rows in (slice(0, 10), slice(10, 20), slice(20, 30)):
        add(whole, rows)
    add(before, slice(0, 10))
    saved = before.state_dict()
    add(before, slice(10, 20))  # this does not change the saved state
    after.load_state_dict(saved)
    add(after, slice(10, 20))
    add(after, slice(20, 30))
    assert after.means() == whole.means()


def curve() -> Any:
    """Make a metric whose value no history can hold."""

    class Curve(torchmetrics.Metric):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.add_state("total", default=torch.tensor(0.0), dist_reduce_fx="sum")

        def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
            self.total += output.sum()

        def compute(self) -> Any:
            return (self.total, self.total)

    return Curve()


def test_error_names_a_metric_that_returns_no_numbers(tmp_path: Path) -> None:
    case = constant(tmp_path, 1, metrics=[curve()])
    with pytest.raises(RanksFailed) as failed:
        case.train(2)
    # A rank may learn that another rank has ended before it fails itself.
    errors = [e for e in failed.value.errors.values() if isinstance(e, InvalidArgumentError)]
    assert errors
    for error in errors:
        assert str(error) == (
            "metric 'Curve' returned tuple, but the history of a fit holds only numbers. Give a "
            "metric whose compute() returns a tensor or a dict of tensors."
        )
