"""The one door to the compiled library: `Engine`. Knows no torch and no Spark.

Threads: any number of Python threads may use one engine. Calls that cannot block keep the GIL
(`ctypes.PyDLL`), so they cost no switch of threads; only waits, create and shutdown release it
(`ctypes.CDLL`). A wait comes back to Python every 50 ms, so Ctrl-C works. Nothing here takes a lock (see
`work.py`).

Shutdown: `shutdown()` stops the native thread and closes its descriptors; memory is freed when the last
reference to the engine and its works is gone, or when the interpreter exits.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sparkhvd.engine import stacks
from sparkhvd.engine.library import (
    ABI_VERSION,
    DEVICE_CPU,
    WIRE_VERSION,
    Collective,
    DeviceOptions,
    DType,
    EngineOptions,
    Isa,
    Knob,
    Library,
    ReduceOp,
)
from sparkhvd.engine.work import (
    ERROR_BYTES,
    INTERNAL,
    OK,
    PENDING,
    WAIT_SLICE_MS,
    Buffer,
    Call,
    GatherOutput,
    State,
    TensorView,
    Work,
    after_fork,
    error_text,
    states,
    to_exception,
)
from sparkhvd.errors import InvalidArgumentError
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
        stream_sockets: list[int]

        def close(self) -> None:
            """Close every descriptor that nobody took."""


__all__ = [
    "ABI_VERSION",
    "WIRE_VERSION",
    "Buffer",
    "Call",
    "DType",
    "Engine",
    "GatherOutput",
    "ReduceOp",
    "TensorView",
    "Work",
    "allgather_into_call",
    "allreduce_call",
    "isa_available",
    "reducescatter_call",
]

# Kept for the next operation of the same kind and shapes; a training loop has few kinds.
MAX_IDLE_CALLS = 256

# A plain integer for the way of every operation: to look up a member of an enumeration costs more.
_ALLREDUCE = int(Collective.ALLREDUCE)


def library_path() -> Path:
    """Where the build puts the compiled library."""
    return Path(__file__).parents[1] / "lib" / "libsparkhvd.so"


@cache
def load() -> Library:
    """The library, loaded on first use; the engines of this process are then closed in forked children.

    Raises:
        EngineUnavailableError: it is missing or of another ABI version.
    """
    library = Library(library_path())
    os.register_at_fork(after_in_child=after_fork)
    return library


def isa_available(isa: str) -> bool:
    """Whether this CPU and this build have the instruction set that `Settings.isa` calls `isa`."""
    return bool(load().isa_available(_isa(isa)))


def _isa(name: str) -> Isa:
    if name not in ISAS:
        raise InvalidArgumentError(f"isa is {name!r}; it must be one of {', '.join(ISAS)}.")
    return Isa[name.upper()]


# How many dropped works that have not finished the submission of another looks at: few beside the hundreds that the
# host may be ahead of a GPU, and enough that at most half as many finished ones wait between them.
_REAP_PATIENCE = 2


def allreduce_call(
    shapes: Sequence[tuple[int, ...]],
    dtype: DType,
    op: ReduceOp,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: int = 0,
    device: int = DEVICE_CPU,
) -> Call:
    """An allreduce for `Engine.start`, of tensors with these shapes; the caller places them and may use it
    again and again. Otherwise as `Engine.allreduce`.
    """
    return Call(_ALLREDUCE, shapes, dtype, op, 0, prescale, postscale, process_set, (), device)


def reducescatter_call(
    shapes: Sequence[tuple[int, ...]],
    dtype: DType,
    op: ReduceOp,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: int = 0,
    device: int = DEVICE_CPU,
) -> Call:
    """A reducescatter for `Engine.start`, as `allreduce_call`; arguments as for `Engine.prepare_reducescatter`."""
    kind = Collective.REDUCESCATTER
    return Call(kind, shapes, dtype, op, 0, prescale, postscale, process_set, (), device)


def allgather_into_call(
    shapes: Sequence[tuple[int, ...]],
    dtype: DType,
    process_set: int = 0,
    device: int = DEVICE_CPU,
) -> Call:
    """The inverse of a reducescatter, in place: every rank has its rows of each tensor and gets the others'.

    For `Engine.start`, as `allreduce_call`. Shapes are equal on all ranks, inputs are outputs; of d rows rank r of n
    has d // n, and one more if r < d % n.
    """
    kind = Collective.ALLGATHER_INTO
    return Call(kind, shapes, dtype, 0, 0, 1.0, 1.0, process_set, (), device)


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
        self._counters: defaultdict[tuple[str, int], Iterator[int]] = defaultdict(itertools.count)
        # Calls that nobody uses, by what they are for: taken out and put back, each in one atomic step.
        self._calls: dict[object, Call] = {}
        library = load()
        handle = _create(library, connections, settings)
        self._state = State(library, handle)
        states.add(self._state)
        self._finalizer = weakref.finalize(self, self._state.close)
        if settings.timeline not in ("", "DYNAMIC") and self.rank == 0:
            try:
                self.start_timeline(settings.timeline, mark_cycles=settings.timeline_mark_cycles)
            except BaseException as error:
                self.abort(f"{type(error).__name__}: {error}")
                self.shutdown()
                raise

    @property
    def rank(self) -> int:
        """Index of this rank."""
        return self.topology.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.topology.size

    def open_device(
        self,
        ordinal: int,
        cuda_library: str | None = None,
        nccl_library: str | None = None,
        nccl_candidates: Sequence[str] = (),
    ) -> None:
        """Open this rank's GPU, so that calls may have it as their `device`. The same one again: nothing happens.

        Not collective. A rank has one device.

        Args:
            ordinal: as the CUDA driver counts in this process.
            cuda_library: None = libcuda.so.1.
            nccl_library: this one and no other; None = the copy that the process has loaded, then
                `nccl_candidates` in their order, then libnccl.so.2.
            nccl_candidates: paths.

        Raises:
            InvalidArgumentError: a library or the device is missing or too old, or another device is open.
        """
        self._state.check_usable("open_device()")
        candidates = [os.fsencode(path) for path in nccl_candidates]
        options = DeviceOptions(
            struct_size=ctypes.sizeof(DeviceOptions),
            device=ordinal,
            cuda_library=None if cuda_library is None else os.fsencode(cuda_library),
            nccl_library=None if nccl_library is None else os.fsencode(nccl_library),
            nccl_candidates=(ctypes.c_char_p * len(candidates))(*candidates),
            num_nccl_candidates=len(candidates),
        )
        buffer = error_text.buffer
        status = self._state.library.device_open(
            self._state.handle, ctypes.byref(options), buffer, ERROR_BYTES
        )
        if status != OK:
            raise to_exception(status, buffer)

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
            op: Average of floats is the correctly rounded quotient of the sum by the number of ranks, both in the
                accumulation type (float32 for halves). Average of integers divides the sum in double and truncates.
            prescale: factor of every input, in the accumulation type.
            postscale: factor of the result. Average of floats divides once, by N / postscale.
            process_set: 0 = all ranks.
            keep: kept alive until the operation has finished, even if the Work is dropped.
            timeout_s: longest wait for the slowest rank; None means `Settings.stall_shutdown_s`.

        Raises:
            InvalidArgumentError: this call is wrong; nothing was submitted.
            NotInitializedError: the engine was shut down, or made before a fork.
            CollectiveError: the engine has failed before.
        """
        call = self.prepare_allreduce(tensors, dtype, op, prescale, postscale, process_set)
        return self.start(call, name, keep, timeout_s)

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
        """Start `prepare_allgather` of one tensor. Otherwise as `allreduce`."""
        call = self.prepare_allgather((tensor,), dtype, process_set)
        return self.start(call, name, keep, timeout_s)

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
        """Start `prepare_broadcast`. Otherwise as `allreduce`."""
        call = self.prepare_broadcast(tensor, root_rank, dtype, process_set)
        return self.start(call, name, keep, timeout_s)

    def barrier(
        self, *, name: str | None = None, process_set: int = 0, timeout_s: float | None = None
    ) -> Work:
        """Start to wait for every rank of the process set. Otherwise as `allreduce`.

        Args:
            name: None numbers the barriers of the process set; every rank then calls as many.
            process_set: 0 = all ranks.
            timeout_s: longest wait for the slowest rank; None means `Settings.stall_shutdown_s`.
        """
        name = name or self._number("barrier", process_set)
        return self.start(Call(Collective.BARRIER, process_set=process_set), name, None, timeout_s)

    def join(self, *, process_set: int = 0, timeout_s: float | None = None) -> Work:
        """Start to say that this rank has no more work, until every rank has said so.

        Meanwhile the others' allreduces (Sum, Average) go on without this rank's tensors; their Average still
        divides by the number of all. Their other operations fail with a `MismatchError`. When all have joined,
        `Work.output().rows[0]` is the rank that came last.

        Args:
            process_set: whose ranks join; 0 = all.
            timeout_s: how long a rank may neither join nor submit anything; 0 = for ever, None = the setting.
        """
        call = Call(Collective.JOIN, process_set=process_set)
        return self.start(call, "join", timeout_s=timeout_s)

    def add_process_set(self, ranks: Sequence[int], *, name: str | None = None) -> Work:
        """Start to make a process set; every rank must call this with the same ranks, members or not.

        Its number is `Work.output().rows[0]`: the same on every rank, never 0, never used again.

        Args:
            ranks: ascending, each once.
            name: None numbers these calls.
        """
        call = Call(Collective.ADD_PROCESS_SET, numbers=ranks)
        return self.start(call, name or self._number("add_process_set"))

    def remove_process_set(self, process_set: int, *, name: str | None = None) -> Work:
        """Start to remove a process set; every rank must call this. What its ranks have agreed on still runs."""
        call = Call(Collective.REMOVE_PROCESS_SET, numbers=(process_set,))
        return self.start(call, name or self._number("remove_process_set"))

    def allocate(
        self,
        num_bytes: int,
        *,
        name: str | None = None,
        process_set: int = 0,
        one_piece: bool = False,
        device: int = DEVICE_CPU,
    ) -> Buffer:
        """Make registered memory; every rank of the process set must call this, with as many bytes. Waits.

        An allreduce whose tensors lie in one buffer, in place and one after the other on every rank, runs
        without copies. The memory is zero at first and outlives the engine.

        Args:
            num_bytes: 1 or more.
            name: None numbers these calls.
            process_set: whose ranks share it.
            one_piece: the ranks of a host get the same piece instead of one each. What they write there they
                must order themselves (`barrier`).
            device: the opened device, to make memory there, each rank its own, which NCCL knows.

        Raises:
            InvalidArgumentError: there is not enough memory on this rank (or, of one piece, on any rank); or as for `allreduce`.
            MismatchError, CollectiveTimeoutError, PeerLostError: as for any operation.
        """
        numbers = (num_bytes, 1) if one_piece else (num_bytes,)
        call = Call(Collective.REGISTER, process_set=process_set, numbers=numbers, device=device)
        work = self.start(call, name or self._number("allocate", process_set))
        work.wait()
        return work.buffer()

    def configure(
        self,
        *,
        chunk_bytes: int = 0,
        streams: int = 0,
        symmetric_bytes: int = 0,
        direct_ranks: int = 0,
        process_set: int = 0,
    ) -> Work:
        """Start to change how operations run, from the same one on, on every rank; 0 changes nothing.

        Args:
            chunk_bytes: of a pipeline step in shared memory, at most `Settings.slot_bytes`.
            streams: connections per pair of ranks that are used.
            symmetric_bytes: up to here every rank of a host reduces everything. May change bits.
            direct_ranks: up to so many hosts exchange directly, above in a ring. May change bits.
            process_set: the one that is changed.
        """
        numbers = [0] * len(Knob)
        numbers[Knob.CHUNK_BYTES] = chunk_bytes
        numbers[Knob.STREAMS] = streams
        numbers[Knob.SYMMETRIC_BYTES] = symmetric_bytes
        numbers[Knob.DIRECT_RANKS] = direct_ranks
        call = Call(Collective.CONFIGURE, process_set=process_set, numbers=numbers)
        return self.start(call, self._number("configure", process_set))

    # --- Calls: what `start` and `run` submit, once. ---

    def prepare_allreduce(
        self,
        tensors: Sequence[TensorView],
        dtype: DType,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
        process_set: int = 0,
        digest: tuple[int, ...] = (),
        device: int = DEVICE_CPU,
    ) -> Call:
        """An allreduce as a call; arguments as for `allreduce`.

        Args:
            tensors: as for `allreduce`, and so on.
            dtype: element type.
            op: the reduction.
            prescale: factor of the inputs.
            postscale: factor of the result.
            process_set: 0 = all ranks.
            digest: one number that must be equal on all ranks, of all operations that belong together.
            device: where the tensors lie: the CPU, or the device that was opened.
        """
        shapes = tuple([tensor[2] for tensor in tensors])
        key = (_ALLREDUCE, shapes, dtype, op, 0, prescale, postscale, process_set, digest, device)
        return self._prepare(key, tensors)

    def prepare_reducescatter(
        self,
        tensors: Sequence[TensorView],
        dtype: DType,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
        process_set: int = 0,
        digest: tuple[int, ...] = (),
        device: int = DEVICE_CPU,
    ) -> Call:
        """An allreduce of which every rank gets its rows only.

        Of d rows rank r of n gets d // n, and one more if r < d % n; ranks in the order of the process set.

        Args:
            tensors: at least one; `shape` of the input, `output` for this rank's rows, which may be where they
                are in the input.
            dtype: element type of all tensors.
            op: Sum, Average, Min, Max or Product.
            prescale: factor of every input.
            postscale: factor of the result.
            process_set: 0 = all ranks.
            digest: as for `prepare_allreduce`.
            device: as for `prepare_allreduce`.
        """
        shapes = tuple([tensor[2] for tensor in tensors])
        kind = Collective.REDUCESCATTER
        key = (kind, shapes, dtype, op, 0, prescale, postscale, process_set, digest, device)
        return self._prepare(key, tensors)

    def prepare_allgather(
        self,
        tensors: Sequence[TensorView],
        dtype: DType,
        process_set: int = 0,
        digest: tuple[int, ...] = (),
        device: int = DEVICE_CPU,
    ) -> Call:
        """The ranks' tensors joined along the first dimension, in rank order, as `Work.output()`.

        First dimensions may differ between ranks, the others may not. On a device the result goes to the tensors'
        outputs, which have room for all ranks' rows.
        """
        shapes = tuple([tensor[2] for tensor in tensors])
        key = (Collective.ALLGATHER, shapes, dtype, 0, 0, 1.0, 1.0, process_set, digest, device)
        return self._prepare(key, tensors)

    def prepare_alltoall(
        self,
        tensor: TensorView,
        splits: Sequence[int] | None,
        dtype: DType,
        process_set: int = 0,
        device: int = DEVICE_CPU,
    ) -> Call:
        """Rows to every rank and rows from every rank; those that came, in rank order, are `Work.output()`.

        Args:
            tensor: at least one dimension; all but the first must be equal on all ranks.
            splits: rows for each rank of the process set, at most as many as there are; None = equal parts.
            dtype: element type.
            process_set: 0 = all ranks.
            device: as for `prepare_allreduce`; there what came goes to the tensor's output.
        """
        numbers = () if splits is None else tuple(splits)
        kind, shapes = Collective.ALLTOALL, (tensor.shape,)
        key = (kind, shapes, dtype, 0, 0, 1.0, 1.0, process_set, numbers, device)
        return self._prepare(key, (tensor,))

    def prepare_broadcast(
        self,
        tensor: TensorView,
        root_rank: int,
        dtype: DType,
        process_set: int = 0,
        device: int = DEVICE_CPU,
    ) -> Call:
        """Rank `root_rank`'s input (its number among all ranks) copied to every rank's output."""
        kind, shapes = Collective.BROADCAST, (tensor.shape,)
        key = (kind, shapes, dtype, 0, root_rank, 1.0, 1.0, process_set, (), device)
        return self._prepare(key, (tensor,))

    # --- Submitting. ---

    def start(
        self, call: Call, name: str, keep: object = None, timeout_s: float | None = None
    ) -> Work:
        """Submit a call. Arguments and errors as for `allreduce`."""
        state = self._state
        self._before(call, name, timeout_s)
        buffer = error_text.buffer
        try:
            status = state.library.submit(
                state.handle, call.reference, call.work_reference, buffer, ERROR_BYTES
            )
            if status == OK:
                return self._adopt(call, name, keep)
        except BaseException:  # Ctrl-C, behind the native call
            self._leave_behind(call, keep)
            raise
        if status == INTERNAL:
            state.lost.append(keep)
        raise to_exception(status, buffer)

    def run(
        self, call: Call, name: str, keep: object = None, timeout_s: float | None = None
    ) -> None:
        """Submit a call and wait until it has finished: as `start(...).wait()`, in less time."""
        state = self._state
        self._before(call, name, timeout_s)
        buffer = error_text.buffer
        waiting = state.waiting
        waiting.add(call)
        work = None
        try:
            status = state.library.run(
                state.handle,
                call.reference,
                WAIT_SLICE_MS,
                call.work_reference,
                buffer,
                ERROR_BYTES,
            )
            if status == PENDING:
                work = self._adopt(call, name, keep)
        except BaseException:  # Ctrl-C, behind the native call
            self._leave_behind(call, keep)
            raise
        finally:
            waiting.discard(call)
        if work is not None:
            work.wait()
        elif status != OK:
            if status == INTERNAL:
                state.lost.append(keep)
            raise to_exception(status, buffer)
        elif call.key is not None:
            self._calls[call.key] = call

    def check(self) -> None:
        """Raise why the engine cannot be used any more, if it cannot."""
        self._state.check_usable("Engine.check()")
        buffer = error_text.buffer
        status = self._state.library.engine_status(self._state.handle, buffer, ERROR_BYTES)
        if status != OK:
            raise to_exception(status, buffer)

    # --- What it tells about itself. ---

    def counters(self) -> dict[str, Any]:
        """What this rank has counted since the engine was made (docs/observe.md); also after a shutdown.

        Raises:
            NotInitializedError: the engine is gone, or was made before a fork.
        """
        state = self._state
        if state.destroyed or state.pid != os.getpid():
            state.check_usable("Engine.counters()")
        size = 1 << 14
        while True:
            buffer = ctypes.create_string_buffer(size)
            length = state.library.engine_counters(state.handle, buffer, size)
            if length < size:
                counters: dict[str, Any] = json.loads(buffer.value)
                return counters
            size = length + 1024  # it may have grown meanwhile

    def start_timeline(self, path: str, *, mark_cycles: bool = False) -> None:
        """Write this rank's timeline from now on; one that is being written ends (see `sparkhvd.observe.timeline`).

        Args:
            path: a file, made or overwritten.
            mark_cycles: also mark when a thread begins to drive the engine.

        Raises:
            InvalidArgumentError: the file cannot be written.
        """
        self._state.check_usable("start_timeline()")
        buffer = error_text.buffer
        status = self._state.library.timeline_start(
            self._state.handle, os.fsencode(path), int(mark_cycles), buffer, ERROR_BYTES
        )
        if status != OK:
            raise to_exception(status, buffer)

    def stop_timeline(self) -> None:
        """End the timeline; returns when its file is complete. Nothing happens if there is none."""
        self._state.check_usable("stop_timeline()")
        buffer = error_text.buffer
        status = self._state.library.timeline_stop(self._state.handle, buffer, ERROR_BYTES)
        if status != OK:
            raise to_exception(status, buffer)

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

    def _prepare(self, key: tuple[Any, ...], tensors: Sequence[TensorView]) -> Call:
        """A call for these tensors; `key` has the arguments of `Call`."""
        call = self._calls.pop(key, None)
        if call is None:
            if len(self._calls) >= MAX_IDLE_CALLS:
                self._calls.clear()
            call = Call(*key)
            call.key = key
        for tensor, given in zip(call.tensors, tensors, strict=True):
            tensor.input = given[0]
            tensor.output = given[1]
        return call

    def _number(self, kind: str, process_set: int = 0) -> str:
        """A name for an operation that every rank of the process set calls as often."""
        return f"{kind}.{next(self._counters[kind, process_set])}"

    def _before(self, call: Call, name: str, timeout_s: float | None) -> None:
        state = self._state
        if not state.usable:
            state.check_usable(name)
        if state.orphans:
            state.reap(_REAP_PATIENCE)
        request = call.request
        request.name = name.encode()
        request.timeout_s = -1.0 if timeout_s is None else max(0.0, timeout_s)

    def _adopt(self, call: Call, name: str, keep: object) -> Work:
        """The operation that was just submitted, as a Work; the call is free again."""
        handle = call.work.value
        assert handle is not None
        # Ctrl-C may come with every call, also behind the making of the Work, which then is dropped and gives
        # its operation up: the call must have forgotten it before.
        self._state.works[handle] = keep
        call.work.value = None
        if call.key is not None:
            self._calls[call.key] = call
        return Work(self, self._state, handle, name)

    def _leave_behind(self, call: Call, keep: object) -> None:
        """An exception came between the submission and its Work: the operation goes on without one."""
        if call.work.value is not None:
            self._state.works[call.work.value] = keep
            self._state.orphans.append(call.work.value)


def _create(library: Library, connections: Connections, settings: Settings) -> int:
    size = connections.size
    sockets = (ctypes.c_int32 * size)(*connections.sockets)
    further = connections.stream_sockets
    stack_signal, stack_pipe = stacks.prepare(settings.stack_signal)
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
        streams=1 + len(further) // size,
        stream_sockets=(ctypes.c_int32 * len(further))(*further),
        stack_signal=stack_signal,
        stack_pipe=stack_pipe,
    )
    if not library.isa_available(options.isa):
        connections.close()
        raise InvalidArgumentError(
            f"Settings.isa is {settings.isa!r}, which this CPU or this build does not have. Use isa='auto'."
        )
    # The library owns the descriptors from here on, also when it fails.
    connections.sockets[:] = [-1] * size
    further[:] = [-1] * len(further)
    handle = ctypes.c_void_p()
    buffer = error_text.buffer
    status = library.engine_create(ctypes.byref(options), ctypes.byref(handle), buffer, ERROR_BYTES)
    if status != OK:
        raise to_exception(status, buffer)
    assert handle.value is not None
    return handle.value
