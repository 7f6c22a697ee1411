"""Driver's side of live output: over connections or files, and the rest when the ranks have ended.

Executors do not always reach a client of Spark Connect. With a store it reads files. Without a store it listens like a
classic driver, and prints a line if ranks have run for a while and no rank has connected.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from sparkhvd import spark
from sparkhvd.errors import SparkhvdError
from sparkhvd.runner import launching
from sparkhvd.runner.horovod_arguments import write_tails
from sparkhvd.runner.live.files import ChunkReader, folder_of
from sparkhvd.runner.live.receiver import Display, Receiver
from sparkhvd.runner.live.sender import OutputRoute
from sparkhvd.runner.options import LaunchOptions
from sparkhvd.runner.outcomes import Outcome
from sparkhvd.spark import SparkShim

# Time in which the first rank must reach a Connect client.
_REACH_S = 10.0


@dataclass(frozen=True)
class Attempt:
    """Attempt of a launch. Its repr leaves out the key.

    Attributes:
        key: in hex.
        job_id: names the attempt.
        number: 0 for the first launch.
        size: number of ranks.
    """

    key: str = field(repr=False)
    job_id: str
    number: int
    size: int


class LiveOutput:
    """Live output of an attempt's ranks. A context manager around its stage."""

    def __init__(
        self,
        shim: SparkShim,
        options: LaunchOptions,
        choice: str,
        attempt: Attempt,
        *,
        on_terminal: bool,
    ) -> None:
        """Prepare live output. It runs inside `with`.

        If live output is impossible, a line is printed, possibly later.

        Args:
            shim: session.
            options: of the launch.
            choice: `Settings.live_output`.
            attempt: of the ranks.
            on_terminal: whether the tasks' stderr is this process's.
        """
        self._stream = options.stream
        self._shows_lines = choice != "messages"
        self._source: Receiver | ChunkReader | None = None
        self._watch: _Watch | None = None
        self.way: OutputRoute | None = None
        is_wanted = options.stream is not None or options.verbose > 0 or options.metrics is not None
        if not is_wanted or choice == "0":
            return
        self._log = launching.log_to(
            options.stream, verbose=options.verbose, timestamps=options.timestamps
        )
        is_shown = options.verbose > 0
        way = OutputRoute(shows_lines=self._shows_lines, on_terminal=on_terminal, is_shown=is_shown)
        # A task on the driver's terminal writes dropped lines there at once, but not lines lost at its end.
        elsewhere = "" if on_terminal else way.elsewhere
        self._display = Display(
            self._show, attempt.size, options.show_progress, elsewhere, options.metrics
        )
        says_why = is_shown and attempt.number == 0
        if shim.is_connect and options.mailbox is not None and options.run_dir is not None:
            folder = folder_of(options.run_dir, attempt.number, attempt.job_id)
            self._source = ChunkReader(options.mailbox, folder, self._display)
            self.way = replace(way, folder=folder)
            return
        try:
            receiver = Receiver.listen(shim, self._display, *astuple(attempt))
        except Exception as e:  # noqa: BLE001 - also Spark's, of a conf without an address; a job can run without
            if says_why:
                _say(f"this process cannot listen ({e}). The output is in the executors' logs.")
            return
        self._source = receiver
        self.way = replace(way, address=receiver.address, at_once=shim.is_connect)
        if shim.is_connect and says_why:
            self._watch = _Watch(shim, attempt.size, receiver)

    def _show(self, text: str) -> None:
        if self._stream is None:
            launching.erase_line(sys.stderr)
        self._log(text)

    def __enter__(self) -> LiveOutput:
        if self._source is not None:
            self._source.__enter__()
        if self._watch is not None:
            self._watch.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._watch is not None:
            self._watch.__exit__()
        if self._source is not None:
            self._source.__exit__()

    def show_rest(self, outcomes: Sequence[Outcome]) -> None:
        """Show what has not been shown live: last records, or the last lines of ranks without live output."""
        silent = outcomes
        if self._source is not None:
            if self._source.is_stuck:  # the stream that blocks would block the caller, too
                return
            self._display.show_rest(outcomes)
            if self._shows_lines:
                silent = [o for o in outcomes if o.rank is None or not self._display.last(o.rank)]
        write_tails(self._stream, silent)


class _Watch:
    """Single notice if ranks run without reaching this Connect client. A context manager."""

    def __init__(self, shim: SparkShim, size: int, receiver: Receiver) -> None:
        self._receiver = receiver
        self._news = spark.noticing_tasks(shim.session, size, self._begin)
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._is_over = False

    def _begin(self) -> None:
        with self._lock:
            if self._timer is None and not self._is_over:
                self._timer = threading.Timer(_REACH_S, self._poll)
                self._timer.daemon = True
                with contextlib.suppress(RuntimeError):  # Python 3.12 starts no thread at exit
                    self._timer.start()

    def _poll(self) -> None:
        if not self._receiver.was_reached:
            host, port = self._receiver.address
            _say(
                f"for {_REACH_S:.0f} s no rank has reached this client of Spark Connect at {host}, port {port}. Is there a firewall, a tunnel or "
                "NAT between the executors and the client? The output is in the executors' logs; its last lines come with the results."
            )

    def __enter__(self) -> None:
        self._news.__enter__()

    def __exit__(self, *_: object) -> None:
        self._news.__exit__(None, None, None)
        with self._lock:
            self._is_over = True
            if self._timer is not None:
                self._timer.cancel()


def _say(why: str) -> None:
    with contextlib.suppress(Exception):  # a closed stream ends no job
        sys.stderr.write(f"sparkhvd: No live output of the ranks: {why}\n")
        sys.stderr.flush()


# ----------------------------------------------------------------------------------------------------
# Hides failures of ranks in the log of a classic driver's JVM; the launch raises them in a shorter form. Spark logs the
# exception of a failed task with all its Java frames, and again for every task of the stage that it cancels; with a
# local master, whose executor is in the driver's JVM, once more there. Two filters of log4j remove these while a launch
# runs. The first matches the job's id in the text of our exceptions. The second matches what Spark logs without that
# text in the threads of the job's tasks: Spark puts the job's local properties `mdc.*` into their logging context.
# Messages of other jobs pass.
#
# Logs of a cluster's executors and of the Spark Connect server are unchanged. Without py4j or log4j 2 nothing changes.
# Everything here is best effort and never raises.
#
# Threads: after a failure a thread removes the filters later, because Spark logs the other tasks when they have ended.

_PROPERTY = "mdc.sparkhvd"
# Spark kills the Python worker of a cancelled task after 2 s, polls again after 2 s, and then logs the task.
_LINGER_S = 6.0
# Pause between two polls for running tasks.
_POLL_S = 0.25


@contextlib.contextmanager
def hidden_failures(shim: SparkShim, job_id: str, *, is_hidden: bool = True) -> Iterator[None]:
    """Hide the JVM's log messages about a job's failed tasks, inside the block and, after a failure, until they end.

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
    except SparkhvdError:  # the JVM has died, and a call would be logged
        raise
    except BaseException:
        if filters:
            thread = threading.Thread(
                target=_remove_later,
                args=(session, filters),
                name="sparkhvd-spark-log",
                daemon=True,
            )
            with contextlib.suppress(RuntimeError):  # Python 3.12 starts no thread at exit
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
        Exception: the JVM has another logging library, or refuses access.
    """
    result = _java_class(session, "core.Filter$Result")
    deny, neutral = result.DENY, result.NEUTRAL
    # The job's id is hexadecimal. A worker without this package raises the `preflight` token.
    text = rf"(?s).*\[sparkhvd-(outcome:{job_id}|preflight):.*"
    regex = _java_class(session, "core.filter.RegexFilter")
    filters.append(regex.createFilter(text, None, False, deny, neutral))
    pair = _java_class(session, "core.util.KeyValuePair")
    pairs = session._sc._gateway.new_array(pair, 1)
    pairs[0] = pair(_PROPERTY, job_id)
    by_thread = _java_class(session, "core.filter.ThreadContextMapFilter")
    filters.append(by_thread.createFilter(pairs, "and", deny, neutral))
    # Filter the whole configuration: a filter on a logger would need a new one, without the level of a Spark shell.
    configuration = _configuration(session)
    for chosen in filters:
        configuration.addFilter(chosen)
    session.sparkContext.setLocalProperty(_PROPERTY, job_id)


def _remove_later(session: Any, filters: list[Any]) -> None:
    """Remove the filters when no task runs any more, at the latest after _LINGER_S."""
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
    return _java_class(session, "LogManager").getContext(False).getConfiguration()


def _java_class(session: Any, name: str) -> Any:
    """Find a class of log4j without a call of py4j for each part of its name."""
    from py4j.java_gateway import JavaClass

    return JavaClass(f"org.apache.logging.log4j.{name}", session._sc._gateway._gateway_client)
