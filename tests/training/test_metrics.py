from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.training.metrics import Forward, Metric, Totals, resolve_metrics

pytestmark = pytest.mark.pure


def own(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output - label).abs().mean()


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ([], []),
        ("accuracy", ["accuracy"]),
        (["mse", own], ["mse", "own"]),
        ([[own]], ["own"]),
        ({"a": own, "b": "mae"}, ["a", "b"]),
        (own, ["own"]),
        (["mse", "mse", own, "mse"], ["mse", "mse_2", "own", "mse_3"]),
        ([lambda o, t: 0, lambda o, t: 1], ["<lambda>", "<lambda>_2"]),
        ([["f1", own], "auc"], ["f1", "own", "auc"]),
    ],
)
def test_metrics_have_unique_names(given: Any, names: list[str]) -> None:
    assert [m.name for m in resolve_metrics(given, ["y"], ["identity"])] == names


def test_each_label_gets_every_metric() -> None:
    metrics = resolve_metrics("mse", ["a", "b"], ["identity", "softmax"])
    assert [(m.name, m.label, m.link) for m in metrics] == [
        ("a_mse", 0, "identity"),
        ("b_mse", 1, "softmax"),
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([[own, "mae"]], ["a_own", "b_mae"]),  # Horovod's: one function per output
        ([["f1", own], [own, "mse"]], ["a_f1", "b_own", "a_own", "b_mse"]),
        ([[own]], ["a_own", "b_own"]),
        ([[None, "auc"]], ["b_auc"]),
        ([own, ["mae", None]], ["a_own", "b_own", "a_mae"]),
        ([[lambda o, t: 0, lambda o, t: 1]], ["a_<lambda>", "b_<lambda>"]),
        ({"error": ["mse", own], "m": "mae"}, ["a_error", "b_error", "a_m", "b_m"]),
    ],
)
def test_metric_group_has_a_metric_per_output(given: Any, expected: list[str]) -> None:
    metrics = resolve_metrics(given, ["a", "b"], ["identity", "sigmoid"])
    assert [m.name for m in metrics] == expected
    assert all(m.name.startswith("ab"[m.label]) for m in metrics)


def test_error_names_a_metric_group_of_wrong_size() -> None:
    with pytest.raises(InvalidArgumentError) as failed:
        resolve_metrics([[own, "mse", "mae"]], ["a", "b"], ["identity", "identity"])
    assert str(failed.value) == (
        "metrics has a group of 3 functions, but there are 2 labels. A list inside the list must have"
        " one function per label (None for a label without a metric), or one function for all labels."
    )


def test_metric_means_keep_the_order_of_the_metrics() -> None:
    totals = Totals(resolve_metrics(["f1", "mse", "auc", "mae"], ["y"], ["sigmoid"]))
    assert list(totals.means("val_")) == ["val_loss", "val_f1", "val_mse", "val_auc", "val_mae"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["recall"],
            "metrics has the name 'recall', which is not a built-in metric. Give one of accuracy, "
            "mse, mae, f1, auc, or a function of (output, label).",
        ),
        ([3], "metrics holds 3. Every entry must be a name or a function of (output, label)."),
        (
            {"epoch": own},
            "metrics: the name 'epoch' is reserved. Give a dict from other names to functions.",
        ),
    ],
)
def test_error_names_invalid_metrics(given: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as failed:
        resolve_metrics(given, ["y"], ["identity"])
    assert str(failed.value) == message


@pytest.mark.parametrize(
    ("output", "label", "link", "expected"),
    [
        ([[0.1, 0.9], [0.8, 0.2]], [1, 1], "softmax", 0.5),
        ([[-0.1], [0.2]], [[0.0], [1.0]], "sigmoid", 1.0),
        ([[0.4], [0.6]], [[0.0], [1.0]], "identity", 1.0),
        ([[1.0, -1.0]], [[1.0, 1.0]], "sigmoid", 0.5),
        ([[2.0, 1.0], [0.1, 0.3]], [[1.0, 0.0], [1.0, 0.0]], "softmax", 0.5),
        ([[-2.0, -1.0]], [[0.4, 0.6]], "softmax", 1.0),
    ],
)
def test_accuracy_compares_with_most_probable_class(
    output: Any, label: Any, link: str, expected: float
) -> None:
    (metric,) = resolve_metrics("accuracy", ["y"], [link])
    found = metric.row_sum(torch.tensor(output), torch.tensor(label))
    assert float(found) == pytest.approx(expected * len(output))


def test_accuracy_row_sum_is_exact() -> None:
    # 1 / 49 * 49 is less than 1.
    (metric,) = resolve_metrics("accuracy", ["y"], ["sigmoid"])
    for rows in (3, 7, 49, 98, 107):
        output = torch.full((rows, 1), -1.0)
        output[0] = 1.0
        assert float(metric.row_sum(output, torch.ones(rows, 1))) == 1


@pytest.mark.parametrize("shape", [(50, 4), (50, 4, 3)])
def test_accuracy_of_probabilities_uses_the_largest(shape: tuple[int, ...]) -> None:
    generator = np.random.default_rng()
    output, label = generator.standard_normal(shape), generator.dirichlet(np.ones(4), shape[:1])
    label = label.reshape(50, 4, *[1] * (len(shape) - 2)) + 0.1 * generator.random(shape)
    (metric,) = resolve_metrics("accuracy", ["y"], ["softmax"])
    found = metric.row_sum(torch.from_numpy(output), torch.from_numpy(label))
    assert float(found) == pytest.approx(50 * np.mean(output.argmax(1) == label.argmax(1)))


def test_mismatched_metric_shapes_raise_a_clear_error() -> None:
    with pytest.raises(InvalidArgumentError) as failed:
        Metric("mse", "mse", 0, "identity").row_sum(torch.ones(4, 3), torch.ones(4))
    assert str(failed.value) == (
        "metric 'mse' compares an output of shape (4, 3) with a label of shape (4,). Give a metric that fits this label, "
        "for example 'accuracy' for classes."
    )
    with pytest.raises(InvalidArgumentError, match=r"'m' returned the shape \(2,\) for 4 rows"):
        Metric("m", lambda o, t: torch.ones(2), 0, "identity").row_sum(torch.ones(4), torch.ones(4))


def test_metric_totals_over_batches_equal_totals_over_all_rows() -> None:
    metrics = resolve_metrics("mae", ["y"], ["identity"])
    generator = torch.Generator().manual_seed(0)
    output, label = torch.rand(10, 1, generator=generator), torch.rand(10, 1, generator=generator)
    totals = Totals(metrics)
    for part in (slice(0, 7), slice(7, 10)):
        o, t = output[part], label[part]
        totals.add(Forward((o,), (t,), (o - t).square().mean(), float(len(o)), False, len(o)))
    means = totals.means("val_")
    assert means["val_loss"] == pytest.approx(float((output - label).square().mean()), rel=1e-6)
    assert means["val_mae"] == pytest.approx(float((output - label).abs().mean()), rel=1e-6)


def test_loss_of_a_batch_without_rows_adds_nothing() -> None:
    totals = Totals(())
    rows, nan = torch.ones(2, 1), torch.tensor(float("nan"))
    totals.add(Forward((rows,), (rows,), torch.tensor(3.0), 2.0, True, 2))
    totals.add(Forward((rows,), (rows,), nan, 0.0, True, 2))
    assert totals.means() == {"loss": 3.0}
    assert totals.values.tolist() == [6.0, 2.0, 4.0]
