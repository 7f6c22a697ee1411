"""The stacks of this process's Python threads, on request of another rank.

The coordinator requests the stacks of a straggler. The straggler's progress thread raises a signal on itself, and
`faulthandler`'s handler, which needs no interpreter, writes the stack of every Python thread into a pipe. So a rank
answers also while a long call into C holds the GIL.

**Threads.** `prepare` may be called by any thread. **Ownership.** Once per process and signal: the pipe and
the handler stay until the process ends, because an engine may use them until then. A forked child inherits them
and creates its own pipe with its first engine.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
from pathlib import Path

# Signal and pipe if this process cannot write its stacks.
NO_STACKS = (0, -1)

# Room for the stacks of many threads; a full pipe truncates the text and never blocks.
_PIPE_BYTES = 256 << 10


class _Process:
    """Signal handlers and pipes registered by this process."""

    def __init__(self, inherited: frozenset[int] = frozenset()) -> None:
        self.lock = threading.Lock()
        self.pipes: dict[int, tuple[int, int]] = {}  # signal -> reading and writing end
        self.inherited = inherited  # signals whose handler is ours, with the parent's pipe


_process = _Process()


def _after_fork() -> None:
    global _process  # noqa: PLW0603 - the parent's lock may be held by a thread that is not here
    _process = _Process(_process.inherited | frozenset(_process.pipes))


if hasattr(os, "register_at_fork"):  # not on Windows, where clients of Spark Connect import this
    os.register_at_fork(after_in_child=_after_fork)


def prepare(signal: int) -> tuple[int, int]:
    """Install the handler of `signal`, unless the program uses the signal itself.

    Reinstalls a removed handler: Lightning's trainer restores Python's handlers of its start, and Python does not know this handler.

    Args:
        signal: a signal's number; 0 = no stacks.

    Returns:
        The signal and the reading end of the pipe that its handler writes to; `NO_STACKS` without stacks.
    """
    if signal == 0:
        return NO_STACKS
    with _process.lock:
        if signal not in _process.pipes:
            if signal not in _process.inherited and _is_used(signal):
                return NO_STACKS
            _process.pipes[signal] = _register(signal)
        read, write = _process.pipes[signal]
        if not _is_used(signal):
            faulthandler.unregister(signal)  # otherwise faulthandler would not install it again
            faulthandler.register(signal, file=write, all_threads=True)
        return signal, read


def _register(signal: int) -> tuple[int, int]:
    """Install the handler of `signal` and return the two ends of its pipe."""
    import fcntl  # not on Windows

    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # above the user's limit: keep the default size
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    try:
        faulthandler.register(signal, file=write, all_threads=True)
    except BaseException:
        os.close(read)
        os.close(write)
        raise
    return read, write


def _is_used(signal: int) -> bool:
    """Check whether the process catches or ignores `signal`, from Python or from C."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, mask = line.partition(":")
        if name in ("SigCgt", "SigIgn") and int(mask, 16) >> (signal - 1) & 1:
            return True
    return False
