"""Owner's side of a nursery: keep one for the launches of this process, and have trainers forked by it.

A later launch then costs a fork instead of an interpreter that imports torch. A nursery fits a launch if everything is equal that
imports and the start of a process read: the interpreter, the search path, variables of numerical libraries, the loader and malloc, limits,
processors, and network and file systems. Any difference starts another one, and the one before ends with its last trainer.

**Threads**: requests of several threads wait for each other. **Ownership**: a process of its own has a nursery that ends with it; the
Python workers of a Spark executor, which come and go, share the one of the process that has started them. Its socket has an abstract
name, and both sides refuse a peer of another user. **Shutdown**: with the process that it belongs to, or when it is not used for a
minute; for some seconds, where two others of the same executor have been started since. **Failure**: whatever a nursery cannot do, a
fresh process does.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import errno
import functools
import hashlib
import json
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from sparkhvd.rendezvous.event_loop import is_same_user
from sparkhvd.runner.processes import ForkedProcess, InheritedPipes, python_of, receive
from sparkhvd.runner.protocol import USEFUL_MODULES

# Read when a process starts, or when what it imports loads.
_READ_EARLY = (
    "LD_", "PYTHON", "MALLOC_", "GLIBC_", "LANG", "LC_", "TZ", "HOME", "TMP", "TEMP", "VIRTUAL_ENV",
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "NUMEXPR_", "VECLIB_", "TBB_",
    "TORCH", "PYTORCH_", "ATEN_", "DNNL_", "MKLDNN_", "ONEDNN_", "NPY_", "NUMPY_", "ARROW_", "PYARROW_",
    "AOT", "CXX", "INDUCTOR_", "PARTITIONER_", "PT2_", "FX_", "THP_", "KINETO_", "SYMPY_", "MPMATH_", "TQDM_",
    "CUDA_", "NVIDIA_", "NCCL_", "TRITON_", "XLA_", "HIP_", "ROCR_",
)  # fmt: skip
# Longest wait for a nursery that imports, before a fresh process is started.
_FORK_S = 120.0
# Longest wait for a nursery that another process starts to listen, and the pause between looks.
_LISTEN_S = 5.0
_PAUSE_S = 0.02
# With a GPU, forks are not tested.
_GPU = Path("/dev/nvidiactl")

Key = tuple[object, ...]


class _LeftRunning(subprocess.Popen[bytes]):
    """Process that outlives this object by design."""

    def __del__(self, _warn: Callable[..., None] = lambda *_, **__: None) -> None:
        # As Popen's, which lets a later Popen reap the process, but without the ResourceWarning.
        super().__del__(_warn=_warn)  # type: ignore[call-arg]


class ZygoteClient:
    """Connection to a nursery process, which is started if there is none.

    Args:
        key: facts that a launch must share.
        environ: environment of the process.
        belongs_to: number of the process with which it ends.
        name: of its socket, for processes that share it; "" for one that ends with this connection.

    Raises:
        OSError: no process could be started or reached.
    """

    def __init__(
        self, key: Key, environ: Mapping[str, str], belongs_to: int, name: str = ""
    ) -> None:
        self.key = key
        self.pid = 0  # until it has answered, where another process has started it
        self.can_fork = True
        self.is_silent = False
        self.has_threads = False
        self._asked: set[str] = set()
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._process: _LeftRunning | None = None
        self.socket = self._connect(
            f"\0sparkhvd-nursery-{name or secrets.token_hex(16)}", not name, belongs_to, environ
        )

    def _connect(
        self, name: str, is_private: bool, belongs_to: int, environ: Mapping[str, str]
    ) -> socket.socket:
        """Connect to the name; the process that binds it starts the nursery."""
        deadline = time.monotonic() + _LISTEN_S
        while True:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                try:
                    listener.bind(name)
                except OSError as e:
                    if e.errno != errno.EADDRINUSE:
                        raise
                else:
                    listener.listen()
                    family = "" if is_private else f"{belongs_to}-{_started_at(belongs_to)}"
                    self._process = _start(listener, family, belongs_to, environ)
                    self.pid = self._process.pid
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                connection.settimeout(_LISTEN_S)
                connection.connect(name)
                if not is_same_user(connection):
                    raise PermissionError(f"{name[1:]} belongs to another user")
                connection.settimeout(_FORK_S)
            except ConnectionRefusedError:  # bound, and does not listen yet, or no longer
                connection.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE_S)
            except BaseException:
                connection.close()
                raise
            else:
                return connection

    def is_usable(self) -> bool:
        """Return True if it lives, can fork, and was made by this process and not by the one that has forked it."""
        if self._process is not None:
            self._process.poll()  # else it would stay a zombie
        return self.can_fork and self._owner == os.getpid() and self._is_open()

    def _is_open(self) -> bool:
        poller = select.poll()
        poller.register(self.socket, select.POLLIN)
        return not poller.poll(0)  # it only answers on the channels of trainers: this is its end

    def fork(self, modules: Sequence[str], ends: InheritedPipes) -> ForkedProcess | None:
        """Fork a trainer; None if that is not possible, and nothing has been or will be started then.

        Args:
            modules: to import before.
            ends: descriptors for it; they stay open here.
        """
        # A trainer that is forked when nobody waits for it any more finds the gate closed.
        gate, opener = os.pipe()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            process = self._forked(modules, [theirs.fileno(), gate, *ends.all()], ours, theirs)
            if process is not None:
                os.write(opener, b"1")
                return process
        finally:
            theirs.close()
            os.close(gate)
            os.close(opener)
        self.can_fork = False
        ours.close()
        return None

    def _forked(
        self, modules: Sequence[str], fds: list[int], ours: socket.socket, theirs: socket.socket
    ) -> ForkedProcess | None:
        ours.settimeout(_FORK_S)
        try:
            with self._lock:
                self._ask(modules, fds)
            theirs.close()  # so that the end of the nursery is the end of the channel
            answer = receive(ours)
            if answer is None:
                return None
            self.has_threads = not answer["pid"]
            self.pid = answer["nursery"]
            ours.settimeout(None)
            return ForkedProcess(answer["pid"], ours) if answer["pid"] else None
        except TimeoutError:
            self.is_silent = True
            return None
        except OSError:  # it has just ended
            return None

    def prepare(self, modules: Sequence[str]) -> None:
        """Import modules for later trainers, those that it has not been told of before; returns at once."""
        with contextlib.suppress(OSError), self._lock:
            if not self._asked.issuperset(modules):
                self._asked.update(modules)
                self._ask(modules, [])

    def _ask(self, modules: Sequence[str], fds: Sequence[int]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.socket.sendmsg([json.dumps({"modules": list(modules)}).encode()], rights)

    def __enter__(self) -> ZygoteClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave it: a nursery of this process alone ends with its last trainer."""
        if self._owner == os.getpid():
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def _start(
    listener: socket.socket, family: str, belongs_to: int, environ: Mapping[str, str]
) -> _LeftRunning:
    lifetime = os.pidfd_open(belongs_to)
    fds = (listener.fileno(), lifetime)
    program = [*python_of("sparkhvd.runner.zygote"), *map(str, fds), family]
    try:
        return _LeftRunning(
            program,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environ,
            pass_fds=fds,
            start_new_session=True,
        )
    finally:
        os.close(lifetime)


class _Kept:
    """Nursery that this process keeps, and the modules that its trainers have needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._zygote: ZygoteClient | None = None
        self._useful: set[str] = set()
        self._shared_by = 0
        self._silent = 0
        atexit.register(self._leave)

    def share(self, belongs_to: int) -> None:
        """Share one with the other children of a process, with which it ends."""
        with self._lock:
            self._shared_by = belongs_to

    def find(self, environ: Mapping[str, str]) -> ZygoteClient | None:
        """Return the nursery that fits an environment, another one where the current one does not or has ended; None if none can be had."""
        with self._lock, contextlib.suppress(OSError):
            belongs_to = self._shared_by or os.getpid()
            key = _key(environ, belongs_to)
            kept = self._zygote
            if kept is not None and kept.has_threads:
                return None
            if kept is None or kept.key != key or not kept.is_usable():
                # One that did not answer keeps its name.
                self._silent += kept is not None and kept.is_silent
                self._close()
                facts = repr((key, self._silent)).encode()
                name = hashlib.sha256(facts).hexdigest() if self._shared_by else ""
                self._zygote = ZygoteClient(key, environ, belongs_to, name)
            return self._zygote
        return None

    def useful(self, modules: Sequence[str]) -> list[str]:
        """List the modules to import before a fork: of those given, and of those that earlier trainers have imported."""
        with self._lock:
            return [name for name in USEFUL_MODULES if name in self._useful or name in modules]

    def remember(self, modules: Iterable[str]) -> None:
        """Let the nursery have modules that a trainer has imported, for the next one."""
        with self._lock:
            new = set(modules).intersection(USEFUL_MODULES) - self._useful
            self._useful.update(new)
            nursery = self._zygote
        if nursery is not None and nursery.is_usable():
            nursery.prepare([name for name in USEFUL_MODULES if name in new])

    def pid(self) -> int | None:
        """Return the number of the nursery's process, or None."""
        with self._lock:
            usable = self._zygote is not None and self._zygote.is_usable()
            return self._zygote.pid if usable and self._zygote is not None else None

    def descriptor(self) -> int | None:
        """Return the descriptor of the nursery's socket, or None."""
        with self._lock:
            return None if self._zygote is None else self._zygote.socket.fileno()

    def forget(self) -> None:
        """End the nursery, if there is one."""
        with self._lock:
            self._close()

    def _leave(self) -> None:
        # Not behind a thread that waits for a nursery to listen.
        if self._lock.acquire(blocking=False):
            self._close()
            self._lock.release()

    def _close(self) -> None:
        if self._zygote is not None:
            self._zygote.close()
        self._zygote = None


of_this_process = _Kept()


def fork(
    modules: Sequence[str], environ: Mapping[str, str], ends: InheritedPipes
) -> ForkedProcess | None:
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


def _key(environ: Mapping[str, str], belongs_to: int) -> Key:
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
        belongs_to,
        _started_at(belongs_to),
        os.path.abspath(sys.executable),
        tuple(sorted(variables.items())),
        tuple(sorted(limits.items())),
        facts,
        spaces,
        os.getpriority(os.PRIO_PROCESS, 0),
    )


def _started_at(pid: int) -> str:
    """Return the start of a process in clock ticks since boot: its number may have been another's before."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
