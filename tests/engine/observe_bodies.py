"""Functions of rank processes for the stall report and timelines. Each is called as fn(engine, talk)."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from typing import Any

import numpy as np

from sparkhvd.engine.engine import Engine
from sparkhvd.errors import PeerLostError
from sparkhvd.observe import timeline
from tests.engine.arrays import allreduce
from tests.harness.rank_process import Talk

LATE_S = 1.2


def sleeping_here() -> None:
    time.sleep(LATE_S)


def holding_the_gil_here() -> None:
    ctypes.PyDLL(None).usleep(int(LATE_S * 1e6))  # keeps the GIL during the call


def computing_here() -> None:
    end = time.monotonic() + LATE_S
    while time.monotonic() < end:
        sum(range(100))


def one_rank_is_late(engine: Engine, talk: Talk) -> Any:
    """Rank 1 is late, for the reason that the test gives. Rank 0 waits for it twice."""
    late = globals()[talk.hear()]
    engine.barrier(name="start").wait()
    if engine.rank == 1:
        late()
    engine.barrier(name="late").wait()
    return "done"


def coordinator_is_late(engine: Engine, talk: Talk) -> Any:
    """Rank 0, which coordinates, delays the others."""
    engine.barrier(name="start").wait()
    if engine.rank == 0:
        sleeping_here()
    engine.barrier(name="late").wait()
    return "done"


def late_rank_has_lost_its_handler(engine: Engine, talk: Talk) -> Any:
    """Rank 1 gives the signal its default action, which would end the process."""
    engine.barrier(name="start").wait()
    if engine.rank == 1:
        signal.signal(engine.settings.stack_signal, signal.SIG_DFL)
        sleeping_here()
    engine.barrier(name="late").wait()
    return "done"


def one_rank_comes_too_late(engine: Engine, talk: Talk) -> Any:
    """Both ranks get the error, and the engine stays usable."""
    engine.barrier(name="start").wait()
    if engine.rank == 1:
        sleeping_here()
    try:
        engine.barrier(name="late").wait()
    except TimeoutError as error:
        text = str(error)
    engine.barrier(name="after", timeout_s=20).wait()
    return text


def join_a_busy_rank(engine: Engine, talk: Talk) -> Any:
    """Rank 1 has no more work. Rank 0, which coordinates, works until the test stops its process."""
    engine.barrier(name="start").wait()
    if engine.rank == 0:
        talk.say("busy")
        while True:
            allreduce(engine, "work", np.ones(3))
            time.sleep(0.1)
    began = time.monotonic()
    talk.say("joining")
    try:
        engine.join().wait()
    except TimeoutError as error:
        return {"text": str(error), "seconds": time.monotonic() - began}
    return "joined"


def say_running_and_wait(engine: Engine, talk: Talk) -> Any:
    """Report that the rank runs, then wait for the other rank. The test stops one of them."""
    engine.barrier(name="start").wait()
    talk.say("running")
    if engine.rank == 1:
        talk.hear()
    engine.barrier(name="late").wait()
    return "done"


def record_all_ranks(engine: Engine, talk: Talk) -> Any:
    """Three ranks write one timeline. Rank 2 is late once."""
    path = talk.hear()
    before = len(os.listdir("/proc/self/fd"))
    timeline.start(engine, path, all_ranks=True)
    for step in range(20):
        if engine.rank == 2 and step == 10:
            time.sleep(1)
        allreduce(engine, f"layer {step % 4}", np.ones(5000, np.float32))
    timeline.stop(engine)
    return len(os.listdir("/proc/self/fd")) - before


def record_all_ranks_until_one_is_killed(engine: Engine, talk: Talk) -> Any:
    """Rank 0 keeps its records when rank 1 is gone."""
    timeline.start(engine, talk.hear(), all_ranks=True)
    allreduce(engine, "first", np.ones(1000, np.float32))
    talk.say("running")
    talk.hear()
    try:
        timeline.stop(engine)
    except PeerLostError as error:
        return str(error)


def record_until_killed(engine: Engine, talk: Talk) -> Any:
    """Rank 0's timeline, until the test kills it."""
    if engine.rank == 0:
        engine.start_timeline(talk.hear())
    allreduce(engine, "first", np.ones(1000, np.float32))
    talk.say("running")
    step = 0
    while True:
        allreduce(engine, f"step {step % 10}", np.ones(3000, np.float32))
        step += 1
