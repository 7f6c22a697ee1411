"""Send the driver's data to the loggers of a fit or a call of `run`: records of epochs, the report, the model.

Failure: every error becomes a warning; a logger never ends a fit.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sparkhvd.observe.loggers.base import Delivery, Fit, Logger, Metric
from sparkhvd.observe.loggers.mlflow import MLflowLogger
from sparkhvd.observe.report.page import HTML_NAME, JSON_NAME, dumps, render
from sparkhvd.observe.system import METRICS

# Seconds that a fit waits for a server after Ctrl-C.
_PATIENCE_OF_A_USER_S = 5.0


class LoggerFanout:
    """Loggers of one fit, as a context manager."""

    def __init__(
        self, loggers: Sequence[Logger], fit: Callable[[], Fit], say: Callable[[str], object]
    ) -> None:
        """Attach loggers to a fit.

        Args:
            loggers: loggers of the estimator, to which MLflow's autologging adds a logger.
            fit: function that describes the fit; it is called only if there is a logger.
            say: function that shows a line to the user.
        """
        self._deliveries: list[Delivery] = []
        self._known_until: dict[int, float] = {}  # rank -> time of its last load sample
        self._began = math.inf
        self._epoch = self._load_epoch = 0  # epoch of the last record, and of the last known load
        known: Fit | None = None
        for logger in (*loggers, *_of_autolog(loggers)):
            try:
                known = known or fit()
                delivery = Delivery(logger.begin(known), logger.patience_s, say)
            except Exception as e:  # noqa: BLE001 - a package or the user's logger may raise any class
                warnings.warn(
                    f"{logger!r} does not log this fit: {type(e).__name__}: {e}", stacklevel=4
                )
            else:
                self._deliveries.append(delivery)

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Log the numbers in the record of an epoch."""
        now = time.time()
        self._epoch = int(record["epoch"])
        self.put(
            Metric(name, float(value), int(record["epoch"]), now)
            for name, value in record.items()
            if name != "epoch" and isinstance(value, (int, float)) and not isinstance(value, bool)
        )

    def data(self, origin: Mapping[str, Any]) -> None:
        """Log the description of the training rows."""
        for each in self._deliveries:
            each.call(lambda sink: sink.log_data(origin))

    @property
    def has_loggers(self) -> bool:
        """True if there is a logger."""
        return bool(self._deliveries)

    @property
    def is_behind(self) -> bool:
        """True if there is a logger, and the load of the ranks in finished epochs is not logged yet."""
        return bool(self._deliveries) and self._load_epoch < self._epoch

    def load(self, profile: Mapping[str, Any]) -> None:
        """Log the ranks' load samples since the last call.

        Args:
            profile: profile of the training so far; see `Profile.state`.
        """
        if epochs := profile.get("epochs"):
            self._load_epoch = epochs[-1]["epoch"] + profile["every"] - 1
        for rank, columns in enumerate(profile.get("load", ()) if self._deliveries else ()):
            node = f"{columns['host']}-rank-{rank}"
            known = self._known_until.get(rank, 0.0)
            for index, moment in enumerate(columns["time"]):
                self._began = min(self._began, moment)
                if moment > known:
                    self.put(
                        Metric(f"system/{node}/{name}", value, int(moment - self._began), moment)
                        for key, name in METRICS.items()
                        if (value := columns[key][index]) is not None
                    )
                    self._known_until[rank] = moment

    def put(self, metrics: Iterable[Metric]) -> None:
        """Pass numbers to every logger."""
        found = list(metrics)
        for each in self._deliveries:
            each.put(found)

    def finished(self, model: object, document: Mapping[str, Any]) -> None:
        """Log the model (or None) and the report (or {}), and wait until everything is logged."""
        for each in self._deliveries if model is not None else ():
            each.call(lambda sink: sink.log_model(model))
        self._end("finished", document, None)

    def failed(self, error: BaseException, document: Mapping[str, Any]) -> None:
        """Log the end of a fit without a model, and wait until it is logged.

        After Ctrl-C, the wait is short.
        """
        is_interrupt = isinstance(error, KeyboardInterrupt)
        patience_s = _PATIENCE_OF_A_USER_S if is_interrupt else None
        self._end("interrupted" if is_interrupt else "failed", document, patience_s)

    def __enter__(self) -> LoggerFanout:
        return self

    def __exit__(self, *error: object) -> None:
        """End the loggers without a warning if an error after the training prevented the log of the end."""
        for each in self._deliveries:
            each.abandon()

    def _end(self, state: str, document: Mapping[str, Any], patience_s: float | None) -> None:
        files: dict[str, bytes] = {}
        if document and self._deliveries:
            files = {JSON_NAME: dumps(document), HTML_NAME: render(document).encode()}
        for each in self._deliveries:
            each.call(lambda sink: sink.finish(state, files))
        for each in self._deliveries:
            try:
                each.close(patience_s)
            except Exception as e:  # noqa: BLE001 - the user's sink may raise any class
                warnings.warn(f"A logger failed: {type(e).__name__}: {e}", stacklevel=4)


def bound(loggers: Sequence[Logger]) -> list[Logger]:
    """Bind the loggers to the state of the calling thread, for fits in other threads."""
    try:
        return [logger.bound() for logger in (*loggers, *_of_autolog(loggers))]
    except Exception as e:  # noqa: BLE001 - a package or the user's logger may raise any class
        warnings.warn(
            f"A logger cannot find the run that is active in this thread: {e}", stacklevel=3
        )
        return list(loggers)


def _of_autolog(loggers: Sequence[Logger]) -> Sequence[Logger]:
    """Make the logger of MLflow's autologging, if it is on and the estimator has no MLflow logger."""
    if any(isinstance(logger, MLflowLogger) for logger in loggers):
        return ()
    try:
        found = MLflowLogger.of_autolog()
    except Exception as e:  # noqa: BLE001 - another version of MLflow may raise any class
        warnings.warn(f"mlflow.pyspark.ml.autolog() does not log this fit: {e}", stacklevel=5)
        return ()
    return () if found is None else (found,)
