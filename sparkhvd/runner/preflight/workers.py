"""Python of Spark's workers, checked by a small job before anything long.

The launch checks every rank again, on its own host.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sparkhvd import as_horovod
from sparkhvd.errors import PreflightError
from sparkhvd.runner.admission import is_launched
from sparkhvd.runner.outcomes import Kind, from_spark_failure
from sparkhvd.runner.preflight.address_space import check_worker
from sparkhvd.runner.preflight.facts import RankFacts, check_ranks, rank_facts

if TYPE_CHECKING:
    from sparkhvd.spark import SparkShim

__all__ = ["check_workers", "enter_worker"]

# Applications and Pythons that have passed.
_passed: set[tuple[str, str, tuple[str, ...]]] = set()


def enter_worker(*, is_as_horovod: bool) -> None:
    """Prepare a Python worker of Spark for torch and for what is unpickled there: first of all in it.

    Args:
        is_as_horovod: whether the driver has the name `horovod`.

    Raises:
        PreflightError: the worker has too little address space.
    """
    check_worker()
    if is_as_horovod:
        as_horovod.install()


def check_workers(shim: SparkShim, requirements: Sequence[str], limit_s: float) -> None:
    """Check the Python of a worker: that it has the package and what a job requires, in the driver's versions.

    Once per application; without a job where a local master's workers run this process's own.

    Args:
        shim: session whose worker is checked.
        requirements: modules that the job needs.
        limit_s: longest wait for a worker in seconds; the time in which launches hold the slots does not count.

    Raises:
        PreflightError: it has not, and the message names the Python and what to do; or no worker came.
    """
    python = shim.worker_python()
    passed = (shim.application(), python, tuple(requirements))
    if passed in _passed or shim.runs_this_python():
        return
    is_held = functools.partial(is_launched, shim.application())
    try:
        found = json.loads(shim.call_in_worker(_look(requirements), limit_s, is_held))
    except TimeoutError as e:
        raise PreflightError(
            f"No Python worker has started in {limit_s:g} s (start_timeout). Free executors on the cluster, or raise start_timeout."
        ) from e
    except Exception as e:
        outcome = from_spark_failure(str(e), python)
        if outcome.kind != Kind.PREFLIGHT:
            raise
        raise PreflightError(outcome.message) from None
    problem = check_ranks(rank_facts(()), [RankFacts.from_dict(found)])
    if problem:
        raise PreflightError(problem)
    _passed.add(passed)


def _look(requirements: Sequence[str]) -> Callable[[], str]:
    """Return a function that starts even where this package is not installed."""

    def look() -> str:
        if importlib.util.find_spec("sparkhvd") is None:
            facts = {
                "host": socket.gethostname(),
                "executable": sys.executable,
                "missing": ["sparkhvd"],
            }
            return json.dumps({**facts, "gpus": [], "python": "", "torch": "", "sparkhvd": ""})
        from sparkhvd.runner.preflight.facts import rank_facts

        return json.dumps(rank_facts(requirements).to_dict())

    return look
