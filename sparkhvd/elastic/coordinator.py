"""Coordinator of an elastic job: the process that starts the members decides who takes part.

**Threads**: one, "sparkhvd-elastic", which owns the sockets and the `Membership`. Other threads call `expect`, `end`, `remove` and `fail`, which
only hand over. **Trust**: a connection that has not proved the job's key is closed after 5 s, and nothing that it sends disturbs the job. A
member's number is part of its proof; only numbers that `expect` has named may ask. **Failure**: a member whose connection ends
takes no part any more. The end of this process ends the job.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from sparkhvd.elastic.channel import FIRST_TURN, pack, party, take
from sparkhvd.elastic.membership import FINISHED, Change, Limits, Membership
from sparkhvd.elastic.messages import Message, Refusal, Report
from sparkhvd.elastic.service import Service
from sparkhvd.rendezvous import Endpoint, Listener
from sparkhvd.rendezvous.handshake import Turn
from sparkhvd.rendezvous.loop import Task, Wait, send
from sparkhvd.rendezvous.reception import Reception

__all__ = ["Coordinator", "Decided", "Formed"]

_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Formed:
    """A change of the members that all of them have carried out.

    Attributes:
        change: what has changed.
        seconds: from the first member's question to the last one's meeting.
        has_met: whether the members have met; False where another change came before.
    """

    change: Change
    seconds: float
    has_met: bool


@dataclass(frozen=True)
class Decided:
    """Decision on the members of a generation, before they learn of it.

    Attributes:
        members: their numbers, by rank.
    """

    members: tuple[int, ...]


class Coordinator:
    """Serves the members of a job; a context manager.

    Args:
        key: of the job, 32 bytes.
        job_id: of the job.
        listener: where members reach this process; closed at the end.
        limits: of the job.
        on_decided: called from the thread before each change.
        on_formed: called from the thread after each change.
        on_refused: called from the thread when a member is told that it takes no part.
    """

    def __init__(
        self,
        key: bytes,
        job_id: str,
        listener: Listener,
        limits: Limits,
        *,
        on_decided: Callable[[Decided], None] = lambda _: None,
        on_formed: Callable[[Formed], None] = lambda _: None,
        on_refused: Callable[[int, Refusal], None] = lambda _, __: None,
    ) -> None:
        self._listener = listener
        self._membership = Membership(limits)
        self._on_decided = on_decided
        self._on_formed = on_formed
        self._on_refused = on_refused
        self._side = party(key, job_id, None)
        self._service = Service("sparkhvd-elastic", self._tell)
        self._loop = self._service.loop
        self._links: dict[int, socket.socket] = {}
        self._expected: set[int] = set()
        self._unmet: set[int] = set()  # of the change that is being carried out
        self._change: Change | None = None
        self._alarm: tuple[float, Task] | None = None
        reception = Reception(
            self._side,
            listener.sockets(),
            self._loop,
            current_turn=lambda: FIRST_TURN,
            on_peer=self._receive_member,
            on_notice=lambda _: None,
            on_shortage=lambda _: None,
        )
        reception.start()
        self._service.start(at_end=self._close_links)

    @property
    def endpoint(self) -> Endpoint:
        """Address for members."""
        return self._listener.endpoint()

    def expect(self, number: int) -> None:
        """Let a new process ask; called before it starts."""

        def note() -> None:
            self._expected.add(number)
            self._membership.expect(number)

        self._service.call(note)

    def end(self, number: int, why: str) -> None:
        """Note that a member's process has ended."""
        self._service.call(lambda: self._membership.end(number, why, time.monotonic()))

    def finish(self, number: int) -> None:
        """Note that a member's process has ended well: nobody joins any more."""

        def note() -> None:
            self._membership.receive(number, Report("finished", 0), time.monotonic())
            self._membership.end(number, FINISHED, time.monotonic())

        self._service.call(note)

    def remove(self, number: int, why: str) -> None:
        """Let a member leave at its next commit."""
        self._service.call(lambda: self._membership.remove(number, why, time.monotonic()))

    def fail(self, text: str) -> None:
        """End the job for all members: it cannot go on."""
        self._service.call(lambda: self._membership.fail(text, time.monotonic()))

    def close(self) -> None:
        """End all connections."""
        self._service.close()
        self._close_links()  # in a fork
        self._listener.close()

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- The thread. ---

    def _close_links(self) -> None:
        for link in self._links.values():  # whatever ended the thread: members do not wait
            link.close()

    def _set_alarm(self) -> None:
        """Wake when the membership has something to do."""
        at = self._membership.next_step_at()
        if self._alarm is not None and self._alarm[0] != at:
            self._loop.cancel(self._alarm[1])
            self._alarm = None
        if at is not None and self._alarm is None:
            self._alarm = (at, self._wake(at))
            self._loop.start(self._alarm[1])

    def _wake(self, at: float) -> Task:
        yield Wait(None, 0, at)
        self._alarm = None
        self._membership.step(time.monotonic())
        self._tell()

    def _receive_member(self, _: Turn, rank: int, sock: socket.socket) -> None:
        number = rank - 1
        if number not in self._expected or number in self._links:
            sock.close()
            return
        self._links[number] = sock
        self._loop.start(self._serve(number, sock))

    def _serve(self, number: int, sock: socket.socket) -> Task:
        """Read a member's messages until its end."""
        came = bytearray()
        why = "has died"
        try:
            while True:
                yield Wait(sock, selectors.EVENT_READ, float("inf"))
                with contextlib.suppress(BlockingIOError):
                    part = sock.recv(_READ_BYTES)
                    if not part:
                        break
                    came += part
                while (message := take(came)) is not None:
                    self._receive(number, message)
        except OSError as error:
            why = f"{why} ({error})"
        except ValueError as error:  # a member with the key that is not one of ours
            why = f"it sent {error}"
        self._expected.discard(number)
        self._links.pop(number).close()
        self._unmet.discard(number)
        self._membership.end(number, why, time.monotonic())
        self._tell()

    def _receive(self, number: int, message: Message) -> None:
        if isinstance(message, Report) and message.kind == "formed":
            self._note_formed(number, message.generation)
        self._membership.receive(number, message, time.monotonic())
        self._tell()

    def _note_formed(self, number: int, generation: int) -> None:
        if self._change is not None and self._change.generation == generation:
            self._unmet.discard(number)
            if not self._unmet:
                self._report(has_met=True)

    def _report(self, *, has_met: bool) -> None:
        change, self._change = self._change, None
        if change is not None:
            self._on_formed(Formed(change, time.monotonic() - change.asked_at, has_met))

    def _tell(self) -> None:
        """Send what the membership has to say."""
        membership = self._membership
        for change in membership.changes:
            self._on_decided(Decided(change.members))
        while membership.outbox:
            number, message = membership.outbox.pop(0)
            if isinstance(message, Refusal):
                self._on_refused(number, message)
            if (link := self._links.get(number)) is not None:
                try:
                    send(link, pack(message))
                except OSError:
                    # It has ended, or is stopped and reads nothing: the task that reads it ends it.
                    with contextlib.suppress(OSError):
                        link.shutdown(socket.SHUT_RDWR)
        while membership.changes:
            self._report(has_met=False)
            self._change = membership.changes.pop(0)
            self._unmet = set(self._change.members)
        self._set_alarm()
