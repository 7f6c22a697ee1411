"""Functions of rank processes that leave and meet again. Each is called as fn(engine, talk)."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sparkhvd import rendezvous
from sparkhvd.engine.engine import Engine
from sparkhvd.errors import CollectiveError
from sparkhvd.rendezvous import in_process
from sparkhvd.rendezvous import rendezvous as sockets
from sparkhvd.settings import Settings
from tests.engine.arrays import allreduce, start_allreduce
from tests.harness.rank_process import Talk
from tests.harness.ranks import run_threads

OPERATIONS = 5
WARM_UP = 50
LOOKS = 5


# Parameters of mallopt(3), from malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8


def keep_malloc_from_keeping() -> None:
    """Make malloc return freed memory to the kernel.

    On a busy machine, threads that usually run one after the other overlap and get an arena each, and malloc_trim(3) does not trim the
    end of arenas other than the first: up to twice the largest array, which looks like a leak.
    """
    libc = ctypes.CDLL(None)
    for parameter, value in (
        (M_TRIM_THRESHOLD, 1 << 16),
        (M_MMAP_THRESHOLD, 1 << 16),
        (M_ARENA_MAX, 1),
    ):
        assert libc.mallopt(parameter, value) == 1


def usage() -> dict[str, int]:
    """Return the resources of this process: bytes of memory, descriptors, threads and lines of /proc/self/maps."""
    gc.collect()
    # Freed memory that malloc keeps for later arrays: sometimes up to twice the largest array.
    ctypes.CDLL(None).malloc_trim(0)
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {
        # Without pages of files, which the kernel drops and loads at any time.
        "rss": int(status["RssAnon"].split()[0]) * 1024,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
    }


class Least:
    """Return the least memory that this process held at any look."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}

    def look(self) -> None:
        now = usage()
        self.held = {what: min(now[what], self.held.get(what, now[what])) for what in now}


def is_told_to_stop() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


def one_generation(meeting: rendezvous.SocketRendezvous, *, stop: bool) -> bool:
    """Meet, work and leave. Return whether rank 0 wants to stop."""
    with Engine(meeting.connect(), meeting.settings) as engine:
        total = sum(range(1, engine.size + 1))
        for step in range(OPERATIONS):
            result = allreduce(engine, f"x {step}", np.full(70_001, engine.rank + 1.0))
            assert (result == total).all()
        wish = allreduce(engine, "stop", np.array([stop and engine.rank == 0]))
        return bool(wish[0])


def until_told(engine: Engine, talk: Talk) -> Any:
    """Run generations until rank 0 receives a stop. Report their number, resources and cost.

    Says "met often" after six generations, and must not receive the stop before.
    """
    (meeting,) = sockets._open_rendezvous
    engine.shutdown()
    talk.say("met")
    count = 0
    slowest = 0.0
    before = None
    stop = False
    while not stop:
        began = time.monotonic()
        stop = one_generation(meeting, stop=engine.rank == 0 and is_told_to_stop())
        slowest = max(slowest, time.monotonic() - began)
        count += 1
        if count == 5:
            before = usage()
        if count == 6:
            talk.say("met often")
    return {"generations": count, "slowest_s": slowest, "before": before, "after": usage()}


def initialize_and_shut_down(engine: Engine, talk: Talk) -> Any:
    """Call hvd.init(), one operation and hvd.shutdown(), as often as the test says."""
    import torch

    import sparkhvd.torch as hvd

    def once() -> None:
        hvd.init()
        assert float(hvd.allreduce(torch.ones(3), op=hvd.Sum)[0]) == hvd.size()
        hvd.shutdown()

    (meeting,) = sockets._open_rendezvous
    engine.shutdown()
    del engine
    rendezvous.install_rendezvous(meeting)
    found = watched(once, talk.hear())
    rendezvous.install_rendezvous(None)
    return found


def meet_and_leave(engine: Engine, talk: Talk) -> Any:
    """Do the same without torch."""
    (meeting,) = sockets._open_rendezvous
    engine.shutdown()
    del engine
    return watched(lambda: one_generation(meeting, stop=False), talk.hear())


def watched(once: Callable[[], object], count: int) -> dict[str, Any]:
    """Call repeatedly, and return the resources before and after."""
    keep_malloc_from_keeping()
    before, after = Least(), Least()
    for number in range(count + WARM_UP):
        once()
        if number < WARM_UP <= number + LOOKS:  # one-time objects exist now
            before.look()
        if number + LOOKS >= count + WARM_UP:
            after.look()
    return {"generations": count, "before": before.held, "after": after.held}


def end(engine: Engine, how: str) -> None:
    """End a rank with an operation in flight that no other rank has submitted."""
    work, _ = start_allreduce(engine, f"never finished {engine.rank}", np.ones(1000))
    if how == "abort":
        engine.abort("on purpose")
    elif how == "vanish":  # silently, like a finalizer
        del work
    engine.shutdown()


def main() -> None:
    """`python -m tests.engine.generations <how> <count>`: run ranks as threads, which end by `how`."""
    how, count = sys.argv[1], int(sys.argv[2])
    settings = Settings(connect_timeout_s=20, slot_bytes=4096)
    meetings = in_process(3, [0, 0, 1], settings)

    def rank(number: int) -> None:
        engine = Engine(meetings[number].connect(), settings)
        assert allreduce(engine, "x", np.ones(3))[0] == 3
        end(engine, how)

    # The heap takes some hundred generations to reach the size that it then swings about, by 2 MB up and down; so
    # the least of several looks counts, at the beginning and at the end.
    warm_up, window = max(WARM_UP, count // 10), max(10, count // 10)
    before, after = Least(), Least()
    for number in range(warm_up + count + 1):
        if (number - warm_up) % (window // 10) == 0 and warm_up <= number <= warm_up + window:
            before.look()
        if (number - warm_up) % (window // 10) == 0 and number >= warm_up + count - window:
            after.look()
        outcomes = run_threads([lambda r=r: rank(r) for r in range(3)])
        # A rank that is still in its operation learns which ranks have left.
        assert all(o is None or isinstance(o, CollectiveError) for o in outcomes), outcomes
        del outcomes
    print(json.dumps({"before": before.held, "after": after.held}))


if __name__ == "__main__":
    main()
