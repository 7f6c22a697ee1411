"""Ranks as threads of this process: `run_ranks(4, fn)` calls fn(engine) on each."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from sparkhvd.engine.engine import Engine
from sparkhvd.rendezvous import Rendezvous, in_process
from sparkhvd.settings import Settings

DEADLINE_S = 60.0

# How a layer above the engine makes `engine` the current engine of a thread (a ContextVar): the torch tests
# set it through `using`.
Use = Callable[[Engine], AbstractContextManager[Any]]


class RanksFailed(AssertionError):
    """Failure of ranks. `errors` has the exceptions by rank."""

    def __init__(self, errors: dict[int, BaseException]) -> None:
        self.errors = errors
        texts = ["".join(traceback.format_exception(e)) for e in errors.values()]
        super().__init__(
            "\n".join(f"--- rank {r}\n{t}" for r, t in zip(errors, texts, strict=True))
        )


def run_threads(
    functions: Sequence[Callable[[], Any]], *, deadline_s: float = DEADLINE_S
) -> list[Any]:
    """Run each function in a thread and return results *or exceptions* in order.

    After a deadline, the failure shows every stack. The threads are daemons and stay.
    """
    outcomes: list[Any] = [None] * len(functions)

    def run(index: int) -> None:
        try:
            outcomes[index] = functions[index]()
        except BaseException as error:  # noqa: BLE001 - it is the outcome
            outcomes[index] = error

    threads = [
        threading.Thread(target=run, args=(i,), name=f"test-rank-{i}", daemon=True)
        for i in range(len(functions))
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + deadline_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    stuck = [t for t in threads if t.is_alive()]
    if stuck:
        frames = sys._current_frames()
        stacks = [
            f"--- {t.name}\n" + "".join(traceback.format_stack(frames[t.ident]))
            for t in threads
            if t.ident in frames
        ]
        raise AssertionError(f"{len(stuck)} ranks hang after {deadline_s} s\n" + "\n".join(stacks))
    return outcomes


def rank_outcomes(
    size: int,
    fn: Callable[[Engine], Any],
    *,
    hosts: Sequence[int] | None = None,
    settings: Settings | None = None,
    rendezvous: Sequence[Rendezvous] | None = None,
    using: Use | None = None,
    deadline_s: float = DEADLINE_S,
) -> list[Any]:
    """Run ranks as `run_ranks` does. An exception of a rank is its outcome and does not fail the test."""
    settings = settings or Settings()
    meetings = rendezvous or in_process(size, hosts, settings)

    def body(rank: int) -> Any:
        with (
            Engine(meetings[rank].connect(), settings) as engine,
            using(engine) if using else contextlib.nullcontext(),
        ):
            return fn(engine)

    return run_threads([lambda r=r: body(r) for r in range(size)], deadline_s=deadline_s)


def run_ranks(
    size: int,
    fn: Callable[[Engine], Any],
    *,
    hosts: Sequence[int] | None = None,
    settings: Settings | None = None,
    rendezvous: Sequence[Rendezvous] | None = None,
    using: Use | None = None,
    deadline_s: float = DEADLINE_S,
) -> list[Any]:
    """Call `fn(engine)` on `size` ranks that are threads of this process.

    Args:
        size: number of ranks.
        fn: the body of every rank, which `engine.rank` identifies.
        hosts: index of the host of each rank; None = one host.
        settings: for the engines.
        rendezvous: one per rank instead of the in-process one.
        using: entered around `fn` with the engine (makes it the thread's current one).
        deadline_s: after these seconds, all stacks are shown and the test fails.

    Returns:
        The results by rank.

    Raises:
        RanksFailed: one or more ranks raised.
    """
    outcomes = rank_outcomes(
        size,
        fn,
        hosts=hosts,
        settings=settings,
        rendezvous=rendezvous,
        using=using,
        deadline_s=deadline_s,
    )
    errors = {r: o for r, o in enumerate(outcomes) if isinstance(o, BaseException)}
    if errors:
        raise RanksFailed(errors)
    return outcomes
