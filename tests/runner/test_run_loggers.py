"""Loggers of `run(fn)`: the part of the ranks' output that they get, and the part that is shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from sparkhvd import log_metrics
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.observe.loggers.base import Fit, Logger, Metric, Sink
from sparkhvd.runner.loggers import attach_loggers, metrics_of

pytestmark = [pytest.mark.pure, pytest.mark.timeout(60)]


class Kept(Logger, Sink):
    """Logger that keeps everything."""

    def __init__(self) -> None:
        self.fits: list[Fit] = []
        self.metrics: list[Metric] = []
        self.state = ""

    def begin(self, fit: Fit) -> Sink:
        self.fits.append(fit)
        return self

    def log(self, metrics: Sequence[Metric]) -> None:
        self.metrics += metrics

    def finish(self, state: str, files: object) -> None:
        self.state = state


def logged(capsys: pytest.CaptureFixture[str], metrics: dict[str, Any], step: int) -> str:
    """Return the entry that `log_metrics` makes."""
    log_metrics(metrics, step)
    return capsys.readouterr().err.removeprefix("metrics ")


def test_metrics_entry_contains_numbers_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    found = metrics_of(logged(capsys, {"loss": torch.tensor(0.5), "rows": 3}, 7))
    assert [m[:3] for m in found] == [("loss", 0.5, 7), ("rows", 3.0, 7)]


@pytest.mark.parametrize(
    "entry",
    [
        "",
        "[]",
        '{"step": 1}',
        "{of mine}",
        '{"step": 1, "time": 0, "values": {"a": "b"}}',
        '{"step": 1, "time": 0, "values": [1]}',
        '{"step": Infinity, "time": 0, "values": {"a": 1}}',
        "[" * 100_000,
    ],
)
def test_invalid_metrics_entry_is_dropped(entry: str) -> None:
    assert metrics_of(entry) == []


def test_too_large_metrics_entry_raises() -> None:
    with pytest.raises(InvalidArgumentError, match="several calls"):
        log_metrics({"n" * 1000 + str(i): 1.0 for i in range(100)}, 1)


@pytest.mark.parametrize(
    ("metrics", "step"), [({"a": "b"}, 1), ({"a": 1.0}, 1.5), ([1.0], 1), ({"a": None}, 1)]
)
def test_a_metric_other_than_a_number_raises_on_the_rank(metrics: Any, step: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="log_metrics"):
        log_metrics(metrics, step)


def test_loggers_get_params_metrics_and_final_state_of_a_run() -> None:
    kept = Kept()
    with attach_loggers([kept], logged, {"num_proc": 2, "hosts": None}, 0) as (metrics, fn):
        assert metrics is not None
        assert fn.__name__ == "logged"
        metrics(0, '{"step": 3, "time": 5.0, "values": {"loss": 1.5}}')
    (fit,) = kept.fits
    assert fit.run_id.startswith("logged-")
    assert fit.params == {"num_proc": "2"}
    assert kept.metrics == [Metric("loss", 1.5, 3, 5.0)]
    assert kept.state == "finished"
    with pytest.raises(ValueError, match="no"), attach_loggers([kept], logged, {}, 0):
        raise ValueError("no")
    assert kept.state == "failed"


def test_logger_function_gets_the_metrics() -> None:
    found: list[Metric] = []
    with attach_loggers(found.extend, logged, {}, 0) as (metrics, _):
        assert metrics is not None
        metrics(1, '{"step": 3, "time": 5.0, "values": {"loss": 1.5}}')
    assert found == [Metric("loss", 1.5, 3, 5.0)]


def test_function_is_unchanged_without_loggers() -> None:
    with attach_loggers(None, logged, {}, 1) as (metrics, fn):
        assert metrics is None
        assert fn is logged
    with (
        pytest.raises(InvalidArgumentError, match="loggers"),
        attach_loggers(["mlflow"], logged, {}, 1),  # type: ignore[list-item]
    ):
        pass
