"""Coordinator of an elastic job. It decides the members of each generation.

It runs in the process that starts the members.

**Threads**: one, "sparkhvd-elastic", which owns the sockets and the `Membership`. Other threads call `expect`, `end`,
`remove` and `fail`, which only post to it. **Trust**: a connection that has not proved the job's key is closed after 5
s, and cannot disturb the job. A member's number is part of its proof; only numbers registered by `expect` may ask.
**Failure**: a member whose connection ends has left the job. The end of this process ends the job.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from sparkhvd.elastic.membership import (
    FINISHED,
    Arrival,
    Change,
    Decision,
    JoinRequest,
    Limits,
    MemberReport,
    Membership,
    Message,
    Refusal,
    Running,
    Update,
    from_dict,
    to_dict,
)
from sparkhvd.errors import ElasticError, InternalError, LeftOutError
from sparkhvd.rendezvous import Endpoint, Listener
from sparkhvd.rendezvous.event_loop import (
    EventLoop,
    Task,
    Wait,
    is_same_user,
    open_connection,
    send,
    sleep,
)
from sparkhvd.rendezvous.handshake import SERVICE_STAGE, ConnectionPhase, introduce
from sparkhvd.rendezvous.listener import Acceptor, host_key, tcp_place, unix_address
from sparkhvd.wire import MOST_BYTES, frame_of, parse, take_frame

_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class GenerationFormed:
    """Change of the members, either carried out by all of them or superseded.

    Attributes:
        change: what has changed.
        seconds: from the first member's question until the last one has connected.
        has_met: whether the members have connected; False if another change came before.
    """

    change: Change
    seconds: float
    has_met: bool


@dataclass(frozen=True)
class Decided:
    """Decision on the members of a generation, before they receive it.

    Attributes:
        members: their numbers, by rank.
    """

    members: tuple[int, ...]


class Coordinator:
    """Server for the members of an elastic job. A context manager.

    Args:
        key: of the job, 32 bytes.
        job_id: of the job.
        listener: where members reach this process; closed at the end.
        limits: of the job.
        on_decided: called from the thread before each change.
        on_formed: called from the thread after each change.
        on_refused: called from the thread when a member is refused.
    """

    def __init__(
        self,
        key: bytes,
        job_id: str,
        listener: Listener,
        limits: Limits,
        *,
        on_decided: Callable[[Decided], None] = lambda _: None,
        on_formed: Callable[[GenerationFormed], None] = lambda _: None,
        on_refused: Callable[[int, Refusal], None] = lambda _, __: None,
    ) -> None:
        self._listener = listener
        self._membership = Membership(limits)
        self._on_decided = on_decided
        self._on_formed = on_formed
        self._on_refused = on_refused
        self._side = party(key, job_id, None)
        self._service = CoordinatorThread("sparkhvd-elastic", self._notify)
        self._loop = self._service.loop
        self._links: dict[int, socket.socket] = {}
        self._expected: set[int] = set()
        self._unmet: set[int] = set()  # members that have not carried out the current change
        self._change: Change | None = None
        self._alarm: tuple[float, Task] | None = None
        acceptor = Acceptor(
            self._side,
            listener.sockets(),
            self._loop,
            current_stage=lambda: SERVICE_STAGE,
            on_peer=self._receive_member,
            on_notice=lambda _: None,
            on_shortage=lambda _: None,
        )
        acceptor.start()
        self._service.start(at_end=self._close_links)

    @property
    def endpoint(self) -> Endpoint:
        """Address for members."""
        return self._listener.endpoint()

    def expect(self, number: int) -> None:
        """Register a new process. Call this before the process starts."""

        def note() -> None:
            self._expected.add(number)
            self._membership.expect(number)

        self._service.call(note)

    def end(self, number: int, why: str) -> None:
        """Record the end of a member's process."""
        self._service.call(lambda: self._membership.end(number, why, time.monotonic()))

    def finish(self, number: int) -> None:
        """Record that a member's process has succeeded. No further process joins."""

        def note() -> None:
            self._membership.receive(number, MemberReport("finished", 0), time.monotonic())
            self._membership.end(number, FINISHED, time.monotonic())

        self._service.call(note)

    def remove(self, number: int, why: str) -> None:
        """Have a member leave at its next commit."""
        self._service.call(lambda: self._membership.remove(number, why, time.monotonic()))

    def fail(self, text: str) -> None:
        """End the job for all members: it cannot continue."""
        self._service.call(lambda: self._membership.fail(text, time.monotonic()))

    def close(self) -> None:
        """End all connections."""
        self._service.close()
        self._close_links()  # a fork has no thread that closes them
        self._listener.close()

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- The thread. ---

    def _close_links(self) -> None:
        for link in self._links.values():  # however the thread ended, members must not wait
            link.close()

    def _set_alarm(self) -> None:
        """Schedule the next step of the membership."""
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
        self._notify()

    def _receive_member(self, _: ConnectionPhase, rank: int, sock: socket.socket) -> None:
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
        except ValueError as error:  # a member that has the key but runs other code
            why = f"it sent {error}"
        self._expected.discard(number)
        self._links.pop(number).close()
        self._unmet.discard(number)
        self._membership.end(number, why, time.monotonic())
        self._notify()

    def _receive(self, number: int, message: Message) -> None:
        if isinstance(message, MemberReport) and message.kind == "formed":
            self._record_formed(number, message.generation)
        self._membership.receive(number, message, time.monotonic())
        self._notify()

    def _record_formed(self, number: int, generation: int) -> None:
        if self._change is not None and self._change.generation == generation:
            self._unmet.discard(number)
            if not self._unmet:
                self._report(has_met=True)

    def _report(self, *, has_met: bool) -> None:
        change, self._change = self._change, None
        if change is not None:
            self._on_formed(GenerationFormed(change, time.monotonic() - change.asked_at, has_met))

    def _notify(self) -> None:
        """Send the membership's messages and report its changes."""
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
                    # The member has ended, or is stopped and does not read. `_serve` sees the shutdown and cleans up.
                    with contextlib.suppress(OSError):
                        link.shutdown(socket.SHUT_RDWR)
        while membership.changes:
            self._report(has_met=False)
            self._change = membership.changes.pop(0)
            self._unmet = set(self._change.members)
        self._set_alarm()


# ----------------------------------------------------------------------------------------------------
# Thread that serves connections and runs calls of other threads.

# Longest sleep of a loop that posted calls wake up.
_IDLE_S = 3600.0
# Longest wait for the end of the thread, whose steps never block.
_END_S = 10.0


class CoordinatorThread:
    """Thread with an event loop.

    Args:
        name: of the thread.
        after: called in the thread after posted calls.

    Attributes:
        loop: of the thread; tasks are started there before `start`, or by the thread.
    """

    def __init__(self, name: str, after: Callable[[], None] = lambda: None) -> None:
        self.loop = EventLoop()
        self._after = after
        self._at_end: Callable[[], None] = lambda: None
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wakeup, self._waker = socket.socketpair()
        self._wakeup.setblocking(False)
        self._is_closing = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, at_end: Callable[[], None]) -> None:
        """Start the thread. It calls `at_end` however it ends."""
        self._at_end = at_end
        self._thread.start()

    def call(self, step: Callable[[], None]) -> None:
        """Post a function to the thread without waiting for it."""
        self._calls.put(step)
        with contextlib.suppress(
            OSError
        ):  # full: a wakeup is pending; closed: the thread has ended
            self._waker.send(b"\0", socket.MSG_DONTWAIT)

    def close(self) -> None:
        """End the thread and close its sockets. In a fork, only close the sockets."""
        if self._thread.is_alive() and os.getpid() == self._pid:

            def stop() -> None:
                self._is_closing = True

            self.call(stop)
            self._thread.join(_END_S)
            if self._thread.is_alive():  # it is a daemon, and still uses its sockets
                return
        for sock in (self._wakeup, self._waker):
            sock.close()

    def _run(self) -> None:
        for task in (self._run_calls(), self._stay_awake()):
            self.loop.start(task)
        try:
            self.loop.run(lambda: self._is_closing)
        finally:
            self.loop.close()
            self._at_end()

    def _run_calls(self) -> Task:
        """Run the calls of other threads."""
        while True:
            yield Wait(self._wakeup, selectors.EVENT_READ, float("inf"))
            with contextlib.suppress(BlockingIOError):
                self._wakeup.recv(_READ_BYTES)
            with contextlib.suppress(queue.Empty):
                while True:
                    self._calls.get_nowait()()
            self._after()

    def _stay_awake(self) -> Task:
        """Bound each wait of the loop: a selector cannot wait forever."""
        while True:
            yield from sleep(_IDLE_S)


# ----------------------------------------------------------------------------------------------------
# Authenticated connections between members and their coordinator, and their messages.
# A connection starts with the handshake of ranks (`rendezvous.handshake`), under its own key, derived from the job's.
# Then each message is a length-prefixed JSON object.

# Above any member's number, as the handshake requires.
_SIZE = 1 << 31


@dataclass(frozen=True)
class CoordinatorSide:
    """A `HandshakeSide`: the coordinator is 0, member n is n + 1."""

    key: bytes = field(repr=False)
    job_id: str
    rank: int
    attempt: int = 0
    size: int = _SIZE


def party(key: bytes, job_id: str, number: int | None) -> CoordinatorSide:
    """Side of a member, or of the coordinator if `number` is None.

    Args:
        key: of the job.
        job_id: of the job.
        number: of the member.
    """
    own = hmac.digest(key, b"elastic coordinator", "sha256")
    return CoordinatorSide(own, f"{job_id} elastic", 0 if number is None else number + 1)


def dial(
    endpoint: Endpoint, side: CoordinatorSide, until: float
) -> Generator[Wait, None, socket.socket | None]:
    """Connect to the coordinator and authenticate, and return the connection, or None if its proof was wrong.

    Raises:
        OSError: it does not listen, or does not answer in time.
    """
    if endpoint.unix_name and endpoint.host_key == host_key() != "":
        sock = yield from open_connection(socket.AF_UNIX, unix_address(endpoint.unix_name), until)
        if not is_same_user(sock):
            sock.close()
            raise PermissionError("the coordinator's socket belongs to another user")
    else:
        sock = yield from open_connection(*tcp_place(endpoint), until)
    try:
        if (yield from introduce(side, 0, SERVICE_STAGE, sock, until)):
            return sock
    except BaseException:
        sock.close()
        raise
    sock.close()
    return None


def pack(message: Message) -> bytes:
    return frame_of(json.dumps(to_dict(message)).encode())


def take(came: bytearray) -> Message | None:
    """Remove the first message from received bytes, or return None if it is incomplete.

    Raises:
        ValueError: they are not a valid message.
    """
    text = take_frame(came, MOST_BYTES)
    return None if text is None else from_dict(parse(text))


# ----------------------------------------------------------------------------------------------------
# Connection of a member to the coordinator of its elastic job.
# **Threads**: the thread that calls `init()` and commits; never two at a time.

# Pause before another attempt to reach the coordinator.
_RETRY_S = 0.1
# A live coordinator answers at once, but its host may be busy.
_DIAL_S = 30.0


@dataclass(frozen=True)
class JoinToken:
    """Token for joining an elastic job. It holds the key: pass it by pipe or descriptor.

    Attributes:
        key: of the job.
        job_id: of the job.
        number: of the member.
        coordinator: address of the coordinator.
        wait_s: longest wait for a decision; above the coordinator's own limit, so that its refusal arrives first.
        meet_s: longest wait for the other members after a decision. All connect at once, unless a member was
            stopped after its request.
    """

    key: bytes = field(repr=False)
    job_id: str
    number: int
    coordinator: Endpoint
    wait_s: float
    meet_s: float

    def to_dict(self) -> dict[str, object]:
        """JSON object with the key, for `rebuild`."""
        return {
            **vars(self),
            "key": self.key.hex(),
            "coordinator": self.coordinator.to_dict(),
        }


class MemberLink:
    """Connection of a member to the coordinator, from its first message on."""

    def __init__(self, join_token: JoinToken) -> None:
        self._join_token = join_token
        self._sock: socket.socket | None = None
        self._came = bytearray()
        self._update: Update | None = None
        self._pid = os.getpid()

    def arrive(self) -> int:
        """Ask for the size of the running generation, or return 0 without a running generation.

        Raises:
            ElasticError: the job cannot continue, or the coordinator is gone.
            SystemExit: this member should leave, or the others have finished.
        """
        deadline = time.monotonic() + self._join_token.wait_s
        self._send(Arrival())
        while not isinstance(message := self._receive(deadline), Running):
            self._take(message)
        return message.size

    def ask(self, ask: JoinRequest) -> Decision:
        """Ask to join the next generation, and wait for the decision.

        Raises:
            LeftOutError: the others continued without this member.
            ElasticError: the job cannot continue, or the coordinator is gone.
            SystemExit: this member should leave, or the others have finished.
        """
        deadline = time.monotonic() + self._join_token.wait_s
        self._update = None  # the decision is newer
        self._send(ask)
        while True:
            message = self._receive(deadline)
            if isinstance(message, Decision) and message.generation > ask.generation:
                self._update = None
                return message
            self._take(message)

    def report(self, kind: str, generation: int) -> None:
        """Send a report, without an error if the coordinator is gone.

        The next question to the coordinator shows that it is gone.
        """
        with contextlib.suppress(ElasticError):
            self._send(MemberReport(kind, generation))

    def news(self) -> Update | None:
        """Pending update of the members, or None. Does not wait.

        Raises:
            LeftOutError: the others continued without this member.
            ElasticError: the coordinator is gone.
        """
        while self._sock is not None and (message := self._receive(0.0, wait=False)) is not None:
            self._take(message)
        return self._update

    def close(self) -> None:
        """End the connection: this member leaves the job."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _take(self, message: Message | None) -> None:
        if isinstance(message, Update):
            self._update = message
        elif isinstance(message, Refusal):
            self._refuse(message)
        elif not isinstance(message, Decision):  # an answer to an abandoned question
            raise InternalError(f"a member got {message!r}.")

    def _refuse(self, refusal: Refusal) -> None:
        me = f"member {self._join_token.number}"
        if refusal.kind == "left out":
            raise LeftOutError(
                f"This process ({me}) is no longer a rank of the elastic job: {refusal.text}. Its work since its last commit is "
                "dropped; it must end, and write nothing."
            )
        if refusal.kind in ("removed", "over"):
            raise SystemExit(0)
        raise ElasticError(f"The elastic job cannot continue: {refusal.text}.")

    def _send(self, message: Message) -> None:
        try:
            self._connected().sendall(pack(message))
        except OSError as error:
            raise self._lost(error) from error

    def _receive(self, deadline: float, *, wait: bool = True) -> Message | None:
        """Receive a message, or return None if nothing has arrived and `wait` is False."""
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
        """Connect, with retries: the coordinator may be busy with many others."""
        join_token = self._join_token
        deadline = time.monotonic() + min(_DIAL_S, join_token.wait_s)
        side = party(join_token.key, join_token.job_id, join_token.number)
        found: list[socket.socket] = []
        problem: list[object] = [
            "it gave a wrong proof: another job, or another version of sparkhvd"
        ]

        def reach() -> Task:
            while not found and time.monotonic() < deadline:
                try:
                    if (
                        sock := (yield from dial(join_token.coordinator, side, deadline))
                    ) is not None:
                        found.append(sock)
                        return
                except ConnectionRefusedError as error:
                    problem[:] = [error]
                    return
                except OSError as error:
                    problem[:] = [error]
                yield from sleep(_RETRY_S)

        loop = EventLoop()
        try:
            loop.start(reach())
            loop.run(loop.is_idle)
        finally:
            loop.close()
        if not found:
            raise self._lost(problem[0])
        found[0].settimeout(_DIAL_S)  # limits a send to a coordinator that does not read
        return found[0]

    def _lost(self, cause: object) -> ElasticError:
        return ElasticError(
            f"The coordinator of the elastic job at {self._join_token.coordinator} is gone ({cause}). It is the process that started "
            "the ranks: start the job again."
        )
