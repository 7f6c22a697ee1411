"""`on_ranks(3, fn)` calls fn() on three ranks, each with its own `hvd`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sparkhvd.torch as hvd
from sparkhvd.settings import Settings
from sparkhvd.torch.context import use_engine
from tests.harness import ranks

DEADLINE_S = 40.0


def on_ranks(
    size: int,
    fn: Callable[[], Any],
    *,
    settings: Settings | None = None,
    hosts: Sequence[int] | None = None,
) -> list[Any]:
    """Return the results by rank. A rank that raises fails the test."""

    def body(_: Any) -> Any:
        result = fn()
        hvd.barrier()  # no rank leaves while another still submits
        return result

    return ranks.run_ranks(
        size, body, settings=settings, hosts=hosts, using=use_engine, deadline_s=DEADLINE_S
    )
