"""CPU time of an idle engine: the whole process with all its threads."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sparkhvd.engine.engine import Engine
from tests.engine.arrays import allreduce
from tests.harness.rank_process import Talk, rank_processes
from tests.harness.soak import amount, left_to_soak

pytestmark = pytest.mark.processes

SECONDS = amount(2, 60)
# The minimum of several windows counts, each longer than the pause between two wakeups: an idle engine's work occurs in each
# of them. CPU time that a virtual machine's host takes is also charged to the process, on a busy host in most windows.
WINDOWS = 5
MAX_IDLE = 0.002  # of one core
MAX_IDLE_WAKES = 10  # a second
# A wait returns to Python ten times a second, so that Ctrl-C works, and checks 67 times a second whether a rank of
# its host has died: 0.3 % of a core each in a virtual machine.
MAX_WAITING = 0.01


def resting_cost(seconds: float) -> dict[str, float]:
    """CPU time of this process as a share of a core, and the wakeups of its threads per second."""
    wakes, began = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw, time.monotonic()
    shares = [share_of_a_core(lambda: time.sleep(seconds / WINDOWS)) for _ in range(WINDOWS)]
    wakes = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - wakes
    return {"share": min(shares), "wakes": wakes / (time.monotonic() - began)}


def share_of_a_core(work: Callable[[], object]) -> float:
    """CPU time of this process per second of `work()`."""
    cpu, began = time.process_time(), time.monotonic()
    work()
    return (time.process_time() - cpu) / (time.monotonic() - began)


def rest(engine: Engine, talk: Talk) -> Any:
    """Work, then keep nothing in flight. Then rank 0 waits repeatedly for a rank that is late."""
    for number in range(50):
        allreduce(engine, f"work {number}", np.ones(20_000, np.float32))
    engine.barrier(name="rested").wait()
    time.sleep(0.1)  # the last operation's threads go to sleep
    idle = resting_cost(SECONDS)
    waiting = []
    for window in range(WINDOWS):
        engine.barrier(name=f"before wait {window}").wait()
        if engine.rank == 1:
            time.sleep(SECONDS / WINDOWS)
        waiting.append(share_of_a_core(lambda: allreduce(engine, "late", np.ones(3))))
    return {"idle": idle, "waiting": min(waiting)}


@pytest.mark.parametrize("tcp_only", [True, *left_to_soak("connections of TCP, here", False)])
def test_idle_and_waiting_engines_use_no_cpu(tcp_only: bool) -> None:
    with rank_processes(f"{__name__}:rest", 2, tcp_only=tcp_only) as ranks:
        first, second = (rank.expect(30 + 3 * SECONDS) for rank in ranks)
    for rank in (first, second):
        assert rank["idle"]["share"] < MAX_IDLE, (first, second)
        assert rank["idle"]["wakes"] < MAX_IDLE_WAKES, (first, second)
    assert first["waiting"] < MAX_WAITING, first
