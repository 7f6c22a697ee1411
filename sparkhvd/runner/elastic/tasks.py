"""Tasks of an elastic job on Spark, as the coordinator sees them: each is a slot for a process.

Spark starts tasks as slots are free, starts them again when an executor is lost, and may start one twice. All of that is the same here: a task that
connects is a slot more, one whose connection ends a slot less.

**Threads**: one, which owns the connections. Others call `start`, `send` and `dismiss`, which only hand over. **Trust**: as for the coordinator's port.
**Shutdown**: after `dismiss` every task is let go, also one that comes later.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass, field

from sparkhvd.elastic import Invitation, Service
from sparkhvd.rendezvous import Job
from sparkhvd.rendezvous.loop import Task, Wait, send, sleep
from sparkhvd.rendezvous.reception import Reception
from sparkhvd.runner import preflight
from sparkhvd.runner.driver_port import FIRST, keep_alive
from sparkhvd.runner.elastic.ends import end_of
from sparkhvd.runner.elastic.slots import Offer, Slot
from sparkhvd.runner.frames import frame_of, take_frame
from sparkhvd.runner.hosts.channel import Message, pack, unpack
from sparkhvd.runner.outcomes import Kind, Outcome
from sparkhvd.runner.preflight import RankFacts
from sparkhvd.runner.watching import Ended

__all__ = ["Tasks"]

_READ_BYTES = 1 << 20
# How long the first tasks are waited for, once one is there: Spark starts them together where it can.
_TOGETHER_S = 1.0


@dataclass(eq=False)
class _Task:
    """A task that is connected.

    Attributes:
        sock: its connection.
        slot: its slot.
        executor: Spark's id of its executor; "" if unknown.
        member: number of the process that it has; None for none.
        result: of that process, as far as it has come.
        is_leaving: whether its executor will be taken away.
    """

    sock: socket.socket
    slot: Slot
    executor: str = ""
    member: int | None = None
    result: bytearray = field(default_factory=bytearray)
    is_leaving: bool = False


class Tasks:
    """Tasks of an attempt, the launcher's `Processes`; a context manager.

    Args:
        listening: where they connect; closed at the end.
        job: the coordinator's side of the proof.
        driver: facts about the process that has launched the job; tasks must suit it.
        wanted: tasks that are waited for a moment before the first process starts.
        tell: called from the thread with the end of a process, and with the slots that are there.
        refuse: called from the thread with the reason why a task cannot take part, if no other one does.
        replace: called from the thread for each task that shall be started in place of one that leaves.
        say: writes a line.

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
        tell: Callable[[Ended | Offer], None],
        refuse: Callable[[str], None],
        replace: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._listening = listening
        self._wanted = wanted
        self._tell, self._refuse, self._replace, self._say = tell, refuse, replace, say
        self.outcomes: dict[int, Outcome] = {}
        self.results: dict[int, bytes] = {}
        self._driver = driver
        self._first: RankFacts | None = None
        self._tasks: list[_Task] = []
        self._idle: list[socket.socket] = []  # of tasks that take no part
        self._is_open = self._is_over = False
        self._service = Service("sparkhvd-tasks")
        reception = Reception(
            job,
            [listening],
            self._service.loop,
            current_turn=lambda: FIRST,
            on_peer=lambda _, __, sock: self._service.loop.start(self._serve(sock)),
            on_notice=lambda _: None,
            on_shortage=lambda _: None,
        )
        reception.start()
        self._service.start(at_end=self._close)

    def start(self, slot: Slot, invitation: Invitation, slots: int) -> None:
        """Start a process in a slot; its end is told as an event."""
        del slots
        self._service.call(lambda: self._start(slot, invitation))

    def send(self, number: int, member: int | None = None) -> None:
        """Send a signal to all processes, or to one."""

        def each() -> None:
            for task in self._tasks:
                if task.member is not None and member in (None, task.member):
                    self._post(task.sock, "signal", number=int(number))

        self._service.call(each)

    def dismiss(self) -> None:
        """Let every task leave; whatever still runs there is killed."""

        def each() -> None:
            self._is_over = True
            for sock in (*self._idle, *(task.sock for task in self._tasks)):
                self._post(sock, "leave")

        self._service.call(each)

    def executors(self) -> set[str]:
        """Return the ids of executors whose tasks take part."""
        return {task.executor for task in list(self._tasks) if not task.is_leaving} - {""}

    def retire(self, executors: Collection[str]) -> None:
        """Let the tasks of executors go as soon as their processes have ended: they are no slots any more."""

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

    def _start(self, slot: Slot, invitation: Invitation) -> None:
        number = invitation.number
        task = next((task for task in self._tasks if task.slot == slot), None)
        if task is None or task.member is not None or task.is_leaving:
            self._end(Outcome(number, Kind.LOST, host=slot.host, exit="lost"))
            return
        task.member = number
        self._post(task.sock, "start", slot=slot.number, invitation=invitation.to_dict())

    def _post(self, sock: socket.socket, kind: str, **values: object) -> None:
        try:
            send(sock, frame_of(pack(kind, b"", values)))
        except OSError:  # it is gone, or stopped: the one who reads ends it
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _serve(self, sock: socket.socket) -> Task:
        """Read the messages of a task until its end."""
        task: _Task | None = None
        keep_alive(sock)
        self._idle.append(sock)
        # What is no message ends the connection, and nothing else.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            hello = bytearray()
            message = yield from _next(sock, hello)
            facts = RankFacts.from_dict(message.values["facts"])
            task = self._admit(sock, facts, str(message.values["executor"]))
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
            self._end(Outcome(task.member, Kind.LOST, host=task.slot.host, exit="lost"))
        self._offer()

    def _admit(self, sock: socket.socket, facts: RankFacts, executor: str) -> _Task | None:
        """Make a slot of a task; None if it takes no part."""
        if self._is_over:
            self._post(sock, "leave")
            return None
        known = [facts] if self._first is None else [self._first, facts]
        if problem := preflight.check_ranks(self._driver, known):
            # It stays, or Spark would start others in its place.
            if self._first is None:
                self._refuse(problem)
            else:
                self._say(f"A task cannot take part. {problem}")
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
            self._tell(Offer(tuple(task.slot for task in self._tasks if not task.is_leaving)))

    def _receive(self, task: _Task, message: Message) -> None:
        member = int(message.values["member"])
        if member != task.member:
            raise ValueError("a message of another process")
        if message.kind == "result":
            task.result += message.data
            return
        outcome = Outcome.from_json(message.data.decode())
        self.results[member] = bytes(task.result)
        task.member, task.result = None, bytearray()
        self._end(outcome)
        if task.is_leaving:
            self._post(task.sock, "leave")

    def _end(self, outcome: Outcome) -> None:
        assert outcome.rank is not None
        self.outcomes[outcome.rank] = outcome
        self._tell(end_of(outcome))


def _next(sock: socket.socket, came: bytearray) -> Generator[Wait, None, Message]:
    """Read a message.

    Raises:
        OSError: there is none any more.
        ValueError: it is none.
    """
    while (frame := take_frame(came)) is None:
        yield Wait(sock, selectors.EVENT_READ, float("inf"))
        with contextlib.suppress(BlockingIOError):
            part = sock.recv(_READ_BYTES)
            if not part:
                raise ConnectionResetError("closed by the task")
            came += part
    return unpack(frame)
