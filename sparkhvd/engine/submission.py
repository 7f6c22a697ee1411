"""`Submitter`: prepares calls and submits them to the native engine: the path of every operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sparkhvd.engine.call import NO_REDUCTION, Call, Reduction, TensorView
from sparkhvd.engine.library import DEVICE_CPU, DType
from sparkhvd.engine.session import Session
from sparkhvd.engine.status import (
    ERROR_BYTES,
    INTERNAL,
    OK,
    PENDING,
    error_text,
)
from sparkhvd.engine.work import WAIT_SLICE_MS, Work
from sparkhvd.settings import Settings

if TYPE_CHECKING:
    from sparkhvd.engine.session import Connections

__all__ = ["Submitter"]

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
