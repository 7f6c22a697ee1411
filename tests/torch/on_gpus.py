"""`on_gpus(3, fn)` calls fn(gpu) on three ranks, each with a GPU of the stand-in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sparkhvd.torch as hvd
from sparkhvd.settings import Settings
from tests.harness import ranks
from tests.harness.fake_cuda import FakeDevice, gpu, use_engine

DEADLINE_S = 60.0


def on_gpus(
    size: int, fn: Callable[[FakeDevice], Any], *, settings: Settings | None = None
) -> list[Any]:
    """Return the results by rank. A rank that raises fails the test."""

    def body(engine: Any) -> Any:
        result = fn(gpu(engine.rank))
        hvd.barrier()  # no rank leaves while another still submits
        return result

    return ranks.run_ranks(size, body, settings=settings, using=use_engine, deadline_s=DEADLINE_S)
