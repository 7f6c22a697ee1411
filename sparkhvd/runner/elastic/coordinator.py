"""Coordinator of an elastic job on Spark: task connections, results, and the files to find it.

Each task is a slot for a process. Spark starts tasks as slots are free, restarts them when an executor is lost, and may
start one twice. A task that connects adds a slot, and the end of its connection removes it.

**Threads**: one, which owns the connections. Other threads call `start`, `send` and `dismiss`, which only post to it.
**Trust**: as for the coordinator's port. **Shutdown**: after `dismiss` every task is released, including late ones.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import queue
import random
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from sparkhvd import interfaces
from sparkhvd.arrow_buffers import binary_array, int32_array
from sparkhvd.elastic import Coordinator, CoordinatorThread, JoinToken
from sparkhvd.elastic.membership import STATE_IS_GONE
from sparkhvd.errors import ElasticError, SparkhvdError, StoreError
from sparkhvd.rendezvous import Job, Listener
from sparkhvd.rendezvous.event_loop import Task, Wait, send, sleep
from sparkhvd.rendezvous.handshake import SERVICE_STAGE
from sparkhvd.rendezvous.listener import Acceptor, bind_tcp
from sparkhvd.runner import launching, preflight
from sparkhvd.runner.driver_port import connect, keep_alive, proof_between
from sparkhvd.runner.elastic.launcher import (
    ElasticLauncher,
    Event,
    JobResult,
    MemberRefused,
    ProcessesStopped,
)
from sparkhvd.runner.elastic.options import CoordinatorTerms
from sparkhvd.runner.elastic.slots import Offer, Slot
from sparkhvd.runner.elastic.task import PURPOSE, TaskSlot, executor_option
from sparkhvd.runner.options import RankChange
from sparkhvd.runner.outcomes import Outcome, OutcomeKind, error_of, is_retryable, root_cause
from sparkhvd.runner.preflight import RankFacts, SharedFiles, describe_shared
from sparkhvd.runner.prewarm import share_zygote
from sparkhvd.runner.protocol import bytes_of
from sparkhvd.runner.results import OUTCOME_PART
from sparkhvd.runner.supervisor import RankEnded, SignalReceived
from sparkhvd.runner.task import TaskSpec, files_of, output_of
from sparkhvd.runner.trainer import INTERRUPT_GRACE_S
from sparkhvd.settings import JobSettings
from sparkhvd.wire import (
    MOST_BYTES,
    Message,
    frame_of,
    pack,
    read_json,
    rebuild,
    take_frame,
    unpack,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import TaskContext

    from sparkhvd.runner.protocol import Payload


_READ_BYTES = 1 << 20
# Time to wait for further tasks after the first has connected: Spark starts them together if it can.
_TOGETHER_S = 1.0


@dataclass(eq=False)
class _Task:
    """Connected task.

    Attributes:
        sock: its connection.
        slot: its slot.
        executor: Spark's id of its executor; "" if unknown.
        member: number of its process; None without one.
        result: of that process, as far as received.
        is_leaving: whether its executor is being decommissioned.
    """

    sock: socket.socket
    slot: Slot
    executor: str = ""
    member: int | None = None
    result: bytearray = field(default_factory=bytearray)
    is_leaving: bool = False


class Tasks:
    """Tasks of an attempt, used as the launcher's `Processes`. A context manager.

    Args:
        listening: where they connect; closed at the end.
        job: the coordinator's side of the handshake.
        driver: facts of the launching process, with which tasks must be compatible.
        wanted: number of tasks to wait for briefly before the first process starts.
        notify: called from the thread with the end of a process, and with the current slots.
        refuse: called from the thread with the reason why a task cannot join, if no other task has.
        replace: called from the thread for each task to start in place of one that leaves.
        log: writes a line.

    Attributes:
        outcomes: of processes that have ended, by number.
        results: pickled, likewise.
    """

    def __init__(
        self,
        listening: socket.socket,
        job: Job,
        driver: RankFacts,
        wanted: int,
        notify: Callable[[RankEnded | Offer], None],
        refuse: Callable[[str], None],
        replace: Callable[[], None],
        log: Callable[[str], None],
    ) -> None:
        self._listening = listening
        self._wanted = wanted
        self._notify, self._refuse, self._replace, self._log = notify, refuse, replace, log
        self.outcomes: dict[int, Outcome] = {}
        self.results: dict[int, bytes] = {}
        self._driver = driver
        self._first: RankFacts | None = None
        self._tasks: list[_Task] = []
        self._idle: list[socket.socket] = []  # connections of tasks that are not slots
        self._is_open = self._is_over = False
        self._service = CoordinatorThread("sparkhvd-tasks")
        acceptor = Acceptor(
            job,
            [listening],
            self._service.loop,
            current_stage=lambda: SERVICE_STAGE,
            on_peer=lambda _, __, sock: self._service.loop.start(self._serve(sock)),
            on_notice=lambda _: None,
            on_shortage=lambda _: None,
        )
        acceptor.start()
        self._service.start(at_end=self._close)

    def start(self, slot: Slot, join_token: JoinToken, slots: int) -> None:
        """Start a process in a slot. Its end is reported as an event."""
        del slots
        self._service.call(lambda: self._start(slot, join_token))

    def send(self, number: int, member: int | None = None) -> None:
        """Send a signal to all processes, or to one."""

        def each() -> None:
            for task in self._tasks:
                if task.member is not None and member in (None, task.member):
                    self._post(task.sock, "signal", number=int(number))

        self._service.call(each)

    def dismiss(self) -> None:
        """Release every task. Remaining processes are killed."""

        def each() -> None:
            self._is_over = True
            for sock in (*self._idle, *(task.sock for task in self._tasks)):
                self._post(sock, "leave")

        self._service.call(each)

    def executors(self) -> set[str]:
        """Ids of executors with active tasks."""
        return {task.executor for task in list(self._tasks) if not task.is_leaving} - {""}

    def retire(self, executors: Collection[str]) -> None:
        """Release the tasks of executors when their processes have ended. They are no longer slots."""

        def each() -> None:
            for task in self._tasks:
                if task.executor in executors and not task.is_leaving:
                    task.is_leaving = True
                    self._replace()
                    if task.member is None:
                        self._post(task.sock, "leave")
            self._offer()

        self._service.call(each)

    def __enter__(self) -> Tasks:
        return self

    def __exit__(self, *_: object) -> None:
        self._service.close()
        self._close()
        self._listening.close()

    # --- The thread. ---

    def _close(self) -> None:
        for sock in (*self._idle, *(task.sock for task in self._tasks)):
            sock.close()

    def _start(self, slot: Slot, join_token: JoinToken) -> None:
        number = join_token.number
        task = next((task for task in self._tasks if task.slot == slot), None)
        if task is None or task.member is not None or task.is_leaving:
            self._end(Outcome(number, OutcomeKind.LOST, host=slot.host, exit="lost"))
            return
        task.member = number
        self._post(task.sock, "start", slot=slot.number, join_token=join_token.to_dict())

    def _post(self, sock: socket.socket, kind: str, **values: object) -> None:
        try:
            send(sock, frame_of(pack(kind, b"", values)))
        except OSError:  # it is gone or stopped: `_serve` sees the shutdown and cleans up
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _serve(self, sock: socket.socket) -> Task:
        """Read the messages of a task until its end."""
        task: _Task | None = None
        keep_alive(sock)
        self._idle.append(sock)
        # An invalid message ends only this connection.
        with contextlib.suppress(OSError, ValueError):
            hello = bytearray()
            message = yield from _next(sock, hello)
            facts = rebuild(RankFacts, message.values.get("facts"))
            task = self._admit(sock, facts, str(message.values.get("executor", "")))
            while True:
                message = yield from _next(sock, hello)
                if task is not None:
                    self._receive(task, message)
        sock.close()
        if task is None:
            self._idle.remove(sock)
            return
        self._tasks.remove(task)
        if task.member is not None:
            self._end(Outcome(task.member, OutcomeKind.LOST, host=task.slot.host, exit="lost"))
        self._offer()

    def _admit(self, sock: socket.socket, facts: RankFacts, executor: str) -> _Task | None:
        """Give a task a slot, or return None if it cannot join."""
        if self._is_over:
            self._post(sock, "leave")
            return None
        known = [facts] if self._first is None else [self._first, facts]
        if problem := preflight.check_ranks(self._driver, known):
            # Keep the connection: Spark would start other tasks in place of an ended task.
            if self._first is None:
                self._refuse(problem)
            else:
                self._log(f"A task cannot join. {problem}")
            return None
        self._first = self._first or facts
        taken = {task.slot.number for task in self._tasks if task.slot.host == facts.host}
        free = next(number for number in range(len(taken) + 1) if number not in taken)
        task = _Task(sock, Slot(facts.host, free), executor)
        self._idle.remove(sock)
        self._tasks.append(task)
        if len(self._tasks) == 1 and not self._is_open:
            self._service.loop.start(self._open())
        self._offer()
        return task

    def _open(self) -> Task:
        yield from sleep(_TOGETHER_S)
        self._is_open = True
        self._offer()

    def _offer(self) -> None:
        self._is_open = self._is_open or len(self._tasks) >= self._wanted
        if self._is_open:
            self._notify(Offer(tuple(task.slot for task in self._tasks if not task.is_leaving)))

    def _receive(self, task: _Task, message: Message) -> None:
        member = message.values.get("member")
        if type(member) is not int or member != task.member:
            raise ValueError(f"message of process {member}, expected {task.member}")
        if message.kind == "result":
            task.result += message.data
            return
        outcome = Outcome.from_json(message.data.decode())
        if outcome.rank != member:
            raise ValueError(f"outcome of process {outcome.rank}, expected {member}")
        self.results[member] = bytes(task.result)
        task.member, task.result = None, bytearray()
        self._end(outcome)
        if task.is_leaving:
            self._post(task.sock, "leave")

    def _end(self, outcome: Outcome) -> None:
        assert outcome.rank is not None
        self.outcomes[outcome.rank] = outcome
        self._notify(end_of(outcome))


def _next(sock: socket.socket, came: bytearray) -> Generator[Wait, None, Message]:
    """Read a message.

    Raises:
        OSError: the connection has ended.
        ValueError: the message is invalid.
    """
    while (frame := take_frame(came, MOST_BYTES)) is None:
        yield Wait(sock, selectors.EVENT_READ, float("inf"))
        with contextlib.suppress(BlockingIOError):
            part = sock.recv(_READ_BYTES)
            if not part:
                raise ConnectionResetError("closed by the task")
            came += part
    return unpack(frame)


# ----------------------------------------------------------------------------------------------------
# Ends of a function's processes: whose results count, and which failure is the root cause. Pure.

_FAILED = 1
# Longest part of an outcome's message in the line of a change.
_SHOWN = 200


def end_of(outcome: Outcome) -> RankEnded:
    assert outcome.rank is not None
    # A replacement would raise the same error before it is a rank, so such an end is final.
    is_final = outcome.kind in (OutcomeKind.EXCEPTION, OutcomeKind.EXIT, OutcomeKind.PREFLIGHT)
    status = 0 if outcome.kind == OutcomeKind.OK else _FAILED
    return RankEnded(outcome.rank, status, _how(outcome), is_final)


def _how(outcome: Outcome) -> str:
    """Describe the end of a process for the line of a change."""
    if outcome.kind == OutcomeKind.LOST:
        return "was lost with its Spark task"
    if outcome.kind == OutcomeKind.PREFLIGHT:
        return f"could not start: {outcome.message[:_SHOWN]}"
    if outcome.error:
        text = outcome.message.partition("\n")[0]
        return f"raised {outcome.error}: {text[:_SHOWN]}"
    return f"ended with {outcome.exit}"


@dataclass(frozen=True)
class JobFailure:
    """Failure of a job. `is_lost` means that all ranks were lost, so a relaunch may help."""

    error: SparkhvdError
    is_lost: bool


class ProcessOutcomes:
    """Outcomes of a job's processes.

    Args:
        job_result: end of the job.
        outcomes: of its processes, by number.
    """

    def __init__(self, job_result: JobResult, outcomes: Mapping[int, Outcome]) -> None:
        self._outcomes = outcomes
        self._members = job_result.members
        self._failed = [self._ranked(outcomes[ended.rank]) for ended in job_result.failed]
        self._cause = root_cause(self._failed)

    def order(self) -> list[int]:
        """List the numbers of the processes with a result for the caller, in rank order."""
        well = [
            number for number, outcome in self._outcomes.items() if outcome.kind == OutcomeKind.OK
        ]
        # Without `init()` in the function there are no members.
        return [number for number in self._members if number in well] or sorted(well)

    @property
    def is_lost(self) -> bool:
        """Whether losses alone explain the end."""
        return self._cause is None or is_retryable(self._cause)

    @property
    def size(self) -> int:
        """Number of ranks of the last generation, for an error."""
        return max(len(self._members), 1, *(1 + (each.rank or 0) for each in self._failed))

    def failure(self, problem: str) -> JobFailure:
        """Make the failure of an unfinished job.

        Args:
            problem: why it could not continue; "" if only its processes have failed.
        """
        error: SparkhvdError | None = None
        if self._cause is not None:
            error = error_of(self._cause, self.size, others=self._failed)
            if not problem:
                return JobFailure(error, self.is_lost)
        problem = problem or STATE_IS_GONE
        elastic = ElasticError(f"The elastic job cannot continue: {problem}.")
        elastic.__cause__ = error
        return JobFailure(elastic, self.is_lost and problem == STATE_IS_GONE)

    def _ranked(self, outcome: Outcome) -> Outcome:
        """Replace the number of a process by its last rank, if it has had a rank."""
        number, members = outcome.rank, self._members
        return replace(outcome, rank=members.index(number) if number in members else number)


# ----------------------------------------------------------------------------------------------------
# Result of an attempt of an elastic job, reported by its coordinator to the launching process.

_KIND = "result"


@dataclass(frozen=True)
class _ResultFacts:
    """JSON object of an `AttemptResult`, with the sizes of its results in place of their bytes."""

    job_result: JobResult
    outcomes: tuple[tuple[int, str], ...]
    results: tuple[tuple[int, int], ...]
    refused: str
    unsent: tuple[tuple[int, str, int, bool], ...]
    changes: tuple[RankChange, ...]


@dataclass(frozen=True)
class AttemptResult:
    """Result of an attempt.

    Attributes:
        job_result: of its launcher.
        outcomes: of its processes, by number.
        results: of successful processes, by number; pickled.
        refused: why the first task could not join; "" if it could.
        unsent: lines of the coordinator that may not have been shown, as `Outcome.unsent`.
        changes: of the ranks.
    """

    job_result: JobResult
    outcomes: Mapping[int, Outcome]
    results: Mapping[int, bytes]
    refused: str = ""
    unsent: tuple[tuple[int, str, int, bool], ...] = ()
    changes: tuple[RankChange, ...] = ()

    def to_bytes(self) -> bytes:
        values = {
            "job_result": asdict(self.job_result),
            "outcomes": [[number, each.to_json()] for number, each in self.outcomes.items()],
            "results": [[number, len(data)] for number, data in self.results.items()],
            "refused": self.refused,
            "unsent": self.unsent,
            "changes": [asdict(change) for change in self.changes],
        }
        return pack(_KIND, b"".join(self.results.values()), values)

    @classmethod
    def from_bytes(cls, content: bytes) -> AttemptResult:
        """Rebuild a result from `to_bytes`."""
        message = unpack(content)
        facts = rebuild(_ResultFacts, message.values)
        results, at = {}, 0
        for number, size in facts.results:
            results[number] = message.data[at : at + size]
            at += size
        outcomes = {number: Outcome.from_json(text) for number, text in facts.outcomes}
        return cls(facts.job_result, outcomes, results, facts.refused, facts.unsent, facts.changes)


# ----------------------------------------------------------------------------------------------------
# Coordinator, launcher and task port of one elastic attempt, in the driver or in a task. **Threads**: the caller's
# thread runs the launcher; the coordinator and the tasks have a thread each. **Shutdown**: the end of the block
# releases every task.

# Longest time to kill and report interrupted ranks, after their time to save.
MARGIN_S = 2.0


class AttemptCoordination:
    """Coordinator, launcher and tasks of one attempt. A context manager.

    Args:
        spec: also of the tasks.
        listening: where tasks reach this process; closed at the end.
        listener: where their processes reach it; likewise.
        log: writes a line.
        replace: called from a thread for each task to start in place of one that leaves.

    Attributes:
        tasks: the tasks.
    """

    def __init__(
        self,
        spec: TaskSpec,
        listening: socket.socket,
        listener: Listener,
        log: Callable[[str], None],
        replace: Callable[[], None] = lambda: None,
    ) -> None:
        terms = rebuild(CoordinatorTerms, spec.elastic)
        self._limits, self._job_id = terms.limits, spec.job_id
        self._key = bytes.fromhex(spec.key)
        self._patience_s = JobSettings.from_json(spec.settings).values.elastic_patience_s
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._refused = ""  # why the first task cannot join
        put = self._events.put
        with contextlib.ExitStack() as stack:
            proof = proof_between(PURPOSE, spec.key, spec.job_id, spec.attempt, 0, 2)
            facts = rebuild(RankFacts, spec.driver)
            self.tasks = stack.enter_context(
                Tasks(listening, proof, facts, terms.wanted, put, self._refuse, replace, log)
            )
            self._coordinator = stack.enter_context(
                Coordinator(
                    self._key,
                    spec.job_id,
                    listener,
                    self._limits.limits(self._patience_s),
                    on_decided=put,
                    on_formed=put,
                    on_refused=lambda number, refusal: put(MemberRefused(number, refusal)),
                )
            )
            self._stack = stack.pop_all()
        self._launcher = ElasticLauncher(
            self._limits, (), self.tasks, self._coordinator, self._invite, log, INTERRUPT_GRACE_S
        )

    def run(self) -> AttemptResult:
        """Run the job to its end. Ctrl-C interrupts the ranks and is raised after their end."""
        try:
            job_result = self._launcher.run(self._events)
        except KeyboardInterrupt:
            self.interrupt()
            with contextlib.suppress(Exception):  # it may have interrupted an update
                self._launcher.run(self._events, INTERRUPT_GRACE_S + MARGIN_S)
            raise
        return AttemptResult(
            job_result,
            self.tasks.outcomes,
            self.tasks.results,
            self._refused,
            changes=tuple(self._launcher.changes),
        )

    def interrupt(self) -> None:
        """Interrupt the ranks, then kill any remaining rank. Any thread may call this."""
        self._events.put(SignalReceived(signal.SIGINT))

    def stop(self, why: str) -> None:
        """End the job, because its tasks have ended. Any thread may call this."""
        self._events.put(ProcessesStopped(why))

    def __enter__(self) -> AttemptCoordination:
        return self

    def __exit__(self, *_: object) -> None:
        self.tasks.dismiss()
        self._stack.close()

    def _refuse(self, problem: str) -> None:
        self._refused = problem
        self.stop(problem)

    def _invite(self, number: int) -> JoinToken:
        return self._limits.join_token(
            self._key, self._job_id, number, self._coordinator.endpoint, self._patience_s
        )


# ----------------------------------------------------------------------------------------------------
# Files of an attempt in the store if the coordinator is in a task: they publish its address and carry messages between
# it and the client. Each file starts with a proof that its writer knows the attempt's key, bound to the path. A wrong
# proof is an error, and the content is not parsed.

# How often the coordinator polls for an interrupt by the client.
LOOK_S = 1.0
_DIGEST = "sha256"
_PROOF_BYTES = 32
_ADDRESS, _INTERRUPT, _RESULT = "coordinator", "interrupt", "result"
# Pause between two polls for a file.
_POLL_S = 0.25
# How late the file of another host may be visible.
_LATE_S = 3.0


class CoordinatorFiles:
    """Files of an attempt.

    Args:
        files: shared by client and tasks.
        run_dir: folder of the run there.
        attempt: 0 for the first launch.
        job_id: of the attempt.
        key: of the attempt, in hex.
    """

    def __init__(
        self, files: SharedFiles, run_dir: str, attempt: int, job_id: str, key: str
    ) -> None:
        self._files = files
        self._folder = f"{run_dir}/attempts/{attempt}/elastic-{job_id}"
        self._key = hmac.digest(bytes.fromhex(key), b"sparkhvd elastic coordinator", _DIGEST)

    # --- For the coordinator. ---

    def publish(self, address: tuple[str, int]) -> None:
        """Publish the coordinator's address for the tasks.

        Raises:
            Exception: the store fails.
        """
        self._write(_ADDRESS, json.dumps(address).encode())

    def is_interrupted(self) -> bool:
        """Whether the client has interrupted the ranks."""
        return self._read(_INTERRUPT) is not None

    def report(self, result: AttemptResult) -> None:
        """Report the result of the attempt to the client."""
        self._write(_RESULT, result.to_bytes())

    # --- For other tasks. ---

    def address(self) -> tuple[str, int] | None:
        """Read the coordinator's address, also after its end, or return None before it is published."""
        if (content := self._read(_ADDRESS)) is None:
            return None
        host, port = read_json(content)  # `_read` has checked the proof
        return str(host), int(port)

    def await_address(self, limit_s: float) -> tuple[str, int] | None:
        """Wait for the coordinator's address, or return None after `limit_s`."""
        until = time.monotonic() + limit_s
        while (found := self.address()) is None and time.monotonic() < until:
            time.sleep(_POLL_S)
        return found

    def is_over(self) -> bool:
        return self._files.exists(self._path(_RESULT))

    # --- For the client. ---

    def interrupt(self) -> None:
        """Ask the coordinator to interrupt the ranks."""
        self._write(_INTERRUPT, b"")

    def result(self) -> AttemptResult | None:
        """Wait some seconds for the coordinator's report, or return None without a report."""
        until = time.monotonic() + _LATE_S
        while (content := self._read(_RESULT)) is None and time.monotonic() < until:
            time.sleep(_POLL_S)
        return None if content is None else AttemptResult.from_bytes(content)

    # --- Files. ---

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def _proof(self, path: str, data: bytes) -> bytes:
        made = hmac.new(self._key, f"{path}\n".encode(), _DIGEST)
        made.update(data)
        return made.digest()

    def _write(self, name: str, data: bytes) -> None:
        path = self._path(name)
        self._files.write_bytes(path, self._proof(path, data) + data)

    def _read(self, name: str) -> bytes | None:
        """Read a file, or return None if it does not exist.

        Raises:
            StoreError: another writer than this attempt has written it.
        """
        path = self._path(name)
        if not self._files.exists(path):
            return None
        content = self._files.read_bytes(path)
        proof, data = content[:_PROOF_BYTES], content[_PROOF_BYTES:]
        if not hmac.compare_digest(proof, self._proof(path, data)):
            raise StoreError(
                f"{path} in {describe_shared(self._files)} was not written by this job: its proof is wrong. Find out who else writes there, and "
                "start the job again."
            )
        return data


# ----------------------------------------------------------------------------------------------------
# Entry point of a task of an elastic job: it finds the coordinator, or runs it, and serves. The coordinator is in the
# driver if tasks reach that, else in the task of the first partition, which publishes its address in the store. It ends
# with its task, and with it the attempt: a restarted task finds an address that refuses connections.
#
# **Threads** of a coordinator in a task, beside its own: one that runs it, one that polls for an interrupt by the
# client.

# How long the coordinator may take to answer.
_CONNECT_S = 30.0
# Pause before another attempt to reach the coordinator.
_PAUSE_S = 0.5


def run_task(
    batches: Iterable[pa.RecordBatch], text: str, program: Payload, shared: bytes
) -> Iterator[pa.RecordBatch]:
    """Serve the coordinator until the job is over. If this fails, yield an outcome as a row."""
    import pyarrow as pa
    from pyspark import TaskContext

    for _ in batches:  # Spark discards a Python worker that leaves input unread
        pass
    context = TaskContext.get()
    spec = TaskSpec.from_json(text)
    assert context is not None
    share_zygote()
    entry = _TaskEntry(context, spec, bytes_of(program), files_of(shared))
    outcome = entry.by_driver() if spec.driver_at is not None else entry.by_store()
    if outcome is not None:
        outcome = replace(outcome, host=socket.gethostname(), attempt=spec.attempt)
        columns = [int32_array(context.partitionId()), int32_array(OUTCOME_PART)]
        yield pa.RecordBatch.from_arrays(
            [*columns, binary_array(outcome.to_json().encode())], names=["rank", "part", "data"]
        )


class _TaskEntry:
    """Task before it has found its coordinator."""

    def __init__(
        self, context: TaskContext, spec: TaskSpec, program: bytes, files: SharedFiles | None
    ) -> None:
        self._context = context
        self._spec = spec
        self._program = program
        self._files = files

    def by_driver(self) -> Outcome | None:
        """Serve the coordinator in the driver and return an outcome if that failed."""
        assert self._spec.driver_at is not None
        try:
            sock = self._connect(self._spec.driver_at)
        except OSError as error:
            return _refusal(
                f"The tasks cannot reach the driver ({socket.gethostname()}: {error}). Open a route from the executors to this process, or let "
                "spark.driver.host name an address at which they reach it; over Spark Connect give a store, which replaces that route "
                "(run_elastic(..., store=Store.create(...)))."
            )
        self._serve(sock)
        return None

    def by_store(self) -> Outcome | None:
        """Serve the coordinator in a task, possibly this one, and return an outcome if that failed."""
        spec, files = self._spec, self._files
        assert files is not None
        coordinator = CoordinatorFiles(files, spec.run_dir, spec.attempt, spec.job_id, spec.key)
        if coordinator.is_over():
            return None
        is_first = self._context.partitionId() == 0 and coordinator.address() is None
        hosted = _HostedCoordinator(spec, files, coordinator) if is_first else None
        with hosted or contextlib.nullcontext():
            outcome = self._join(coordinator)
        if hosted is not None and hosted.problem:
            return Outcome(None, OutcomeKind.SPARK, exit="failed", message=hosted.problem)
        return outcome

    def _join(self, coordinator: CoordinatorFiles) -> Outcome | None:
        """Serve the coordinator at the address in the store."""
        limit_s = rebuild(CoordinatorTerms, self._spec.elastic).limits.start_timeout_s
        if (address := coordinator.await_address(limit_s)) is None:
            return _refusal(
                f"After {limit_s:g} s (start_timeout=) the coordinator's task had not published its address in the store. Free slots of "
                "the application, or raise start_timeout; the store must be one folder for all executors."
            )
        try:
            sock = self._connect(address)
        except OSError as error:
            if coordinator.is_over():
                return None
            where = f"{address[0]}, port {address[1]}"
            return Outcome(None, OutcomeKind.LOST, exit="lost", message=f"{where}: {error}")
        self._serve(sock)
        return None

    def _connect(self, address: tuple[str, int]) -> socket.socket:
        """Connect to the coordinator, with retries: many tasks may connect at once.

        Raises:
            OSError: it is gone, or does not answer.
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
    return Outcome(None, OutcomeKind.PREFLIGHT, exit="not started", message=message)


class _HostedCoordinator:
    """Coordinator in this task. As a context manager, it waits for the end of the attempt.

    Its lines take the route of the ranks' output, under a number that no process has.
    """

    def __init__(self, spec: TaskSpec, shared: SharedFiles, files: CoordinatorFiles) -> None:
        """Listen, and publish the address.

        Raises:
            Exception: there is no address, or the store fails.
        """
        settings = JobSettings.from_json(spec.settings).values
        own = _own_address(settings.interfaces, is_local=spec.is_local)
        self._files = files
        self._output = output_of(spec, spec.size - 1, shared)
        listening = bind_tcp(own, settings)
        with contextlib.ExitStack() as stack:
            self._coordination = stack.enter_context(
                AttemptCoordination(
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

    def __enter__(self) -> _HostedCoordinator:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:  # as long as the job takes
            thread.join()

    def _coordinate(self) -> None:
        """Run the job to its end, and report to the client before the tasks may leave."""
        try:
            with self._stack, self._output:
                result = self._coordination.run()
                self._files.report(replace(result, unsent=self._output.close()))
        except Exception as error:  # noqa: BLE001 - the client must be notified
            self.problem = f"its coordinator ended with {type(error).__name__}: {error}"
        finally:
            self._is_over.set()

    def _watch(self) -> None:
        """Interrupt the ranks when the client asks for it."""
        while not self._is_over.wait(LOOK_S):
            with contextlib.suppress(
                Exception
            ):  # a store may raise anything; the next poll tries again
                if self._files.is_interrupted():
                    self._coordination.interrupt()
                    return


def _own_address(choice: str, *, is_local: bool) -> str:
    """Numeric address of this task for the other tasks.

    Raises:
        OSError: Spark's name of this host has no address.
        PreflightError: no interface of the choice is here and up, or only the loopback interface.
    """
    host = executor_option("--hostname").strip("[]")
    driver = urlsplit(executor_option("--driver-url")).hostname
    if is_local or choice or (host and driver):
        return launching.own_address(host, [host, driver or host], choice, is_local=is_local)
    return interfaces.own_address("", socket.gethostname())
