"""Nursery process: has imported what trainers import first, and forks a trainer when a rank is wanted.

It is started as `python -m sparkhvd.runner.zygote LISTENER_FD PIDFD FAMILY` by `nurseries.Nursery`, and serves owners, which
launch ranks: one, or the Python workers of a Spark executor.

    owner -> nursery   {"modules": [...]} + descriptors of a channel, a gate and `InheritedPipes`   fork a trainer
    owner -> nursery   {"modules": [...]}                                                 import them for later trainers, once none runs whose end it
                                                                                          would tell late
    nursery -> nursery   a connection                                                     another one of the family has been started
    nursery -> owner   {"pid": n, ...}, later {} at the trainer's end, and {"status": n, ...} once the owner has answered (channel)
    owner -> trainer   one byte through the gate: the owner has not given up; then the environment, the first frame on its pipe

**Threads**: none, or a fork would be unsafe: after each import it looks, and a nursery with threads forks no more. **Trust**: owners
run as the same user; their code runs in forks only; the modules are those that an owner names. **Failure**: a trainer survives its
nursery, and dies with the pipe of its owner. **Shutdown**: when its last trainer is gone and the process of the pidfd, too, or
the only owner of a private one; and after a minute without a request, or some seconds if two others have been started since the last one:
launches that alternate keep theirs, and ever other ones pile up none.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
from typing import NoReturn

from sparkhvd.rendezvous.event_loop import is_same_user
from sparkhvd.runner import child
from sparkhvd.runner.processes import InheritedPipes, kill_group, receive, send
from sparkhvd.runner.protocol import dumps, read_frame

# How long a nursery waits for work.
IDLE_S = 60.0
# The same once it is not one of the newest two.
_OLD_S = 5.0
# Nurseries of a family that can tell of each other.
_MOST = 16
_MESSAGE_BYTES = 1 << 16
_MAX_DESCRIPTORS = 7


class _Forked:
    """Trainer of this nursery, and the channel to its owner; None once the owner has closed it."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.channel: socket.socket | None = channel
        self.has_ended = False

    def end(self) -> None:
        """Tell the owner, who then may send no signal any more and lets it be reaped."""
        self.has_ended = True
        self._notify({})

    def reap(self) -> None:
        """Kill the rest of the group, free the number, and tell the status."""
        kill_group(self.pid)
        _, status, usage = os.wait4(self.pid, 0)
        os.close(self.pidfd)
        code = os.waitstatus_to_exitcode(status)
        self._notify({"status": code, "peak_rss_bytes": usage.ru_maxrss * 1024})
        if self.channel is not None:
            self.channel.close()

    def _notify(self, message: dict[str, int]) -> None:
        if self.channel is not None:
            with contextlib.suppress(OSError):
                send(self.channel, message)


class _Server:
    """Loop that serves owners and watches trainers.

    Args:
        listener: accepts owners.
        lifetime: descriptor of the process with which this one ends.
        family: name that all nurseries of that process share; "" for one that ends with its only owner.
    """

    def __init__(self, listener: socket.socket, lifetime: int, family: str) -> None:
        self._listener = listener
        self._lifetime = lifetime
        self._is_private = not family
        self._news = _announced(family) if family else None
        self._num_newer = 0
        self._is_over = False
        self._owners: dict[int, socket.socket] = {}
        self._trainers: list[_Forked] = []
        self._wanted: list[str] = []  # modules for later trainers

    def serve(self) -> None:
        """Serve until there is no more use for it, or a time has passed without any."""
        while self._trainers or not self._is_over:
            ends = {t.pidfd: t for t in self._trainers if not t.has_ended}
            channels = {t.channel.fileno(): t for t in self._trainers if t.channel is not None}
            asked = [] if self._is_over else [self._lifetime, self._listener.fileno()]
            news = [] if self._news is None else [self._news.fileno()]
            timeout = None if self._trainers else IDLE_S if self._num_newer < 2 else _OLD_S
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
                    self._heard(channels[fd])
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

    def _heard(self, trainer: _Forked) -> None:
        """Handle the owner's leave to reap a trainer, or the owner's end."""
        if trainer not in self._trainers:  # it has been reaped a moment ago
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
        if not data:
            del self._owners[owner.fileno()]
            owner.close()
            self._is_over |= self._is_private
            return
        self._num_newer = 0
        self._wanted += json.loads(data)["modules"]
        if fds:
            self._load_wanted()
            self._fork(fds)

    def _load_wanted(self) -> None:
        wanted, self._wanted = self._wanted, []
        _load(wanted)

    def _fork(self, fds: list[int]) -> None:
        channel = socket.socket(fileno=fds[0])
        gate, spec, result, log, *listener = fds[1:]
        pid, parent = 0, os.getpid()
        # A lock that another thread holds would stay locked.
        if len(os.listdir("/proc/self/task")) == 1:
            pid = os.fork()
            if pid == 0:
                self._leave()
                ends = InheritedPipes(spec, result, log, (-1, -1))
                _become_trainer(channel, gate, ends, listener, parent)
        for fd in fds[1:]:
            os.close(fd)
        with contextlib.suppress(OSError):
            send(channel, {"pid": pid, "nursery": parent})
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
    """Tell the other nurseries of a family of this one; return a socket at which later ones tell it, or None if there are too many."""
    own: socket.socket | None = None
    for number in range(_MOST):
        name = f"\0sparkhvd-nurseries-{family}-{number}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            other.setblocking(False)
            with contextlib.suppress(OSError):  # nobody is there, or it has no time
                other.connect(name)
        if own is None:
            own = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                own.bind(name)
                own.listen()
            except OSError:  # another one's
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
    """Be a trainer in a fork, as `python -m sparkhvd.runner.child` is one."""
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
        os.environ.update(json.loads(environ))  # noqa: TID251
        _reseed()
        status = child.main(ends.spec, ends.result, listener)
        child.end(status, parent)
    except BaseException:  # noqa: BLE001 - door: nothing of the nursery may run on in a fork
        sys.excepthook(*sys.exc_info())
        with contextlib.suppress(Exception):
            sys.stderr.flush()
    finally:
        os._exit(1)


def _reseed() -> None:
    """Seed the generators that a fresh process seeds from the system: forks must not draw the same numbers."""
    if "numpy" in sys.modules:  # Python's own has seen to itself
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def main(listener_fd: int, lifetime: int, family: str) -> None:
    """Serve the processes that connect to a socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is for the owner, who passes it on
    # The working directory, which trainers have in their path only if the owner has; Python 3.10 cannot leave it out.
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    child.hold_threads()
    with contextlib.closing(socket.socket(fileno=listener_fd)) as listener:
        for fd in (listener_fd, lifetime):
            os.set_inheritable(fd, False)
        _Server(listener, lifetime, family).serve()


if __name__ == "__mp_main__":  # in a process that multiprocessing spawns from a trainer
    child.pickle_main_by_value(dumps)
if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
