"""Works: operations in flight, as torch.distributed and its C++ see them.

A caller that waits drives the engine itself. A future is completed by a waiter, by the end of the backward pass in
which the future was requested, or by the thread of `_Completer`, whichever first finds the work finished.

If the ranks compute on all cores of one host, operations of a backward pass start when the pass ends (`BackwardQueue`),
because the engine's thread would take cores from the pass.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistBackendError

from sparkhvd import errors
from sparkhvd.engine.work import Work as Operation
from sparkhvd.torch.gradients.reducer import BackwardEnd, after_backward, in_backward

# ----------------------------------------------------------------------------------------------------
# Futures whose callbacks may launch collectives. The ranks match these collectives even if the callbacks run at
# different times or on different threads.


class OperationNames:
    """Names for the collectives of a group, or of a callback, in the order of their launch.

    Callbacks have their own order, because a rank runs a callback when it finds the work finished. In the group's order
    the callback's collectives would have different positions on different ranks.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._callbacks = 0
        self.count = 0

    def name(self) -> str:
        """Create the next name."""
        name = f"{self._prefix}.{self.count}"
        self.count += 1
        return name

    def child(self) -> OperationNames:
        """Create separate names for the next callback, because callbacks may run in any order."""
        self._callbacks += 1
        return OperationNames(f"{self._prefix}.then{self._callbacks}")


class _Current(threading.local):
    scope: OperationNames | None = None


_current = _Current()


def current_scope() -> OperationNames | None:
    """Return the names of this thread's running callback, or None."""
    return _current.scope


@contextmanager
def _entered(scope: OperationNames) -> Iterator[None]:
    before, _current.scope = _current.scope, scope
    try:
        yield
    finally:
        _current.scope = before


class Future(torch.futures.Future[Any]):
    """Future of a work or of a callback. A wait in Python waits for the work.

    Args:
        settle: waits for the work, and runs callbacks.
        scope: names the operations that callbacks launch.
        default: value that torch's C++ gets instead of an error if `hides_error` returns True.
        hides_error: returns True as long as the end of a backward pass will raise the error, because DDP's C++ would
            lose the error's class.
    """

    def __init__(
        self,
        settle: Callable[[], object],
        scope: OperationNames,
        default: object,
        hides_error: Callable[[], bool],
    ) -> None:
        super().__init__()
        self._settle = settle
        self._scope = scope
        self._default = default
        self._hides_error = hides_error
        self._error: Exception | None = None
        self._children: list[Future] = []

    def finish(self, value: object, error: BaseException | None) -> None:
        """Complete the future. Its callbacks run in this thread."""
        if error is None:
            self.set_result(value)
            return
        self._error = error if isinstance(error, Exception) else RuntimeError(repr(error))
        if self._hides_error():
            self.set_result(value if value is not None else self._default)
        else:
            self.set_exception(self._error)

    def check(self) -> None:
        """Raise the error of this future, or of a callback's future, because torch's C++ cannot read it."""
        if self._error is not None:
            raise self._error
        for child in self._children:
            child.check()

    def wait(self) -> Any:
        """Drive the engine until the result is ready, and return it."""
        if not self.done():
            self._settle()
        if self._error is not None:
            raise self._error
        return super().wait()

    def then(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> Future:
        """Call a function with this future when it is complete, and return the future of its result."""
        child = Future(self._settle, self._scope.child(), self._default, self._hides_error)
        self._children.append(child)

        def run(_: object) -> None:
            try:
                with _entered(child._scope):
                    value = callback(self)
            except Exception as error:  # noqa: BLE001 - becomes the future's error
                child.finish(None, error)
            else:
                child.finish(value, None)

        super().add_done_callback(run)
        return child

    def add_done_callback(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> None:
        """Call a function when the future is complete."""
        self.then(callback)


# ----------------------------------------------------------------------------------------------------
# Error classes that are both the engine's and torch.distributed's.


class CollectiveError(errors.CollectiveError, DistBackendError):
    """`sparkhvd.CollectiveError` that is also torch's `DistBackendError`."""


class CollectiveTimeoutError(errors.CollectiveTimeoutError, DistBackendError):
    """`sparkhvd.CollectiveTimeoutError` that is also torch's `DistBackendError`."""


class PeerLostError(errors.PeerLostError, DistBackendError):
    """`sparkhvd.PeerLostError` that is also torch's `DistBackendError`."""


_TORCH: dict[type[BaseException], type[errors.CollectiveError]] = {
    errors.CollectiveError: CollectiveError,
    errors.CollectiveTimeoutError: CollectiveTimeoutError,
    errors.PeerLostError: PeerLostError,
}


# Replacements for advice in the engine's messages that does not apply to callers of torch.distributed.
_WORDS = {
    ", or use different names": "",
    ", or give the two tensors different names": "",
    "raise stall_shutdown_s": "raise the timeout of the group",
    "or raise the timeout.": "or raise the timeout of the group.",
    # Programs search torch's messages for " timeout ".
    "s of wait(). It continues: wait again, or shut the engine down.": "s timeout of wait(). The operation continues: wait again, "
    "or destroy the group.",
    "Call shutdown() on a rank only": "Destroy a group on a rank only",
}

# The engine's tags have 63 bits. Groups of the same ranks share a process set, and the upper bits separate their messages.
TAG_BITS, NUMBER_BITS = 32, 16


def as_torch(error: BaseException) -> BaseException:
    """Convert an error of the engine to a torch error with torch's words and return other errors unchanged."""
    if not isinstance(error, (errors.CollectiveError, errors.MismatchError)):
        return error
    text = re.sub(r"(?<=with tag )\d+", lambda tag: str(int(tag[0]) % (1 << TAG_BITS)), str(error))
    for engines, torchs in _WORDS.items():
        text = text.replace(engines, torchs)
    ours = _TORCH.get(type(error), type(error))(text)
    if isinstance(error, errors.CollectiveError) and isinstance(ours, errors.CollectiveError):
        ours.lost = error.lost
    return ours


_UNLIMITED = timedelta(0)

# Shortest and longest interval between polls of works that have a future. The engine's thread finishes a work within 1 ms.
_FIRST_LOOK_S = 0.0005
_LAST_LOOK_S = 0.004
# Delay before the first poll of works that the end of a backward pass should complete. The poll is needed if the pass
# ends in an exception, or if its callbacks wait in C++ for a work of another pass.
_LOOK_AFTER_PASS_S = 0.25
# Idle time after which the thread ends; longer than the pause between two training steps.
_IDLE_S = 1.0


class _End:
    """Callback at the end of a backward pass. Only autograd refers to it, so it is freed when the pass ends in an exception."""

    def __init__(self, passes: BackwardQueue, work: Work) -> None:
        self._backward_queue = passes
        self.work = work

    def __call__(self) -> None:
        self._backward_queue.finish()


class BackwardQueue:
    """Works of one group to launch, or wait for, at the end of the running backward pass."""

    def __init__(self) -> None:
        self._ends: list[weakref.ref[_End]] = []

    def add(self, work: Work) -> bool:
        """Defer a work to the end of the backward pass.

        The end of the pass also waits for the work if its future was requested. So `backward()` raises an error with
        its own type, which torch's C++ would lose when DDP waits for the future. DDP's own callback runs later, and may
        wait for works of enclosing passes, so the end of a pass finishes all works. DDP's callback must run also after
        an error, because otherwise DDP refuses every later step.

        Returns:
            False outside of a pass.
        """
        # Do not defer works of callbacks at the end of a pass, because DDP waits in its callbacks for these works.
        if not in_backward():
            return False
        end = _End(self, work)
        try:
            after_backward(end)
        except RuntimeError:
            # Autograd accepts no callback here: the thread runs an autograd node outside of a backward pass.
            return False
        # If the pass ends in another exception, autograd frees `end`, and then nothing raises the work's error.
        weakref.finalize(end, work.leave_pass).atexit = False
        self._ends.append(weakref.ref(end))
        return True

    def finish(self) -> None:
        """Launch all works, and wait for works with a requested future."""
        ends, self._ends = self._ends, []
        works = [end.work for reference in ends if (end := reference()) is not None]
        for work in works:
            work.launch()
        errors_found: list[BaseException] = []
        for work in works:
            try:
                work.finish_backward()
            except Exception as error:  # noqa: BLE001 - raised behind DDP's callback
                errors_found.append(error)
            work.leave_pass()
        if errors_found:
            throw = partial(_throw, errors_found[0])
            BackwardEnd(lambda _: after_backward(throw))


def _throw(error: BaseException) -> None:
    raise error


# ----------------------------------------------------------------------------------------------------
# Works: operations of the engine that torch sees as a single operation.


class Work(dist.Work):
    """Operations of the engine as a single work of torch.

    Args:
        operations: empty for a work that has finished.
        outputs: the value of the future and of `result()`.
        finish: moves results to torch's tensors; called once when all operations have finished, before waiters and
            callbacks continue.
        scope: names the operations that callbacks of the future launch.
        passes: the group's queue, for works whose future DDP may wait for.
        launch: starts the operations, for a work that is launched later.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        outputs: Sequence[Tensor] = (),
        finish: Callable[[], object] | None = None,
        scope: OperationNames | None = None,
        passes: BackwardQueue | None = None,
        launch: Callable[[], Sequence[Operation]] | None = None,
    ) -> None:
        super().__init__()
        self.operations = operations
        self._backward_queue = passes
        self._launch = launch
        # If `add` returns False, the work cannot be deferred and is launched at once.
        self._in_pass = launch is not None and passes is not None and passes.add(self)
        self._outputs = list(outputs)
        self._finish = finish
        self._scope = scope or OperationNames("")
        self._lock = threading.RLock()
        self._is_settled = not operations and finish is None and launch is None
        self._error: BaseException | None = None
        self._future: Future | None = None
        self.source: int | None = None
        if not self._in_pass:
            self.launch()

    def wait(self, timeout: timedelta = _UNLIMITED) -> bool:
        """Wait for the results, and raise the work's error if it failed.

        Args:
            timeout: longest wait, after which the work continues; 0 means until the work ends, at the latest after the
                group's timeout.
        """
        if not self._is_settled:
            seconds = timeout.total_seconds()
            self.settle(seconds if seconds > 0 else None)
        if self._error is not None:
            raise self._error
        return True

    def leave_pass(self) -> None:
        """Show errors in futures from now on, because no backward pass will raise them."""
        self._in_pass = False

    def launch(self) -> None:
        """Start the operations of a deferred work, unless they are started."""
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
        """Wait until the work has succeeded or failed. Only an expired timeout raises an error."""
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
        """Check whether the work has succeeded or failed. Never blocks."""
        if self._is_settled:
            return True
        self.launch()
        with contextlib.suppress(Exception):  # a failed work has ended too
            if not all([operation.done() for operation in self.operations]):
                return False
        self.settle()
        return True

    def is_success(self) -> bool:
        """Check whether the work has succeeded."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error of a failed work, or None while the work runs and after success."""
        return self._error if self.is_completed() else None

    def result(self) -> list[Tensor]:
        """Return the tensors of the result. Call it after the work has ended."""
        return self._outputs

    def synchronize(self) -> None:
        """Wait for the results, and raise the work's error if it failed."""
        self.wait()

    def source_rank(self) -> int:
        """Return the sender of the received tensor."""
        if self.source is None:
            raise RuntimeError(
                "source_rank(): only a finished receive has a source rank. Wait for it first."
            )
        return self.source

    _source_rank = source_rank

    def finish_backward(self) -> None:
        """Wait for a requested future at the end of the backward pass.

        Raises errors of the work, and of the future's callbacks.
        """
        if self._future is not None:
            self.wait()
            self._future.check()

    def _is_in_pass(self) -> bool:
        return self._in_pass

    def get_future(self) -> Future:
        with self._lock:
            if self._future is None:
                default = self._outputs[0] if len(self._outputs) == 1 else self._outputs
                self._future = Future(self.settle, self._scope, default, self._is_in_pass)
                if self._is_settled:
                    self._future.finish(self._outputs, self._error)
                else:
                    if not self._in_pass and self._backward_queue is not None:
                        self._in_pass = self._backward_queue.add(self)
                    _completer.add(self, _LOOK_AFTER_PASS_S if self._in_pass else 0.0)
            return self._future


FINISHED = Work(())
"""The work of a caller that has already waited."""


class _Completer:
    """Thread to complete futures without a waiting thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._works: list[tuple[float, Work]] = []  # with the time of the first poll
        self._thread: threading.Thread | None = None
        self._next_look = math.inf

    def add(self, work: Work, patience_s: float) -> None:
        """Complete the work's future when it ends. The first poll is after `patience_s`."""
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
        """Stop polling a finished work."""
        with self._changed:
            self._works = [each for each in self._works if each[1] is not work]

    def _run(self) -> None:
        pause = _FIRST_LOOK_S
        while True:
            with self._changed:
                now = time.monotonic()
                works = [work for first_look, work in self._works if first_look <= now]
            # `is_completed` also removes finished works from the list.
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
