"""Owner's side of a nursery: keep one for the launches of this process, and have trainers forked by it.

A later launch then costs a fork instead of an interpreter that imports torch. A nursery fits a launch if everything is equal that
imports and the start of a process read: the interpreter, the search path, variables of numerical libraries, the loader and malloc, limits,
processors, and network and file systems. Any difference starts another one, and the one before ends with its last trainer.

**Threads**: requests of several threads wait for each other. **Ownership**: the nursery is a child of this process, over whose
socket nobody else can ask; it ends with this process, or when it is not used for a minute. **Failure**: whatever a nursery cannot
do, a fresh process does.
"""

from __future__ import annotations

import array
import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from sparkhvd.runner.frames import USEFUL_MODULES
from sparkhvd.runner.processes import Ends, ForkedProcess, receive

__all__ = ["Nursery", "fork", "is_possible", "of_this_process", "prepare"]

# Read when a process starts, or when what it imports loads.
_READ_EARLY = (
    "LD_", "PYTHON", "MALLOC_", "GLIBC_", "LANG", "LC_", "TZ", "HOME", "TMPDIR", "VIRTUAL_ENV",
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "NUMEXPR_", "VECLIB_", "TBB_",
    "TORCH", "PYTORCH_", "ATEN_", "DNNL_", "ONEDNN_", "NPY_", "NUMPY_", "ARROW_", "PYARROW_",
    "CUDA_", "NVIDIA_", "NCCL_", "TRITON_", "XLA_", "HIP_", "ROCR_",
)  # fmt: skip
# Longest wait for a nursery that imports, before a fresh process is started.
_FORK_S = 120.0
# With a GPU, forks are not tested.
_GPU = Path("/dev/nvidiactl")

Key = tuple[object, ...]


class Nursery:
    """Nursery process, and the socket to it.

    Args:
        key: facts that a launch must share.
        environ: environment of the process.
    """

    def __init__(self, key: Key, environ: Mapping[str, str]) -> None:
        self.key = key
        self.can_fork = True
        self.has_threads = False
        self._asked: set[str] = set()
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [
                    os.path.abspath(sys.executable),
                    *("-m", "sparkhvd.runner.nursery", str(theirs.fileno())),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environ,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def is_usable(self) -> bool:
        """Return True if it lives, can fork, and belongs to this process and not to the one that has forked it."""
        return self.can_fork and self._owner == os.getpid() and self._process.poll() is None

    def fork(self, modules: Sequence[str], ends: Ends) -> ForkedProcess | None:
        """Fork a trainer; None if that is not possible, and nothing has been started then.

        Args:
            modules: to import before.
            ends: descriptors for it; they stay open here.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.ExitStack() as stack:
            stack.callback(ours.close)
            ours.settimeout(_FORK_S)
            try:
                with self._lock:
                    self._ask(modules, [theirs.fileno(), *ends.all()])
                theirs.close()
                answer = self._answer(ours)
            except OSError:  # it has just ended
                answer = None
            if answer is None or not answer["pid"]:
                self.can_fork = False
                self.has_threads = answer is not None
                return None
            ours.settimeout(None)
            process = ForkedProcess(answer["pid"], ours)
            stack.pop_all()
            return process

    def _answer(self, channel: socket.socket) -> dict[str, int] | None:
        """Receive the answer to a request; a nursery that imports for minutes is killed, so that it does not fork later on."""
        try:
            return receive(channel)
        except TimeoutError:
            self._process.kill()
            self._process.wait()
            return receive(channel)

    def prepare(self, modules: Sequence[str]) -> None:
        """Import modules for later trainers, those that it has not been told of before; returns at once."""
        with contextlib.suppress(OSError), self._lock:
            if not self._asked.issuperset(modules):
                self._asked.update(modules)
                self._ask(modules, [])

    def _ask(self, modules: Sequence[str], fds: Sequence[int]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.socket.sendmsg([json.dumps({"modules": list(modules)}).encode()], rights)

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let it end with its last trainer."""
        if self._owner == os.getpid():
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


class _Kept:
    """Nursery that this process keeps, and the modules that its trainers have needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nursery: Nursery | None = None
        self._useful: set[str] = set()

    def find(self, environ: Mapping[str, str]) -> Nursery | None:
        """Return the nursery that fits an environment, a new one where the current one does not or has ended; None if one had threads."""
        key = _key(environ)
        with self._lock:
            if self._nursery is not None and self._nursery.has_threads:
                return None
            if self._nursery is None or self._nursery.key != key or not self._nursery.is_usable():
                self._close()
                self._nursery = Nursery(key, environ)
            return self._nursery

    def useful(self, modules: Sequence[str]) -> list[str]:
        """List the modules to import before a fork: of those given, and of those that earlier trainers have imported."""
        with self._lock:
            return [name for name in USEFUL_MODULES if name in self._useful or name in modules]

    def remember(self, modules: Iterable[str]) -> None:
        """Let the nursery have modules that a trainer has imported, for the next one."""
        with self._lock:
            new = set(modules).intersection(USEFUL_MODULES) - self._useful
            self._useful.update(new)
            nursery = self._nursery
        if nursery is not None and nursery.is_usable():
            nursery.prepare([name for name in USEFUL_MODULES if name in new])

    def pid(self) -> int | None:
        """Return the number of the nursery's process, or None."""
        with self._lock:
            usable = self._nursery is not None and self._nursery.is_usable()
            return self._nursery.pid if usable and self._nursery is not None else None

    def descriptor(self) -> int | None:
        """Return the descriptor of the nursery's socket, or None."""
        with self._lock:
            return None if self._nursery is None else self._nursery.socket.fileno()

    def forget(self) -> None:
        """End the nursery, if there is one."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._nursery is not None:
            self._nursery.close()
        self._nursery = None


of_this_process = _Kept()


def fork(modules: Sequence[str], environ: Mapping[str, str], ends: Ends) -> ForkedProcess | None:
    """Fork a trainer from this process's nursery; None if a fresh process must do.

    Args:
        modules: that the trainer imports early.
        environ: environment with which it imports them.
        ends: descriptors for it; they stay open here.
    """
    nursery = of_this_process.find(environ)
    return None if nursery is None else nursery.fork(of_this_process.useful(modules), ends)


def prepare(modules: Sequence[str], environ: Mapping[str, str]) -> None:
    """Let this process's nursery import what a trainer needs that is forked soon; returns at once.

    Args:
        modules: that the trainer imports early.
        environ: environment with which it imports them.
    """
    nursery = of_this_process.find(environ)
    if nursery is not None:
        nursery.prepare(of_this_process.useful(modules))


def is_possible() -> bool:
    """Return True if this platform has what a nursery needs, and no GPU."""
    return hasattr(socket, "recv_fds") and _has_pidfds() and not _GPU.exists()


@functools.cache
def _has_pidfds() -> bool:
    """Return True if the kernel gives descriptors of processes; a container may forbid it."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def _key(environ: Mapping[str, str]) -> Key:
    """Collect the facts that a fork cannot change any more, and a fresh process would have."""
    import resource  # absent on Windows, where a Connect client may import this file

    variables = {n: v for n, v in environ.items() if n.startswith(_READ_EARLY)}
    limits = {
        name: resource.getrlimit(getattr(resource, name))
        for name in dir(resource)
        if name.startswith("RLIMIT_")
    }
    status = Path("/proc/thread-self/status").read_text()
    kept = ("Umask:", "Uid:", "Gid:", "Cpus_allowed:", "CapEff:")
    facts = tuple(line for line in status.splitlines() if line.startswith(kept))
    spaces = tuple(os.readlink(f"/proc/thread-self/ns/{kind}") for kind in ("net", "mnt", "pid"))
    return (
        os.getpid(),
        os.path.abspath(sys.executable),
        tuple(sorted(variables.items())),
        tuple(sorted(limits.items())),
        facts,
        spaces,
        os.getpriority(os.PRIO_PROCESS, 0),
    )
