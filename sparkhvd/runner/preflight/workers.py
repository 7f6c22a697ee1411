"""Python of Spark's workers, checked by a small job before anything long.

The launch checks every rank again, on its own host.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sparkhvd.errors import PreflightError
from sparkhvd.runner.outcomes import Kind, from_spark_failure
from sparkhvd.runner.preflight.facts import RankFacts, check_ranks, rank_facts

if TYPE_CHECKING:
    from sparkhvd.spark import SparkShim

__all__ = ["check_workers"]

# Applications and Pythons that have passed.
_passed: set[tuple[str, str, tuple[str, ...]]] = set()


def check_workers(shim: SparkShim, requirements: Sequence[str]) -> None:
    """Check the Python of a worker: that it has the package and what a job requires, in the driver's versions.

    Once per application; without a job where a local master's workers run this process's own.

    Raises:
        PreflightError: it has not; the message names the Python and what to do.
    """
    python = shim.worker_python()
    passed = (shim.application(), python, tuple(requirements))
    if passed in _passed or (shim.is_local and python == sys.executable):
        return
    try:
        found = json.loads(shim.call_in_worker(_look(requirements), "Python of the workers"))
    except Exception as e:
        outcome = from_spark_failure(str(e), python)
        if outcome.kind != Kind.PREFLIGHT:
            raise
        raise PreflightError(outcome.message) from None
    if "executable" not in found:  # the package is missing, and with it the rest of the facts
        raise PreflightError(
            f"The workers run {found['python']}, which has no module sparkhvd. Set PYSPARK_PYTHON (spark.pyspark.python) to a "
            "Python that has it before the session starts, or install it there."
        )
    problem = check_ranks(rank_facts(()), [RankFacts.from_dict(found)])
    if problem:
        raise PreflightError(problem)
    _passed.add(passed)


def _look(requirements: Sequence[str]) -> Callable[[], str]:
    """Return a function that starts even where this package is not installed."""

    def look() -> str:
        if importlib.util.find_spec("sparkhvd") is None:
            return json.dumps({"python": sys.executable})
        from sparkhvd.runner.preflight.facts import rank_facts

        return json.dumps(rank_facts(requirements).to_dict())

    return look
