"""States of Keras' metrics over ranks: results equal those of one process with the rows of all ranks."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="runs where keras is: pip install 'sparkhvd[keras]'")

import sparkhvd.torch as hvd  # noqa: E402 - after importorskip
from sparkhvd.keras.training import merge_states  # noqa: E402
from tests.torch.on_ranks import on_ranks  # noqa: E402

pytestmark = pytest.mark.ranks

SIZE = 3


class Largest(keras.metrics.Metric):  # type: ignore[misc]
    """A metric with rank 0's state."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.add_variable((), "zeros", aggregation="only_first_replica")

    def update_state(self, y: Any, predicted: Any, sample_weight: Any = None) -> None:
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(predicted)))

    def result(self) -> Any:
        return self.largest


def metrics() -> list[Any]:
    kinds = keras.metrics
    return [
        kinds.AUC(num_thresholds=50),
        kinds.AUC(curve="PR"),
        kinds.Precision(),
        kinds.F1Score(threshold=0.5),
        kinds.MeanIoU(2),
        kinds.BinaryAccuracy(),
        kinds.R2Score(),
    ]


def rows(seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, (40 + 7 * seed, 1)).astype("float32")
    return y, np.clip(0.4 * y + rng.uniform(0, 0.6, y.shape), 0, 1).astype("float32")


def test_merged_metrics_equal_one_process_including_auc_and_f1() -> None:
    whole, parts = metrics(), [metrics() for _ in range(SIZE)]
    for seed in range(SIZE):
        for one, some in zip(whole, parts[seed], strict=True):
            one.update_state(*rows(seed))
            some.update_state(*rows(seed))

    def merged() -> list[float]:
        own = parts[hvd.rank()]
        merge_states(SimpleNamespace(metrics_variables=[v for m in own for v in m.variables]))
        return [float(np.asarray(m.result().detach()).mean()) for m in own]

    found = on_ranks(SIZE, merged)
    wanted = [float(np.asarray(m.result().detach()).mean()) for m in whole]
    assert found[0] == found[1] == found[2]
    assert found[0] == pytest.approx(wanted, abs=1e-6)


def test_metric_variable_can_request_the_value_of_rank_0() -> None:
    parts = [Largest() for _ in range(2)]
    for number, part in enumerate(parts):
        part.update_state(np.zeros(1), np.array([0.25 + number], "float32"))

    def merged() -> float:
        own = parts[hvd.rank()]
        merge_states(SimpleNamespace(metrics_variables=own.variables))
        return float(own.result())

    assert on_ranks(2, merged) == [0.25, 0.25]
