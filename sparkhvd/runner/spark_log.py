"""Log of a classic driver's JVM without the failures of ranks, which the launch raises in a shorter form.

Spark logs the exception of a failed task with all its Java frames, and again for every task of the stage that it cancels; with
a local master, whose executor is in the driver's JVM, once more there. Two filters of log4j leave these out while a launch
runs. The first knows them by the job's id, which is in the text of our exceptions. The second is for what Spark logs in the
threads of the job's tasks, without that text: Spark puts the job's local properties `mdc.*` into the logging context
of these threads. Messages of other jobs pass.

Executors of a cluster log as ever, and so does the server of Spark Connect. Where there is no py4j or no log4j 2 nothing
changes. Everything here is best effort and never raises.

Threads: after a failure one removes the filters, because Spark logs the other tasks of the stage when they have ended.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from sparkhvd.errors import SparkhvdError
from sparkhvd.spark import SparkShim

__all__ = ["hidden_failures"]

_PROPERTY = "mdc.sparkhvd"
# Spark kills the Python worker of a cancelled task after 2 s, looks again after 2 s, and then logs the task.
_LINGER_S = 6.0
_POLL_S = 0.25


@contextlib.contextmanager
def hidden_failures(shim: SparkShim, job_id: str, *, is_hidden: bool = True) -> Iterator[None]:
    """Hide what the driver's JVM logs about failed tasks of a job, inside the block and after a failure until they have ended.

    The job must be submitted by this thread, or by one that inherits its Spark properties.

    Args:
        shim: session of the job.
        job_id: id of the launch, which is in the text of its tasks' exceptions.
        is_hidden: False changes nothing.
    """
    if shim.is_connect or not is_hidden:
        yield
        return
    session = shim.session
    filters: list[Any] = []
    with contextlib.suppress(Exception):
        _add(session, job_id, filters)
    try:
        yield
    except SparkhvdError:  # the JVM has died, and to ask it would be logged
        raise
    except BaseException:
        if filters:
            thread = threading.Thread(
                target=_remove_later,
                args=(session, filters),
                name="sparkhvd-spark-log",
                daemon=True,
            )
            with contextlib.suppress(RuntimeError):  # Python 3.12 starts no thread at its end
                thread.start()
        raise
    else:
        _remove(session, filters)
    finally:
        with contextlib.suppress(Exception):
            session.sparkContext.setLocalProperty(_PROPERTY, None)


def _add(session: Any, job_id: str, filters: list[Any]) -> None:
    """Add the filters to the JVM, and to `filters`.

    Raises:
        Exception: the JVM has another logging library, or does not let us.
    """
    core = session._jvm.org.apache.logging.log4j.core
    deny, neutral = core.Filter.Result.DENY, core.Filter.Result.NEUTRAL
    # The job's id is hexadecimal; a worker without this package tells so by another token.
    text = rf"(?s).*\[sparkhvd-(outcome:{job_id}|preflight):.*"
    filters.append(core.filter.RegexFilter.createFilter(text, None, False, deny, neutral))
    pairs = session._sc._gateway.new_array(core.util.KeyValuePair, 1)
    pairs[0] = core.util.KeyValuePair(_PROPERTY, job_id)
    filters.append(core.filter.ThreadContextMapFilter.createFilter(pairs, "and", deny, neutral))
    # Of the whole configuration: a logger with one of its own would no longer have the level of a Spark shell.
    configuration = _configuration(session)
    for chosen in filters:
        configuration.addFilter(chosen)
    session.sparkContext.setLocalProperty(_PROPERTY, job_id)


def _remove_later(session: Any, filters: list[Any]) -> None:
    """Remove the filters when no task runs any more, or soon."""
    deadline = time.monotonic() + _LINGER_S
    with contextlib.suppress(Exception):
        tracker = session.sparkContext._jsc.sc().statusTracker()
        while time.monotonic() < deadline:
            if not any(executor.numRunningTasks() for executor in tracker.getExecutorInfos()):
                break
            time.sleep(_POLL_S)
    _remove(session, filters)


def _remove(session: Any, filters: list[Any]) -> None:
    with contextlib.suppress(Exception):  # the JVM may be gone
        configuration = _configuration(session)
        for chosen in filters:
            configuration.removeFilter(chosen)


def _configuration(session: Any) -> Any:
    return session._jvm.org.apache.logging.log4j.LogManager.getContext(False).getConfiguration()
