"""Operations in flight and their results: `Work`, `GatherOutput`, `Buffer`."""

from __future__ import annotations

import ctypes
import math
import os
import time
from dataclasses import dataclass

from sparkhvd.engine.library import (
    DEVICE_CPU,
    ERROR_BYTES,
    INTERNAL,
    OK,
    PENDING,
    EngineHandles,
    Library,
    Output,
    error_text,
)
from sparkhvd.errors import CollectiveTimeoutError, NotInitializedError

# Longest time in native code between checks for pending signals.
WAIT_SLICE_S = 0.1
WAIT_SLICE_MS = round(WAIT_SLICE_S * 1000)


@dataclass(frozen=True, slots=True)
class GatherOutput:
    """Result in memory of the engine, valid as long as the `Work`.

    Attributes:
        address: the first byte; 0 for an empty result.
        num_bytes: length.
        rows: first dimensions received from each rank of the process set; an allgather of several tensors
            has them tensor after tensor, like the bytes. For a join, the rank that joined last. For a new
            process set, its number.
    """

    address: int
    num_bytes: int
    rows: tuple[int, ...]


class Buffer:
    """Registered memory: this rank's part of its host's memory. Freed with the last reference.

    This rank may use it, also after the engine is gone. While an operation on it is in flight, peers also write to it.

    Attributes:
        address: the first byte, aligned to a page.
        num_bytes: length.
        is_shared: True if other ranks of this host share it; otherwise it is ordinary memory.
        device: the device whose memory it is; -1 for ordinary memory.
    """

    __slots__ = (
        "__weakref__",
        "_handle",
        "_library",
        "address",
        "device",
        "is_shared",
        "num_bytes",
    )

    def __init__(self, library: Library, handle: int) -> None:
        self._library = library
        self._handle = handle
        self.address: int = library.buffer_data(handle)
        self.num_bytes: int = library.buffer_bytes(handle)
        self.is_shared = bool(library.buffer_is_shared(handle))
        self.device: int = library.buffer_device(handle)

    def __repr__(self) -> str:
        if self.device != DEVICE_CPU:
            return f"<Buffer of {self.num_bytes} bytes on device {self.device}>"
        return f"<Buffer of {self.num_bytes} bytes, {'shared' if self.is_shared else 'not shared'}>"

    def __del__(self) -> None:
        self._library.buffer_release(self._handle)


class Work:
    """A started operation."""

    __slots__ = ("__weakref__", "_engine", "_handle", "_name", "_state")

    def __init__(self, engine: object, state: EngineHandles, handle: int, name: str) -> None:
        self._engine = engine  # an engine lives as long as its works
        self._state = state
        self._handle = handle
        self._name = name

    def __repr__(self) -> str:
        return f"<Work {self._name!r}>"

    def __del__(self) -> None:
        try:
            state = self._state
        except AttributeError:  # Ctrl-C before it was initialized
            return
        if not state.destroyed:
            # The garbage collector may run this inside any call of the engine, so no call here may take a lock of the
            # engine.
            state.orphans.append(self._handle)
        elif state.pid == os.getpid():
            state.release(self._handle)  # only frees memory

    def done(self) -> bool:
        """Whether the operation has finished. Never blocks, and advances no operation.

        Raises:
            MismatchError: the ranks disagreed.
            CollectiveError: the set of ranks changed; the contents of the tensors are undefined.
        """
        state = self._state
        if not state.usable:
            self._check()
        buffer = error_text.buffer
        return self._finished(state.library.poll(self._handle, buffer, ERROR_BYTES), buffer)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the operation to finish, and advance all operations of the engine meanwhile.

        Args:
            timeout_s: longest wait here; None means until the operation ends by itself, at the latest after
                the timeout it was submitted with. The operation continues after a timeout here.

        Raises:
            MismatchError: the ranks disagreed; the engine stays usable.
            CollectiveTimeoutError: a rank did not submit in time.
            PeerLostError: a rank is gone.
            CollectiveError: the set of ranks changed; the contents of the tensors are undefined.
        """
        if self.done():
            return
        state = self._state
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        wait, waiting, token, slice_ms = state.library.wait, state.waiting, object(), WAIT_SLICE_MS
        waiting.add(token)
        try:
            while True:
                if timeout_s is not None:
                    left_ms = math.ceil((deadline - time.monotonic()) * 1000)
                    slice_ms = max(0, min(WAIT_SLICE_MS, left_ms))
                buffer = error_text.buffer
                if self._finished(wait(self._handle, slice_ms, buffer, ERROR_BYTES), buffer):
                    return
                if time.monotonic() >= deadline:
                    raise CollectiveTimeoutError(
                        f"{self._name}: not finished within the {timeout_s:g} s of wait(). It continues: "
                        "wait again, or shut the engine down."
                    )
                self._check()
        finally:
            waiting.discard(token)

    def wait_stream(self, stream: int, timeout_s: float | None = None) -> None:
        """Make a stream wait for this operation's end. This thread does not wait for the device.

        Returns once the operation is launched on the device, which needs every rank's submission; advances every
        operation of the engine meanwhile. Later work on `stream` sees the results.

        Args:
            stream: the CUstream.
            timeout_s: longest wait here; None means until the operation's own timeout.

        Raises:
            InvalidArgumentError: the operation is on the CPU, or the stream is being captured.
            MismatchError, CollectiveTimeoutError, PeerLostError, CollectiveError: as `wait`.
        """
        self._check()
        state, token = self._state, object()
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        slice_ms = WAIT_SLICE_MS
        state.waiting.add(token)
        try:
            while True:
                if timeout_s is not None:
                    left_ms = math.ceil((deadline - time.monotonic()) * 1000)
                    slice_ms = max(0, min(WAIT_SLICE_MS, left_ms))
                buffer = error_text.buffer
                status = state.library.wait_stream(
                    self._handle, stream, slice_ms, buffer, ERROR_BYTES
                )
                if status == OK:
                    return
                if status != PENDING:
                    raise self._state.to_exception(status, buffer)
                if time.monotonic() >= deadline:
                    raise CollectiveTimeoutError(
                        f"{self._name}: the operation was not launched within {timeout_s} s, the timeout of wait_stream(). "
                        "It is still pending: wait again, or shut the engine down."
                    )
                self._check()
        finally:
            state.waiting.discard(token)

    def output(self) -> GatherOutput:
        """Result of a finished allgather, alltoall, join or new process set.

        Raises:
            InvalidArgumentError: the operation has not finished, or its result is in the caller's memory.
        """
        self._check()
        output = Output(struct_size=ctypes.sizeof(Output))
        buffer = error_text.buffer
        status = self._state.library.work_output(
            self._handle, ctypes.byref(output), buffer, ERROR_BYTES
        )
        if status != OK:
            raise self._state.to_exception(status, buffer)
        return GatherOutput(
            output.data or 0, output.num_bytes, tuple(output.rows[: output.num_rows])
        )

    def buffer(self) -> Buffer:
        """Memory of a finished registration. Call it once.

        Raises:
            InvalidArgumentError: the operation has not finished, or is not a registration.
        """
        self._check()
        library, handle, text = self._state.library, ctypes.c_void_p(), error_text.buffer
        status = library.work_buffer(self._handle, ctypes.byref(handle), text, ERROR_BYTES)
        if status != OK:
            raise self._state.to_exception(status, text)
        assert handle.value is not None
        return Buffer(library, handle.value)

    def _finished(self, status: int, buffer: ctypes.Array[ctypes.c_char]) -> bool:
        if status == PENDING:
            return False
        works, handle = self._state.works, self._handle
        if status == INTERNAL and self._state.library.poll(handle, None, 0) == PENDING:
            raise self._state.to_exception(
                status, buffer
            )  # the wait failed; the operation continues
        # Finished: the caller's memory is released, also if the Work is kept for its output.
        if handle in works:
            if status != OK:
                self._state.keep_if_left(handle, works[handle])
            works[handle] = None
        if status != OK:
            raise self._state.to_exception(status, buffer)
        return True

    def _check(self) -> None:
        # An operation that finished before the shutdown keeps its result, so `closed` does not matter here.
        state = self._state
        if state.forked:
            state.check_usable(self._name)
        if state.destroyed:
            raise NotInitializedError(f"{self._name}: the engine is gone. Create a new one.")
