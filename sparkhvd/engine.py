"""The one door to the compiled library: `Engine` and `Work`. Knows no torch and no Spark.

Threads: any number of Python threads may use one engine. Calls that cannot block keep the GIL
(`ctypes.PyDLL`), so they cost no switch of threads; only waits, create and shutdown release it
(`ctypes.CDLL`). A wait comes back to Python every 50 ms, so Ctrl-C works.

Ownership: `_State` owns the native handles and everything that operations read and write (`keep`). A
`Work` that is dropped before its operation has finished leaves its handle to the state, which gives it up
on a later call. Nothing here takes a lock: each step is one atomic operation of a dict, deque or set, so a
garbage collection may run a `__del__` anywhere, and a fork never meets a held lock.

Shutdown: `shutdown()` stops the native thread and closes its descriptors; memory is freed when the last
reference to the engine and its works is gone, or when the interpreter exits.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, lru_cache
from pathlib import Path
from types import TracebackType
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
    SparkhvdError,
)
from sparkhvd.settings import ISAS, Settings
from sparkhvd.topology import Topology, topology

if TYPE_CHECKING:
    # STYLE keeps `engine` and `rendezvous` apart at run time; the engine only needs the shape of this.
    from typing import Protocol

    class Connections(Protocol):
        """Connected, authenticated sockets to every peer (see `sparkhvd.rendezvous.Connections`)."""

        rank: int
        size: int
        hosts: tuple[int, ...]
        sockets: list[int]

        def close(self) -> None:
            """Close every descriptor that nobody took."""


__all__ = [
    "ABI_VERSION",
    "WIRE_VERSION",
    "DType",
    "Engine",
    "GatherOutput",
    "ReduceOp",
    "TensorView",
    "Work",
    "isa_available",
]

ABI_VERSION = 1
WIRE_VERSION = 1

# Longest time in native code without a look at pending signals.
WAIT_SLICE_S = 0.05
ERROR_BYTES = 2048


class Status(IntEnum):
    """What a native call or a finished operation says."""

    OK = 0
    PENDING = 1
    INVALID_ARGUMENT = 2
    MISMATCH = 3
    TIMEOUT = 4
    PEER_LOST = 5
    SHUT_DOWN = 6
    UNSUPPORTED = 7
    INTERNAL = 8


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
    """Reductions; the numbers are Horovod's."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


class Collective(IntEnum):
    """Kinds of operation."""

    ALLREDUCE = 0
    ALLGATHER = 1
    BROADCAST = 2
    BARRIER = 3
    ALLTOALL = 4
    REDUCESCATTER = 5
    JOIN = 6


class Isa(IntEnum):
    """Instruction sets of the reduce kernels; `Settings.isa` has their names."""

    AUTO = 0
    SCALAR = 1
    AVX2 = 2
    AVX512 = 3
    NEON = 4


DEVICE_CPU = -1


# --- The header in ctypes. A test compares all of it with native/include/sparkhvd.h. ---


class EngineOptions(ctypes.Structure):
    """`sparkhvd_engine_options`."""

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
    ]


class Tensor(ctypes.Structure):
    """`sparkhvd_tensor`."""

    _fields_ = [
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("num_dims", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


class Request(ctypes.Structure):
    """`sparkhvd_request`."""

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
    """`sparkhvd_output`."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("num_rows", ctypes.c_uint32),
        ("data", ctypes.c_void_p),
        ("num_bytes", ctypes.c_uint64),
        ("rows", ctypes.POINTER(ctypes.c_int64)),
    ]


STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "sparkhvd_engine_options": EngineOptions,
    "sparkhvd_tensor": Tensor,
    "sparkhvd_request": Request,
    "sparkhvd_output": Output,
}

_HANDLE = ctypes.c_void_p
_OUT_HANDLE = ctypes.POINTER(ctypes.c_void_p)
_ERROR = (ctypes.c_char_p, ctypes.c_size_t)


@dataclass(frozen=True)
class Signature:
    """A function of the header; one that may block releases the GIL."""

    returns: Any
    arguments: tuple[Any, ...]
    may_block: bool = False


FUNCTIONS: dict[str, Signature] = {
    "sparkhvd_abi_version": Signature(ctypes.c_uint32, ()),
    "sparkhvd_wire_version": Signature(ctypes.c_uint32, ()),
    "sparkhvd_isa_available": Signature(ctypes.c_int32, (ctypes.c_int32,)),
    "sparkhvd_engine_create": Signature(
        ctypes.c_int32,
        (ctypes.POINTER(EngineOptions), _OUT_HANDLE, *_ERROR),
        may_block=True,
    ),
    "sparkhvd_engine_shutdown": Signature(ctypes.c_int32, (_HANDLE, *_ERROR), may_block=True),
    "sparkhvd_engine_abort": Signature(None, (_HANDLE, ctypes.c_char_p)),
    "sparkhvd_engine_status": Signature(ctypes.c_int32, (_HANDLE, *_ERROR)),
    "sparkhvd_engine_after_fork": Signature(None, (_HANDLE,)),
    # Joins a thread that needs no GIL; releases it all the same, because a join is a wait.
    "sparkhvd_engine_destroy": Signature(None, (_HANDLE,), may_block=True),
    "sparkhvd_submit": Signature(
        ctypes.c_int32, (_HANDLE, ctypes.POINTER(Request), _OUT_HANDLE, *_ERROR)
    ),
    "sparkhvd_poll": Signature(ctypes.c_int32, (_HANDLE, *_ERROR)),
    "sparkhvd_wait": Signature(ctypes.c_int32, (_HANDLE, ctypes.c_uint32, *_ERROR), may_block=True),
    "sparkhvd_work_output": Signature(ctypes.c_int32, (_HANDLE, ctypes.POINTER(Output), *_ERROR)),
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
                f"Engine(): cannot load {path}: {found}. In a checkout run `make env`; "
                "otherwise reinstall sparkhvd on Linux (x86-64 or aarch64)."
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

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...


def library_path() -> Path:
    """Where the build puts the compiled library."""
    return Path(__file__).parent / "lib" / "libsparkhvd.so"


@cache
def load() -> Library:
    """The library, loaded on first use; the engines of this process are then closed in forked children.

    Raises:
        EngineUnavailableError: it is missing or of another ABI version.
    """
    library = Library(library_path())
    os.register_at_fork(after_in_child=_after_fork)
    return library


def isa_available(isa: str) -> bool:
    """Whether this CPU and this build have the instruction set that `Settings.isa` calls `isa`."""
    return bool(load().isa_available(_isa(isa)))


def _isa(name: str) -> Isa:
    if name not in ISAS:
        raise InvalidArgumentError(f"isa is {name!r}; it must be one of {', '.join(ISAS)}.")
    return Isa[name.upper()]


class _ErrorText(threading.local):
    """One buffer per thread for the sentence that explains a status."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(ERROR_BYTES)


_error_text = _ErrorText()

_ERRORS: dict[int, type[SparkhvdError]] = {
    Status.INVALID_ARGUMENT: InvalidArgumentError,
    Status.MISMATCH: MismatchError,
    Status.TIMEOUT: CollectiveTimeoutError,
    Status.PEER_LOST: PeerLostError,
    Status.SHUT_DOWN: CollectiveError,
    Status.UNSUPPORTED: InvalidArgumentError,
    Status.INTERNAL: InternalError,
}


def _to_exception(status: int, buffer: ctypes.Array[ctypes.c_char]) -> SparkhvdError:
    """The one translation from the library's status and sentence to an exception."""
    message = buffer.value.decode("utf-8", errors="replace")
    return _ERRORS.get(status, InternalError)(message or f"The library gave status {status}.")


@dataclass(frozen=True, slots=True)
class TensorView:
    """Contiguous, row-major memory of the caller.

    Attributes:
        input: address that is read until the operation has finished.
        output: address that is written; may equal `input`; 0 where the engine allocates the result.
        shape: length of every dimension.
    """

    input: int
    output: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GatherOutput:
    """The result of an allgather; the memory lives as long as the `Work`.

    Attributes:
        address: the first byte; 0 when there are none.
        num_bytes: length.
        rows: first dimension that each rank of the process set contributed.
    """

    address: int
    num_bytes: int
    rows: tuple[int, ...]


class _State:
    """The native handles of one engine, shared by the engine, its works and its finalizer."""

    def __init__(self, library: Library, handle: int) -> None:
        self.library = library
        self.handle = handle
        self.pid = os.getpid()
        # Every work that has not been given up, and what its operation reads and writes.
        self.works: dict[int, object] = {}
        # Works that Python has dropped; given up once they have finished.
        self.orphans: deque[int] = deque()
        # Waits in native code right now; the engine must not be freed under them.
        self.waiting: set[object] = set()
        self.closed = False
        self.destroyed = False

    def check_usable(self, what: str) -> None:
        if self.pid != os.getpid():
            raise NotInitializedError(
                f"{what}: the engine was created before fork() and does not work in the forked "
                "process. Start the process with spawn, or create an engine in it."
            )
        if self.closed:
            raise NotInitializedError(f"{what}: the engine was shut down. Create a new one.")

    def reap(self) -> None:
        """Gives up dropped works that have finished meanwhile."""
        for _ in range(len(self.orphans)):
            try:
                handle = self.orphans.popleft()
            except IndexError:  # another thread reaps too
                return
            if self.library.poll(handle, None, 0) == Status.PENDING:
                self.orphans.append(handle)
            else:
                self.release(handle)

    def release(self, handle: int) -> None:
        keep = self.works.pop(handle, None)
        self.library.work_release(handle)
        del keep  # after the release: nothing reads or writes it any more

    def shutdown(self) -> Status:
        self.closed = True
        # No buffer: in a finalizer the thread's may not exist yet, or not any more.
        status = self.library.engine_shutdown(self.handle, None, 0)
        self.reap()
        return Status(status)

    def close(self) -> None:
        """The finalizer: everything that is left, in the process that made it."""
        if self.destroyed or self.pid != os.getpid():
            return
        self.shutdown()
        if self.waiting:  # a daemon thread still waits while the interpreter exits
            return
        self.destroyed = True
        # Works that Python still holds stay: the memory of an allgather may be a tensor's that is in use, also
        # while the interpreter exits.
        self.reap()
        self.library.engine_destroy(self.handle)


class Work:
    """A started operation."""

    __slots__ = ("__weakref__", "_engine", "_handle", "_name", "_state")

    def __init__(self, engine: Engine, state: _State, handle: int, name: str) -> None:
        self._engine = engine  # an engine lives as long as its works
        self._state = state
        self._handle = handle
        self._name = name

    def __repr__(self) -> str:
        return f"<Work {self._name!r}>"

    def __del__(self) -> None:
        state = self._state
        if not state.destroyed:
            # No call that may take a lock of the engine here: this may run inside any other one.
            state.orphans.append(self._handle)
        elif state.pid == os.getpid():
            state.release(self._handle)  # only frees

    def done(self) -> bool:
        """Whether the operation has finished; never blocks and drives nothing.

        Raises:
            MismatchError: the ranks disagreed.
            CollectiveError: the set of ranks changed; the contents of the tensors are undefined.
        """
        return self._finished(self._state.library.poll, ())

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the operation has finished; drives every operation of the engine meanwhile.

        Args:
            timeout_s: longest wait here; None means until the operation ends by itself, at the latest after
                the timeout it was submitted with. The operation goes on after a timeout here.

        Raises:
            MismatchError: the ranks disagreed; the engine stays usable.
            CollectiveTimeoutError: a rank did not come in time.
            PeerLostError: a rank is gone.
            CollectiveError: the set of ranks changed; the contents of the tensors are undefined.
        """
        if self.done():
            return
        state = self._state
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        token = object()
        state.waiting.add(token)
        try:
            while True:
                slice_s = min(WAIT_SLICE_S, deadline - time.monotonic())
                if self._finished(state.library.wait, (max(0, math.ceil(slice_s * 1000)),)):
                    return
                if time.monotonic() >= deadline:
                    raise CollectiveTimeoutError(
                        f"{self._name}: not finished after the {timeout_s} s that wait() was given. It goes "
                        "on; wait again, or shut the engine down."
                    )
        finally:
            state.waiting.discard(token)

    def output(self) -> GatherOutput:
        """What a finished allgather produced.

        Raises:
            InvalidArgumentError: the operation has not finished, or its result is in the caller's memory.
        """
        self._check()
        output = Output(struct_size=ctypes.sizeof(Output))
        buffer = _error_text.buffer
        status = self._state.library.work_output(
            self._handle, ctypes.byref(output), buffer, ERROR_BYTES
        )
        if status != Status.OK:
            raise _to_exception(status, buffer)
        return GatherOutput(
            output.data or 0, output.num_bytes, tuple(output.rows[: output.num_rows])
        )

    def _finished(self, call: Callable[..., int], arguments: tuple[int, ...]) -> bool:
        self._check()
        buffer = _error_text.buffer
        status = call(self._handle, *arguments, buffer, ERROR_BYTES)
        if status == Status.PENDING:
            return False
        # Finished: the caller's memory is free again, also when the Work lives on for its output.
        if self._handle in self._state.works:
            self._state.works[self._handle] = None
        if status != Status.OK:
            raise _to_exception(status, buffer)
        return True

    def _check(self) -> None:
        # An operation that finished before the shutdown keeps its result, so `closed` does not matter here.
        state = self._state
        if state.pid != os.getpid():
            state.check_usable(self._name)
        if state.destroyed:
            raise NotInitializedError(f"{self._name}: the engine is gone. Create a new one.")


# A forked child must close its copies of every engine's descriptors.
_states: weakref.WeakSet[_State] = weakref.WeakSet()


def _after_fork() -> None:
    for state in list(_states):
        if not state.destroyed:
            state.library.engine_after_fork(state.handle)


@lru_cache(maxsize=4096)
def _shape_array(shape: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(shape))(*shape)


class Engine:
    """The collectives of one rank. A context manager: success shuts down, an exception aborts.

    Creating one is collective: every rank does it, and it returns once all have.

    Args:
        connections: an authenticated socket to every peer; the engine owns them from now on, also when this
            raises.
        settings: the same on every rank.

    Raises:
        EngineUnavailableError: the compiled library is missing or of another version.
        InvalidArgumentError: the settings ask for what this machine cannot do.
        CollectiveTimeoutError: a rank did not come within `settings.connect_timeout_s`.
        PeerLostError: a rank's process or connection is gone.
    """

    def __init__(self, connections: Connections, settings: Settings) -> None:
        self.settings = settings
        self.topology: Topology = topology(connections.rank, connections.hosts)
        self._barriers: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
        library = load()
        handle = _create(library, connections, settings)
        self._state = _State(library, handle)
        _states.add(self._state)
        self._finalizer = weakref.finalize(self, self._state.close)

    @property
    def rank(self) -> int:
        """Index of this rank."""
        return self.topology.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.topology.size

    def allreduce(
        self,
        tensors: Sequence[TensorView],
        *,
        name: str,
        dtype: DType,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
        process_set: int = 0,
        keep: object = None,
        timeout_s: float | None = None,
    ) -> Work:
        """Start to combine `tensors` elementwise over all ranks; every rank gets the same values.

        Every rank of the process set submits the same name, shapes, dtype and operation, in any order among
        its operations. Never blocks. Inputs are read and outputs written until the work has finished.

        Args:
            tensors: one or more tensors that are reduced as one operation.
            name: matches the operation across ranks; unique among those in flight.
            dtype: element type of all tensors.
            op: Average of integers sums, multiplies by 1/N in double and truncates.
            prescale: factor of every input, in the accumulation type (float32 for halves).
            postscale: factor of the result.
            process_set: 0 = all ranks.
            keep: kept alive until the operation has finished, even if the Work is dropped.
            timeout_s: longest wait for the slowest rank; None means `Settings.stall_shutdown_s`.

        Raises:
            InvalidArgumentError: this call is wrong; nothing was submitted.
            NotInitializedError: the engine was shut down, or made before a fork.
            CollectiveError: the engine has failed before.
        """
        return self._submit(
            Request(
                collective=Collective.ALLREDUCE,
                process_set=process_set,
                dtype=dtype,
                reduce_op=op,
                prescale=prescale,
                postscale=postscale,
            ),
            tensors,
            name,
            keep,
            timeout_s,
        )

    def allgather(
        self,
        tensor: TensorView,
        *,
        name: str,
        dtype: DType,
        process_set: int = 0,
        keep: object = None,
        timeout_s: float | None = None,
    ) -> Work:
        """Start to join the ranks' tensors along the first dimension, in rank order.

        First dimensions may differ between ranks, the others may not. The result is `Work.output()`.
        Otherwise as `allreduce`.
        """
        request = Request(collective=Collective.ALLGATHER, process_set=process_set, dtype=dtype)
        return self._submit(request, (tensor,), name, keep, timeout_s)

    def broadcast(
        self,
        tensor: TensorView,
        *,
        root_rank: int,
        name: str,
        dtype: DType,
        process_set: int = 0,
        keep: object = None,
        timeout_s: float | None = None,
    ) -> Work:
        """Start to copy rank `root_rank`'s input to every rank's output. Otherwise as `allreduce`."""
        request = Request(
            collective=Collective.BROADCAST,
            process_set=process_set,
            dtype=dtype,
            root_rank=root_rank,
        )
        return self._submit(request, (tensor,), name, keep, timeout_s)

    def barrier(
        self, *, name: str | None = None, process_set: int = 0, timeout_s: float | None = None
    ) -> Work:
        """Start to wait for every rank of the process set. Otherwise as `allreduce`.

        Args:
            name: None numbers the barriers of the process set; every rank then calls as many.
            process_set: 0 = all ranks.
            timeout_s: longest wait for the slowest rank; None means `Settings.stall_shutdown_s`.
        """
        if name is None:
            name = f"barrier.{next(self._barriers[process_set])}"
        request = Request(collective=Collective.BARRIER, process_set=process_set)
        return self._submit(request, (), name, None, timeout_s)

    def check(self) -> None:
        """Raise why the engine cannot be used any more, if it cannot."""
        self._state.check_usable("Engine.check()")
        buffer = _error_text.buffer
        status = self._state.library.engine_status(self._state.handle, buffer, ERROR_BYTES)
        if status != Status.OK:
            raise _to_exception(status, buffer)

    def shutdown(self) -> None:
        """Leave politely; operations in flight end with an error here and on the peers. Idempotent."""
        if self._state.pid == os.getpid() and not self._state.destroyed:
            self._state.shutdown()

    def abort(self, reason: str) -> None:
        """Fail every operation here and on the peers, with `reason` in their messages. Never blocks."""
        if self._state.pid == os.getpid() and not self._state.closed:
            self._state.library.engine_abort(self._state.handle, reason.encode())

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.abort(f"{type(error).__name__}: {error}")
        self.shutdown()

    def _submit(
        self,
        request: Request,
        tensors: Sequence[TensorView],
        name: str,
        keep: object,
        timeout_s: float | None,
    ) -> Work:
        state = self._state
        state.check_usable(name)
        if state.orphans:
            state.reap()
        count = len(tensors)
        array = (Tensor * count)()
        shapes = [_shape_array(view.shape) for view in tensors]
        for slot, view, shape in zip(array, tensors, shapes, strict=True):
            slot.input = view.input
            slot.output = view.output
            slot.shape = shape
            slot.num_dims = len(view.shape)
        request.struct_size = ctypes.sizeof(Request)
        request.name = name.encode()
        request.device = DEVICE_CPU
        request.num_tensors = count
        request.tensors = array
        request.timeout_s = -1.0 if timeout_s is None else max(0.0, timeout_s)
        handle = ctypes.c_void_p()
        buffer = _error_text.buffer
        status = state.library.submit(
            state.handle, ctypes.byref(request), ctypes.byref(handle), buffer, ERROR_BYTES
        )
        if status != Status.OK:
            raise _to_exception(status, buffer)
        assert handle.value is not None
        state.works[handle.value] = keep
        return Work(self, state, handle.value, name)


def _create(library: Library, connections: Connections, settings: Settings) -> int:
    size = connections.size
    sockets = (ctypes.c_int32 * size)(*connections.sockets)
    options = EngineOptions(
        struct_size=ctypes.sizeof(EngineOptions),
        rank=connections.rank,
        size=size,
        hosts=(ctypes.c_int32 * size)(*connections.hosts),
        sockets=sockets,
        isa=_isa(settings.isa),
        spin_us=settings.spin_us,
        stall_warning_s=settings.stall_warning_s,
        stall_shutdown_s=settings.stall_shutdown_s,
        host_loss_s=settings.host_loss_s,
        connect_timeout_s=settings.connect_timeout_s,
        slot_bytes=settings.slot_bytes,
        slots=settings.slots,
        use_shared_memory=int(settings.shared_memory),
    )
    if not library.isa_available(options.isa):
        connections.close()
        raise InvalidArgumentError(
            f"Settings.isa is {settings.isa!r}, which this CPU or this build does not have. Use isa='auto'."
        )
    # The library owns the descriptors from here on, also when it fails.
    connections.sockets[:] = [-1] * size
    handle = ctypes.c_void_p()
    buffer = _error_text.buffer
    status = library.engine_create(ctypes.byref(options), ctypes.byref(handle), buffer, ERROR_BYTES)
    if status != Status.OK:
        raise _to_exception(status, buffer)
    assert handle.value is not None
    return handle.value
