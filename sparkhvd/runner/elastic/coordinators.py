"""Coordinator of an attempt for the process that launches it: in that process, or in a task of the stage."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, Protocol

from sparkhvd import connect
from sparkhvd.errors import PreflightError
from sparkhvd.rank_settings import JobSettings
from sparkhvd.rendezvous import Listener
from sparkhvd.runner import driver_port
from sparkhvd.runner.elastic.attempt_result import AttemptResult
from sparkhvd.runner.elastic.coordination import MARGIN_S, Coordination
from sparkhvd.runner.elastic.coordinator_files import LOOK_S, CoordinatorFiles
from sparkhvd.runner.elastic.options import Terms
from sparkhvd.runner.options import LaunchOptions
from sparkhvd.runner.task import TaskSpec
from sparkhvd.runner.trainer import INTERRUPT_GRACE_S
from sparkhvd.spark import SparkShim

__all__ = [
    "STAGE_HAS_ENDED",
    "AttemptCoordinator",
    "CoordinatorInDriver",
    "CoordinatorInTask",
    "not_started",
]

STAGE_HAS_ENDED = "its Spark stage has ended"


def not_started(limit_s: float) -> PreflightError:
    """Return the error of a job of which no task has started in time."""
    return PreflightError(
        f"after {limit_s:g} s (start_timeout=) no task of the job has started. Free slots of the application, or raise start_timeout."
    )


class AttemptCoordinator(Protocol):
    """Coordinator of an attempt; a context manager around its stage.

    Attributes:
        address: at which tasks reach it; None where they look in the store.
    """

    address: tuple[str, int] | None

    def take(self, spec: TaskSpec) -> None:
        """Begin, before the stage is submitted."""

    def look(self) -> None:
        """Do what is due every second; called from a thread that may ask Spark."""

    def note_end(self) -> None:
        """Note that the stage has ended; from any thread."""

    def run(self) -> AttemptResult | None:
        """Wait for the end of the job, and let the ranks save at Ctrl-C; None where nobody could tell how it has ended."""

    def dismiss(self) -> None:
        """Let the tasks leave."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *_: object) -> None: ...


class CoordinatorInDriver:
    """Coordinator in this process.

    Args:
        shim: session.
        say: writes a line.
        replace: called from a thread for each task that shall be started in place of one that leaves.
    """

    def __init__(
        self, shim: SparkShim, say: Callable[[str], None], replace: Callable[[], None]
    ) -> None:
        self._shim = shim
        self._say, self._replace = say, replace
        self._listening, host = driver_port.listen(shim)
        self.address: tuple[str, int] | None = (host, int(self._listening.getsockname()[1]))
        self._stack = contextlib.ExitStack()

    def take(self, spec: TaskSpec) -> None:
        """Begin, before the stage is submitted."""
        settings = JobSettings.from_json(spec.settings).values
        listener = Listener.bind(driver_port.address_of_one_interface(self._shim), settings)
        self._made = Coordination(spec, self._listening, listener, self._say, self._replace)
        self._stack.enter_context(self._made)

    def look(self) -> None:
        """Let ranks leave whose executors Spark will take away."""
        tasks = self._made.tasks
        if gone := self._shim.decommissioned(tasks.executors()):
            tasks.retire(gone)

    def note_end(self) -> None:
        """Note that the stage has ended."""
        self._made.stop(STAGE_HAS_ENDED)

    def run(self) -> AttemptResult | None:
        """Run the job to its end."""
        return self._made.run()

    def dismiss(self) -> None:
        """Let the tasks leave."""
        self._made.tasks.dismiss()

    def __enter__(self) -> CoordinatorInDriver:
        self._stack.callback(self._listening.close)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class CoordinatorInTask:
    """Coordinator in a task, of which this client of Spark Connect hears by the store alone.

    Args:
        shim: session.
        options: of the launch, with a store.
        size: number of the stage's tasks.
    """

    def __init__(self, shim: SparkShim, options: LaunchOptions, size: int) -> None:
        self.address: tuple[str, int] | None = None
        self._options = options
        self._started, self._ended = threading.Event(), threading.Event()
        self._news = connect.noticing_tasks(shim.session, size, self._started.set)

    def take(self, spec: TaskSpec) -> None:
        """Begin, before the stage is submitted."""
        files = self._options.shared
        assert files is not None
        self._files = CoordinatorFiles(files, spec.run_dir, spec.attempt, spec.job_id, spec.key)
        self._start_s = Terms.from_dict(spec.elastic).limits.start_timeout_s

    def look(self) -> None:
        """Do nothing: Spark Connect tells of no executors."""

    def note_end(self) -> None:
        """Note that the stage has ended."""
        self._ended.set()

    def run(self) -> AttemptResult | None:
        """Wait for the end of the stage.

        Raises:
            PreflightError: no task has started in time.
        """
        try:
            if not self._ended.wait(self._start_s) and not self._started.is_set():
                raise not_started(self._start_s)
            self._ended.wait()  # as long as the job takes
        except KeyboardInterrupt:
            self._interrupt()
            raise
        return self._files.result()

    def _interrupt(self) -> None:
        """Let the ranks save, where their coordinator can be told."""
        mailbox = self._options.mailbox
        if mailbox is None or mailbox.poll_s is None:  # a Spark task would wait for their slots
            return
        with contextlib.suppress(Exception):  # a store may raise anything: Spark's own way remains
            self._files.interrupt()
            self._ended.wait(LOOK_S + INTERRUPT_GRACE_S + MARGIN_S)

    def dismiss(self) -> None:
        """Do nothing: the coordinator lets the tasks leave."""

    def __enter__(self) -> CoordinatorInTask:
        self._news.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._news.__exit__(None, None, None)
