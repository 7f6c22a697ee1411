"""Report epochs on the driver while the ranks train, by polling the run's metrics file.

Threads: one background thread polls, prints and calls the user's function. Ownership: only this thread reads the
metrics file. Shutdown: leaving the block stops the thread after a last read, so every epoch is reported exactly once.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sparkhvd.data.ownership import renew_leases
from sparkhvd.data.store.store import Store
from sparkhvd.estimator.fitting.status_line import of_this_process
from sparkhvd.observe.loggers.fanout import LoggerFanout
from sparkhvd.observe.report.charts import format_seconds
from sparkhvd.training.checkpoints.files import Checkpoints, epoch_of
from sparkhvd.training.metrics import RESERVED
from sparkhvd.training.types import History
from sparkhvd.wire import read_json

# Seconds between two reads of the metrics file; shorter epochs are reported together.
POLL_S = 0.25
# Seconds between two reads if a read costs a Spark task.
TASK_POLL_S = 2.0
# A line announces phases that take longer than this.
_LATE_S = 5.0
# Seconds between two lines of progress within an epoch, on streams without line replacement.
_PLAIN_S = 10.0
# For this long after the line of an epoch, messages about its steps are ignored: they have arrived late.
_BEHIND_S = 3.0
# An epoch's line shows waiting above this share of the epoch, if the epoch is longer than this.
_MUCH_WAITING, _LONG_EPOCH_S = 0.1, 1.0
# Longest wait for a running read after the training has ended.
_LAST_READ_S = 60.0
# Reporters of the fits that train in this process now.
_training: list[EpochReporter] = []
_training_lock = threading.Lock()


def format_epoch(record: Mapping[str, object], epochs: int) -> str:
    """Format an epoch as one line: "epoch 3/10  loss 0.1234  accuracy 0.9600  val_loss 0.1300  12,345 rows/s"."""
    shown = {
        name: value for name, value in record.items() if name == "loss" or name not in RESERVED
    }
    numbers = "".join(f"  {name} {_short(value)}" for name, value in shown.items())
    width = len(str(epochs))
    rate = record.get("rows_per_s")  # a custom loop may not record a rate
    speed = f"  {rate:,.0f} rows/s" if isinstance(rate, (int, float)) else ""
    broken = sum(int(record.get(f"{part}broken_rows") or 0) for part in ("", "val_"))  # type: ignore[call-overload]
    left_out = f"  {broken:,} broken row{'s' * (broken != 1)} left out" if broken else ""
    ranks = f"  ranks {record['ranks']}" if "ranks" in record else ""
    return f"epoch {record['epoch']:>{width}}/{epochs}{numbers}{ranks}{speed}{left_out}{_why_slow(record)}"


def format_step(report: Mapping[str, Any], waits: Mapping[int, float]) -> str:
    """Format progress within an epoch.

    For example "epoch 2/10  step 120/1,500  loss 0.1234  12,345 rows/s  28 s left  waiting for rank 3 20%  accuracy
    0.9600".

    Args:
        report: of rank 0, see `sparkhvd.training.profile`.
        waits: rank -> share of the epoch in which the rank waited for reduced gradients.
    """
    means = dict(report["means"])
    loss = f"  loss {_short(means.pop('loss'))}" if "loss" in means else ""
    steps = left = ""
    if report["num_steps"]:
        seconds = round(report["left_s"])
        steps = f"/{report['num_steps']:,}"
        left = f"  {format_seconds(seconds) if seconds else '0 s'} left"
    text = f"epoch {report['epoch']}/{report['epochs']}  step {report['step']:,}{steps}{loss}  {report['rows_per_s']:,.0f} rows/s{left}"
    if waits and (share := max(waits.values()) - min(waits.values())) >= _MUCH_WAITING:
        text += f"  waiting for rank {min(waits, key=waits.__getitem__)} {min(1.0, share):.0%}"
    return text + "".join(f"  {name} {_short(value)}" for name, value in means.items())


def _why_slow(record: Mapping[str, object]) -> str:
    """Format the large waits of an epoch: "  waited for data 40%, for rank 3 20%"."""
    seconds = record.get("seconds")
    if not isinstance(seconds, (int, float)) or seconds < _LONG_EPOCH_S:
        return ""
    causes = {
        "data_wait_s": "data",
        "rank_wait_s": f"rank {record.get('slowest_rank')}",
        "comm_wait_s": "gradients",
    }
    found = []
    for name, cause in causes.items():
        waited = record.get(name)
        if isinstance(waited, (int, float)) and waited >= _MUCH_WAITING * seconds:
            found.append(f"for {cause} {min(1.0, waited / seconds):.0%}")
    return f"  waited {', '.join(found)}" if found else ""


def _short(value: object) -> str:
    """Format a number with four decimals, or a very small or large number with five digits: "0.1234", "1.5e-05"."""
    if not isinstance(value, (int, float)):
        return str(value)
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e3 else f"{value:.5g}"


def _is_finite(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


@contextlib.contextmanager
def announce_late(text: str, verbose: int, after_s: float = _LATE_S) -> Iterator[None]:
    """Print a line if the block takes longer than `after_s` seconds, unless `verbose` is 0."""
    timer = threading.Timer(after_s, of_this_process.print, (text,))
    timer.daemon = True
    if verbose:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def report_skipped(skipped: Mapping[str, tuple[int, int]], verbose: int) -> None:
    """Print how many rows `handle_invalid` has skipped.

    Args:
        skipped: name of the rows ("training") -> (number skipped, total).
        verbose: 0 prints nothing.
    """
    for name, (count, total) in skipped.items():
        if verbose and count:
            of_this_process.print(
                f"handle_invalid skipped {count:,} of {total:,} {name} rows with a null or an invalid number"
            )


def poll_interval(store: Store, num_proc: int, slots: int | None, verbose: int) -> float | None:
    """Choose the seconds between two reads.

    Returns None and prints the reason if the ranks hold every task slot.
    """
    if store.is_seen:
        return POLL_S
    if slots is None or slots > num_proc:
        return TASK_POLL_S
    if verbose:
        of_this_process.print(
            f"Epochs and lines of ranks are printed when the training ends: this client does not see {store.url}. Reading it needs a "
            f"free task slot, but the ranks use all {slots}."
        )
    return None


class EpochReporter:
    """Reporter of epochs, as a context manager around the launch.

    It prints a line per epoch and calls the user's function.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        *,
        epochs: int,
        verbose: int,
        progress: Callable[[dict[str, Any]], object] | None,
        fanout: LoggerFanout | None = None,
        poll_s: float | None = POLL_S,
        name: str = "",
        label: str = "",
    ) -> None:
        """Prepare a reporter. Its thread starts with the `with` block.

        Args:
            checkpoints: checkpoints of the run.
            epochs: number of epochs of the run.
            verbose: 0 prints nothing.
            progress: the user's function of an epoch's record, or None; it may raise.
            fanout: loggers of the fit.
            poll_s: seconds between two reads; None reads only after the training.
            name: prefix in brackets that lines have while another fit of this process trains.
            label: prefix that lines always have, to distinguish this fit from other fits of the estimator.
        """
        self._checkpoints, self._reader = checkpoints, checkpoints.reader()
        self._epochs = epochs
        self._verbose = verbose
        self._fanout = fanout
        self._progress = progress
        self._poll_s = poll_s
        self._name = name
        self._label = label
        self._is_alone = True
        self._reported, self._reported_at = 0, -math.inf
        self._said_at = time.monotonic()
        # For the progress line: loss of the previous epoch, and rank -> share of waiting in the current epoch.
        self._last_loss = ""
        self._waits: dict[int, float] = {}
        self._waits_of = 0
        self._warned: set[str] = set()
        self._stopping = threading.Event()
        self._reading_since: float | None = None  # start of the running read
        self._thread = threading.Thread(target=self._run, name="sparkhvd-progress", daemon=True)

    def __enter__(self) -> EpochReporter:
        # Epochs up to the last checkpoint of a resumed run were reported before; later epochs are trained and reported
        # again.
        self._reported = self._checkpoints.latest_epoch()
        self._checkpoints.keep_records(self._reported)
        with _training_lock:
            _training.append(self)
            if len(_training) > 1:
                for reporter in _training:
                    reporter._is_alone = False
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with _training_lock:
            _training.remove(self)
        self._stopping.set()
        of_this_process.remove(self)
        # Wait for the thread, because the user's function may be slow, but give up if a read of the store hangs.
        while self._thread.is_alive():
            began = self._reading_since
            if began is not None and time.monotonic() - began > _LAST_READ_S:
                return
            self._thread.join(0.05)

    def show_step(self, message: str) -> None:
        """Show progress within an epoch: a replaceable line on a terminal or in a notebook, elsewhere a line per 10 s.

        Args:
            message: message of a rank, see `sparkhvd.training.profile`. Messages of ranks other than 0 only report
                their waits.
        """
        report = read_json(message)
        epoch = report["epoch"]
        if epoch != self._waits_of:
            self._waits_of = epoch
            self._waits.clear()
        self._waits[report["rank"]] = report["waited"]
        # The line of the whole epoch, which comes through the store, may arrive before this message.
        is_told = epoch <= self._reported and time.monotonic() - self._reported_at < _BEHIND_S
        is_late = self._stopping.is_set() or is_told
        if report["rank"] or not self._verbose or is_late:
            return
        # Ignore ranks that an elastic fit has lost within the epoch.
        waits = {rank: share for rank, share in self._waits.items() if rank < report["size"]}
        text = format_step(report, waits)
        if of_this_process.show(self, f"{self._short_prefix}{text}", self._last_loss):
            if self._stopping.is_set():  # the reporter was stopped meanwhile
                of_this_process.remove(self)
            return
        if time.monotonic() - self._said_at >= _PLAIN_S:
            self._said_at = time.monotonic()
            of_this_process.print(f"{self._prefix}{text}")

    @property
    def _prefix(self) -> str:
        """Prefix of the lines, such as "[fold 2, batch_size=64] ", or "" for a single fit without a label."""
        shown = ": ".join(filter(None, ("" if self._is_alone else self._name, self._label)))
        return f"[{shown}] " if shown else ""

    @property
    def _short_prefix(self) -> str:
        """Prefix in the shared line of all fits.

        It is the label, or the part of the name after the last "-".
        """
        shown = self._label or ("" if self._is_alone else self._name.rpartition("-")[2])
        return f"[{shown}] " if shown else ""

    def returns(self, epoch: int, history: History, monitor: str) -> None:
        """Print the epoch of the model's weights if it is not the last epoch."""
        value = next((r.get(monitor) for r in history if r.get("epoch") == epoch), None)
        is_last = not history or history[-1].get("epoch") == epoch
        if self._verbose and isinstance(value, (int, float)) and not is_last:
            of_this_process.print(
                f"{self._prefix}the model has the weights of epoch {epoch}/{self._epochs}: {monitor} {value:.4g}"
            )

    def ended(self, reason: str, epoch: int) -> None:
        """Print why a fit ended before its last epoch, such as "stopped after epoch 4/10: val_loss has not ..."."""
        if self._verbose and reason:
            of_this_process.print(
                f"{self._prefix}stopped after epoch {epoch}/{self._epochs}: {reason}"
            )

    def _check_losses(self, record: Mapping[str, object]) -> None:
        """Warn about the first non-finite loss and about the first NaN metric."""
        losses = [name for name in ("loss", "val_loss") if not _is_finite(record.get(name, 0.0))]
        rate = record.get("lr")
        now = f" ({rate:g} now)" if isinstance(rate, float) else ""
        for name in losses:
            self._warn_once(
                "loss",
                f"{name} of epoch {record['epoch']} is {record[name]}: the training has diverged, or the loss divides by 0 or takes "
                f"the logarithm of 0. Lower learning_rate{now}, or set gradient_clip_norm=1.0; terminate_on_nan=True ends the "
                "fit at the first such step. Scale features and labels with large values (StandardScaler).",
            )
        for name, value in record.items():
            if value != value and not losses:
                self._warn_once(
                    "metric",
                    f"{name} of epoch {record['epoch']} is nan: it is not defined for these rows ('auc' needs rows of both classes, "
                    "and every metric needs rows), or your code has logged nan.",
                )

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, stacklevel=2)

    def _run(self) -> None:
        began = self._reported
        text = f"{self._prefix}waiting for epoch {began + 1}/{self._epochs}"
        with contextlib.ExitStack() as waiting:
            waiting.enter_context(announce_late(text, self._verbose))
            while not self._stopping.wait(self._poll_s):
                self._read()
                renew_leases()
                if self._reported > began or self._waits:  # an epoch or steps are shown now
                    waiting.close()
        self._read()

    def _read(self) -> None:
        self._reading_since = time.monotonic()
        try:
            records = self._reader.after(self._reported)
        except (OSError, ValueError):
            return  # a temporary read error only delays a line; it must not end the training
        finally:
            self._reading_since = None
        for record in records:
            self._report(record)
            self._reported, self._reported_at = epoch_of(record), time.monotonic()
        if self._fanout is not None and self._fanout.is_behind:
            with contextlib.suppress(OSError, ValueError):
                self._fanout.load(self._checkpoints.profile())

    def _report(self, record: dict[str, Any]) -> None:
        if "loss" in record:  # a custom loop may not record a loss
            self._last_loss = f"  loss {_short(record['loss'])} in epoch {record['epoch']}"
        if self._verbose:
            self._said_at = time.monotonic()
            of_this_process.print(f"{self._prefix}{format_epoch(record, self._epochs)}")
        with of_this_process.erased():
            self._notify_user(record)

    def _notify_user(self, record: dict[str, Any]) -> None:
        self._check_losses(record)
        if self._fanout is not None:
            self._fanout.epoch(record)
        if self._progress is not None:
            try:
                self._progress(record)
            except Exception as e:  # noqa: BLE001 - the user's function must not end the training
                self._progress = None
                warnings.warn(
                    f"The function progress raised {type(e).__name__}: {e}. It is not called again in this fit.",
                    stacklevel=2,
                )
