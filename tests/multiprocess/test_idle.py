"""What an engine costs while nothing happens: CPU time of the whole process, all its threads."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from sparkhvd.engine import Engine
from tests.engine.arrays import allreduce
from tests.harness.rank_process import Talk, rank_processes
from tests.harness.soak import amount

SECONDS = amount(2, 60)
MAX_IDLE = 0.002  # of one core
# A wait comes back to Python twenty times a second, so that Ctrl-C works.
MAX_WAITING = 0.01


def share_of_a_core(seconds: float, sleep: Any) -> float:
    """CPU time of this process per second while `sleep()` lasts."""
    cpu, began = time.process_time(), time.monotonic()
    sleep()
    took = time.monotonic() - began
    assert took > seconds / 2
    return (time.process_time() - cpu) / took


def rest(engine: Engine, talk: Talk) -> Any:
    """Work, then nothing in flight; then rank 0 waits for a rank that comes late."""
    for number in range(50):
        allreduce(engine, f"work {number}", np.ones(20_000, np.float32))
    engine.barrier(name="rested").wait()
    time.sleep(0.1)  # the last operation's threads go to sleep
    idle = share_of_a_core(SECONDS, lambda: time.sleep(SECONDS))
    engine.barrier(name="before the wait").wait()
    if engine.rank == 0:
        waiting = share_of_a_core(SECONDS, lambda: allreduce(engine, "late", np.ones(3)))
        return {"idle": idle, "waiting": waiting}
    time.sleep(SECONDS)
    allreduce(engine, "late", np.ones(3))
    return {"idle": idle}


@pytest.mark.parametrize("tcp_only", [False, True])
def test_idle_and_waiting_engines_use_no_cpu(tcp_only: bool) -> None:
    with rank_processes(f"{__name__}:rest", 2, tcp_only=tcp_only) as ranks:
        first, second = (rank.expect(30 + 3 * SECONDS) for rank in ranks)
    assert max(first["idle"], second["idle"]) < MAX_IDLE, (first, second)
    assert first["waiting"] < MAX_WAITING, first
