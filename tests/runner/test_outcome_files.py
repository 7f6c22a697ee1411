"""Outcomes of ranks in files, which a task and the driver read."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from sparkhvd.runner import outcome_files, preflight
from sparkhvd.runner.outcomes import Outcome, OutcomeKind

pytestmark = pytest.mark.pure


class Files:
    """A folder as `SharedFiles`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write_bytes(self, path: str, data: bytes) -> None:
        (self._folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self._folder / path).write_bytes(data)

    def read_bytes(self, path: str) -> bytes:
        return (self._folder / path).read_bytes()

    def exists(self, path: str) -> bool:
        return (self._folder / path).exists()


def test_outcome_files_of_an_earlier_fit_are_ignored(tmp_path: Path) -> None:
    files = Files(tmp_path)
    old = Outcome(0, OutcomeKind.EXCEPTION, error="ValueError", message="fixed since", job_id="one")
    files.write_bytes(preflight.outcome_path("runs/r", 0, 0), old.to_json().encode())
    assert outcome_files.read_outcomes(files, "runs/r", 0, "two", 2) == []
    assert outcome_files.read_outcomes(files, "runs/r", 0, "one", 2) == [old]
    new = replace(old, rank=1, job_id="two")
    files.write_bytes(preflight.outcome_path("runs/r", 0, 1), new.to_json().encode())
    assert outcome_files.read_outcomes(files, "runs/r", 0, "two", 2) == [new]


def test_the_driver_waits_for_a_late_outcome_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Files(tmp_path)
    late = Outcome(1, OutcomeKind.EXCEPTION, error="ValueError", message="bad", job_id="one")
    path = preflight.outcome_path("runs/r", 0, 1)
    assert outcome_files.await_outcomes(files, "runs/r", 0, "one", 2, set()) == []
    timer = threading.Timer(0.3, files.write_bytes, (path, late.to_json().encode()))
    timer.start()
    try:
        assert outcome_files.await_outcomes(files, "runs/r", 0, "one", 2, {1}) == [late]
    finally:
        timer.join()
    monkeypatch.setattr(outcome_files, "_LATE_S", 0.1)
    assert outcome_files.await_outcomes(files, "runs/r", 0, "one", 2, {0, 1}) == [late]
