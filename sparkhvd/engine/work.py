"""Operations as they cross into the library: `Call` before, `Work` in flight, `Output` and `Buffer` after.

Threads: any. Nothing here takes a lock: each step is one atomic operation of a dict, deque or set, so a garbage
collection may run a `__del__` anywhere, and a fork never meets a held lock.

Ownership: `State` owns the native handles and everything that operations read and write (`keep`). A `Work` that
is dropped before its operation has finished leaves its handle to the state, which gives it up on a later call.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sparkhvd.engine.library import DEVICE_CPU, Library, Output, Request, Status, Tensor
from sparkhvd.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    InternalError,
    InvalidArgumentError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    SparkhvdError,
)

__all__ = ["Buffer", "Call", "GatherOutput", "State", "TensorView", "Work"]

# Longest time in native code without a look at pending signals.
WAIT_SLICE_S = 0.05
WAIT_SLICE_MS = round(WAIT_SLICE_S * 1000)
ERROR_BYTES = 2048
# Plain integers for the way of every operation: to look up a member of an enumeration costs more.
OK = int(Status.OK)
PENDING = int(Status.PENDING)
INTERNAL = int(Status.INTERNAL)


class ErrorText(threading.local):
    """One buffer per thread for the sentence that explains a status."""

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
}


def to_exception(status: int, buffer: ctypes.Array[ctypes.c_char]) -> SparkhvdError:
    """The one translation from the library's status and sentence to an exception."""
    message = buffer.value.decode("utf-8", errors="replace")
    return _ERRORS.get(status, InternalError)(message or f"The library gave status {status}.")


class TensorView(NamedTuple):
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
    """The result of an operation that makes its own; the memory lives as long as the `Work`.

    Attributes:
        address: the first byte; 0 when there are none.
        num_bytes: length.
        rows: first dimensions that came from each rank of the process set; an allgather of several tensors
            has them tensor after tensor, as it has the bytes. Of a join the rank that joined last, of a new
            process set its number.
    """

    address: int
    num_bytes: int
    rows: tuple[int, ...]


class Buffer:
    """Registered memory: this rank's part of what the ranks of the host share. Freed with the last reference.

    It is this rank's to use, also after the engine is gone; while an operation on it is in flight, peers write
    it too.

    Attributes:
        address: the first byte, aligned to a page.
        num_bytes: length.
        is_shared: whether other ranks of this host share it; if not, it is as any other memory.
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


class State:
    """The native handles of one engine, shared by the engine, its works and its finalizer."""

    def __init__(self, library: Library, handle: int) -> None:
        self.library = library
        self.handle = handle
        self.pid = os.getpid()
        # Every work that has not been given up, and what its operation reads and writes.
        self.works: dict[int, object] = {}
        # What operations read and write that have no work although they may go on: their submission failed inside
        # the library (no memory, say), perhaps when the engine had taken them. Kept as long as the engine.
        self.lost: list[object] = []
        # Works that Python has dropped; given up once they have finished.
        self.orphans: deque[int] = deque()
        # Waits in native code right now; the engine must not be freed under them.
        self.waiting: set[object] = set()
        self.usable = True  # neither closed nor forked: one look before every operation
        self.closed = False
        self.forked = False  # this process is a child of the one that made the engine
        self.destroyed = False

    def check_usable(self, what: str) -> None:
        """Raise why the engine cannot be used any more, if it was closed or forked."""
        if self.forked:
            raise NotInitializedError(
                f"{what}: the engine was created before fork() and does not work in the forked "
                "process. Start the process with spawn, or create an engine in it."
            )
        if self.closed:
            raise NotInitializedError(f"{what}: the engine was shut down. Create a new one.")

    def reap(self, patience: int | None = None) -> None:
        """Give up dropped works that have finished meanwhile, until `patience` of them have not; None = all."""
        pending = 0
        for _ in range(len(self.orphans)):
            try:
                handle = self.orphans.popleft()
            except IndexError:  # another thread reaps too
                return
            if self.library.poll(handle, None, 0) != PENDING:
                self.release(handle)
                continue
            self.orphans.append(handle)  # one that takes long does not hide what is behind it
            pending += 1
            if pending == patience:
                return

    def release(self, handle: int) -> None:
        """Give up a work that has finished."""
        keep = self.works.pop(handle, None)
        self.library.work_release(handle)
        del keep  # after the release: nothing reads or writes it any more

    def shutdown(self) -> Status:
        """Stop the native thread and give up what has finished."""
        self.closed = True
        self.usable = False
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

    def __init__(self, engine: object, state: State, handle: int, name: str) -> None:
        self._engine = engine  # an engine lives as long as its works
        self._state = state
        self._handle = handle
        self._name = name

    def __repr__(self) -> str:
        return f"<Work {self._name!r}>"

    def __del__(self) -> None:
        try:
            state = self._state
        except AttributeError:  # Ctrl-C, before anything was in it
            return
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
        state = self._state
        if not state.usable:
            self._check()
        buffer = error_text.buffer
        return self._finished(state.library.poll(self._handle, buffer, ERROR_BYTES), buffer)

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
                        f"{self._name}: not finished after the {timeout_s} s that wait() was given. It goes "
                        "on; wait again, or shut the engine down."
                    )
                self._check()
        finally:
            waiting.discard(token)

    def wait_stream(self, stream: int, timeout_s: float | None = None) -> None:
        """Make a stream wait for the end of this operation on the device; this thread does not wait for the device.

        Returns once the operation has been handed to the device, which takes every rank's submission; drives every
        operation of the engine meanwhile. What is enqueued on `stream` afterwards sees the results.

        Args:
            stream: the CUstream.
            timeout_s: longest wait here; None means until the operation's own timeout.

        Raises:
            InvalidArgumentError: the operation is not one on a device, or the stream is being captured.
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
                    raise to_exception(status, buffer)
                if time.monotonic() >= deadline:
                    raise CollectiveTimeoutError(
                        f"{self._name}: not handed to the device after the {timeout_s} s that wait_stream() was "
                        "given. It goes on; wait again, or shut the engine down."
                    )
                self._check()
        finally:
            state.waiting.discard(token)

    def output(self) -> GatherOutput:
        """What a finished operation has made: allgather, alltoall, join, a new process set.

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
            raise to_exception(status, buffer)
        return GatherOutput(
            output.data or 0, output.num_bytes, tuple(output.rows[: output.num_rows])
        )

    def buffer(self) -> Buffer:
        """The memory that a finished registration has made; once.

        Raises:
            InvalidArgumentError: the operation has not finished, or is no registration.
        """
        self._check()
        library, handle, text = self._state.library, ctypes.c_void_p(), error_text.buffer
        status = library.work_buffer(self._handle, ctypes.byref(handle), text, ERROR_BYTES)
        if status != OK:
            raise to_exception(status, text)
        assert handle.value is not None
        return Buffer(library, handle.value)

    def _finished(self, status: int, buffer: ctypes.Array[ctypes.c_char]) -> bool:
        if status == PENDING:
            return False
        works, handle = self._state.works, self._handle
        if status == INTERNAL and self._state.library.poll(handle, None, 0) == PENDING:
            raise to_exception(status, buffer)  # the wait failed; the operation goes on
        # Finished: the caller's memory is free again, also when the Work lives on for its output.
        if handle in works:
            works[handle] = None
        if status != OK:
            raise to_exception(status, buffer)
        return True

    def _check(self) -> None:
        # An operation that finished before the shutdown keeps its result, so `closed` does not matter here.
        state = self._state
        if state.forked:
            state.check_usable(self._name)
        if state.destroyed:
            raise NotInitializedError(f"{self._name}: the engine is gone. Create a new one.")


# A forked child must close its copies of every engine's descriptors.
states: weakref.WeakSet[State] = weakref.WeakSet()


def after_fork() -> None:
    for state in list(states):
        state.forked = True
        state.usable = False
        if not state.destroyed:
            state.library.engine_after_fork(state.handle)


class Call:
    """An operation as the library takes it, built once and submitted any number of times.

    Not for two threads at a time. The library copies it at submission, so it may be used again at once.

    Args:
        collective: kind of operation.
        shapes: of the tensors; their addresses come from `place`.
        dtype: element type of all tensors.
        op: the reduction, where there is one.
        root_rank: of a broadcast, in all ranks.
        prescale: factor of every input of a reduction.
        postscale: factor of its result.
        process_set: 0 = all ranks.
        numbers: what else the operation needs to know: the splits of an alltoall, ranks, bytes.
        device: where the tensors lie: -1, the CPU, or the device that was opened. Then the caller sets
            `request.stream` before every submission.
    """

    __slots__ = ("_kept", "key", "reference", "request", "tensors", "work", "work_reference")

    def __init__(
        self,
        collective: int,
        shapes: Sequence[tuple[int, ...]] = (),
        dtype: int = 0,
        op: int = 0,
        root_rank: int = 0,
        prescale: float = 1.0,
        postscale: float = 1.0,
        process_set: int = 0,
        numbers: Sequence[int] = (),
        device: int = DEVICE_CPU,
    ) -> None:
        self.key: object = None  # where the engine keeps it while nobody uses it
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
            reduce_op=op,
            root_rank=root_rank,
            prescale=prescale,
            postscale=postscale,
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
        """Say where a tensor is read and written."""
        tensor = self.tensors[index]
        tensor.input = input_address
        tensor.output = output_address
