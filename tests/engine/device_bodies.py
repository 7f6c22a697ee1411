"""What rank processes with a pretended GPU run; each is called as fn(engine, talk)."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import numpy as np

from sparkhvd.engine import DType, Engine, ReduceOp, TensorView, Work

LIBRARIES = Path(__file__).parents[2] / "build" / "native"
CUDA = LIBRARIES / "libfake_cuda.so"
NCCL = LIBRARIES / "libfake_nccl.so"


def open_device(engine: Engine) -> ctypes.CDLL:
    """The rank's device, of the stand-in; returns its controls."""
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
    engine: Engine, name: str, array: DeviceArray, timeout_s: float | None = None
) -> Work:
    """An allreduce in place."""
    tensor = TensorView(array.buffer.address, array.buffer.address, array.values.shape)
    call = engine.prepare_allreduce([tensor], DType.FLOAT32, ReduceOp.SUM, device=engine.rank)
    call.request.stream = 0
    return engine.start(call, name, array, timeout_s)


def add(engine: Engine, talk: Any) -> Any:
    """One allreduce, and what is told about it."""
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
    """Rank 2's device does not come to the operation; the others' wait in it."""
    fake = open_device(engine)
    array = DeviceArray(engine, np.ones(5, np.float32))
    start_sum(engine, "first", array).wait()
    if engine.rank == 2:
        fake.fake_cuda_hang(b"ncclAllReduce@stream", 1)
    work = start_sum(engine, "x", array)
    work.wait_stream(0)
    talk.say("running")
    work.wait()


def negotiate_until_it_fails(engine: Engine, talk: Any) -> Any:
    """Rank 2 does not submit."""
    open_device(engine)
    array = DeviceArray(engine, np.ones(5, np.float32))
    talk.say("running")
    if engine.rank == 2:
        talk.hear()
    start_sum(engine, "x", array).wait()


def connect_until_it_fails(engine: Engine, talk: Any) -> Any:
    """Rank 2 is stuck in the making of the communicator, where the others wait for it."""
    fake = open_device(engine)
    if engine.rank == 2:
        fake.fake_cuda_hang(b"ncclCommInitRankConfig", 1)
    engine.barrier(name="start").wait()
    call = engine.prepare_allreduce(
        [TensorView(0, 0, (0,))], DType.FLOAT32, ReduceOp.SUM, device=engine.rank
    )
    call.request.stream = 0
    work = engine.start(call, "x")
    talk.say("running")
    work.wait()


def fork_beside_it(engine: Engine, talk: Any) -> Any:
    """A forked child drops what it has of the device, and calls nothing of CUDA."""
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
