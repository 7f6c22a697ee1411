"""Parts of a 4-byte allreduce of two ranks on one CPU: the unavoidable and the engine's cost.

    .venv/bin/python benchmarks/one_cpu.py [--rounds 9] [--json FILE] [--write]

Every part runs on CPU 0 of two processes (the call of one rank alone: of one), by turns. Handing over is a counter in shared memory
that the processes increase by turns, with `sched_yield` or an eventfd between; a round trip is two of them. No torch.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import mmap
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from scale import BODY, TIMEOUT_S, end, ordered
from scale_rank import start

from common import ROOT, Report, median_and_quartiles

sys.path.insert(0, str(ROOT))
from sparkhvd.engine.engine import Engine  # noqa: E402 - of the checkout
from sparkhvd.rendezvous import in_process  # noqa: E402
from sparkhvd.settings import Settings  # noqa: E402
from tests.harness.rank_process import rank_processes  # noqa: E402

CPU = 0
CALLS = 2000
WARM_UP = 200
Step = Callable[[], Any]


class Turns:
    """Turns of this process and a child of it."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._count = ctypes.c_uint64.from_buffer(self._memory)
        self._events = [os.eventfd(0), os.eventfd(0)]
        self.me = 0

    def by_yield(self) -> None:
        """Give the other its turn and wait for the next one."""
        self._count.value += 1
        while self._count.value % 2 != self.me:
            os.sched_yield()

    def by_eventfd(self) -> None:
        os.eventfd_write(self._events[1 - self.me], 1)
        os.eventfd_read(self._events[self.me])


Make = Callable[[Turns], contextlib.AbstractContextManager[Step]]


@contextlib.contextmanager
def partner(turns: Turns, make: Make) -> Iterator[Step]:
    """Run the step in a child process until the end, and yield this process's step.

    The child waits for its first turn.
    """
    child = os.fork()
    if child == 0:
        turns.me = 1
        with make(turns) as step:
            while True:
                step()
    try:
        with make(turns) as step:
            yield step
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def per_step(step: Step) -> list[float]:
    """Measure the seconds of each step."""
    for _ in range(WARM_UP):
        step()
    times = []
    for _ in range(CALLS):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return times


@contextlib.contextmanager
def lone_call() -> Iterator[Step]:
    """Make an engine of one rank, and a call of it."""
    (meeting,) = in_process(1, (0,), Settings())
    with Engine(meeting.connect(), Settings()) as engine:
        array = np.zeros(1, np.float32)
        yield lambda: start(engine, "one", array).wait()


@contextlib.contextmanager
def call_and_hand_over(turns: Turns) -> Iterator[Step]:
    """Make a step of both."""
    with lone_call() as call:

        def step() -> None:
            call()
            turns.by_yield()

        yield step


# Of two processes that take turns.
IN_TURNS: dict[str, Make] = {
    "handing over and back, sched_yield": lambda turns: contextlib.nullcontext(turns.by_yield),
    "handing over and back, eventfd": lambda turns: contextlib.nullcontext(turns.by_eventfd),
    "the call on each of two engines of one rank, handed over by sched_yield": call_and_hand_over,
}


def parts() -> Iterator[tuple[str, list[float]]]:
    """Measure each part once."""
    for name, make in IN_TURNS.items():
        turns = Turns()
        with partner(turns, make) as step:
            yield name, per_step(step)
    with lone_call() as step:
        yield "the call on an engine of one rank, alone", per_step(step)
    with rank_processes(BODY, 2, settings=Settings(connect_timeout_s=TIMEOUT_S)) as ranks:
        ordered(ranks, "one", 4, WARM_UP)
        yield "allreduce of two ranks", ordered(ranks, "one", 4, CALLS)["wall"]
        end(ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="a file for the raw numbers")
    parser.add_argument("--write", action="store_true", help="keep the table in docs/results/")
    options = parser.parse_args()
    os.sched_setaffinity(0, {CPU})
    report = Report(f"Two ranks on one CPU, load {os.getloadavg()[0]:.1f} at the start")
    found: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for name, times in parts():
            found.setdefault(name, []).append(statistics.median(times))
    report.table(["4 B", "time"], [[name, median_and_quartiles(t)] for name, t in found.items()])
    report.raw["one CPU"] = found
    report.note(f"Medians of {CALLS} calls in each of {options.rounds} rounds, in turn.")
    report.finish("benchmarks/one_cpu.py", write=options.write, json_path=options.json)


if __name__ == "__main__":
    main()
