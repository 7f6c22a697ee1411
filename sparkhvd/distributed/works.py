"""Works: operations in flight, as torch.distributed and its C++ see them.

A caller that waits drives the engine itself. A future is completed by whoever finds the work finished first: a waiter, the
end of the backward pass in which it was asked for, or the thread of `_Completer`.

Where the ranks compute on all cores of one host, what is launched in a backward pass starts when the pass ends (`Passes`): until
then the engine's thread would take the cores from them.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from sparkhvd.distributed.errors import as_torch
from sparkhvd.distributed.futures import Future, Scope
from sparkhvd.engine.engine import Work as Operation
from sparkhvd.torch.gradients.backward_end import after_backward, in_backward

__all__ = ["FINISHED", "Passes", "Work"]

_UNLIMITED = timedelta(0)

# Between two looks at the works of futures: the engine's own thread finishes them within 1 ms of being ready.
_FIRST_LOOK_S = 0.0005
_LAST_LOOK_S = 0.004
# The same of works for which the end of a backward pass waits: a pass that ends in an exception, or whose own
# callbacks wait in C++ for a work of another pass, shall not wait for ever.
_LOOK_AFTER_PASS_S = 0.25
# How long the thread stays without works: one step of training does not start it anew for the next.
_IDLE_S = 1.0


class _End:
    """Callback at the end of a backward pass. Autograd alone holds it, so it is gone when the pass ends in an exception."""

    def __init__(self, passes: Passes, work: Work) -> None:
        self._passes = passes
        self.work = work

    def __call__(self) -> None:
        self._passes.finish()


class Passes:
    """Works of one group that are launched, or waited for, at the end of the running backward pass."""

    def __init__(self) -> None:
        self._ends: list[weakref.ref[_End]] = []

    def add(self, work: Work) -> bool:
        """Have the end of the backward pass launch a work, and wait for it if its future was asked for.

        An error then is backward()'s, with its own type: torch's C++, where DDP waits for the future, would lose that. DDP's
        own callback comes behind, and may wait for works of passes around this one, so its end is that of all works.

        Returns:
            False outside of a pass.
        """
        # Behind callbacks at the end nothing may be put off: DDP waits in them for what they launch.
        if not in_backward():
            return False
        end = _End(self, work)
        try:
            after_backward(end)
        except RuntimeError:  # in a node, but not in a pass that has an end
            return False
        self._ends.append(weakref.ref(end))
        return True

    def finish(self) -> None:
        """Launch all works, and wait for those whose future was asked for."""
        ends, self._ends = self._ends, []
        works = [end.work for reference in ends if (end := reference()) is not None]
        for work in works:
            work.launch()
        for work in works:
            work.finish_backward()


class Work(dist.Work):
    """Operations of the engine that torch sees as one.

    Args:
        operations: none for a work that has finished.
        outputs: the value of the future and of `result()`.
        finish: called once, when all have finished, before anyone is told: moves results to where torch wants them.
        scope: names what callbacks of the future launch.
        passes: of the group, for works whose future DDP may wait for.
        launch: starts the operations, for a work that is launched later.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        outputs: Sequence[Tensor] = (),
        finish: Callable[[], object] | None = None,
        scope: Scope | None = None,
        passes: Passes | None = None,
        launch: Callable[[], Sequence[Operation]] | None = None,
    ) -> None:
        super().__init__()
        self.operations = operations
        self._passes = passes
        self._launch = launch
        # A work that could not be put off is launched at once.
        self._in_pass = launch is not None and passes is not None and passes.add(self)
        self._outputs = list(outputs)
        self._finish = finish
        self._scope = scope or Scope("")
        self._lock = threading.RLock()
        self._is_settled = not operations and finish is None and launch is None
        self._error: BaseException | None = None
        self._future: Future | None = None
        self.source: int | None = None
        if not self._in_pass:
            self.launch()

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

    def launch(self) -> None:
        """Start the operations of a work that is launched later, unless that was done."""
        with self._lock:
            launch, self._launch = self._launch, None
            if launch is None:
                return
            try:
                self.operations = launch()
            except Exception as e:  # noqa: BLE001 - kept, and raised by every wait
                error = e
            else:
                return
        self._end(error)

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait for the end, good or bad; raises only if the time is over."""
        self.launch()
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
            _completer.forget(self)
            future.finish(self._outputs, self._error)

    def is_completed(self) -> bool:
        """Check whether it has ended, good or bad; never blocks."""
        if self._is_settled:
            return True
        self.launch()
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
        """Wait at the end of the backward pass for the future, if somebody has it; raises also what its callbacks have raised."""
        if self._future is not None:
            self.wait()
            self._future.check()

    def get_future(self) -> Future:
        """Return the future of the results."""
        with self._lock:
            if self._future is None:
                self._future = Future(self.settle, self._scope)
                if self._is_settled:
                    self._future.finish(self._outputs, self._error)
                else:
                    if not self._in_pass and self._passes is not None:
                        self._in_pass = self._passes.add(self)
                    _completer.add(self, _LOOK_AFTER_PASS_S if self._in_pass else 0.0)
            return self._future


FINISHED = Work(())
"""The work of a caller who has waited already."""


class _Completer:
    """Thread that completes futures nobody waits for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._works: list[tuple[float, Work]] = []  # with the time of the first look
        self._thread: threading.Thread | None = None
        self._next_look = math.inf

    def add(self, work: Work, patience_s: float) -> None:
        """Complete the work's future when it ends; first look at it after `patience_s`."""
        first_look = time.monotonic() + patience_s
        with self._changed:
            self._works.append((first_look, work))
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="sparkhvd-futures", daemon=True
                )
                self._thread.start()
            elif first_look < self._next_look:
                self._changed.notify()

    def forget(self, work: Work) -> None:
        """Let go of a work that has ended."""
        with self._changed:
            self._works = [each for each in self._works if each[1] is not work]

    def _run(self) -> None:
        pause = _FIRST_LOOK_S
        while True:
            with self._changed:
                now = time.monotonic()
                works = [work for first_look, work in self._works if first_look <= now]
            # Those that have ended are forgotten.
            if any([work.is_completed() for work in works]):
                pause = _FIRST_LOOK_S
                continue
            with self._changed:
                now = time.monotonic()
                pause = min(2 * pause, _LAST_LOOK_S)
                times = [max(first_look, now + pause) for first_look, _ in self._works]
                self._next_look = min(times, default=now + _IDLE_S)
                if self._changed.wait(self._next_look - now):
                    pause = _FIRST_LOOK_S
                elif not self._works:
                    self._thread = None
                    return
                self._next_look = -math.inf


_completer = _Completer()
