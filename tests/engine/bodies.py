"""Functions of rank processes. Each is called as fn(engine, talk)."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import time
import weakref
from typing import Any

import numpy as np

from sparkhvd.engine.calls import Reduction
from sparkhvd.engine.engine import Engine
from sparkhvd.engine.library import Collective, DType, ReduceOp
from sparkhvd.errors import CollectiveError
from sparkhvd.rendezvous.rendezvous import SocketRendezvous
from tests.engine.arrays import allreduce, start_allreduce, view
from tests.harness.rank_process import Talk
from tests.harness.waiting import wait_until


def add(engine: Engine, talk: Talk) -> Any:
    """Run one allreduce."""
    return allreduce(engine, "x", np.full(3, engine.rank + 1.0)).tolist()


def add_without_rank_1(rendezvous: SocketRendezvous, talk: Talk) -> Any:
    """Rank 1 dies before it connects. The other ranks run an allreduce."""
    if rendezvous.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with Engine(rendezvous.connect(), rendezvous.settings) as engine:
        return add(engine, talk)


def poll_in_opposite_orders(engine: Engine, talk: Talk) -> Any:
    """Rank 0 submits A, B. Rank 1 submits B, A. Both only poll."""
    engine.barrier(name="start").wait()
    names = ["A", "B"] if engine.rank == 0 else ["B", "A"]
    # One size exceeds a slot, so that the copy at submission does not finish it.
    sizes = {"A": 10, "B": 3_000_000}
    started = time.monotonic()
    works = {
        name: start_allreduce(engine, name, np.full(sizes[name], engine.rank + 1.0, np.float32))
        for name in names
    }
    pending = dict(works)
    while pending:
        for name, (work, _) in list(pending.items()):
            if work.done():
                del pending[name]
        time.sleep(0.0005)
        assert time.monotonic() - started < 10, f"{sorted(pending)} never finish by polling"
    return {name: [float(r.min()), float(r.max())] for name, (_, r) in works.items()}


def hold_the_gil(engine: Engine, talk: Talk) -> Any:
    """Rank 1 submits and then keeps its interpreter busy for 0.8 s, which must not delay rank 0's waits."""
    libc = ctypes.PyDLL(None)  # keeps the GIL during the call
    engine.barrier(name="start").wait()
    seconds = []
    for size in (10, 1_000_000):  # below and above what is copied at submission
        work, result = start_allreduce(engine, f"x {size}", np.ones(size, np.float32))
        if engine.rank == 1:
            libc.usleep(800_000)
            work.wait()
        else:
            time.sleep(0.3)  # rank 1 has submitted and is asleep
            start = time.monotonic()
            work.wait()
            seconds.append(time.monotonic() - start)
        assert np.all(result == 2)
        engine.barrier(name=f"next {size}").wait()
    return seconds


def reduce_until_it_fails(engine: Engine, talk: Talk) -> Any:
    """Repeat allreduces until the test or a lost rank ends it."""
    allreduce(engine, "first", np.ones(1000, np.float32))
    talk.say("running")
    step = 0
    while True:
        allreduce(engine, f"step {step}", np.ones(300_000, np.float32))
        step += 1


def wait_for_a_rank_that_never_comes(engine: Engine, talk: Talk) -> Any:
    """Wait for the last rank, which submits nothing."""
    engine.barrier(name="start").wait()
    if engine.rank == engine.size - 1:
        talk.say("running")
        time.sleep(60)
    talk.say("running")
    allreduce(engine, "x", np.ones(10, np.float32))
    return "done"


def wait_beside_forked_children(engine: Engine, talk: Talk) -> Any:
    """Wait as above, with a living forked child, which must not keep the sockets open."""
    engine.barrier(name="start").wait()
    child = os.fork()
    if child == 0:
        time.sleep(4)  # longer than the test allows
        os._exit(0)
    talk.say("running")
    if engine.rank == engine.size - 1:
        time.sleep(60)
    allreduce(engine, "x", np.ones(10, np.float32))
    return "done"


def use_in_forked_child(engine: Engine, talk: Talk) -> Any:
    """Use the engine in a forked child, which gets an error, while the parent continues."""
    before, _ = start_allreduce(engine, "before", np.ones(4, np.float32))
    before.wait()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        texts = []
        for call in (lambda: allreduce(engine, "x", np.ones(3)), before.done, engine.check):
            try:
                call()
            except Exception as error:  # noqa: BLE001 - reported to the test
                texts.append(f"{type(error).__name__}: {error}")
        engine.shutdown()
        engine.abort("no rank receives this")
        # No socket of the parent is left in the child.
        sockets = [
            fd
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")
            and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        ]
        os.write(write, repr((texts, len(sockets))).encode())
        os._exit(0)
    os.waitpid(child, 0)
    written = os.read(read, 10_000).decode()
    os.close(read)
    os.close(write)
    after = allreduce(engine, "after", np.ones(4, np.float32)).tolist()
    return [written, after]


def interrupted_wait(engine: Engine, talk: Talk) -> Any:
    """Ctrl-C while rank 0 waits for a rank that submits nothing."""
    engine.barrier(name="start").wait()
    if engine.rank == 1:
        talk.hear()
        allreduce(engine, "x", np.ones(10, np.float32))
        return "done"
    work, _ = start_allreduce(engine, "x", np.ones(10, np.float32))
    talk.say("waiting")
    try:
        work.wait()
    except KeyboardInterrupt:
        talk.say(time.monotonic())
    talk.hear()
    work.wait()  # the operation has continued
    return "done"


def interrupted_run(engine: Engine, talk: Talk) -> Any:
    """Ctrl-C in a call that submits and waits. The memory of its operation must stay alive."""
    engine.barrier(name="start").wait()
    if engine.rank == 1:
        talk.hear()
        allreduce(engine, "x", np.ones(100_000))
        return "done"

    class Buffer(np.ndarray):  # a plain array has no weak references in old NumPy
        pass

    array = np.ones(100_000).view(Buffer)
    alive = weakref.ref(array)
    call = engine.prepare(
        Collective.ALLREDUCE, [view(array, array)], DType.FLOAT64, Reduction(ReduceOp.SUM)
    )
    talk.say("waiting")
    try:
        engine.run(call, "x", array)
    except KeyboardInterrupt:
        talk.say(time.monotonic())
    del array
    gc.collect()
    assert alive() is not None
    talk.hear()

    def is_given_up() -> bool:
        engine._state.reap()  # like any later call
        return alive() is None

    wait_until(is_given_up, "the array is given up", within_s=10)
    return "done"


class Tick(Exception):
    """Exception that a timer raises."""


def is_done(work: Any) -> bool:
    try:
        return bool(work.done())
    except CollectiveError:  # the other rank has left without submitting it
        return False


def interrupted_at_any_moment(engine: Engine, talk: Talk) -> Any:
    """Rank 0's calls are interrupted repeatedly, before, in and after the native code."""
    count, interrupted = 3000, 0
    if (
        engine.rank == 1
    ):  # has all of them in flight. Those that rank 0 did not submit end with the engine
        works = [start_allreduce(engine, str(number), np.ones(3)) for number in range(count)]
        engine.barrier(name="end").wait()
        return sum(is_done(work) for work, _ in works)

    armed = False

    def tick(number: int, frame: Any) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise Tick

    signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0007)
    for number in range(count):
        array = np.ones(3)
        try:
            armed = True
            if number % 2:
                call = engine.prepare(
                    Collective.ALLREDUCE,
                    [view(array, array)],
                    DType.FLOAT64,
                    Reduction(ReduceOp.SUM),
                )
                engine.run(call, str(number), array)
            else:
                start_allreduce(engine, str(number), array)[0].wait()
            armed = False
        except Tick:
            interrupted += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    engine.barrier(name="end").wait()
    gc.collect()
    engine._state.reap()
    return [interrupted, len(engine._state.works)]


def leave_with_an_exception(engine: Engine, talk: Talk) -> Any:
    """Rank 0 raises inside `with Engine` while the others are in an operation."""
    engine.barrier(name="start").wait()
    if engine.rank == 0:
        raise ValueError("the reason")
    allreduce(engine, "x", np.ones(10, np.float32))
    return "done"
