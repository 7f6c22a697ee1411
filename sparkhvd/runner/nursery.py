"""Nursery process: has imported what trainers import first, and forks a trainer when a rank is wanted.

It is started as `python -m sparkhvd.runner.nursery SOCKET_FD` by `nurseries.Nursery`, and serves the process that has started it,
alone, over a socket pair that nobody else can open.

    owner -> nursery   {"modules": [...]} + descriptors of a channel and `Ends`   fork a trainer
    owner -> nursery   {"modules": [...]}                                         import them for later trainers
    owner -> trainer   the environment, as the first frame on its pipe
    nursery -> owner   {"pid": n}, later {} at the trainer's end, and {"status": n, ...} once the owner has answered it (channel)

**Threads**: none, or a fork would be unsafe: after each import it looks, and a nursery with threads forks no more. **Trust**: the
user's code runs in forks only; the modules are those that the owner names. **Failure**: a trainer survives its nursery, and
dies with the pipe of its owner. **Shutdown**: at the end of the owner's socket, when its last trainer is gone; and after a
minute without a trainer.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from typing import NoReturn

from sparkhvd.runner import blas, child, spawning
from sparkhvd.runner.frames import read_frame
from sparkhvd.runner.pickling import dumps
from sparkhvd.runner.processes import Ends, kill_group, receive, send

__all__ = ["IDLE_S", "main"]

# How long a nursery waits for work.
IDLE_S = 60.0
_MESSAGE_BYTES = 1 << 16
_MAX_DESCRIPTORS = 6


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
        self._tell({})

    def reap(self) -> None:
        """Kill the rest of the group, free the number, and tell the status."""
        kill_group(self.pid)
        _, status, usage = os.wait4(self.pid, 0)
        os.close(self.pidfd)
        code = os.waitstatus_to_exitcode(status)
        self._tell({"status": code, "peak_rss_bytes": usage.ru_maxrss * 1024})
        if self.channel is not None:
            self.channel.close()

    def _tell(self, message: dict[str, int]) -> None:
        if self.channel is not None:
            with contextlib.suppress(OSError):
                send(self.channel, message)


class _Server:
    def __init__(self, owner: socket.socket) -> None:
        self._owner: socket.socket | None = owner
        self._trainers: list[_Forked] = []

    def serve(self) -> None:
        """Serve the owner until it is gone, or a minute has passed without a trainer."""
        while self._owner is not None or self._trainers:
            ends = {t.pidfd: t for t in self._trainers if not t.has_ended}
            owners = {t.channel.fileno(): t for t in self._trainers if t.channel is not None}
            asked = [] if self._owner is None else [self._owner.fileno()]
            timeout = None if self._trainers else IDLE_S
            ready, _, _ = select.select([*asked, *ends, *owners], [], [], timeout)
            if not ready and not self._trainers:
                return
            for fd in ready:
                if fd in ends:
                    self._ended(ends[fd])
                elif fd in owners:
                    self._heard(owners[fd])
                else:
                    self._answer()

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

    def _answer(self) -> None:
        if self._owner is None:
            return
        try:
            data, fds, _, _ = socket.recv_fds(self._owner, _MESSAGE_BYTES, _MAX_DESCRIPTORS)
        except ConnectionError:
            data, fds = b"", []
        if not data:
            self._owner.close()
            self._owner = None
            return
        _load(json.loads(data)["modules"])
        if fds:
            self._fork(fds)

    def _fork(self, fds: list[int]) -> None:
        channel = socket.socket(fileno=fds[0])
        spec, result, log, *listener = fds[1:]
        if (
            len(os.listdir("/proc/self/task")) > 1
        ):  # a lock that another thread holds would stay locked
            pid = 0
        else:
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                self._leave()
                _become_trainer(channel, Ends(spec, result, log, (-1, -1)), listener, parent)
        for fd in fds[1:]:
            os.close(fd)
        with contextlib.suppress(OSError):
            send(channel, {"pid": pid})
        if pid:
            self._trainers.append(_Forked(pid, channel))
        else:
            channel.close()

    def _leave(self) -> None:
        """Close what a fork must not keep open."""
        if self._owner is not None:
            self._owner.close()
        for trainer in self._trainers:
            os.close(trainer.pidfd)
            if trainer.channel is not None:
                trainer.channel.close()


def _load(modules: list[str]) -> None:
    for name in modules:
        # The user's function imports it again, and reports its absence if it matters.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the pages of everything imported


def _become_trainer(
    channel: socket.socket, ends: Ends, listener: list[int], parent: int
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
        environ = read_frame(ends.spec)
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


def main(owner_fd: int) -> None:
    """Serve the process at the other end of a socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is for the owner, who passes it on
    blas.hold_threads()
    with contextlib.closing(socket.socket(fileno=owner_fd)) as owner:
        owner.set_inheritable(False)
        _Server(owner).serve()


if __name__ == "__mp_main__":  # in a process that multiprocessing spawns from a trainer
    spawning.pickle_main_by_value(dumps)
if __name__ == "__main__":
    main(int(sys.argv[1]))
