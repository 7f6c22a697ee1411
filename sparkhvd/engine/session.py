"""`Session`: the life of one native engine, and the calls that concern the whole of it."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sparkhvd.engine import stacks
from sparkhvd.engine.library import DeviceOptions, EngineOptions, Isa, Library, Loss
from sparkhvd.engine.state import State, load, states
from sparkhvd.engine.status import ERROR_BYTES, OK, error_text, to_exception
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.settings import ISAS, Settings
from sparkhvd.topology import Topology, topology

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


__all__ = ["Session", "isa_available"]


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
