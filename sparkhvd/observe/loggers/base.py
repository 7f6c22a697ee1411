"""Interface of loggers, and delivery of numbers to them."""

from __future__ import annotations

import abc
import itertools
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Metric(NamedTuple):
    """Number of a fit.

    Attributes:
        name: key of an epoch's record, or `system/<node>/<name>`.
        value: may be NaN or infinite.
        step: epoch, counted from 1; for system metrics seconds since the start of the training.
        time: seconds since 1970.
    """

    name: str
    value: float
    step: int
    time: float


@dataclass(frozen=True)
class Fit:
    """Facts about a fit at its start.

    Attributes:
        run_id: name of the run in the store.
        params: Param -> value as text without secrets.
        tags: name -> text of other facts, without secrets.
        label: text that distinguishes the fit from other fits of its estimator, such as "fold 2, batch_size=64", or "".
        epochs_done: number of epochs that an interrupted run has done before this fit resumes it.
    """

    run_id: str
    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    label: str = ""
    epochs_done: int = 0


class Sink:
    """Destination of one fit's numbers.

    One background thread calls its methods in order, and again after an error.

    Attributes:
        place: description of the destination, for messages.
    """

    place = "the logger"

    def start(self) -> None:
        """Open the destination. This is the first call."""

    def log(self, metrics: Sequence[Metric]) -> None:
        """Write at most 1,000 numbers."""
        raise NotImplementedError

    def log_data(self, data: Mapping[str, Any]) -> None:
        """Write a description of the training rows, see `TorchModel.training_data`."""

    def log_model(self, model: Any) -> None:
        """Write the trained `TorchModel`."""

    def finish(self, state: str, files: Mapping[str, bytes]) -> None:
        """End the fit. This is the last call.

        Args:
            state: "finished", "failed" or "interrupted".
            files: name -> content of the files of the fit's report; may be {}.
        """

    def is_refused(self, error: Exception) -> bool:
        """Whether the destination refuses the entry, so that a retry would fail in the same way."""
        return True


class Logger(abc.ABC):
    """Base class of loggers of fits, for `TorchEstimator(loggers=[...])`.

    A logger holds no state of a fit, and can be copied and pickled.

    Attributes:
        patience_s: longest wait in s for undelivered numbers at the end of a fit.
    """

    patience_s: float = 60.0

    def bound(self) -> Logger:
        """Make a logger with the calling thread's state, for fits of a grid in other threads."""
        return self

    @abc.abstractmethod
    def begin(self, fit: Fit) -> Sink:
        """Make the sink of a fit, without contacting a server.

        This runs in the thread that calls `fit`.
        """


# ----------------------------------------------------------------------------------------------------
# Deliver a fit's numbers to a sink in the background.
# Threads: one thread per fit and sink. Other threads call `put` and `call`, which never wait. Ownership: only the
# delivery thread calls the sink. Shutdown: `close` waits at most `patience_s` for the remaining entries. A call of the
# sink that does not return by then continues in a daemon thread.

# Maximum of numbers per call, which is the limit of MLflow.
_MOST = 1000
# Seconds before a retry: the first pause, which is doubled up to the longest pause.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
# Longest wait at the end of a fit for calls that do not fail, such as the upload of a model; `patience_s` does not
# limit them.
_LONGEST_CALL_S = 1800.0

# Function that calls a method of the sink.
Call = Callable[[Sink], None]


def _start(sink: Sink) -> None:
    sink.start()


class Delivery:
    """Queue of numbers and calls for a sink, with a delivery thread."""

    def __init__(self, sink: Sink, patience_s: float, say: Callable[[str], object]) -> None:
        """Start the delivery thread. It calls the sink's `start` first.

        Args:
            sink: destination.
            patience_s: longest wait of `close`.
            say: function that shows a line to the user.
        """
        self._sink, self._patience_s, self._log = sink, patience_s, say
        self._queue: deque[Metric | Call] = deque([_start])
        self._changed = threading.Condition()
        self._is_closing = self._is_over = False
        self._down_since: float | None = None  # time.monotonic() of the first failed delivery
        self._thread = threading.Thread(target=self._run, name="sparkhvd-logger", daemon=True)
        self._thread.start()

    def put(self, metrics: Sequence[Metric]) -> None:
        """Add numbers to the queue."""
        with self._changed:
            self._queue.extend(metrics)
            self._changed.notify()

    def call(self, function: Call) -> None:
        """Add a function to the queue. The thread calls it with the sink."""
        with self._changed:
            self._queue.append(function)
            self._changed.notify()

    def close(self, patience_s: float | None = None) -> None:
        """Wait until the queue is delivered, and warn about lost entries.

        Args:
            patience_s: longest wait for a sink that does not respond; None uses the logger's own.
        """
        patience_s = self._patience_s if patience_s is None else patience_s
        began = time.monotonic()
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        while self._thread.is_alive():
            self._thread.join(0.1)
            since = self._down_since
            is_down_long = since is not None and time.monotonic() > max(began, since) + patience_s
            if is_down_long or time.monotonic() > began + patience_s + _LONGEST_CALL_S:
                break
        with self._changed:
            self._is_over = True  # if a call of the sink is still running, it is the last call
            self._changed.notify()
            numbers = sum(isinstance(each, Metric) for each in self._queue)
            others = len(self._queue) - numbers
        if numbers or others:
            warnings.warn(
                f"{self._sink.place} has not responded for {patience_s:g} s, and the fit has ended: {numbers:,} numbers and {others} other "
                "entries are missing there. The report of the fit has the numbers.",
                stacklevel=2,
            )

    def abandon(self) -> None:
        """End the delivery without a wait or a warning. After `close` this does nothing."""
        with self._changed:
            self._is_closing = self._is_over = True
            self._changed.notify()

    # -- the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while part := self._next():
            try:
                self._deliver(part)
            except Exception as e:  # noqa: BLE001 - a logger error ends nothing
                if not self._sink.is_refused(e):
                    self._record_down(e)
                    self._pause(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                    continue
                self._refused(part, e)
            else:
                self._record_up()
            pause_s = _FIRST_PAUSE_S
            with self._changed:
                for _ in part:
                    self._queue.popleft()

    def _next(self) -> list[Metric | Call]:
        """Wait for the next entries of the queue: one call, or several numbers, or return [] at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closing)
            if self._is_over or not self._queue:
                return []
            if not isinstance(self._queue[0], Metric):
                return [self._queue[0]]
            numbers = itertools.takewhile(lambda each: isinstance(each, Metric), self._queue)
            return list(itertools.islice(numbers, _MOST))

    def _deliver(self, part: Sequence[Metric | Call]) -> None:
        metrics = [each for each in part if isinstance(each, Metric)]
        if metrics:
            self._sink.log(metrics)
        for each in part:
            if not isinstance(each, Metric):
                each(self._sink)

    def _pause(self, pause_s: float) -> None:
        """Wait before a retry. The wait is shorter when the fit waits for the delivery."""
        with self._changed:
            if not self._is_closing:
                self._changed.wait_for(lambda: self._is_closing, pause_s)
            else:
                self._changed.wait_for(lambda: self._is_over, _FIRST_PAUSE_S)

    def _record_down(self, error: Exception) -> None:
        if self._down_since is None:
            self._down_since = time.monotonic()
            self._log(
                f"{self._sink.place} does not respond ({_first_line(error)}). Training continues; undelivered numbers are kept."
            )

    def _record_up(self) -> None:
        if self._down_since is not None:
            self._down_since = None
            self._log(f"{self._sink.place} responds again; the waiting entries are logged.")

    def _refused(self, part: Sequence[Metric | Call], error: Exception) -> None:
        place = self._sink.place
        what = f"{len(part)} numbers" if isinstance(part[0], Metric) else "an entry"
        if part[0] is _start:
            what = "this fit"
            self._sink = _Nowhere()
        warnings.warn(f"{place} refuses {what}: {_first_line(error)}", stacklevel=2)


class _Nowhere(Sink):
    """Sink for discarding the numbers of a fit after a refused start."""

    def start(self) -> None:
        pass

    def log(self, metrics: Sequence[Metric]) -> None:
        pass


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text[:200]}"
