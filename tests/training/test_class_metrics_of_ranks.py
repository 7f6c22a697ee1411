"""F1 and AUC over ranks equal scikit-learn's over all rows, for any distribution of the rows."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from sparkhvd.engine.engine import Engine
from sparkhvd.torch.context import use_engine
from sparkhvd.training.metrics import F1, Auc
from tests.harness.later import Later
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.ranks

reference = Later("sklearn.metrics")


@pytest.mark.parametrize(
    "rows",
    [(5,), (0, 40, 1), (300, 0, 0, 7), (1, 1), (0, 0), (400, 401, 399, 397, 403)],
    ids=str,
)
@pytest.mark.parametrize("kind", ["float32", "float64", "ties", "equal"])
def test_merged_metrics_equal_metrics_over_all_rows(rows: tuple[int, ...], kind: str) -> None:
    generator = np.random.default_rng()
    dtype = np.float64 if kind == "float64" else np.float32
    scores = [generator.standard_normal(n).astype(dtype) + r for r, n in enumerate(rows)]
    if kind == "ties":
        scores = [s.round() for s in scores]
    elif kind == "equal":
        scores = [s * 0 for s in scores]
    classes = [generator.integers(0, 2, n) for n in rows]

    def body(engine: Engine) -> dict[str, float]:
        rank = engine.rank
        found = {}
        for metric in (F1("f1", 0, "sigmoid"), Auc("auc", 0, "sigmoid")):
            for start in range(0, rows[rank], 64):
                part = slice(start, start + 64)
                metric.update(torch.tensor(scores[rank][part]), torch.tensor(classes[rank][part]))
            metric.combine()
            found |= metric.values()
        return found

    y, z = np.concatenate(classes), np.concatenate(scores)
    with warnings.catch_warnings(action="ignore"):
        results = run_ranks(len(rows), body, using=use_engine)
        expected = {
            "f1": reference.f1_score(y, z > 0, zero_division=0.0) if len(y) else np.nan,
            "auc": reference.roc_auc_score(y, z) if len(set(y.tolist())) == 2 else np.nan,
        }
    for result in results:
        assert result == pytest.approx(expected, rel=1e-12, nan_ok=True)


def test_nan_metric_on_one_rank_is_nan_on_all_ranks() -> None:
    def body(engine: Engine) -> float:
        metric = Auc("auc", 0, "sigmoid")
        nan = float("nan") if engine.rank else 0.0
        metric.update(torch.tensor([nan, 1.0]), torch.tensor([0, 1]))
        metric.combine()
        return metric.values()["auc"]

    assert np.isnan(run_ranks(2, body, using=use_engine)).all()
