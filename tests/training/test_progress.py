from __future__ import annotations

import json
from typing import Any

import pytest

import sparkhvd.torch as hvd
from sparkhvd.training import profile
from sparkhvd.training.profile import StepReporter

pytestmark = pytest.mark.pure


class Clock:
    """Seconds that a test sets, in place of the module `time`."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(profile, "time", clock := Clock())
    return clock


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    reports: list[dict[str, Any]] = []

    def take(text: str) -> None:
        assert len(text.encode()) < 4087  # a frame on the pipe to the task
        reports.append(json.loads(text))

    monkeypatch.setattr(profile, "report_progress", take)
    return reports


def be_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setattr(hvd, "rank", lambda: rank)
    monkeypatch.setattr(hvd, "size", lambda: 2)


def test_ranks_report_waiting_times_on_change_and_periodically(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, sent: list[dict[str, Any]]
) -> None:
    be_rank(monkeypatch, 1)
    it = StepReporter(1, 2, 100)
    counts = []
    for second in range(1, 15):
        clock.now = float(second)
        share = 0.5 if second < 8 else 0.7
        it.step(second, 4, dict, waited_s=share * second)
        counts.append(len(sent))
    # At 1 s, again at 6 s because the first may be lost, changed at 8 s, again at 13 s.
    assert counts == [1, 1, 1, 1, 1, 2, 2, 3, 3, 3, 3, 3, 4, 4]
    assert sent[0] == {"rank": 1, "epoch": 1, "waited": 0.5}


@pytest.mark.parametrize(("name", "shown"), [("m", 10), ("m" * 1000, 4), ("é" * 3000, 1)])
def test_progress_report_with_long_metric_names_keeps_other_values(
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
    sent: list[dict[str, Any]],
    name: str,
    shown: int,
) -> None:
    be_rank(monkeypatch, 0)
    it = StepReporter(1, 2, 100)
    clock.now = 1.0
    it.step(1, 4, lambda: {"loss": 0.5} | {f"{name}{i}": 1.0 for i in range(40)})
    assert [len(report["means"]) for report in sent] == [shown]
    assert sent[0]["means"]["loss"] == 0.5
