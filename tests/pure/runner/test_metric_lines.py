"""Loggers of `run(fn)`: what of the ranks' output they get, and what is shown."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from sparkhvd import log_metrics
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.observe.loggers.base import Fit, Logger, Metric, Sink
from sparkhvd.runner.loggers import LineSplitter, attach_loggers

pytestmark = pytest.mark.timeout(60)


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
    """Return the line that `log_metrics` gives a rank's driver."""
    log_metrics(metrics, step)
    return capsys.readouterr().err


def test_numbers_go_to_the_loggers_and_other_lines_where_they_went(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = logged(capsys, {"loss": torch.tensor(0.5), "rows": 3}, 7)
    found: list[Metric] = []
    shown = io.StringIO()
    splitter = LineSplitter(found.extend, shown)
    stamp = "2026-11-27T13:00:00.000+00:00 "
    splitter.write(f"[0] before\n[0] {line}{stamp}[11] {line}[0] after\n")
    splitter.flush()
    assert [m[:3] for m in found] == [("loss", 0.5, 7), ("rows", 3.0, 7)] * 2
    assert shown.getvalue() == "[0] before\n[0] after\n"


@pytest.mark.parametrize(
    "line",
    [
        '[0] metrics {"step": 1}\n',
        "[0] metrics {of mine}\n",
        '[0] metrics {"step": 1, "time": 0, "values": {"a": "b"}}\n',
        "metrics {}\n",
    ],
)
def test_lines_that_look_like_them_are_shown(line: str) -> None:
    shown = io.StringIO()
    LineSplitter(lambda _: pytest.fail("taken"), shown).write(line)
    assert shown.getvalue() == line


@pytest.mark.parametrize(
    ("metrics", "step"), [({"a": "b"}, 1), ({"a": 1.0}, 1.5), ([1.0], 1), ({"a": None}, 1)]
)
def test_what_is_no_number_is_an_error_on_the_rank(metrics: Any, step: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="log_metrics"):
        log_metrics(metrics, step)


def test_a_call_is_followed_to_its_end() -> None:
    kept, shown = Kept(), io.StringIO()
    with attach_loggers([kept], logged, {"num_proc": 2, "hosts": None}, shown, 0) as (stream, fn):
        assert stream is not None
        assert fn.__name__ == "logged"
        stream.write('[0] metrics {"step": 3, "time": 5.0, "values": {"loss": 1.5}}\n')
    (fit,) = kept.fits
    assert fit.run_id.startswith("logged-")
    assert fit.params == {"num_proc": "2"}
    assert kept.metrics == [Metric("loss", 1.5, 3, 5.0)]
    assert kept.state == "finished"
    with pytest.raises(ValueError, match="no"), attach_loggers([kept], logged, {}, shown, 0):
        raise ValueError("no")
    assert kept.state == "failed"


def test_without_loggers_the_stream_stays_as_it_is() -> None:
    shown = io.StringIO()
    with attach_loggers(None, logged, {}, shown, 1) as (stream, fn):
        assert stream is shown
        assert fn is logged
    with (
        pytest.raises(InvalidArgumentError, match="loggers"),
        attach_loggers(["mlflow"], logged, {}, shown, 1),  # type: ignore[list-item]
    ):
        pass
