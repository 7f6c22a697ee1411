"""`Engine`: the operations of one rank. Imports neither torch nor Spark.

Threads: any number of Python threads may use one engine. Calls that cannot block keep the GIL
(`ctypes.PyDLL`), so they need no thread switch; only waits, create and shutdown release it
(`ctypes.CDLL`). A wait returns to Python every 100 ms, so Ctrl-C works. Nothing here takes a lock (see
`EngineHandles`).

Shutdown: `shutdown()` stops the native thread and closes its descriptors; memory is freed when the last
reference to the engine and its works is gone, or when the interpreter exits.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sparkhvd.engine import stacks
from sparkhvd.engine.calls import NO_REDUCTION, Call, Reduction, TensorView
from sparkhvd.engine.library import (
    DEVICE_CPU,
    ERROR_BYTES,
    INTERNAL,
    OK,
    PENDING,
    Collective,
    DeviceOptions,
    DType,
    EngineHandles,
    EngineOptions,
    Isa,
    Knob,
    Library,
    Loss,
    error_text,
    load,
    states,
    to_exception,
)
from sparkhvd.engine.work import WAIT_SLICE_MS, Buffer, Work
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.settings import ISAS, Settings
from sparkhvd.topology import Topology, topology
from sparkhvd.wire import read_json

if TYPE_CHECKING:
    # `engine` must not import `rendezvous` at run time (STYLE), so a protocol describes these connections.
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
            """Close every descriptor not taken over."""


# Most idle calls that an engine keeps for operations of the same kind and shapes; a training loop has few kinds.
MAX_IDLE_CALLS = 256

# A submission releases finished dropped works until it has polled this many unfinished works. The number is small,
# because the host may be hundreds of works ahead of a GPU; with 2, at most half as many finished works as unfinished
# works wait.
_REAP_PATIENCE = 2


def isa_available(isa: str) -> bool:
    """Check whether this CPU and this build have an instruction set, by its name in `Settings.isa`."""
    return bool(load().isa_available(_isa(isa)))


def _isa(name: str) -> Isa:
    if name not in ISAS:
        raise InvalidArgumentError(f"isa is {name!r}; it must be one of {', '.join(ISAS)}.")
    return Isa[name.upper()]


class Engine:
    """Engine of one rank. As a context manager it shuts down at success, and aborts after an exception.

    Creating an engine is collective: it returns once every rank has created its own.

    Args:
        connections: an authenticated socket to every peer; the engine owns them from now on, also after an error.
        settings: the same on every rank.

    Raises:
        EngineUnavailableError: the compiled library is missing or of another version.
        InvalidArgumentError: this machine does not support the settings.
        CollectiveTimeoutError: a rank did not connect within `settings.connect_timeout_s`.
        PeerLostError: a rank's process or connection is gone.
    """

    def __init__(self, connections: Connections, settings: Settings) -> None:
        # Idle calls by their arguments: taken out and put back, each in one atomic step.
        self._calls: dict[object, Call] = {}
        self.settings = settings
        self.topology: Topology = topology(connections.rank, connections.hosts)
        self._counters: defaultdict[tuple[str, int], Iterator[int]] = defaultdict(itertools.count)
        library = load()
        handle = _create(library, connections, settings)
        self._state = EngineHandles(library, handle)
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
        return self.topology.rank

    @property
    def size(self) -> int:
        return self.topology.size

    def open_device(
        self,
        ordinal: int,
        cuda_library: str | None = None,
        nccl_library: str | None = None,
        nccl_candidates: Sequence[str] = (),
    ) -> None:
        """Open this rank's GPU as a `device` for calls. Do nothing if it is open.

        Not collective. A rank has one device.

        Args:
            ordinal: the CUDA driver's index in this process.
            cuda_library: None = libcuda.so.1.
            nccl_library: path of the only library to try; None = the copy that the process has loaded, then
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
        """Raise the error that made the engine unusable, if any."""
        self._state.check_usable("Engine.check()")
        buffer = error_text.buffer
        status = self._state.library.engine_status(self._state.handle, buffer, ERROR_BYTES)
        if status != OK:
            raise self._state.to_exception(status, buffer)

    def losses(self) -> dict[int, Loss]:
        """Lost ranks, and how, as far as this rank knows."""
        return self._state.losses()

    def counters(self) -> dict[str, Any]:
        """Read the counters since the engine was made (docs/monitoring.md), also after a shutdown.

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
                counters: dict[str, Any] = read_json(buffer.value)
                return counters
            size = length + 1024  # it may have grown meanwhile

    def start_timeline(self, path: str, *, mark_cycles: bool = False) -> None:
        """Start this rank's timeline and end a running one (see `sparkhvd.observe.timeline`).

        Args:
            path: a file, created or overwritten.
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
        """Stop a running timeline and wait until its file is complete."""
        self._state.check_usable("stop_timeline()")
        buffer = error_text.buffer
        status = self._state.library.timeline_stop(self._state.handle, buffer, ERROR_BYTES)
        if status != OK:
            raise to_exception(status, buffer)

    def shutdown(self) -> None:
        """Close gracefully. Operations in flight fail here and on the peers. Idempotent."""
        if self._state.pid == os.getpid() and not self._state.destroyed:
            self._state.shutdown()

    def release(self) -> None:
        """Shut down and free all memory now instead of with the last reference, including the counters."""
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

    # -- operations --------------------------------------------------------------------------------

    def allreduce(
        self,
        tensors: Sequence[TensorView],
        *,
        name: str,
        dtype: DType,
        reduction: Reduction,
        process_set: int = 0,
        keep: object = None,
        timeout_s: float | None = None,
    ) -> Work:
        """Start to reduce `tensors` elementwise over all ranks. Every rank gets the same values.

        Every rank of the process set submits the same name, shapes, dtype and operation, in any order among
        its operations. Never blocks. Inputs are read and outputs written until the work has finished.

        Args:
            tensors: one or more tensors that are reduced as one operation.
            name: matches the operation across ranks; unique among those in flight.
            dtype: element type of all tensors.
            reduction: operation and factors.
            process_set: 0 = all ranks.
            keep: kept alive until the operation has finished, even if the Work is dropped.
            timeout_s: longest wait for the slowest rank; None means `Settings.stall_shutdown_s`.

        Raises:
            InvalidArgumentError: this call is wrong; nothing was submitted.
            NotInitializedError: the engine was shut down, or made before a fork.
            CollectiveError: the engine failed earlier.
        """
        call = self.prepare(Collective.ALLREDUCE, tensors, dtype, reduction, process_set)
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
        """Start to join one tensor of every rank. The result is `Work.output()`. Otherwise as `allreduce`."""
        call = self.prepare(Collective.ALLGATHER, (tensor,), dtype, NO_REDUCTION, process_set)
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
        """Start to copy the input of `root_rank` to every rank's output. Otherwise as `allreduce`."""
        call = self.prepare(
            Collective.BROADCAST, (tensor,), dtype, NO_REDUCTION, process_set, root_rank
        )
        return self.start(call, name, keep, timeout_s)

    def barrier(
        self, *, name: str | None = None, process_set: int = 0, timeout_s: float | None = None
    ) -> Work:
        """Start to wait for every rank of the process set. Otherwise as `allreduce`.

        Args:
            name: None numbers the barriers of the process set; every rank must then call equally many.
            process_set: 0 = all ranks.
            timeout_s: longest wait for the slowest rank; None means `Settings.stall_shutdown_s`.
        """
        name = name or self._number("barrier", process_set)
        return self.start(Call(Collective.BARRIER, process_set=process_set), name, None, timeout_s)

    def join(self, *, process_set: int = 0, timeout_s: float | None = None) -> Work:
        """Start a join: this rank has no more work. It finishes when every rank has joined.

        Meanwhile the others' allreduces (Sum, Average) run without this rank's tensors; their Average still
        divides by the number of all ranks. Their other operations fail with a `MismatchError`. When all have joined,
        `Work.output().rows[0]` is the rank that joined last.

        Args:
            process_set: the ranks that join; 0 = all.
            timeout_s: how long a rank may neither join nor submit anything; 0 = for ever, None = the setting.
        """
        call = Call(Collective.JOIN, process_set=process_set)
        return self.start(call, "join", timeout_s=timeout_s)

    def add_process_set(self, ranks: Sequence[int], *, name: str | None = None) -> Work:
        """Start to create a process set. Every rank must call this with the same ranks, members or not.

        Its number is `Work.output().rows[0]`: the same on every rank, never 0, never reused.

        Args:
            ranks: ascending, each once.
            name: None numbers these calls.
        """
        call = Call(Collective.ADD_PROCESS_SET, numbers=ranks)
        return self.start(call, name or self._number("add_process_set"))

    def remove_process_set(self, process_set: int, *, name: str | None = None) -> Work:
        """Start to remove a process set. Every rank must call this. Negotiated operations still run."""
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
        """Allocate registered memory and wait for it.

        Every rank of the process set must call this, with equal sizes. An allreduce whose tensors lie in one buffer, in
        place and one after the other on every rank, runs without copies. The memory is zero at first and outlives the
        engine.

        Args:
            num_bytes: 1 or more.
            name: None numbers these calls.
            process_set: the ranks that share it.
            one_piece: the ranks of a host share one piece of memory. They must order their writes themselves
                (`barrier`).
            device: the opened device, to allocate each rank's memory there and register it with NCCL.

        Raises:
            InvalidArgumentError: there is not enough memory on this rank (or, of one piece, on any rank); or as
                for `allreduce`.
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
        process_set: int = 0,
    ) -> Work:
        """Start to change the algorithms of later operations. A value of 0 changes nothing.

        The change applies from the same operation on every rank.

        Args:
            chunk_bytes: of a pipeline step in shared memory, at most `Settings.slot_bytes`.
            streams: connections in use per pair of ranks.
            process_set: the process set to change.
        """
        numbers = [0] * len(Knob)
        numbers[Knob.CHUNK_BYTES] = chunk_bytes
        numbers[Knob.STREAMS] = streams
        call = Call(Collective.CONFIGURE, process_set=process_set, numbers=numbers)
        return self.start(call, self._number("configure", process_set))

    def _number(self, kind: str, process_set: int = 0) -> str:
        """Name an operation by kind and call number.

        Every rank of the process set must call this equally often.
        """
        return f"{kind}.{next(self._counters[kind, process_set])}"

    # -- submission, the path of every operation ---------------------------------------------------

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
        """Prepare a call for `start` or `run`. Reuses an idle call with equal arguments.

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
        """Submit a call and wait until it has finished: a faster `start(...).wait()`."""
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
        """Make a Work of the submitted operation. The call is free again."""
        handle = call.work.value
        assert handle is not None
        # Ctrl-C may interrupt any call here, also after the Work was made. The Work is then dropped and releases its
        # operation, so the call must forget the handle first.
        self._state.works[handle] = keep
        call.work.value = None
        if call.key is not None:
            self._calls[call.key] = call
        return Work(self, self._state, handle, name)

    def _leave_behind(self, call: Call, keep: object) -> None:
        """Keep the memory of a submitted operation if an exception has prevented its Work."""
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
