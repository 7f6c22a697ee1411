"""A member's connection to the coordinator of its elastic job.

**Threads**: one at a time, the one that calls `init()` and commits.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from dataclasses import dataclass, field

from sparkhvd.elastic.channel import dial, pack, party, take
from sparkhvd.elastic.messages import (
    Arrival,
    Ask,
    Decision,
    Message,
    Refusal,
    Report,
    Running,
    Update,
)
from sparkhvd.errors import ElasticError, InternalError, LeftOutError
from sparkhvd.rendezvous import Endpoint
from sparkhvd.rendezvous.loop import Loop, Task, sleep

__all__ = ["Invitation", "Link"]

_READ_BYTES = 1 << 16
_RETRY_S = 0.1
# A coordinator that is there answers at once; its host may be busy.
_DIAL_S = 30.0


@dataclass(frozen=True)
class Invitation:
    """What a process needs to take part in an elastic job. Hand it over by pipe or descriptor: it holds the key.

    Attributes:
        key: of the job.
        job_id: of the job.
        number: of the member.
        coordinator: address of the coordinator.
        wait_s: longest wait for a decision; above the coordinator's own, which tells why it ends.
        meet_s: longest wait for the others of a decision, who all come at once: one that does not was stopped after it had asked.
    """

    key: bytes = field(repr=False)
    job_id: str
    number: int
    coordinator: Endpoint
    wait_s: float
    meet_s: float

    def to_dict(self) -> dict[str, object]:
        """Return a JSON object with the key in it."""
        return {
            **vars(self),
            "key": self.key.hex(),
            "coordinator": self.coordinator.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: dict[str, object]) -> Invitation:
        """Rebuild an invitation from `to_dict`."""
        coordinator = values["coordinator"]
        assert isinstance(coordinator, dict)
        return cls(
            bytes.fromhex(str(values["key"])),
            str(values["job_id"]),
            int(str(values["number"])),
            Endpoint.from_dict(coordinator),
            float(str(values["wait_s"])),
            float(str(values["meet_s"])),
        )


class Link:
    """Connection of a member to the coordinator, from its first question on."""

    def __init__(self, invitation: Invitation) -> None:
        self._invitation = invitation
        self._sock: socket.socket | None = None
        self._came = bytearray()
        self._update: Update | None = None
        self._pid = os.getpid()

    def arrive(self) -> int:
        """Return the number of members of the generation that runs already; 0 if none does.

        Raises:
            ElasticError: the job cannot go on, or the coordinator is gone.
            SystemExit: this member should leave, or the others have finished.
        """
        deadline = time.monotonic() + self._invitation.wait_s
        self._send(Arrival())
        while not isinstance(message := self._receive(deadline), Running):
            self._take(message)
        return message.size

    def ask(self, ask: Ask) -> Decision:
        """Ask to take part in the next generation, and wait for the decision.

        Raises:
            LeftOutError: the others went on without this member.
            ElasticError: the job cannot go on, or the coordinator is gone.
            SystemExit: this member should leave, or the others have finished.
        """
        deadline = time.monotonic() + self._invitation.wait_s
        self._update = None  # the decision will know more
        self._send(ask)
        while True:
            message = self._receive(deadline)
            if isinstance(message, Decision) and message.generation > ask.generation:
                self._update = None
                return message
            self._take(message)

    def report(self, kind: str, generation: int) -> None:
        """Tell the coordinator; nothing happens if it is gone, which the next question will show."""
        with contextlib.suppress(ElasticError):
            self._send(Report(kind, generation))

    def news(self) -> Update | None:
        """Return the news that the members should change, if there are any; does not wait.

        Raises:
            LeftOutError: the others went on without this member.
            ElasticError: the coordinator is gone.
        """
        while self._sock is not None and (message := self._receive(0.0, wait=False)) is not None:
            self._take(message)
        return self._update

    def close(self) -> None:
        """End the connection: this member takes no part any more."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _take(self, message: Message | None) -> None:
        if isinstance(message, Update):
            self._update = message
        elif isinstance(message, Refusal):
            self._refuse(message)
        elif not isinstance(message, Decision):  # an answer to a question that was given up
            raise InternalError(f"a member got {message!r}.")

    def _refuse(self, refusal: Refusal) -> None:
        me = f"member {self._invitation.number}"
        if refusal.kind == "left out":
            raise LeftOutError(
                f"This process ({me}) is no rank of the elastic job any more: {refusal.text}. Its work since its last commit is "
                "dropped; it must end, and write nothing."
            )
        if refusal.kind in ("removed", "over"):
            raise SystemExit(0)
        raise ElasticError(f"The elastic job cannot go on: {refusal.text}.")

    def _send(self, message: Message) -> None:
        try:
            self._connected().sendall(pack(message))
        except OSError as error:
            raise self._lost(error) from error

    def _receive(self, deadline: float, *, wait: bool = True) -> Message | None:
        """Receive a message; None where none is there and `wait` is False."""
        while (message := take(self._came)) is None:
            sock = self._connected()
            left = deadline - time.monotonic() if wait else 0.0
            try:
                with selectors.DefaultSelector() as selector:
                    selector.register(sock, selectors.EVENT_READ)
                    if not selector.select(max(0.0, left)):
                        if not wait:
                            return None
                        if left <= 0:
                            raise self._lost("it gave no answer in time")
                        continue
                part = sock.recv(_READ_BYTES)
            except OSError as error:
                raise self._lost(error) from error
            if not part:
                raise self._lost("it has ended")
            self._came += part
        return message

    def _connected(self) -> socket.socket:
        if os.getpid() != self._pid:
            raise ElasticError(
                "This process was forked by a rank of an elastic job, and is no rank itself. Let the rank communicate."
            )
        if self._sock is None:
            self._sock = self._dial()
        return self._sock

    def _dial(self) -> socket.socket:
        """Connect, as often as it takes: the coordinator may be busy with many others."""
        invitation = self._invitation
        deadline = time.monotonic() + min(_DIAL_S, invitation.wait_s)
        side = party(invitation.key, invitation.job_id, invitation.number)
        found: list[socket.socket] = []
        problem: list[object] = [
            "it gave a wrong proof: another job, or another version of sparkhvd"
        ]

        def reach() -> Task:
            while not found and time.monotonic() < deadline:
                try:
                    if (
                        sock := (yield from dial(invitation.coordinator, side, deadline))
                    ) is not None:
                        found.append(sock)
                        return
                except ConnectionRefusedError as error:
                    problem[:] = [error]
                    return
                except OSError as error:
                    problem[:] = [error]
                yield from sleep(_RETRY_S)

        loop = Loop()
        try:
            loop.start(reach())
            loop.run(loop.is_idle)
        finally:
            loop.close()
        if not found:
            raise self._lost(problem[0])
        found[0].settimeout(_DIAL_S)  # of a message, should the coordinator read nothing
        return found[0]

    def _lost(self, cause: object) -> ElasticError:
        return ElasticError(
            f"The coordinator of the elastic job at {self._invitation.coordinator} is gone ({cause}). It is the process that started "
            "the ranks: start the job again."
        )
