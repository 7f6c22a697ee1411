"""Operations before they are submitted: `TensorView`, `Reduction`, `Call`."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from sparkhvd.engine import stacks
from sparkhvd.engine.library import (
    DEVICE_CPU,
    ERROR_BYTES,
    INTERNAL,
    OK,
    PENDING,
    DeviceOptions,
    DType,
    EngineOptions,
    Isa,
    Library,
    Loss,
    ReduceOp,
    Request,
    State,
    Tensor,
    error_text,
    load,
    states,
    to_exception,
)
from sparkhvd.engine.work import WAIT_SLICE_MS, Work
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.settings import ISAS, Settings
from sparkhvd.topology import Topology, topology


class TensorView(NamedTuple):
    """Contiguous, row-major memory of the caller.

    Attributes:
        input: address that is read until the operation has finished.
        output: address that is written; may equal `input`; 0 where the engine allocates the result.
        shape: length of every dimension.
        room: bytes at `output`, of operations whose result's size the ranks have yet to agree on (allgather, alltoall,
            gather, scatter); a result that does not fit is an error on every rank.
    """

    input: int
    output: int
    shape: tuple[int, ...]
    room: int = 0


class Reduction(NamedTuple):
    """Operation and factors of a reduction.

    Attributes:
        op: Average of floats is the correctly rounded quotient of the sum by the number of ranks, both in the
            accumulation type (float32 for halves). Average of integers divides the sum in double and truncates.
        prescale: factor of every input, in the accumulation type.
        postscale: factor of the result. Average of floats divides once, by N / postscale.
    """

    op: ReduceOp
    prescale: float = 1.0
    postscale: float = 1.0


# In the requests of operations that reduce nothing.
NO_REDUCTION = Reduction(ReduceOp.AVERAGE)


class Call:
    """An operation as the library takes it, built once and submitted any number of times.

    Not for two threads at a time. The library copies it at submission, so it may be used again at once.

    Args:
        collective: kind of operation; see `Collective`.
        shapes: of the tensors; `place` sets their addresses.
        dtype: element type of all tensors.
        reduction: of the kinds that reduce.
        process_set: 0 = all ranks.
        root_rank: of a broadcast, counted among all ranks.
        numbers: further arguments of the kind: the splits of an alltoall, ranks, bytes; or a digest.
        device: where the tensors lie: -1, the CPU, or the opened device. Then the caller sets `request.stream`
            before every submission.
    """

    __slots__ = ("_kept", "key", "reference", "request", "tensors", "work", "work_reference")

    def __init__(
        self,
        collective: int,
        shapes: Sequence[tuple[int, ...]] = (),
        dtype: int = 0,
        reduction: Reduction = NO_REDUCTION,
        process_set: int = 0,
        root_rank: int = 0,
        numbers: Sequence[int] = (),
        device: int = DEVICE_CPU,
    ) -> None:
        self.key: object = None  # under which an engine keeps the idle call
        array = (Tensor * len(shapes))()
        self.tensors = list(array)  # the same memory
        lengths = [(ctypes.c_int64 * len(shape))(*shape) for shape in shapes]
        for tensor, shape, values in zip(self.tensors, shapes, lengths, strict=True):
            tensor.shape = values
            tensor.num_dims = len(shape)
        self.request = Request(
            struct_size=ctypes.sizeof(Request),
            collective=collective,
            process_set=process_set,
            dtype=dtype,
            reduce_op=reduction.op,
            root_rank=root_rank,
            prescale=reduction.prescale,
            postscale=reduction.postscale,
            device=device,
            num_tensors=len(shapes),
            tensors=array,
        )
        if numbers:
            self.request.splits = (ctypes.c_int64 * len(numbers))(*numbers)
            self.request.num_splits = len(numbers)
        self.work = ctypes.c_void_p()
        self.reference = ctypes.byref(self.request)
        self.work_reference = ctypes.byref(self.work)
        self._kept = array, lengths

    def place(self, index: int, input_address: int, output_address: int) -> None:
        """Set the addresses where a tensor is read and written."""
        tensor = self.tensors[index]
        tensor.input = input_address
        tensor.output = output_address


# ----------------------------------------------------------------------------------------------------
# `Session`: the life of one native engine, and the calls that concern the whole of it.

if TYPE_CHECKING:
    # STYLE keeps `engine` and `rendezvous` apart at run time; the engine only needs the shape of this.
    from typing import Protocol

    from typing_extensions import Self

    class Connections(Protocol):
        """Connected, authenticated sockets to every peer (see `sparkhvd.rendezvous.Connections`)."""

        rank: int
        size: int
        hosts: tuple[int, ...]
        sockets: list[int]
        stream_sockets: list[int]

        def close(self) -> None:
            """Close every descriptor that nobody took."""


def isa_available(isa: str) -> bool:
    """Check whether this CPU and this build have an instruction set, by its name in `Settings.isa`."""
    return bool(load().isa_available(_isa(isa)))


def _isa(name: str) -> Isa:
    if name not in ISAS:
        raise InvalidArgumentError(f"isa is {name!r}; it must be one of {', '.join(ISAS)}.")
    return Isa[name.upper()]


class Session:
    """Native engine of one rank, from creation to shutdown; arguments and errors as for `Engine`."""

    def __init__(self, connections: Connections, settings: Settings) -> None:
        self.settings = settings
        self.topology: Topology = topology(connections.rank, connections.hosts)
        self._counters: defaultdict[tuple[str, int], Iterator[int]] = defaultdict(itertools.count)
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
        """Open this rank's GPU, so that calls may have it as their `device`; does nothing if it is open.

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

    def check(self) -> None:
        """Raise the reason why the engine cannot be used any more, if there is one."""
        self._state.check_usable("Engine.check()")
        buffer = error_text.buffer
        status = self._state.library.engine_status(self._state.handle, buffer, ERROR_BYTES)
        if status != OK:
            raise self._state.to_exception(status, buffer)

    def losses(self) -> dict[int, Loss]:
        """Return the ranks that are lost, and how, as far as this rank knows."""
        return self._state.losses()

    def counters(self) -> dict[str, Any]:
        """Return this rank's counters since the engine was made (docs/observe.md); also after a shutdown.

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
        """Start to write this rank's timeline; one that is being written ends (see `sparkhvd.observe.timeline`).

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
        """End the timeline, if there is one; returns when its file is complete."""
        self._state.check_usable("stop_timeline()")
        buffer = error_text.buffer
        status = self._state.library.timeline_stop(self._state.handle, buffer, ERROR_BYTES)
        if status != OK:
            raise to_exception(status, buffer)

    def shutdown(self) -> None:
        """Leave politely; operations in flight end with an error here and on the peers. Idempotent."""
        if self._state.pid == os.getpid() and not self._state.destroyed:
            self._state.shutdown()

    def release(self) -> None:
        """Shut down, and free what the engine holds now, not when the last reference to it goes; counters are gone, too."""
        self._state.close()

    def abort(self, reason: str) -> None:
        """Fail every operation here and on the peers, with `reason` in their messages. Never blocks."""
        if self._state.pid == os.getpid() and not self._state.closed:
            self._state.library.engine_abort(self._state.handle, reason.encode())

    def __enter__(self) -> Self:
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

    def _number(self, kind: str, process_set: int = 0) -> str:
        """Return a name for an operation that every rank of the process set calls equally often."""
        return f"{kind}.{next(self._counters[kind, process_set])}"


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
        streams=len(further) // size,
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


# ----------------------------------------------------------------------------------------------------
# `Submitter`: prepares calls and submits them to the native engine: the path of every operation.

# Kept for the next operation of the same kind and shapes; a training loop has few kinds.
MAX_IDLE_CALLS = 256

# Unfinished dropped works that a submission looks at: few beside the hundreds that the host may be ahead of a GPU,
# and enough that at most half as many finished ones wait between them.
_REAP_PATIENCE = 2


class Submitter(Session):
    """A session that submits operations; arguments and errors as for `Engine`."""

    def __init__(self, connections: Connections, settings: Settings) -> None:
        # Idle calls by their arguments: taken out and put back, each in one atomic step.
        self._calls: dict[object, Call] = {}
        super().__init__(connections, settings)

    def prepare(
        self,
        collective: int,
        tensors: Sequence[TensorView],
        dtype: DType,
        reduction: Reduction = NO_REDUCTION,
        process_set: int = 0,
        root_rank: int = 0,
        numbers: tuple[int, ...] = (),
        device: int = DEVICE_CPU,
    ) -> Call:
        """Return a call of these tensors for `start` or `run`, an idle one if there is one with equal arguments.

        `Collective` describes the tensors and numbers of each kind, `Call` the other arguments.
        """
        shapes = tuple([tensor[2] for tensor in tensors])
        key = (collective, shapes, dtype, reduction, process_set, root_rank, numbers, device)
        call = self._calls.pop(key, None)
        if call is None:
            if len(self._calls) >= MAX_IDLE_CALLS:
                self._calls.clear()
            call = Call(*key)
            call.key = key
        for tensor, view in zip(call.tensors, tensors, strict=True):
            tensor.input = view[0]
            tensor.output = view[1]
            if len(view) > 3:
                tensor.output_bytes = view[3]
        return call

    def start(
        self, call: Call, name: str, keep: object = None, timeout_s: float | None = None
    ) -> Work:
        """Submit a call. Arguments and errors as for `Engine.allreduce`."""
        state = self._state
        self._before(call, name, timeout_s)
        buffer = error_text.buffer
        try:
            status = state.library.submit(
                state.handle, call.reference, call.work_reference, buffer, ERROR_BYTES
            )
            if status == OK:
                return self._adopt(call, name, keep)
        except BaseException:  # Ctrl-C, after the native call
            self._leave_behind(call, keep)
            raise
        if status == INTERNAL:
            state.lost.append(keep)
        raise self._state.to_exception(status, buffer)

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
        except BaseException:  # Ctrl-C, after the native call
            self._leave_behind(call, keep)
            raise
        finally:
            waiting.discard(call)
        if work is not None:
            work.wait()
        elif status != OK:
            if status == INTERNAL:
                state.lost.append(keep)
            raise self._state.to_exception(status, buffer)
        elif call.key is not None:
            self._calls[call.key] = call

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
        """Return the submitted operation as a Work; the call is free again."""
        handle = call.work.value
        assert handle is not None
        # Ctrl-C may come with every call, also after the Work was made, which then is dropped and releases its
        # operation: the call must have forgotten it before.
        self._state.works[handle] = keep
        call.work.value = None
        if call.key is not None:
            self._calls[call.key] = call
        return Work(self, self._state, handle, name)

    def _leave_behind(self, call: Call, keep: object) -> None:
        """Let an operation go on without a Work, because an exception came between its submission and its Work."""
        if call.work.value is not None:
            self._state.works[call.work.value] = keep
            self._state.orphans.append(call.work.value)
