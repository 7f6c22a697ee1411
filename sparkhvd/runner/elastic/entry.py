"""What Spark calls in a task of an elastic job: it finds the coordinator, or is it, and serves.

The coordinator is in the driver where tasks reach that, else in the task of the first partition, which tells where through the store. It ends with its
task, and with it the attempt: whoever comes in that task's place finds an address where nobody is.

**Threads** of a coordinator in a task, beside its own: one that runs it, one that looks whether the client wants an end.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from sparkhvd import interfaces
from sparkhvd.arrow_buffers import binary_array, int32_array
from sparkhvd.rank_settings import JobSettings
from sparkhvd.rendezvous import Listener
from sparkhvd.rendezvous.listener import bind_tcp
from sparkhvd.runner import launching
from sparkhvd.runner.driver_port import connect, proof_between
from sparkhvd.runner.elastic.coordination import Coordination
from sparkhvd.runner.elastic.coordinator_files import LOOK_S, CoordinatorFiles
from sparkhvd.runner.elastic.options import Terms
from sparkhvd.runner.elastic.task import PURPOSE, TaskSlot, executor_option
from sparkhvd.runner.head_start import share_nursery
from sparkhvd.runner.outcomes import Kind, Outcome
from sparkhvd.runner.payload import bytes_of
from sparkhvd.runner.preflight import SharedFiles
from sparkhvd.runner.results import OUTCOME_PART
from sparkhvd.runner.task import TaskSpec, files_of, output_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import TaskContext

    from sparkhvd.runner.payload import Payload

__all__ = ["run_task"]

# How long the coordinator may take to answer.
_CONNECT_S = 30.0
_PAUSE_S = 0.5


def run_task(
    batches: Iterable[pa.RecordBatch], text: str, program: Payload, shared: bytes
) -> Iterator[pa.RecordBatch]:
    """Take part until the job is over; yield an outcome as a row where this task could not."""
    import pyarrow as pa
    from pyspark import TaskContext

    for _ in batches:  # a task that leaves input unread costs Spark the Python worker
        pass
    context = TaskContext.get()
    spec = TaskSpec.from_json(text)
    assert context is not None
    share_nursery()
    entry = _Entry(context, spec, bytes_of(program), files_of(shared))
    outcome = entry.by_driver() if spec.driver_at is not None else entry.by_store()
    if outcome is not None:
        outcome = replace(outcome, host=socket.gethostname(), attempt=spec.attempt)
        columns = [int32_array(context.partitionId()), int32_array(OUTCOME_PART)]
        yield pa.RecordBatch.from_arrays(
            [*columns, binary_array(outcome.to_json().encode())], names=["rank", "part", "data"]
        )


class _Entry:
    """A task that looks for its coordinator."""

    def __init__(
        self, context: TaskContext, spec: TaskSpec, program: bytes, files: SharedFiles | None
    ) -> None:
        self._context = context
        self._spec = spec
        self._program = program
        self._files = files

    def by_driver(self) -> Outcome | None:
        """Serve the coordinator in the driver; return why that could not be."""
        assert self._spec.driver_at is not None
        try:
            sock = self._connect(self._spec.driver_at)
        except OSError as error:
            return _refusal(
                f"The tasks cannot reach the driver ({socket.gethostname()}: {error}). Open a way from the executors to this process, or let "
                "spark.driver.host name an address at which they reach it; over Spark Connect give a store, and they meet without it "
                "(run_elastic(..., store=Store.create(...)))."
            )
        self._serve(sock)
        return None

    def by_store(self) -> Outcome | None:
        """Serve the coordinator in a task, which may be this one; return why that could not be."""
        spec, files = self._spec, self._files
        assert files is not None
        coordinator = CoordinatorFiles(files, spec.run_dir, spec.attempt, spec.job_id, spec.key)
        if coordinator.is_over():
            return None
        is_first = self._context.partitionId() == 0 and coordinator.address() is None
        hosted = _OwnCoordinator(spec, files, coordinator) if is_first else None
        with hosted or contextlib.nullcontext():
            outcome = self._join(coordinator)
        if hosted is not None and hosted.problem:
            return Outcome(None, Kind.SPARK, exit="failed", message=hosted.problem)
        return outcome

    def _join(self, coordinator: CoordinatorFiles) -> Outcome | None:
        """Serve the coordinator whose address is in the store."""
        limit_s = Terms.from_dict(self._spec.elastic).limits.start_timeout_s
        if (address := coordinator.await_address(limit_s)) is None:
            return _refusal(
                f"After {limit_s:g} s (start_timeout=) the task that decides who the ranks are had not told its address in the store. Free slots of "
                "the application, or raise start_timeout; the store must be one folder for all executors."
            )
        try:
            sock = self._connect(address)
        except OSError as error:
            if coordinator.is_over():
                return None
            where = f"{address[0]}, port {address[1]}"
            return Outcome(None, Kind.LOST, exit="lost", message=f"{where}: {error}")
        self._serve(sock)
        return None

    def _connect(self, address: tuple[str, int]) -> socket.socket:
        """Connect to the coordinator, as often as it takes: many tasks may come at once.

        Raises:
            OSError: it is not there, or does not answer.
        """
        spec, until = self._spec, time.monotonic() + _CONNECT_S
        proof = proof_between(PURPOSE, spec.key, spec.job_id, spec.attempt, 1, 2)
        while True:
            try:
                return connect(address, proof, _CONNECT_S)
            except ConnectionRefusedError:
                raise
            except OSError:
                if time.monotonic() > until:
                    raise
            time.sleep(_PAUSE_S * random.random())

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            TaskSlot(self._context, self._spec, self._program, self._files, sock).serve()


def _refusal(message: str) -> Outcome:
    return Outcome(None, Kind.PREFLIGHT, exit="not started", message=message)


class _OwnCoordinator:
    """Coordinator in this task; a context manager that waits for the end of the attempt.

    What it says goes the way of the ranks' output, as that of one whose number no process has.
    """

    def __init__(self, spec: TaskSpec, shared: SharedFiles, files: CoordinatorFiles) -> None:
        """Listen, and tell the tasks where.

        Raises:
            Exception: there is no address, or the store refuses it.
        """
        settings = JobSettings.from_json(spec.settings).values
        own = _own_address(settings.interfaces, is_local=spec.is_local)
        self._files = files
        self._output = output_of(spec, spec.size - 1, shared)
        listening = bind_tcp(own, settings)
        with contextlib.ExitStack() as stack:
            self._coordination = stack.enter_context(
                Coordination(
                    spec,
                    listening,
                    Listener.bind(own, settings),
                    lambda text: self._output.message(f"sparkhvd: {text}"),
                )
            )
            files.publish((own, int(listening.getsockname()[1])))
            self._stack = stack.pop_all()
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=each, name=f"sparkhvd-{each.__name__}", daemon=True)
            for each in (self._coordinate, self._watch)
        ]
        self.problem = ""

    def __enter__(self) -> _OwnCoordinator:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:  # as long as the job takes
            thread.join()

    def _coordinate(self) -> None:
        """Run the job to its end, and tell the client before the tasks may leave."""
        try:
            with self._stack, self._output:
                result = self._coordination.run()
                self._files.report(replace(result, unsent=self._output.close()))
        except Exception as error:  # noqa: BLE001 - door: the client must learn of it
            self.problem = f"its coordinator ended with {type(error).__name__}: {error}"
        finally:
            self._is_over.set()

    def _watch(self) -> None:
        """Interrupt the ranks when the client wants that."""
        while not self._is_over.wait(LOOK_S):
            with contextlib.suppress(Exception):  # a store may raise anything, and is asked again
                if self._files.is_interrupted():
                    self._coordination.interrupt()
                    return


def _own_address(choice: str, *, is_local: bool) -> str:
    """Return the address at which other tasks reach this one.

    Raises:
        OSError: Spark's name of this host has no address.
        PreflightError: no interface of the choice is here and up, or none but the loopback's.
    """
    host = executor_option("--hostname").strip("[]")
    driver = urlsplit(executor_option("--driver-url")).hostname
    if is_local or choice or (host and driver):
        return launching.own_address(host, [host, driver or host], choice, is_local=is_local)
    return interfaces.own_address("", socket.gethostname())
