"""Loggers of `run(fn)`: receive entries of `log_metrics` from the ranks, and each rank's load.

Threads: any may pass an entry. Failure: an invalid entry is dropped; see `observe.loggers`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.observe.loggers.base import Fit, Logger, Metric
from sparkhvd.observe.loggers.fanout import LoggerFanout
from sparkhvd.observe.system import METRICS as SYSTEM_METRICS
from sparkhvd.observe.system import Gpu, LoadMonitor, Sample
from sparkhvd.rank_messages import log_metrics
from sparkhvd.topology import RankContext, context
from sparkhvd.wire import read_json


def metrics_of(entry: str) -> list[Metric]:
    """Parse an entry of `log_metrics`, or return an empty list if it is invalid."""
    try:
        fields = read_json(entry)
        step, moment = int(fields["step"]), float(fields["time"])
        return [Metric(name, float(v), step, moment) for name, v in fields["values"].items()]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return []


@contextlib.contextmanager
def attach_loggers(
    loggers: Sequence[Logger] | Callable[[Sequence[Metric]], None] | None,
    fn: Callable[..., object],
    params: Mapping[str, object],
    verbose: int,
) -> Iterator[tuple[Callable[[int, str], None] | None, Callable[..., Any]]]:
    """Attach loggers to a call on ranks.

    Yields a function that takes a rank and its entries of `log_metrics`, and the function for the ranks.

    Args:
        loggers: of the call, or a function that takes numbers; without loggers entries are lines of output, and the function is unchanged.
        fn: the function, whose name the run gets.
        params: of the run; None for unknown values.
        verbose: 0 prints nothing on stderr.

    Raises:
        InvalidArgumentError: `loggers` has another type.
    """
    if not loggers:
        yield None, fn
        return
    # The launch reports a function that cannot be called.
    called = WithSystemMetrics(fn) if callable(fn) else fn
    if callable(loggers):
        put = loggers
        yield lambda _, entry: put(metrics_of(entry)), called
        return
    found = [loggers] if isinstance(loggers, Logger) else list(loggers)
    if not all(isinstance(each, Logger) for each in found):
        raise InvalidArgumentError(
            f"loggers is {loggers!r:.200}; it must be a list such as [sparkhvd.MLflowLogger()]."
        )
    name = str(getattr(fn, "__name__", type(fn).__name__)).strip("<>")
    run_id = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
    texts = {key: str(value) for key, value in params.items() if value is not None}

    def log(line: str) -> None:
        if verbose:
            sys.stderr.write(f"{line}\n")

    fanout = LoggerFanout(found, lambda: Fit(run_id, params=texts), log)
    try:
        yield lambda _, entry: fanout.put(metrics_of(entry)), called
    except BaseException as e:
        fanout.failed(e, {})
        raise
    fanout.finished(None, {})


# ----------------------------------------------------------------------------------------------------
# Load of the ranks of `run(fn, loggers=[...])`: each rank logs once per second what its process uses.
# Threads: one in each rank while `fn` runs, see `observe.system`. Failure: never reaches `fn`.


class WithSystemMetrics:
    """Wrapper of a function, to log its rank's load while it runs."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        """Wrap a function. It keeps its name and code, for messages."""
        functools.update_wrapper(self, fn)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call the function, and log system metrics until it ends."""
        place, began = context(), time.time()
        fn: Callable[..., Any] = vars(self)["__wrapped__"]
        if place is None:
            return fn(*args, **kwargs)
        node = f"{socket.gethostname()}-rank-{place.rank}"

        def notify(sample: Sample) -> None:
            numbers = {
                f"system/{node}/{name}": value
                for key, name in SYSTEM_METRICS.items()
                if not math.isnan(value := getattr(sample, key))
            }
            log_metrics(numbers, int(sample.time - began))

        sampler = LoadMonitor(_OwnGpu(place), notify)
        sampler.start()
        with contextlib.closing(sampler):
            return fn(*args, **kwargs)


class _OwnGpu:
    """GPU of this rank, once torch has initialized CUDA."""

    def __init__(self, place: RankContext) -> None:
        self._index = place.local_rank if place.gpu is None else place.gpu
        self._found: Gpu | None = None
        self._has_looked = False

    def __call__(self) -> tuple[float, float]:
        """Read the percent and megabytes in use, or NaN where unknown."""
        torch = sys.modules.get("torch")
        if not self._has_looked and torch is not None and torch.cuda.is_initialized():
            self._has_looked = True
            with contextlib.suppress(Exception):  # torch's errors, such as for a missing device
                uuid = torch.cuda.get_device_properties(self._index).uuid
                self._found = Gpu.find(f"GPU-{uuid}")
        return (math.nan, math.nan) if self._found is None else self._found()
