"""F1 and AUC by name over batches equal scikit-learn's over all rows."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.training.metrics import F1, Auc, Forward, Totals, resolve_metrics
from tests.harness.later import Later

pytestmark = pytest.mark.pure

reference = Later("sklearn.metrics")

SIZES = (1, 2, 7, 301)


def value(name: str, output: Any, label: Any, link: str = "sigmoid", batch: int = 5) -> float:
    """Compute a metric over batches. The state after the middle batch passes through a checkpoint."""
    output, label = torch.as_tensor(output), torch.as_tensor(label)
    metrics = resolve_metrics(name, ["y"], [link])
    totals = Totals(metrics)
    for start in range(0, len(output), batch):
        o, t = output[start : start + batch], label[start : start + batch]
        totals.add(Forward((o,), (t,), torch.zeros(()), float(len(o)), False, len(o)))
        if start == len(output) // 2 // batch * batch:
            saved, totals = totals.state_dict(), Totals(metrics)
            totals.load_state_dict(saved)
    return totals.means()[name]


def scores(rows: int, *columns: int, ties: bool = False) -> np.ndarray:
    values = np.random.default_rng().standard_normal((rows, *columns)).astype(np.float32)
    return values.round(1) if ties else values


def classes(rows: int, number: int) -> np.ndarray:
    return np.random.default_rng().integers(0, number, rows)


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("ties", [False, True])
def test_auc_equals_scikit_learn(rows: int, ties: bool) -> None:
    z, y = scores(rows, ties=ties), classes(rows, 2)
    with warnings.catch_warnings(action="ignore"):  # one class: NaN
        expected = pytest.approx(reference.roc_auc_score(y, z), rel=1e-12, nan_ok=True)
    pairs = np.stack([np.zeros(rows, np.float32), z], 1)  # two scores rank by their difference
    assert value("auc", z, y.astype(np.float32)) == expected
    assert value("auc", z[:, None], y[:, None], "identity") == expected
    assert value("auc", pairs, y, "softmax") == expected
    assert value("auc", pairs, np.eye(2, dtype=np.float32)[y], "softmax") == expected


def test_auc_is_exact_over_many_batches_and_large_scores() -> None:
    z, y = scores(3001).astype(np.float64) * 1e300, classes(3001, 2)
    assert value("auc", z, y, batch=1) == pytest.approx(reference.roc_auc_score(y, z), rel=1e-12)
    assert value("auc", np.array([-np.inf, 0.0, -0.0, np.inf]), np.array([0, 0, 1, 1])) == 0.875


def test_auc_ignores_labels_that_are_no_class() -> None:
    z, y = scores(50, 2), classes(50, 3) - 1
    seen = y >= 0
    expected = pytest.approx(
        reference.roc_auc_score(y[seen], (z[:, 1] - z[:, 0])[seen]), nan_ok=True
    )
    assert value("auc", z, np.where(seen, y, -100), "softmax") == expected


def test_auc_is_nan_for_one_class_no_rows_or_nan() -> None:
    assert math.isnan(value("auc", [0.5, 1.0], [1, 1]))
    assert math.isnan(Totals(resolve_metrics("auc", ["y"], ["sigmoid"])).means()["auc"])
    assert math.isnan(value("auc", [0.5, math.nan, 1.0], [0, 1, 1]))


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("link", ["sigmoid", "identity"])
def test_f1_of_two_classes_is_the_f1_of_the_positive_class(rows: int, link: str) -> None:
    z, y = scores(rows), classes(rows, 2)
    threshold = 0.0 if link == "sigmoid" else 0.5
    expected = pytest.approx(reference.f1_score(y, z > threshold, zero_division=0.0), rel=1e-12)
    with warnings.catch_warnings(action="ignore"):  # no positive row
        assert value("f1", z, y.astype(np.float32), link) == expected
        assert value("f1", z[:, None], y, link) == expected
        pairs = np.stack([np.full(rows, threshold, np.float32), z], 1)
        assert value("f1", pairs, y, "softmax") == expected


@pytest.mark.parametrize("rows", SIZES)
def test_multiclass_f1_averages_over_classes_that_occur(rows: int) -> None:
    z, y = scores(rows, 5), classes(rows, 3)  # two classes may be predicted alone
    expected = pytest.approx(reference.f1_score(y, z.argmax(1), average="macro", zero_division=0.0))
    assert value("f1", z, y, "softmax") == expected
    assert value("f1", z, np.eye(5)[y], "softmax") == expected
    # Of images, and with pixels that the loss ignores.
    pixels, there = scores(rows, 5, 2, 3), classes(rows * 6, 5).reshape(rows, 2, 3)
    seen = there != 4
    expected = pytest.approx(
        reference.f1_score(there[seen], pixels.argmax(1)[seen], average="macro", zero_division=0.0)
    )
    assert value("f1", pixels, np.where(seen, there, -100), "softmax") == expected


def test_f1_of_several_labels_per_row_is_their_mean() -> None:
    z, y = scores(80, 4), classes(320, 2).reshape(80, 4)
    assert value("f1", z, y.astype(np.float32)) == pytest.approx(
        reference.f1_score(y, z > 0, average="macro")
    )


def test_f1_without_positive_rows_is_zero_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="metric 'f1' is 0, because no label and no prediction is"):
        assert value("f1", [-0.5, -1.0], [0.0, 0.0]) == 0
    assert math.isnan(Totals(resolve_metrics("f1", ["y"], ["sigmoid"])).means()["f1"])


@pytest.mark.parametrize(
    ("metric", "output", "label"),
    [
        (
            F1("m", 0, "softmax"),
            torch.ones(4, 3),
            torch.ones(4, 2, dtype=torch.int64)[:, 0].repeat(2),
        ),
        (F1("m", 0, "sigmoid"), torch.ones(4), torch.ones(4, 2)),
        (Auc("m", 0, "softmax"), torch.ones(4, 3), torch.ones(4, dtype=torch.int64)),
        (Auc("m", 0, "sigmoid"), torch.ones(4, 2), torch.ones(4, 2)),
    ],
)
def test_mismatched_class_metric_shapes_raise_a_clear_error(
    metric: F1 | Auc, output: Any, label: Any
) -> None:
    with pytest.raises(InvalidArgumentError, match=r"metric 'm' .*shape \(4.*of shape \("):
        metric.update(output, label)
