"""Handover of a rank to the first process to call `init()`: its own, or a program started by it.

As with Horovod's variables, `subprocess.run([sys.executable, "train.py"])` in a rank that has not called `init()` makes
that program the rank. The rank's variables name an abstract Unix socket, at which its launcher (for a script) or the
rank itself (for a function) hands over job and listener, once. A later program gets an error, because it would
otherwise train alone silently.

**Trust**: the name is not secret. The kernel names each side the peer's user, and other users get nothing.

**Threads**: one per claim, which waits for programs. A fork of the rank has neither that thread nor the sockets.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.launchers.bootstrap import Handover, is_handover, take
from sparkhvd.launchers.environment import place_in
from sparkhvd.rendezvous import Listener, Rendezvous, SingleRendezvous
from sparkhvd.rendezvous.event_loop import UNAUTHENTICATED_S, is_same_user
from sparkhvd.rendezvous.listener import unix_address
from sparkhvd.settings import Settings
from sparkhvd.wire import read_json

VARIABLE = "SPARKHVD_PLACE"
# Longest wait of a program for its answer: the answering process may be busy, or stopped.
ANSWER_S = 30.0
_READ_BYTES = 1 << 16
# A handover takes 200 KB in a job of a thousand ranks.
_MOST_BYTES = 64 << 20
_OWN_JOB = f"To make it a job of its own, start it without {VARIABLE} in its environment."


class RankClaim:
    """Handover of a rank to the first process to claim it, and refusal of later processes.

    Args:
        handover: of the rank.
        listener: of the rank. Closed when another process claims the place, and by `close`.
        is_own: whether this process is the rank, and not a launcher.
    """

    def __init__(self, handover: Handover, listener: Listener, *, is_own: bool) -> None:
        self.descriptor = handover.to_descriptor()
        self._is_own = is_own
        self._who = handover.who
        self._listener = listener
        self._lock = threading.Lock()  # guards the following, and the descriptor in this process
        self._taken_by = 0  # process that has connected to the socket
        self._sock = socket.socket(socket.AF_UNIX)
        self._name = secrets.token_hex(16)
        with contextlib.suppress(OSError):  # a sandbox without Unix sockets: programs get an error
            self._sock.bind(unix_address(self._name))
            self._sock.listen(socket.SOMAXCONN)
        threading.Thread(target=self._serve, name="sparkhvd-place", daemon=True).start()

    def variables(self, env: Mapping[str, str], *, is_inherited: bool) -> dict[str, str]:
        """Make the environment variable of the rank. Programs find this claim by it.

        Args:
            env: all other variables of the rank.
            is_inherited: whether the rank inherits `descriptor` under its number.
        """
        number = self.descriptor if is_inherited else -1
        return {VARIABLE: f"{number} {self._name} {os.getpid()} {_launcher_in(env)}"}

    def claim(self) -> None:
        """Claim the rank for this process.

        Raises:
            InvalidArgumentError: another process has it.
        """
        with self._lock:
            if self._taken_by:
                raise InvalidArgumentError(
                    f"init(): process {self._taken_by}, which this process started, called init() first and is now {self._who}. Call "
                    "init() here before that program starts, or only in that program."
                )
            take(self.descriptor)

    def close(self) -> None:
        """Stop handing over. The closed listener shows the other ranks that this rank is gone."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes the socket
        with self._lock:
            if self.descriptor >= 0:
                os.close(self.descriptor)
                self.descriptor = -1
        self._listener.close()

    def close_in_fork(self) -> None:
        """Close everything in a fork, which has no serving thread."""
        self._lock = threading.Lock()  # the thread may have held it
        self._sock.close()
        self.close()

    def _serve(self) -> None:
        # If a connection gets no descriptor or memory, the socket closes, and programs get an error.
        with self._sock, contextlib.suppress(OSError):
            while True:
                sock, _ = self._sock.accept()
                with sock, contextlib.suppress(OSError):
                    sock.settimeout(UNAUTHENTICATED_S)
                    if is_same_user(sock):
                        self._answer(sock)

    def _answer(self, sock: socket.socket) -> None:
        with self._lock:
            content = take(self.descriptor) if self.descriptor >= 0 else None
            if content is None:
                sock.sendall(json.dumps({"taken": self._how()}).encode())
                return
            try:
                fds = [fd for fd in self._listener.filenos() if fd >= 0]
                sent = socket.send_fds(sock, [content], fds)
                sock.sendall(content[sent:])
            except OSError:  # the program has ended: the next process may claim the rank
                os.pwrite(self.descriptor, content, 0)
                raise
            self._taken_by = _process_of(sock)
        self._listener.close()

    def _how(self) -> str:
        if self._taken_by:
            return f"process {self._taken_by} called init() first and is now {self._who}"
        if self._is_own:
            return f"{self._who}, which started it, called init() itself"
        return f"the process of {self._who}, or a program that it started, called init() first"


def _launcher_in(env: Mapping[str, str]) -> str:
    """Name of the job in a launcher's variables, such as torch's, or return "" without any."""
    with contextlib.suppress(InvalidArgumentError):
        place = place_in(env, 0)
        return "" if place is None else place.job
    return ""


def _process_of(sock: socket.socket) -> int:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[0])


# Claim of this process, with its pid, if it is a rank that runs a function.
_held: list[tuple[RankClaim, int]] = []


def hold(handover: Handover, listener: Listener) -> None:
    """Let programs started by this process claim its rank until it calls `init()`."""
    place = RankClaim(handover, listener, is_own=True)
    variables = os.environ  # noqa: TID251 - the launcher's own
    variables.update(place.variables(variables, is_inherited=False))
    _held[:] = [(place, os.getpid())]
    os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    for place, _ in _held:
        place.close_in_fork()
    _held.clear()


def claim() -> None:
    """Claim this process's rank, if it holds a claim.

    Raises:
        InvalidArgumentError: a program that it has started has claimed it.
    """
    for place, _ in _held:
        place.claim()


def receive() -> Rendezvous | None:
    """Become the rank that `sparkhvdrun` passes in a descriptor.

    None without a descriptor, or if another process has claimed the rank.
    """
    text = os.environ.get(VARIABLE)  # noqa: TID251 - the launcher's own
    number = (text or "-1").partition(" ")[0]
    descriptor = int(number) if number.isdecimal() else -1
    if descriptor < 0 or not is_handover(descriptor):
        return None
    content = take(descriptor)
    if content is None:
        return None
    os.close(descriptor)
    handover = Handover.from_bytes(content)
    return handover.enter(handover.listen())


def inherit() -> Rendezvous | None:
    """Become the rank that started this program, or return None.

    None without such a rank, or if the rank started this program's launcher. If the rank has called `init()`, a
    multiprocessing process becomes a job of its own, and a line reports that.

    Raises:
        InvalidArgumentError: another process has the place, or there is no answer.
    """
    variables = os.environ  # noqa: TID251 - the launcher's own
    text = variables.get(VARIABLE)
    if text is None:
        return None
    _, name, holder, launcher = (*text.split(" ", 3), "", "", "")[:4]
    if _launcher_in(variables) not in ("", launcher):
        return None
    what = f"init(): this process was started by a rank ({VARIABLE} is set)"
    try:
        content, listener = _ask(name)
    except OSError as error:
        why = f"did not answer in {ANSWER_S:g} s" if isinstance(error, TimeoutError) else error
        raise InvalidArgumentError(
            f"{what} and cannot take its place: process {holder}, which holds it, has ended or is out of reach ({why}). Start the program in the "
            f"rank, in its network namespace, and wait there for its end. {_OWN_JOB}"
        ) from error
    values = read_json(content)
    if taken := values.get("taken"):
        if multiprocessing.parent_process() is not None:
            sys.stderr.write(
                f"sparkhvd: process {os.getpid()} was started by multiprocessing and is a job of its own with one rank: {taken}.\n"
            )
            return SingleRendezvous(Settings.resolve())
        raise InvalidArgumentError(
            f"{what} and has no place in the job: {taken}. Call init() in one of them: let the rank communicate and hand the results over, or start "
            f"this program instead of calling init() there. {_OWN_JOB}"
        )
    handover = Handover.from_bytes(content, listener)
    return handover.enter(handover.listen())


def _ask(name: str) -> tuple[bytes, tuple[int, int]]:
    """Request a place and return the answer, and the descriptors of its listener.

    Raises:
        OSError: there is no answer, or it is another user's.
    """
    until = time.monotonic() + ANSWER_S
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(ANSWER_S)
        sock.connect(unix_address(name))
        if not is_same_user(sock):
            raise PermissionError("another user's process answers")
        content, fds, _, _ = socket.recv_fds(sock, _READ_BYTES, 2)
        part = content
        while part and len(content) <= _MOST_BYTES:
            sock.settimeout(max(0.001, until - time.monotonic()))
            part = sock.recv(_READ_BYTES)
            content += part
    try:
        read_json(content)
    except ValueError as error:
        for fd in fds:
            os.close(fd)
        raise ConnectionResetError("the answer is not whole") from error
    tcp, unix = (*fds, -1, -1)[:2]
    return content, (tcp, unix)
