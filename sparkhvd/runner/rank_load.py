"""Load of the ranks of `run(fn, loggers=[...])`: each tells the driver once per second what its process uses.

Threads: one in each rank while `fn` runs, see `observe.system`. Failure: none reaches `fn`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from sparkhvd.observe.system import METRICS, Gpu, Sample, Sampler
from sparkhvd.rank_context import RankContext, context
from sparkhvd.rank_messages import log_metrics

__all__ = ["WithLoad"]


class WithLoad:
    """A function that tells the load of its rank while it runs."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        """Wrap a function; names and code are still those of the function, for messages."""
        functools.update_wrapper(self, fn)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call the function."""
        place, began = context(), time.time()
        fn: Callable[..., Any] = vars(self)["__wrapped__"]
        if place is None:
            return fn(*args, **kwargs)
        node = f"{socket.gethostname()}-rank-{place.rank}"

        def tell(sample: Sample) -> None:
            numbers = {
                f"system/{node}/{name}": value
                for key, name in METRICS.items()
                if not math.isnan(value := getattr(sample, key))
            }
            log_metrics(numbers, int(sample.time - began))

        sampler = Sampler(_OwnGpu(place), tell)
        sampler.start()
        with contextlib.closing(sampler):
            return fn(*args, **kwargs)


class _OwnGpu:
    """The GPU of this rank, from the moment when torch has begun to use one."""

    def __init__(self, place: RankContext) -> None:
        self._index = place.local_rank if place.gpu is None else place.gpu
        self._found: Gpu | None = None
        self._has_looked = False

    def __call__(self) -> tuple[float, float]:
        """Return percent and megabytes in use; NaN where they are not known."""
        torch = sys.modules.get("torch")
        if not self._has_looked and torch is not None and torch.cuda.is_initialized():
            self._has_looked = True
            with contextlib.suppress(Exception):  # of torch, or of a device that is not there
                uuid = torch.cuda.get_device_properties(self._index).uuid
                self._found = Gpu.find(f"GPU-{uuid}")
        return (math.nan, math.nan) if self._found is None else self._found()
