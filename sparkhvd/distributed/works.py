"""Works: operations in flight, as torch.distributed and its C++ see them.

A caller that waits drives the engine itself. A future is completed by whoever finds the work finished first: a waiter, the
end of the backward pass in which it was asked for, or the thread of `_Completer`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from sparkhvd.distributed.errors import as_torch
from sparkhvd.distributed.futures import Future, Scope
from sparkhvd.engine.engine import Work as Operation
from sparkhvd.torch.gradients.backward_end import after_backward

__all__ = ["FINISHED", "Work"]

_UNLIMITED = timedelta(0)

# Between two looks at the works of futures: the engine's own thread finishes them within 1 ms of being ready.
_FIRST_LOOK_S = 0.0005
_LAST_LOOK_S = 0.004


class Work(dist.Work):
    """Operations of the engine that torch sees as one.

    Args:
        operations: none for a work that has finished.
        outputs: the value of the future and of `result()`.
        finish: called once, when all have finished, before anyone is told: moves results to where torch wants them.
        scope: names what callbacks of the future launch.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        outputs: Sequence[Tensor] = (),
        finish: Callable[[], object] | None = None,
        scope: Scope | None = None,
    ) -> None:
        super().__init__()
        self.operations = operations
        self._outputs = list(outputs)
        self._finish = finish
        self._scope = scope or Scope("")
        self._lock = threading.RLock()
        self._is_settled = not operations and finish is None
        self._error: BaseException | None = None
        self._future: Future | None = None
        self.source: int | None = None

    def wait(self, timeout: timedelta = _UNLIMITED) -> bool:
        """Wait until the results are there; raises what went wrong.

        Args:
            timeout: longest wait here, and the work goes on; 0 = until it ends, at the latest after the group's timeout.
        """
        if not self._is_settled:
            seconds = timeout.total_seconds()
            self.settle(seconds if seconds > 0 else None)
        if self._error is not None:
            raise self._error
        return True

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait for the end, good or bad; raises only if the time is over."""
        error: BaseException | None = None
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for operation in self.operations:
            try:
                operation.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            except Exception as e:  # noqa: BLE001 - kept, and raised by every wait
                if deadline is not None and time.monotonic() >= deadline:
                    raise as_torch(e) from None
                error = error or e
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            if self._is_settled:
                return
            if error is None and self._finish is not None:
                try:
                    self._finish()
                except Exception as e:  # noqa: BLE001 - kept, and raised by every wait
                    error = e
            self._finish = None
            self._error = None if error is None else as_torch(error)
            self._is_settled = True
            future = self._future
        if future is not None:
            future.finish(self._outputs, self._error)

    def is_completed(self) -> bool:
        """Check whether it has ended, good or bad; never blocks."""
        if self._is_settled:
            return True
        with contextlib.suppress(Exception):  # an error is an end
            if not all([operation.done() for operation in self.operations]):
                return False
        self.settle()
        return True

    def is_success(self) -> bool:
        """Check whether it has ended well."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return what went wrong; None while it runs or when it has ended well."""
        return self._error if self.is_completed() else None

    def result(self) -> list[Tensor]:
        """Return the tensors of the result, once it has ended."""
        return self._outputs

    def synchronize(self) -> None:
        """Wait until the results are there; raises what went wrong."""
        self.wait()

    def source_rank(self) -> int:
        """Return the rank from which a receive got its tensor."""
        if self.source is None:
            raise RuntimeError(
                "source_rank(): only a receive that has ended has one. Wait for it first."
            )
        return self.source

    _source_rank = source_rank

    def finish_backward(self) -> None:
        """Wait at the end of the backward pass; raises also what callbacks of the future have raised."""
        self.wait()
        if self._future is not None:
            self._future.check()

    def get_future(self) -> Future:
        """Return the future of the results."""
        with self._lock:
            if self._future is None:
                self._future = Future(self.settle, self._scope)
                if not self._is_settled:
                    _complete_later(self)
                    return self._future
                self._future.finish(self._outputs, self._error)
            return self._future


FINISHED = Work(())
"""The work of a caller who has waited already."""


def _complete_later(work: Work) -> None:
    # Inside backward(): its end waits for the work, in the thread of the pass, before DDP reads the future; an error then
    # is backward()'s, with its own type. torch's C++ would lose that.
    with contextlib.suppress(RuntimeError):  # not inside backward()
        after_backward(work.finish_backward)
    _completer.add(work)


class _Completer:
    """Thread that completes futures; there while works wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: list[Work] = []
        self._thread: threading.Thread | None = None

    def add(self, work: Work) -> None:
        """Complete the work's future when it ends."""
        with self._lock:
            self._works.append(work)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="sparkhvd-futures", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        pause = _FIRST_LOOK_S
        while True:
            with self._lock:
                works = list(self._works)
                if not works:
                    self._thread = None
                    return
            ended = {id(work) for work in works if work.is_completed()}
            with self._lock:
                self._works = [work for work in self._works if id(work) not in ended]
            pause = _FIRST_LOOK_S if ended else min(2 * pause, _LAST_LOOK_S)
            if not ended:
                time.sleep(pause)


_completer = _Completer()
