"""Functions of rank processes with a GPU of the stand-in. Each is called as fn(engine, talk)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import numpy as np

from sparkhvd.engine.calls import Reduction, TensorView
from sparkhvd.engine.engine import Engine
from sparkhvd.engine.library import Collective, DType, ReduceOp
from sparkhvd.engine.work import Work
from sparkhvd.errors import CollectiveError, CollectiveTimeoutError
from tests.engine.arrays import allreduce
from tests.harness.paths import ROOT
from tests.harness.waiting import wait_until

LIBRARIES = ROOT / "build" / "native"
CUDA = LIBRARIES / "libfake_cuda.so"
NCCL = LIBRARIES / "libfake_nccl.so"


def open_device(engine: Engine) -> ctypes.CDLL:
    """Open the rank's device, of the stand-in, and return its controls."""
    engine.open_device(engine.rank, str(CUDA), str(NCCL))
    return ctypes.CDLL(str(CUDA))


class DeviceArray:
    """Memory of the device, which the stand-in keeps in host memory."""

    def __init__(self, engine: Engine, values: np.ndarray[Any, Any]) -> None:
        self.buffer = engine.allocate(values.nbytes, device=engine.rank)
        raw = (ctypes.c_char * values.nbytes).from_address(self.buffer.address)
        self.values = np.frombuffer(raw, values.dtype)
        self.values[:] = values


def start_sum(
    engine: Engine,
    name: str,
    array: DeviceArray,
    timeout_s: float | None = None,
    process_set: int = 0,
) -> Work:
    """Start an allreduce in place."""
    tensor = TensorView(array.buffer.address, array.buffer.address, array.values.shape)
    call = engine.prepare(
        Collective.ALLREDUCE,
        [tensor],
        DType.FLOAT32,
        Reduction(ReduceOp.SUM),
        process_set,
        device=engine.rank,
    )
    call.request.stream = 0
    return engine.start(call, name, array, timeout_s)


def add(engine: Engine, talk: Any) -> Any:
    """Run one allreduce, and send the test its result."""
    open_device(engine)
    array = DeviceArray(engine, np.full(5, engine.rank + 1, np.float32))
    work = start_sum(engine, "x", array)
    work.wait_stream(0)
    work.wait()
    algorithms = sorted(
        entry["algorithm"] for entry in engine.counters()["collectives"] if entry["algorithm"]
    )
    return array.values.tolist(), array.buffer.device, algorithms


def spin_until_it_fails(engine: Engine, talk: Any) -> Any:
    """Rank 2's device does not reach the operation, in which the other ranks' devices wait."""
    fake = open_device(engine)
    array = DeviceArray(engine, np.ones(5, np.float32))
    start_sum(engine, "first", array).wait()
    if engine.rank == 2:
        fake.fake_cuda_hang(b"ncclAllReduce@stream", 1)
    work = start_sum(engine, "x", array)
    work.wait_stream(0)
    talk.say("running")
    work.wait()


def reduce_beside_a_launch(engine: Engine, talk: Any) -> Any:
    """Measure the seconds of small allreduces on the CPU while another thread waits three seconds for a launch, and other
    programs use the CPUs.
    """
    fake = open_device(engine)
    array = DeviceArray(engine, np.ones(5, np.float32))
    start_sum(engine, "first", array).wait()
    fake.fake_cuda_delay_us(b"ncclAllReduce", 1, 3_000_000)
    slow = start_sum(engine, "slow", array)
    waiter = threading.Thread(target=slow.wait_stream, args=(0,))
    waiter.start()
    seconds = []
    with contextlib.ExitStack() as stack:
        # Here, because the kernel may divide the CPUs between sessions.
        for _ in range(2 * (os.cpu_count() or 1)):
            other = stack.enter_context(
                subprocess.Popen([sys.executable, "-c", "while True: pass"])
            )
            stack.callback(other.kill)
        end = time.monotonic() + 1
        while time.monotonic() < end:
            began = time.perf_counter()
            allreduce(engine, f"x {len(seconds)}", np.ones(3))
            seconds.append(time.perf_counter() - began)
            time.sleep(0.013)  # not in step with the scheduler
    is_waiting = waiter.is_alive()
    waiter.join()
    slow.wait()
    return seconds, is_waiting


def negotiate_until_it_fails(engine: Engine, talk: Any) -> Any:
    """Rank 2 does not submit."""
    open_device(engine)
    array = DeviceArray(engine, np.ones(5, np.float32))
    talk.say("running")
    if engine.rank == 2:
        talk.hear()
    start_sum(engine, "x", array).wait()


def relay_until_it_fails(engine: Engine, talk: Any) -> Any:
    """Rank 2 coordinates an own set, whose orders rank 0 relays. Its death ends all of them."""
    open_device(engine)
    alone = add_set(engine, 2)
    array = DeviceArray(engine, np.ones(5, np.float32))
    talk.say("running")
    while engine.rank == 2:
        start_sum(engine, "again", array, process_set=alone).wait_stream(0)
    start_sum(engine, "x", array).wait()


def connect_until_it_fails(engine: Engine, talk: Any) -> Any:
    """Rank 2 hangs while the communicator is made, where the other ranks wait for it."""
    fake = open_device(engine)
    if engine.rank == 2:
        fake.fake_cuda_hang(b"ncclCommInitRankConfig", 1)
    engine.barrier(name="start").wait()
    call = engine.prepare(
        Collective.ALLREDUCE,
        [TensorView(0, 0, (0,))],
        DType.FLOAT32,
        Reduction(ReduceOp.SUM),
        device=engine.rank,
    )
    call.request.stream = 0
    work = engine.start(call, "x")
    talk.say("running")
    work.wait()


REMOTE_ERROR = 6  # ncclRemoteError


def add_set(engine: Engine, *ranks: int) -> int:
    """Add a process set with a communicator on the device."""
    work = engine.add_process_set(ranks)
    work.wait()
    return work.output().rows[0]


def leave_and_let_nccl_tell(engine: Engine, talk: Any) -> Any:
    """Rank 1 shuts down while rank 0 waits for it on the device, where NCCL reports the lost peer.

    The test chooses which comes first.
    """
    first = talk.hear()
    fake = open_device(engine)
    pair, others = add_set(engine, 0, 1), add_set(engine, 0, 2)
    array = DeviceArray(engine, np.ones(5, np.float32))
    if engine.rank < 2:
        start_sum(engine, "first", array, process_set=pair).wait()
    engine.barrier(name="ready").wait()
    text = ""
    if engine.rank == 1:
        fake.fake_cuda_hang(b"ncclAllReduce@stream", 1)
        start_sum(engine, "x", array, process_set=pair).wait_stream(0)
        time.sleep(0.1 if first == "error" else 0)
        engine.shutdown()
        return "left"
    if engine.rank == 0:
        fake.fake_cuda_fail(b"ncclAllReduce@stream", 1, REMOTE_ERROR)
        fake.fake_cuda_stream_delay_us(0 if first == "error" else 300_000)
        work = start_sum(engine, "x", array, process_set=pair)
        try:
            work.wait()
        except CollectiveError as error:
            text = f"{type(error).__name__}: {error}"
        fake.fake_cuda_reset()
        fake.fake_cuda_stream_delay_us(0)
    # The set without the departed rank continues.
    array.values[:] = 1
    start_sum(engine, "y", array, process_set=others).wait()
    return text, array.values.tolist()


def stand_still(engine: Engine, talk: Any) -> Any:
    """Rank 1's GPU does not reach the operation for a while."""
    fake = open_device(engine)
    pair = add_set(engine, 0, 1)
    array = DeviceArray(engine, np.ones(5, np.float32))
    start_sum(engine, "first", array, process_set=pair).wait()
    if engine.rank == 1:
        fake.fake_cuda_hang(b"ncclAllReduce@stream", 1)
    talk.say(engine.counters()["stall_warnings"])
    work = start_sum(engine, "stuck", array, process_set=pair)
    work.wait_stream(0)
    wait_until(lambda: engine.counters()["stall_warnings"] >= 2, "a stall is warned of")
    talk.say("warned")
    talk.hear()  # the other rank was warned, too
    if engine.rank == 1:
        fake.fake_cuda_reset()
    work.wait()
    start_sum(engine, "after", array, process_set=pair).wait()
    return engine.counters()["stall_warnings"]


def time_out(engine: Engine, talk: Any) -> list[bool]:
    """Let one operation succeed and one time out, and return whether the memory of each is still kept."""
    fake = open_device(engine)
    arrays = [DeviceArray(engine, np.ones(5, np.float32)) for _ in range(2)]
    start_sum(engine, "well", arrays[0]).wait()
    fake.fake_cuda_hang(b"ncclAllReduce", 1)
    with contextlib.suppress(CollectiveTimeoutError):
        start_sum(engine, "stuck", arrays[1], timeout_s=0.3).wait()
        raise AssertionError("it did not time out")
    fake.fake_cuda_reset()
    kept = [weakref.ref(array) for array in arrays]
    arrays.clear()
    engine.shutdown()
    return [array() is not None for array in kept]


def fork_beside_it(engine: Engine, talk: Any) -> Any:
    """Fork a child, which drops its references to the device and calls nothing of CUDA."""
    fake = open_device(engine)
    array = DeviceArray(engine, np.ones(5, np.float32))
    work = start_sum(engine, "x", array)
    work.wait()
    calls = fake.fake_cuda_count(b"cuCtxPushCurrent")
    child = os.fork()
    if child == 0:
        del array.values, array.buffer, array, work
        same = fake.fake_cuda_count(b"cuCtxPushCurrent") == calls
        os._exit(0 if same else 1)
    _, status = os.waitpid(child, 0)
    again = DeviceArray(engine, np.ones(5, np.float32))
    start_sum(engine, "y", again).wait()
    return os.waitstatus_to_exitcode(status), again.values.tolist()
