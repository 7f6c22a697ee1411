"""Zygote process: preloads what trainers import first, and forks a trainer per request.

`zygote_client.ZygoteClient` starts it as `python -m sparkhvd.runner.zygote LISTENER_FD PIDFD FAMILY IDLE_S`. It serves owners,
which launch ranks: a single process, or the Python workers of a Spark executor.

    owner -> zygote    {"modules": [...]} + descriptors of a channel, a gate and `InheritedPipes`   fork a trainer
    owner -> zygote    {"modules": [...]}   import them for later trainers, once no trainer runs whose end would be reported late
    zygote -> zygote   a connection: a newer zygote of the family has started
    zygote -> owner    {"pid": n, ...}, later {} at the trainer's end, and {"status": n, ...} once the owner has answered (channel)
    owner -> trainer   one byte through the gate: the owner has not given up; then the environment, the first frame on its pipe

**Threads**: a fork with threads would be unsafe, so it checks after each import and stops forking if there are any.
**Trust**: owners run as the same user. Their code runs in forks only; the zygote imports the modules that an owner
names. **Failure**: a trainer survives its zygote, and dies with the pipe of its owner. **Shutdown**: after its last
trainer, once the process of the pidfd, or the only owner of a private zygote, is gone; and after IDLE_S without a
request, or 5 s if two newer zygotes have started since the last one: alternating launches keep theirs, and unused
zygotes do not accumulate.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from sparkhvd import lazy_compiler
from sparkhvd.rendezvous.event_loop import is_same_user
from sparkhvd.runner import child
from sparkhvd.runner.processes import InheritedPipes, reap, receive, send
from sparkhvd.runner.protocol import dumps
from sparkhvd.wire import parse, read_frame, read_json, rebuild

# How long a zygote waits for work if two newer zygotes exist.
_OLD_S = 5.0
# Zygotes of a family that can notify each other.
_MOST = 16
_MESSAGE_BYTES = 1 << 16
# Descriptors of a fork request, in this order: channel, gate, specification, result, log, and up to two listeners.
_FEWEST_DESCRIPTORS, _MAX_DESCRIPTORS = 5, 7


class _Forked:
    """Trainer of this zygote, and the channel to its owner. The channel is None once the owner has closed it."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.channel: socket.socket | None = channel
        self.has_ended = False

    def end(self) -> None:
        """Report the exit. The owner must not signal the pid afterwards, and confirms that it may be reaped."""
        self.has_ended = True
        self._notify({})

    def reap(self) -> None:
        """Kill the rest of the group, release the pid, and report the status."""
        ended = reap(self.pid)
        os.close(self.pidfd)
        self._notify(vars(ended))
        if self.channel is not None:
            self.channel.close()

    def _notify(self, message: Mapping[str, object]) -> None:
        if self.channel is not None:
            with contextlib.suppress(OSError):
                send(self.channel, message)


@dataclass(frozen=True)
class ForkRequest:
    """Request of an owner: modules to import before this fork or, without descriptors, before later forks."""

    modules: list[str]


class _Server:
    """Loop to serve owners and watch trainers.

    Args:
        listener: accepts owners.
        lifetime: pidfd of the process with which this one ends.
        family: name shared by all zygotes of that process; "" for a private zygote, which ends with its only owner.
        idle_s: how long it waits for work.
    """

    def __init__(self, listener: socket.socket, lifetime: int, family: str, idle_s: float) -> None:
        self._listener = listener
        self._lifetime = lifetime
        self._is_private = not family
        self._idle_s = idle_s
        self._news = _announced(family) if family else None
        self._num_newer = 0
        self._is_over = False
        self._owners: dict[int, socket.socket] = {}
        self._trainers: list[_Forked] = []
        self._wanted: list[str] = []  # modules for later trainers

    def serve(self) -> None:
        """Serve until the zygote is no longer needed, or has been idle for some time."""
        while self._trainers or not self._is_over:
            ends = {t.pidfd: t for t in self._trainers if not t.has_ended}
            channels = {t.channel.fileno(): t for t in self._trainers if t.channel is not None}
            asked = [] if self._is_over else [self._lifetime, self._listener.fileno()]
            news = [] if self._news is None else [self._news.fileno()]
            timeout = None if self._trainers else self._idle_s if self._num_newer < 2 else _OLD_S
            if self._wanted and not self._trainers:
                timeout = 0
            ready, _, _ = select.select(
                [*asked, *news, *self._owners, *ends, *channels], [], [], timeout
            )
            if not ready and not self._trainers:
                if not self._wanted:
                    return
                self._load_wanted()
            for fd in ready:
                if fd in ends:
                    self._ended(ends[fd])
                elif fd in channels:
                    self._receive(channels[fd])
                elif fd in self._owners:
                    self._answer(self._owners[fd])
                elif fd == self._lifetime:
                    self._is_over = True
                elif fd == self._listener.fileno():
                    self._accept()
                elif self._news is not None:
                    with self._news.accept()[0] as newer:
                        self._num_newer += is_same_user(newer)

    def _accept(self) -> None:
        owner, _ = self._listener.accept()
        if is_same_user(owner):
            self._owners[owner.fileno()] = owner
        else:
            owner.close()

    def _ended(self, trainer: _Forked) -> None:
        trainer.end()
        if trainer.channel is None:
            self._reap(trainer)

    def _receive(self, trainer: _Forked) -> None:
        """Handle the owner's permission to reap a trainer, or the owner's end."""
        if trainer not in self._trainers:  # it was reaped a moment ago
            return
        channel = trainer.channel
        if channel is not None and receive(channel) is None:
            channel.close()
            trainer.channel = None
        if trainer.has_ended:
            self._reap(trainer)

    def _reap(self, trainer: _Forked) -> None:
        trainer.reap()
        self._trainers.remove(trainer)

    def _answer(self, owner: socket.socket) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(owner, _MESSAGE_BYTES, _MAX_DESCRIPTORS)
        except ConnectionError:
            data, fds = b"", []
        try:
            modules = rebuild(ForkRequest, parse(data)).modules
            if 0 < len(fds) < _FEWEST_DESCRIPTORS:
                raise ValueError("a request with too few descriptors")
            channel = socket.socket(fileno=fds[0]) if fds else None
        except (ValueError, OSError):  # the owner has ended, or runs other code
            for fd in fds:
                os.close(fd)
            del self._owners[owner.fileno()]
            owner.close()
            self._is_over |= self._is_private
            return
        self._num_newer = 0
        self._wanted += modules
        if channel is not None:
            self._load_wanted()
            self._fork(channel, fds[1:])

    def _load_wanted(self) -> None:
        wanted, self._wanted = self._wanted, []
        _load(wanted)

    def _fork(self, channel: socket.socket, fds: list[int]) -> None:
        gate, spec, result, log, *listener = fds
        pid, parent = 0, os.getpid()
        # A lock that another thread holds would stay locked in the fork.
        if len(os.listdir("/proc/self/task")) == 1:
            pid = os.fork()
            if pid == 0:
                self._leave()
                ends = InheritedPipes(spec, result, log, (-1, -1))
                _become_trainer(channel, gate, ends, listener, parent)
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(OSError):
            send(channel, {"pid": pid, "zygote": parent})
        if pid:
            self._trainers.append(_Forked(pid, channel))
        else:
            channel.close()

    def _leave(self) -> None:
        """Close what a fork must not keep open."""
        self._listener.close()
        if self._news is not None:
            self._news.close()
        os.close(self._lifetime)
        for owner in self._owners.values():
            owner.close()
        for trainer in self._trainers:
            os.close(trainer.pidfd)
            if trainer.channel is not None:
                trainer.channel.close()


def _announced(family: str) -> socket.socket | None:
    """Notify the other zygotes of a family.

    Returns a socket for notices of newer zygotes; None if there are too many zygotes.
    """
    own: socket.socket | None = None
    for number in range(_MOST):
        name = f"\0sparkhvd-zygotes-{family}-{number}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            other.setblocking(False)
            with contextlib.suppress(OSError):  # no such zygote, or its backlog is full
                other.connect(name)
        if own is None:
            own = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                own.bind(name)
                own.listen()
            except OSError:  # another zygote has the name
                own.close()
                own = None
    return own


def _load(modules: list[str]) -> None:
    child.load(modules)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the pages of everything imported


def _become_trainer(
    channel: socket.socket, gate: int, ends: InheritedPipes, listener: list[int], parent: int
) -> NoReturn:
    """Run a trainer in a fork, as `python -m sparkhvd.runner.child` does."""
    try:
        os.setsid()
        channel.close()
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (ends.log, 1), (ends.log, 2)):
            os.dup2(source, target)
        os.close(null)
        os.close(ends.log)
        has_passed = os.read(gate, 1)
        os.close(gate)
        environ = read_frame(ends.spec) if has_passed else None
        if environ is None:  # the owner has given up
            os._exit(0)
        os.environ.clear()  # noqa: TID251 - that of a fresh process
        os.environ.update(read_json(environ))  # noqa: TID251
        _reseed()
        status = child.main(ends.spec, ends.result, listener)
        child.end(status, parent)
    except BaseException:  # noqa: BLE001 - the code of the zygote must not continue in a fork
        sys.excepthook(*sys.exc_info())
        with contextlib.suppress(Exception):
            sys.stderr.flush()
    finally:
        os._exit(1)


def _reseed() -> None:
    """Seed the random generators as in a fresh process: forks must not draw equal numbers."""
    if "numpy" in sys.modules:  # Python reseeds its own generator
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def main(listener_fd: int, lifetime: int, family: str, idle_s: float) -> None:
    """Serve processes connecting to a socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner forwards a terminal's Ctrl-C
    # Trainers have the working directory in their path only if the owner has; Python 3.10 cannot leave it out.
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    child.hold_threads()
    lazy_compiler.install()  # a trainer without this setting removes it
    with contextlib.closing(socket.socket(fileno=listener_fd)) as listener:
        listener.listen()  # from now on its peers see this process's pid
        for fd in (listener_fd, lifetime):
            os.set_inheritable(fd, False)
        _Server(listener, lifetime, family, idle_s).serve()


if __name__ == "__mp_main__":  # in a process that multiprocessing spawns from a trainer
    child.pickle_main_by_value(dumps)
if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
