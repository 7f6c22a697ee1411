"""The C header in ctypes: enumerations, structures and functions of the compiled library.

A test compares all of it with `native/include/sparkhvd.h`. Only this package uses the functions.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkhvd.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    EngineUnavailableError,
    InternalError,
    InvalidArgumentError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    ResultMemoryError,
    SparkhvdError,
)

ABI_VERSION = 12
WIRE_VERSION = 15


class Status(IntEnum):
    """Results of native calls and finished operations."""

    OK = 0
    PENDING = 1
    INVALID_ARGUMENT = 2
    MISMATCH = 3
    TIMEOUT = 4
    PEER_LOST = 5
    SHUT_DOWN = 6
    UNSUPPORTED = 7
    INTERNAL = 8
    NO_MEMORY = 9


class DType(IntEnum):
    """Element types."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    UINT64 = 6
    INT64 = 7
    FLOAT16 = 8
    BFLOAT16 = 9
    FLOAT32 = 10
    FLOAT64 = 11
    BOOL = 12


class ReduceOp(IntEnum):
    """Reductions. Those of Horovod have Horovod's numbers. Bitwise reductions are for integers and bool, on the CPU."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5
    BIT_AND = 6
    BIT_OR = 7
    BIT_XOR = 8


class Collective(IntEnum):
    """Kinds of operation: the tensors, results and numbers of each.

    ALLREDUCE: combines tensors elementwise; every rank gets the same values.
    ALLGATHER: joins the ranks' tensors along the first dimension, in rank order, as `Work.output()`. First dimensions
        may differ between ranks, the others may not. On a device the result goes to the tensors' outputs, which
        have room for all ranks' rows.
    BROADCAST: copies the input of `root_rank` (counted among all ranks) to every rank's output.
    BARRIER: waits for every rank of the process set.
    ALLTOALL: sends rows to every rank and joins the received rows in rank order, as `Work.output()`; on a device in
        the tensor's output. Numbers: the rows for each rank of the process set, empty for equal parts. All
        dimensions but the first are equal on all ranks.
    REDUCESCATTER: an allreduce that gives every rank only its rows, in the tensors' outputs, which may be their place
        in the input. Of d rows rank r of n gets d // n, and one more if r < d % n; ranks in the order of
        the process set.
    ALLGATHER_INTO: the inverse of a reducescatter, in place: every rank has its rows of each tensor and gets the
        others'. Shapes are equal on all ranks, inputs are outputs.
    REDUCE: an allreduce with the result only on `root_rank`, in its tensors' outputs. CPU only.
    GATHER: an allgather of one tensor with the result only on `root_rank`. CPU only.
    SCATTER: divides the tensor of `root_rank` by rows, as `Work.output()`. Numbers: on the root, the rows for each rank
        of the process set, empty for equal parts; the other ranks pass a tensor of 0 rows. CPU only.
    SEND, RECEIVE: a message from one rank of the process set to another, `root_rank`; -1 = a receive from any rank. Not
        collective: no other rank takes part, and names need only be unique on their rank. Numbers: the tag; a receive
        adds 1 if shorter messages fit, too, and the tensor is undefined behind their bytes. `Work.output().rows` of a
        receive: sender, tag, bytes. CPU only.
    JOIN, ADD_PROCESS_SET, REMOVE_PROCESS_SET, REGISTER, CONFIGURE: see `Engine.join`, `add_process_set`,
        `remove_process_set`, `allocate` and `configure`.

    Numbers of an allreduce, allgather or reducescatter: empty, or a digest of the operations of a group, which must be
    equal on all ranks.
    """

    ALLREDUCE = 0
    ALLGATHER = 1
    BROADCAST = 2
    BARRIER = 3
    ALLTOALL = 4
    REDUCESCATTER = 5
    JOIN = 6
    ADD_PROCESS_SET = 7
    REMOVE_PROCESS_SET = 8
    REGISTER = 9
    CONFIGURE = 10
    ALLGATHER_INTO = 11
    REDUCE = 12
    GATHER = 13
    SCATTER = 14
    SEND = 15
    RECEIVE = 16


class Knob(IntEnum):
    """Index of each number in a CONFIGURE request."""

    CHUNK_BYTES = 0
    STREAMS = 1
    DIRECT_RANKS = 2


class Loss(IntEnum):
    """How a rank was lost."""

    DEAD = 1
    SILENT = 2
    LEFT = 3


class Isa(IntEnum):
    """Instruction sets of the reduce kernels, named as in `Settings.isa`."""

    AUTO = 0
    SCALAR = 1
    AVX2 = 2
    AVX512 = 3
    NEON = 4


DEVICE_CPU = -1


class EngineOptions(ctypes.Structure):
    """C structure `sparkhvd_engine_options`."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("hosts", ctypes.POINTER(ctypes.c_int32)),
        ("sockets", ctypes.POINTER(ctypes.c_int32)),
        ("isa", ctypes.c_int32),
        ("spin_us", ctypes.c_int32),
        ("stall_warning_s", ctypes.c_double),
        ("stall_shutdown_s", ctypes.c_double),
        ("host_loss_s", ctypes.c_double),
        ("connect_timeout_s", ctypes.c_double),
        ("slot_bytes", ctypes.c_uint64),
        ("slots", ctypes.c_uint32),
        ("use_shared_memory", ctypes.c_uint32),
        ("streams", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("stream_sockets", ctypes.POINTER(ctypes.c_int32)),
        ("stack_signal", ctypes.c_int32),
        ("stack_pipe", ctypes.c_int32),
    ]


class DeviceOptions(ctypes.Structure):
    """C structure `sparkhvd_device_options`."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("device", ctypes.c_int32),
        ("cuda_library", ctypes.c_char_p),
        ("nccl_library", ctypes.c_char_p),
        ("nccl_candidates", ctypes.POINTER(ctypes.c_char_p)),
        ("num_nccl_candidates", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


class Tensor(ctypes.Structure):
    """C structure `sparkhvd_tensor`."""

    _fields_ = [
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("num_dims", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("output_bytes", ctypes.c_uint64),
    ]


class Request(ctypes.Structure):
    """C structure `sparkhvd_request`."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("collective", ctypes.c_int32),
        ("name", ctypes.c_char_p),
        ("process_set", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("reduce_op", ctypes.c_int32),
        ("root_rank", ctypes.c_int32),
        ("prescale", ctypes.c_double),
        ("postscale", ctypes.c_double),
        ("device", ctypes.c_int32),
        ("num_tensors", ctypes.c_uint32),
        ("tensors", ctypes.POINTER(Tensor)),
        ("stream", ctypes.c_uint64),
        ("splits", ctypes.POINTER(ctypes.c_int64)),
        ("num_splits", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("timeout_s", ctypes.c_double),
    ]


class Output(ctypes.Structure):
    """C structure `sparkhvd_output`."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("num_rows", ctypes.c_uint32),
        ("data", ctypes.c_void_p),
        ("num_bytes", ctypes.c_uint64),
        ("rows", ctypes.POINTER(ctypes.c_int64)),
    ]


class LossEntry(ctypes.Structure):
    """C structure `sparkhvd_loss`."""

    _fields_ = [("rank", ctypes.c_int32), ("kind", ctypes.c_int32)]


STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "sparkhvd_engine_options": EngineOptions,
    "sparkhvd_device_options": DeviceOptions,
    "sparkhvd_tensor": Tensor,
    "sparkhvd_request": Request,
    "sparkhvd_output": Output,
    "sparkhvd_loss": LossEntry,
}

_HANDLE = ctypes.c_void_p
_OUT_HANDLE = ctypes.POINTER(ctypes.c_void_p)
_ERROR = (ctypes.c_char_p, ctypes.c_size_t)


@dataclass(frozen=True)
class Signature:
    """C function of the header. A call releases the GIL if it may block."""

    returns: Any
    arguments: tuple[Any, ...]
    may_block: bool = False


FUNCTIONS: dict[str, Signature] = {
    "sparkhvd_abi_version": Signature(ctypes.c_uint32, ()),
    "sparkhvd_wire_version": Signature(ctypes.c_uint32, ()),
    "sparkhvd_isa_available": Signature(ctypes.c_int32, (ctypes.c_int32,)),
    # Releases the GIL, although it waits for nothing, because it reads megabytes.
    "sparkhvd_crc32_blocks": Signature(
        None,
        (
            ctypes.c_void_p,
            ctypes.c_uint64,
            ctypes.c_uint64,
            ctypes.c_uint64,
            ctypes.POINTER(ctypes.c_uint32),
        ),
        may_block=True,
    ),
    "sparkhvd_engine_create": Signature(
        ctypes.c_int32,
        (ctypes.POINTER(EngineOptions), _OUT_HANDLE, *_ERROR),
        may_block=True,
    ),
    "sparkhvd_engine_shutdown": Signature(ctypes.c_int32, (_HANDLE, *_ERROR), may_block=True),
    "sparkhvd_finish": Signature(None, (), may_block=True),
    "sparkhvd_engine_abort": Signature(None, (_HANDLE, ctypes.c_char_p)),
    "sparkhvd_engine_status": Signature(ctypes.c_int32, (_HANDLE, *_ERROR)),
    "sparkhvd_engine_after_fork": Signature(None, (_HANDLE,)),
    # Joins a thread that needs no GIL; releases the GIL, because a join is a wait.
    "sparkhvd_engine_destroy": Signature(None, (_HANDLE,), may_block=True),
    "sparkhvd_engine_counters": Signature(
        ctypes.c_size_t, (_HANDLE, ctypes.c_char_p, ctypes.c_size_t)
    ),
    "sparkhvd_engine_lost": Signature(
        ctypes.c_uint32, (_HANDLE, ctypes.POINTER(LossEntry), ctypes.c_uint32)
    ),
    # Both wait for the disk.
    "sparkhvd_timeline_start": Signature(
        ctypes.c_int32, (_HANDLE, ctypes.c_char_p, ctypes.c_int32, *_ERROR), may_block=True
    ),
    "sparkhvd_timeline_stop": Signature(ctypes.c_int32, (_HANDLE, *_ERROR), may_block=True),
    # Loads libraries and starts the device.
    "sparkhvd_device_open": Signature(
        ctypes.c_int32, (_HANDLE, ctypes.POINTER(DeviceOptions), *_ERROR), may_block=True
    ),
    "sparkhvd_submit": Signature(
        ctypes.c_int32, (_HANDLE, ctypes.POINTER(Request), _OUT_HANDLE, *_ERROR)
    ),
    "sparkhvd_run": Signature(
        ctypes.c_int32,
        (_HANDLE, ctypes.POINTER(Request), ctypes.c_uint32, _OUT_HANDLE, *_ERROR),
        may_block=True,
    ),
    "sparkhvd_poll": Signature(ctypes.c_int32, (_HANDLE, *_ERROR)),
    "sparkhvd_wait": Signature(ctypes.c_int32, (_HANDLE, ctypes.c_uint32, *_ERROR), may_block=True),
    "sparkhvd_wait_stream": Signature(
        ctypes.c_int32, (_HANDLE, ctypes.c_uint64, ctypes.c_uint32, *_ERROR), may_block=True
    ),
    "sparkhvd_work_output": Signature(ctypes.c_int32, (_HANDLE, ctypes.POINTER(Output), *_ERROR)),
    "sparkhvd_work_buffer": Signature(ctypes.c_int32, (_HANDLE, _OUT_HANDLE, *_ERROR)),
    "sparkhvd_buffer_data": Signature(ctypes.c_void_p, (_HANDLE,)),
    "sparkhvd_buffer_bytes": Signature(ctypes.c_uint64, (_HANDLE,)),
    "sparkhvd_buffer_is_shared": Signature(ctypes.c_int32, (_HANDLE,)),
    "sparkhvd_buffer_device": Signature(ctypes.c_int32, (_HANDLE,)),
    "sparkhvd_buffer_release": Signature(None, (_HANDLE,)),
    "sparkhvd_work_is_left_to_device": Signature(ctypes.c_int32, (_HANDLE,)),
    "sparkhvd_work_release": Signature(None, (_HANDLE,)),
}


class Library:
    """The loaded functions, by their names without the prefix."""

    def __init__(self, path: Path) -> None:
        try:
            keeps_gil, releases_gil = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
        except OSError as error:
            found = str(error) if path.exists() else "the file is missing"
            raise EngineUnavailableError(
                f"Engine(): cannot load {path}: {found}. In a checkout run `make env`. Elsewhere install the "
                "wheel for Linux on x86-64 or aarch64, or compile the library on this machine: "
                "`pip install --force-reinstall --no-deps --no-binary sparkhvd sparkhvd`. (The wheel "
                "py3-none-any is for clients and has no library.)"
            ) from error
        version = getattr(keeps_gil, "sparkhvd_abi_version", None)
        found_version = None if version is None else int(version())
        if found_version != ABI_VERSION:
            raise EngineUnavailableError(
                f"Engine(): {path} has ABI version {found_version}, this Python package needs "
                f"{ABI_VERSION}. In a checkout run `make env` to build the library again; otherwise "
                "reinstall sparkhvd."
            )
        for name, signature in FUNCTIONS.items():
            function = getattr(releases_gil if signature.may_block else keeps_gil, name)
            function.restype = signature.returns
            function.argtypes = signature.arguments
            setattr(self, name.removeprefix("sparkhvd_"), function)
        # Exit handlers run in reverse order. The engines' shutdown is registered later, so it runs before this handler.
        atexit.register(self.finish)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...


# ----------------------------------------------------------------------------------------------------
# Statuses of the library and their exceptions.

ERROR_BYTES = 2048
# Plain integers for the path of every operation: looking up a member of an enumeration costs more.
OK = int(Status.OK)
PENDING = int(Status.PENDING)
INTERNAL = int(Status.INTERNAL)


class ErrorText(threading.local):
    """Buffer per thread for the error message of a status."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(ERROR_BYTES)


error_text = ErrorText()

_ERRORS: dict[int, type[SparkhvdError]] = {
    Status.INVALID_ARGUMENT: InvalidArgumentError,
    Status.MISMATCH: MismatchError,
    Status.TIMEOUT: CollectiveTimeoutError,
    Status.PEER_LOST: PeerLostError,
    Status.SHUT_DOWN: CollectiveError,
    Status.UNSUPPORTED: InvalidArgumentError,
    Status.INTERNAL: InternalError,
    Status.NO_MEMORY: ResultMemoryError,
}


def to_exception(status: int, buffer: ctypes.Array[ctypes.c_char]) -> SparkhvdError:
    message = buffer.value.decode("utf-8", errors="replace")
    return _ERRORS.get(status, InternalError)(message or f"The library gave status {status}.")


# ----------------------------------------------------------------------------------------------------
# Memory files by the kernel's own numbers.
# Python builds for an old glibc, such as conda's, run on kernels with memory files but lack `os.memfd_create` and the
# constants of seals. `fcntl` is imported at its use, so that a client on Windows can import this module. The numbers
# are Linux's and never change.

MFD_CLOEXEC = 1
MFD_ALLOW_SEALING = 2
F_ADD_SEALS = 1033
F_GET_SEALS = 1034
F_SEAL_SHRINK = 2
# The system call's number by `uname -m`.
SYS_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}


def new_memfd(name: str) -> int:
    """Create an empty, sealable, close-on-exec memory file and return its descriptor.

    Args:
        name: shown in /proc only.

    Raises:
        OSError: memory files are forbidden here or missing in this kernel.
    """
    flags = MFD_CLOEXEC | MFD_ALLOW_SEALING
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, flags)
    number = SYS_MEMFD_CREATE.get(os.uname().machine)
    if number is None:
        raise OSError(f"this Python cannot make memory files on {os.uname().machine}")
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = int(libc.syscall(ctypes.c_long(number), name.encode(), ctypes.c_uint(flags)))
    if descriptor < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"memfd_create: {os.strerror(code)}")
    return descriptor


def seal_against_shrinking(descriptor: int) -> None:
    """Seal a memory file permanently against shrinking."""
    import fcntl

    fcntl.fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK)


def is_sealed_against_shrinking(descriptor: int) -> bool:
    """Check whether a received memory file can never shrink. An OSError if it cannot be sealed."""
    import fcntl

    return bool(fcntl.fcntl(descriptor, F_GET_SEALS) & F_SEAL_SHRINK)


# ----------------------------------------------------------------------------------------------------
# The loaded library, and the native handles of each engine.
# Threads: any. Nothing here takes a lock: each step is one atomic operation of a dict, deque or set, so a garbage
# collection may run a `__del__` anywhere, and a fork never meets a held lock.
#
# Ownership: `EngineHandles` owns the native handles and everything that operations read and write (`keep`). A `Work` that
# is dropped before its operation has finished passes its handle to the state, which releases it on a later call.


def library_path() -> Path:
    return Path(__file__).parents[1] / "lib" / "libsparkhvd.so"


@cache
def load() -> Library:
    """Load the library on first use. From then on, forked children close this process's engines.

    Raises:
        EngineUnavailableError: it is missing or of another ABI version.
    """
    library = Library(library_path())
    os.register_at_fork(after_in_child=_after_fork)
    return library


class EngineHandles:
    """The native handles of one engine, shared by the engine, its works and its finalizer."""

    def __init__(self, library: Library, handle: int) -> None:
        self.library = library
        self.handle = handle
        self.pid = os.getpid()
        # Every work that has not been released, and the memory that its operation reads and writes.
        self.works: dict[int, object] = {}
        # Memory that a failed submission may still use: the library failed (for lack of memory, say), perhaps after it
        # had accepted the operation. Such operations have no work. Freed with the engine.
        self.lost: list[object] = []
        # Works that Python has dropped; released once they have finished.
        self.orphans: deque[int] = deque()
        # Waits in native code right now; the engine must not be freed under them.
        self.waiting: set[object] = set()
        self.usable = True  # neither closed nor forked: one check before every operation
        self.closed = False
        self.forked = False  # this process is a child of the one that made the engine
        self.destroyed = False

    def check_usable(self, what: str) -> None:
        """Raise a `NotInitializedError` if the engine was closed or forked."""
        if self.forked:
            raise NotInitializedError(
                f"{what}: the engine was created before fork() and does not work in the forked "
                "process. Start the process with spawn, or create an engine in it."
            )
        if self.closed:
            raise NotInitializedError(f"{what}: the engine was shut down. Create a new one.")

    def losses(self) -> dict[int, Loss]:
        """Get the lost ranks known here, with the kind of loss. Empty once the engine is gone."""
        if self.destroyed or self.pid != os.getpid():
            return {}
        found = self.library.engine_lost(self.handle, None, 0)
        entries = (LossEntry * found)()
        found = min(found, self.library.engine_lost(self.handle, entries, found))
        return {entry.rank: Loss(entry.kind) for entry in entries[:found]}

    def to_exception(self, status: int, buffer: ctypes.Array[ctypes.c_char]) -> SparkhvdError:
        """Make the exception for a status. Add the lost ranks to a `CollectiveError`."""
        error = to_exception(status, buffer)
        if isinstance(error, CollectiveError):
            error.lost = {rank: loss.name.lower() for rank, loss in self.losses().items()}
        return error

    def reap(self, patience: int | None = None) -> None:
        """Release dropped, finished works. Stop after `patience` unfinished works (None: never)."""
        pending = 0
        for _ in range(len(self.orphans)):
            try:
                handle = self.orphans.popleft()
            except IndexError:  # another thread reaps too
                return
            if self.library.poll(handle, None, 0) != PENDING:
                self.release(handle)
                continue
            self.orphans.append(handle)  # at the end: a slow work must not hide finished works
            pending += 1
            if pending == patience:
                return

    def release(self, handle: int) -> None:
        """Release a finished work."""
        keep = self.works.pop(handle, None)
        if keep is not None:
            self.keep_if_left(handle, keep)
        self.library.work_release(handle)
        del keep  # after the release: no operation uses it any more

    def keep_if_left(self, handle: int, keep: object) -> None:
        """Keep the memory of a failed operation permanently, if a GPU may still use it."""
        if self.library.work_is_left_to_device(handle):
            _left_to_devices.append(keep)

    def shutdown(self) -> Status:
        """Stop the native thread and release the finished works."""
        self.closed = True
        self.usable = False
        # No buffer: in a finalizer the thread's buffer may not exist.
        status = self.library.engine_shutdown(self.handle, None, 0)
        self.reap()
        return Status(status)

    def close(self) -> None:
        """Shut down and free the engine, as its finalizer. Do nothing in a forked process."""
        if self.destroyed or self.pid != os.getpid():
            return
        self.shutdown()
        if self.waiting:  # a daemon thread still waits while the interpreter exits
            return
        self.destroyed = True
        # Works that Python still holds stay: a tensor may use the memory of an allgather, also while the interpreter
        # exits.
        self.reap()
        self.library.engine_destroy(self.handle)


# Memory of operations that ended by a deadline while a GPU was busy with them. The GPU may write there at any time, so
# the memory must not be reused as long as this process lives.
_left_to_devices: list[object] = []

# A forked child must close its copies of every engine's descriptors.
states: weakref.WeakSet[EngineHandles] = weakref.WeakSet()


def _after_fork() -> None:
    for state in list(states):
        state.forked = True
        state.usable = False
        if not state.destroyed:
            state.library.engine_after_fork(state.handle)
