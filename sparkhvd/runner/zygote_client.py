"""Start a zygote, a process with torch already imported, and request trainers from it as forks.

A fork costs less than a new interpreter with an import of torch. A zygote fits a launch only if nothing differs that
affects imports or the start of a process: interpreter, search path, variables of numerical libraries, the loader and
malloc, limits, processors, and network and file systems. If anything differs, the launch starts another zygote, and
the previous zygote ends with its last trainer.

**Threads**: requests of several threads are serialized. **Ownership**: an ordinary process has its own zygote, which
ends with it. The short-lived Python workers of a Spark executor share the zygote of their parent process. Its socket
has an abstract name, and both sides reject a peer of another user. **Shutdown**: with the process that it belongs to,
or after `idle_s` without work; after a few seconds if two newer zygotes of the same executor exist. **Failure**: a
fresh process replaces a fork.
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
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from sparkhvd.rendezvous.event_loop import is_same_user
from sparkhvd.runner.processes import (
    ForkedProcess,
    InheritedPipes,
    python_of,
    receive,
    stat_of,
    wait_for_answer,
)
from sparkhvd.runner.protocol import USEFUL_MODULES
from sparkhvd.settings import ZYGOTE_STAYS_S

# Prefixes of variables that a process reads at its start, or during its imports.
_READ_EARLY = (
    "LD_", "PYTHON", "MALLOC_", "GLIBC_", "LANG", "LC_", "TZ", "HOME", "TMP", "TEMP", "VIRTUAL_ENV",
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "NUMEXPR_", "VECLIB_", "TBB_",
    "TORCH", "PYTORCH_", "ATEN_", "DNNL_", "MKLDNN_", "ONEDNN_", "NPY_", "NUMPY_", "ARROW_", "PYARROW_",
    "AOT", "CXX", "INDUCTOR_", "PARTITIONER_", "PT2_", "FX_", "THP_", "KINETO_", "SYMPY_", "MPMATH_", "TQDM_",
    "CUDA_", "NVIDIA_", "NCCL_", "TRITON_", "XLA_", "HIP_", "ROCR_",
)  # fmt: skip
# Longest wait for a zygote that imports, before a fresh process is started.
_FORK_S = 120.0
# Longest wait until a zygote that another process starts listens.
_LISTEN_S = 5.0
# Pause between two attempts to connect to a zygote.
_PAUSE_S = 0.02
# With a GPU, forks are not tested.
_GPU = Path("/dev/nvidiactl")

Key = tuple[object, ...]


class _LeftRunning(subprocess.Popen[bytes]):
    """Process that outlives this object by design."""

    def __del__(self, _warn: Callable[..., None] = lambda *_, **__: None) -> None:
        # Like Popen's, which lets a later Popen reap the process, but without the ResourceWarning.
        super().__del__(_warn=_warn)  # type: ignore[call-arg]


class ZygoteClient:
    """Connection to a zygote process, started on demand.

    Args:
        key: facts that a launch must share.
        environ: environment of the process.
        belongs_to: pid of the process with which it ends.
        name: of its socket, for processes that share it; "" for a private zygote, which ends with this connection.
        idle_s: how long it stays without a request.

    Raises:
        OSError: no process could be started or reached.
    """

    def __init__(
        self,
        key: Key,
        environ: Mapping[str, str],
        belongs_to: int,
        name: str = "",
        idle_s: float = ZYGOTE_STAYS_S,
    ) -> None:
        self.key = key
        self.pid = 0  # unknown until the first answer if another process has started it
        self.can_fork = True
        self.is_silent = False
        self.has_threads = False
        self._asked: set[str] = set()
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._process: _LeftRunning | None = None
        self._idle_s = idle_s
        self.socket = self._connect(
            f"\0sparkhvd-zygote-{name or secrets.token_hex(16)}", not name, belongs_to, environ
        )

    def _connect(
        self, name: str, is_private: bool, belongs_to: int, environ: Mapping[str, str]
    ) -> socket.socket:
        """Connect to the name. If this process binds it, start the zygote first."""
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
                    self._process = _start(listener, family, belongs_to, environ, self._idle_s)
                    self.pid = self._process.pid
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                connection.settimeout(_LISTEN_S)
                connection.connect(name)
                if not is_same_user(connection):
                    raise PermissionError(f"{name[1:]} belongs to another user")
                connection.settimeout(_FORK_S)
            except ConnectionRefusedError:  # bound, but not listening yet, or no longer
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
        """Whether the zygote lives and can fork, and this process itself created the connection."""
        if self._process is not None:
            self._process.poll()  # else it would stay a zombie
        return self.can_fork and self._owner == os.getpid() and self._is_open()

    def _is_open(self) -> bool:
        poller = select.poll()
        poller.register(self.socket, select.POLLIN)
        return not poller.poll(
            0
        )  # readable only once the zygote has ended: it answers on the channels of trainers

    def fork(self, modules: Sequence[str], ends: InheritedPipes) -> ForkedProcess | None:
        """Fork a trainer, or return None if impossible. After None, no trainer has started or will.

        Args:
            modules: to import before.
            ends: descriptors for it; they stay open here.
        """
        # A trainer forked after the caller has given up finds the gate closed.
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
        try:
            with self._lock:
                self._ask(modules, fds)
            theirs.close()  # so that the end of the zygote ends the channel
            wait_for_answer(ours, self.pid or _pid_of_peer(self.socket), _FORK_S)
            answer = receive(ours)
            if answer is None:
                return None
            self.has_threads = not answer["pid"]
            self.pid = answer["zygote"]
            return ForkedProcess(answer["pid"], ours, self.pid) if answer["pid"] else None
        except TimeoutError as e:
            self.is_silent = True
            with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr may be closed
                sys.stderr.write(
                    f"sparkhvd: the zygote of ranks does not answer ({e}). A new process is started in place of a fork.\n"
                )
            return None
        except OSError:  # the zygote has just ended
            return None

    def prepare(self, modules: Sequence[str]) -> None:
        """Import modules for later trainers, unless they were requested before. Returns at once."""
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
        """Close the connection. A private zygote ends with its last trainer."""
        if self._owner == os.getpid():
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def _start(
    listener: socket.socket,
    family: str,
    belongs_to: int,
    environ: Mapping[str, str],
    idle_s: float,
) -> _LeftRunning:
    lifetime = os.pidfd_open(belongs_to)
    fds = (listener.fileno(), lifetime)
    program = [*python_of("sparkhvd.runner.zygote"), *map(str, fds), family, f"{idle_s:g}"]
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
    """Zygote of this process, and the modules needed by its trainers so far."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._zygote: ZygoteClient | None = None
        self._useful: set[str] = set()
        self._shared_by = 0
        self._silent = 0
        atexit.register(self._leave)

    def share(self, belongs_to: int) -> None:
        """Share a zygote with a process's other children. The zygote ends with that process."""
        with self._lock:
            self._shared_by = belongs_to

    def find(self, environ: Mapping[str, str], idle_s: float) -> ZygoteClient | None:
        """Get a zygote for the environment, started if necessary, or None if impossible."""
        with self._lock, contextlib.suppress(OSError):
            belongs_to = self._shared_by or os.getpid()
            key = _key(environ, belongs_to)
            kept = self._zygote
            if kept is not None and kept.has_threads:
                return None
            if kept is None or kept.key != key or not kept.is_usable():
                # A zygote that did not answer still holds its name, so the next zygote gets another name.
                self._silent += kept is not None and kept.is_silent
                self._close()
                facts = repr((key, self._silent)).encode()
                name = hashlib.sha256(facts).hexdigest() if self._shared_by else ""
                self._zygote = ZygoteClient(key, environ, belongs_to, name, idle_s)
            return self._zygote
        return None

    def useful(self, modules: Sequence[str]) -> list[str]:
        """List the modules to import before a fork, from the given modules and the imports of earlier trainers."""
        with self._lock:
            return [name for name in USEFUL_MODULES if name in self._useful or name in modules]

    def remember(self, modules: Iterable[str]) -> None:
        """Preload a trainer's imported modules for the next trainer."""
        with self._lock:
            new = set(modules).intersection(USEFUL_MODULES) - self._useful
            self._useful.update(new)
            zygote = self._zygote
        if zygote is not None and zygote.is_usable():
            zygote.prepare([name for name in USEFUL_MODULES if name in new])

    def pid(self) -> int | None:
        """Get the pid of the zygote, or None without a usable zygote."""
        with self._lock:
            usable = self._zygote is not None and self._zygote.is_usable()
            return self._zygote.pid if usable and self._zygote is not None else None

    def descriptor(self) -> int | None:
        """Get the descriptor of the zygote's socket, or None without a zygote."""
        with self._lock:
            return None if self._zygote is None else self._zygote.socket.fileno()

    def forget(self) -> None:
        """End the zygote, if there is one."""
        with self._lock:
            self._close()

    def _leave(self) -> None:
        # Do not wait for a thread that waits for a zygote to listen.
        if self._lock.acquire(blocking=False):
            self._close()
            self._lock.release()

    def _close(self) -> None:
        if self._zygote is not None:
            self._zygote.close()
        self._zygote = None


of_this_process = _Kept()


def fork(
    modules: Sequence[str], environ: Mapping[str, str], ends: InheritedPipes, idle_s: float
) -> ForkedProcess | None:
    """Fork a trainer from this process's zygote, or return None to require a fresh process.

    Args:
        modules: that the trainer imports early.
        environ: environment with which it imports them.
        ends: descriptors for it; they stay open here.
        idle_s: how long a zygote that is started for it stays without a request.
    """
    zygote = of_this_process.find(environ, idle_s)
    return None if zygote is None else zygote.fork(of_this_process.useful(modules), ends)


def prepare(modules: Sequence[str], environ: Mapping[str, str], idle_s: float) -> None:
    """Preload modules in this process's zygote for an upcoming trainer, without waiting.

    Args:
        modules: that the trainer imports early.
        environ: environment with which it imports them.
        idle_s: see `fork`.
    """
    zygote = of_this_process.find(environ, idle_s)
    if zygote is not None:
        zygote.prepare(of_this_process.useful(modules))


def is_possible() -> bool:
    """Whether this platform supports a zygote and has no GPU."""
    return hasattr(socket, "recv_fds") and _has_pidfds() and not _GPU.exists()


@functools.cache
def _has_pidfds() -> bool:
    """Whether pidfds work: a kernel may lack them, or a container forbid them."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def _key(environ: Mapping[str, str], belongs_to: int) -> Key:
    """Collect facts fixed before a fork but read by a fresh process at its start."""
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
    """Start of a process in clock ticks since boot.

    Raises:
        ProcessLookupError: there is no such process.
    """
    stat = stat_of(pid)
    if stat is None:
        raise ProcessLookupError(pid)
    return stat.started


def _pid_of_peer(sock: socket.socket) -> int:
    """Get the pid of the caller of `listen` at the other end."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", data)[0])
