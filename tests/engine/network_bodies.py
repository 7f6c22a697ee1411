"""Functions of ranks on two hosts. Each is called as fn(engine, talk)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from sparkhvd.engine.engine import Engine
from sparkhvd.engine.library import Collective, DType, ReduceOp
from sparkhvd.errors import PeerLostError
from tests.engine.arrays import (
    allgather,
    allreduce,
    broadcast,
    dtype_of,
    expected,
    random_array,
    start_receive,
    start_send,
    view,
)
from tests.harness.rank_process import Talk

# One element, less and more than a part of the exchange (256 KiB), and several parts with a rest.
SIZES = (1, 1_000, 400_007)
TYPES = (DType.FLOAT32, DType.FLOAT16, DType.INT64)


def collectives(engine: Engine, talk: Talk) -> Any:
    """Run rounds of all collectives, compare them with NumPy, and return the hosts as the engine sees them."""
    for number in range(talk.hear()):
        for size in SIZES:
            for dtype in TYPES:
                label = f"{number}/{size}/{dtype.name}"
                inputs = [
                    random_array(dtype, (size,), seed=1000 * number + rank)
                    for rank in range(engine.size)
                ]
                own = inputs[engine.rank]
                got = allreduce(engine, f"sum {label}", own)
                want = expected(dtype_of(own), ReduceOp.SUM, inputs)
                # Ranks are added inside a host, then hosts, so sums are equal up to rounding.
                close = (
                    {"rtol": 1e-2, "atol": 2e-2}
                    if dtype == DType.FLOAT16
                    else {"rtol": 1e-5, "atol": 1e-5}
                )
                np.testing.assert_allclose(got, want, **close, err_msg=label)
                root = number % engine.size
                got = broadcast(engine, f"broadcast {label}", own, root)
                np.testing.assert_array_equal(got, inputs[root], err_msg=label)
                rows = [values[: max(0, size - rank)] for rank, values in enumerate(inputs)]
                joined, _ = allgather(engine, f"gather {label}", rows[engine.rank])
                np.testing.assert_array_equal(joined, np.concatenate(rows), err_msg=label)
        engine.barrier(name=f"round {number}").wait()
    return list(engine.topology.hosts)


class AllCameError(Exception):
    """No rank was lost, and all messages have arrived."""


def keep_busy(engine: Engine, talk: Talk) -> Any:
    """Keep bytes in transit all the time."""

    def run() -> None:
        for step in itertools.count():
            allreduce(engine, f"step {step}", np.ones(300_000, np.float32))

    return until_a_rank_is_lost(engine, talk, run)


def fill_the_window_of_a_stopped_rank(engine: Engine, talk: Talk) -> Any:
    """Send rank 1, which is stopped, more small messages than its socket holds, and wait for it.

    If the received message has `stop_in_transfer`, rank 1 is stopped during a tensor, so that its connection for
    tensors is full too. If it continues, it gets all messages.
    """
    stop_in_transfer = talk.hear()["stop_in_transfer"]
    tensor = np.full(8 << 20, engine.rank + 1.0, np.float32)
    messages = [np.full(7000, number, np.float64) for number in range(8)]

    def run() -> None:
        if stop_in_transfer:
            call = engine.prepare(Collective.BROADCAST, [view(tensor, tensor)], dtype_of(tensor))
            transfer = engine.start(call, "tensor", tensor)
        if engine.rank == 0:
            talk.hear()
            for number, message in enumerate(messages):
                start_send(engine, f"message {number}", message, 1, tag=5)
            talk.say("sent")
        elif not stop_in_transfer:
            time.sleep(600)
        if stop_in_transfer:
            transfer.wait()
            assert (tensor == 1).all()
        if engine.rank == 1:
            for number, message in enumerate(messages):
                got = np.empty_like(message)
                start_receive(engine, f"message {number}", got, 0, tag=5).wait()
                np.testing.assert_array_equal(got, message)
        engine.barrier(name="last").wait()
        raise AllCameError

    try:
        return until_a_rank_is_lost(engine, talk, run)
    except AllCameError:
        return "all came"


def exchange_on_a_slow_path(engine: Engine, talk: Talk) -> Any:
    """Wait for an allreduce that waits for an alltoall of some MB, and return the seconds."""
    rows = np.full((engine.size, talk.hear() << 17), engine.rank + 1.0)
    engine.barrier(name="start").wait()
    began = time.monotonic()
    call = engine.prepare(
        Collective.ALLTOALL, [view(rows)], dtype_of(rows), numbers=(1,) * engine.size
    )
    exchange = engine.start(call, "exchange", rows)
    total = allreduce(engine, "behind it", np.full(1000, engine.rank + 1.0))
    exchange.wait()
    assert (total == engine.size * (engine.size + 1) / 2).all()
    return time.monotonic() - began


def wait_in_silence(engine: Engine, talk: Talk) -> Any:
    """Each rank waits for the others in a different operation, so that no bytes are in transit."""
    name = f"only rank {engine.rank}"
    return until_a_rank_is_lost(engine, talk, lambda: allreduce(engine, name, np.ones(10)))


def until_a_rank_is_lost(engine: Engine, talk: Talk, run: Callable[[], Any]) -> Any:
    """Return the time of the loss by this machine's clock, and the error. Leaving the engine takes more time."""
    engine.barrier(name="start").wait()
    talk.say("running")
    try:
        run()
    except PeerLostError as error:
        return {"at": time.monotonic(), "text": str(error), "lost": dict(error.lost)}
    raise AssertionError("no rank was lost")
