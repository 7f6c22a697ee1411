"""Outcomes as files in the run's folder, to report failures to other ranks and the driver."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection

from sparkhvd.runner.outcomes import Outcome, OutcomeKind, root_cause
from sparkhvd.runner.preflight import SharedFiles, outcome_path

# A rank that failed as a consequence waits, so that the rank with the cause ends the stage first.
_CONSEQUENCE_WAIT_S = 5.0
# The same for a rank that crashed, which may have the cause.
_CRASH_WAIT_S = 0.5
# Pause between two polls for other ranks' outcomes.
_POLL_S = 0.25
# Longest wait of the driver for an outcome that a rank has reported as written.
_LATE_S = 3.0


def write(files: SharedFiles | None, run_dir: str, outcome: Outcome) -> bool:
    """Write an outcome into the run's folder. Return False on failure or without a folder."""
    if files is None or not run_dir or outcome.rank is None:
        return False
    # Without the file the outcome travels in the exception, shortened.
    with contextlib.suppress(Exception):
        path = outcome_path(run_dir, outcome.attempt, outcome.rank)
        files.write_bytes(path, outcome.to_json().encode())
        return True
    return False


def await_cause(files: SharedFiles | None, run_dir: str, size: int, own: Outcome) -> Outcome:
    """Wait for a rank with the cause to end the stage and return the best known cause.

    When this task raises, Spark kills the other tasks of the stage and drops their errors. So an
    exception of the user's function is raised at once, a crash soon, a lost peer last.
    """
    wait = {OutcomeKind.CRASH: _CRASH_WAIT_S, OutcomeKind.COLLECTIVE: _CONSEQUENCE_WAIT_S}.get(
        own.kind, 0.0
    )
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        known = [own, *read_outcomes(files, run_dir, own.attempt, own.job_id, size)]
        cause = root_cause(known)
        if cause is not None and cause.kind != own.kind:
            return cause
    return own


def read_outcomes(
    files: SharedFiles | None, run_dir: str, attempt: int, job_id: str, size: int
) -> list[Outcome]:
    """Read the outcomes written so far by ranks of this launch. Empty without a shared store.

    Outcomes of an earlier fit with the same run_id, which also counted its attempts from 0, are ignored.
    """
    outcomes: list[Outcome] = []
    if files is None or not run_dir:
        return outcomes
    for rank in range(size):
        path = outcome_path(run_dir, attempt, rank)
        # A report about a failure must not fail: an unreadable file counts as missing.
        with contextlib.suppress(Exception):
            if files.exists(path):
                outcome = Outcome.from_json(files.read_bytes(path).decode())
                if outcome.job_id == job_id:
                    outcomes.append(outcome)
    return outcomes


def await_outcomes(
    files: SharedFiles | None,
    run_dir: str,
    attempt: int,
    job_id: str,
    size: int,
    ranks: Collection[int | None],
) -> list[Outcome]:
    """Read the outcomes once those of `ranks` exist: a file of another host may be visible late."""
    deadline = time.monotonic() + _LATE_S
    while True:
        outcomes = read_outcomes(files, run_dir, attempt, job_id, size)
        if {o.rank for o in outcomes}.issuperset(ranks) or time.monotonic() > deadline:
            return outcomes
        time.sleep(_POLL_S)
