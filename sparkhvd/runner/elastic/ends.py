"""Ends of a function's processes: whose results count, and which failure explains the others. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sparkhvd.elastic.membership import STATE_IS_GONE
from sparkhvd.errors import ElasticError, SparkhvdError
from sparkhvd.runner.elastic.launcher import Verdict
from sparkhvd.runner.outcomes import Kind, Outcome, error_of, is_retryable, root_cause
from sparkhvd.runner.watching import Ended

__all__ = ["Ends", "Failure", "end_of"]

_FAILED = 1
# Of an outcome's message in the line of a change.
_SHOWN = 200


def end_of(outcome: Outcome) -> Ended:
    """Return the end of a process for the launcher."""
    assert outcome.rank is not None
    # What a function raises before it was a rank, another process would raise, too.
    is_final = outcome.kind in (Kind.EXCEPTION, Kind.EXIT, Kind.PREFLIGHT)
    status = 0 if outcome.kind == Kind.OK else _FAILED
    return Ended(outcome.rank, status, _how(outcome), is_final)


def _how(outcome: Outcome) -> str:
    """Return how a process has ended, for the line of a change."""
    if outcome.kind == Kind.LOST:
        return "was lost with its Spark task"
    if outcome.kind == Kind.PREFLIGHT:
        return f"could not start: {outcome.message[:_SHOWN]}"
    if outcome.error:
        text = outcome.message.partition("\n")[0]
        return f"raised {outcome.error}: {text[:_SHOWN]}"
    return f"ended with {outcome.exit}"


@dataclass(frozen=True)
class Failure:
    """Failure of a job, and whether all of its ranks were lost, so that it may do better if it begins anew."""

    error: SparkhvdError
    is_lost: bool


class Ends:
    """Ends of a job's processes.

    Args:
        verdict: end of the job.
        outcomes: of its processes, by number.
    """

    def __init__(self, verdict: Verdict, outcomes: Mapping[int, Outcome]) -> None:
        self._outcomes = outcomes
        self._members = verdict.members
        self._failed = [self._ranked(outcomes[ended.rank]) for ended in verdict.failed]
        self._cause = root_cause(self._failed)

    def order(self) -> list[int]:
        """Return the numbers of the processes whose results count, by rank."""
        well = [number for number, outcome in self._outcomes.items() if outcome.kind == Kind.OK]
        # Those that never met others are of a function without `init()`.
        return [number for number in self._members if number in well] or sorted(well)

    @property
    def is_lost(self) -> bool:
        """Whether nothing but losses explains the end."""
        return self._cause is None or is_retryable(self._cause)

    @property
    def size(self) -> int:
        """Number of ranks of the last generation, as an error names it."""
        return max(len(self._members), 1, *(1 + (each.rank or 0) for each in self._failed))

    def failure(self, problem: str) -> Failure:
        """Return the failure of a job that has not finished.

        Args:
            problem: why it could not go on; "" if nothing but its processes has failed.
        """
        error: SparkhvdError | None = None
        if self._cause is not None:
            error = error_of(self._cause, self.size, others=self._failed)
            if not problem:
                return Failure(error, self.is_lost)
        problem = problem or STATE_IS_GONE
        elastic = ElasticError(f"The elastic job cannot go on: {problem}.")
        elastic.__cause__ = error
        return Failure(elastic, self.is_lost and problem == STATE_IS_GONE)

    def _ranked(self, outcome: Outcome) -> Outcome:
        """Return the outcome of a process as one of the rank that it was last."""
        number, members = outcome.rank, self._members
        return replace(outcome, rank=members.index(number) if number in members else number)
