"""A rank of `scale.py`: runs the driver's measurements, without torch.

The driver sends {"what", "bytes", "steps"}; the answer is {"wall": seconds of each step, "cpu": CPU seconds of this
process per step}. None ends the rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from sparkhvd.engine.calls import Reduction, TensorView
from sparkhvd.engine.engine import Engine
from sparkhvd.engine.library import DType, ReduceOp

# Tensors of a step of "many": submitted together, then all waited for.
MANY = 32


def rank(engine: Engine, talk: Any) -> None:
    """Measure on demand."""
    steps: dict[str, Callable[[Any], None]] = {
        "barrier": lambda array: engine.barrier(name="barrier").wait(),
        "one": lambda array: start(engine, "one", array).wait(),
        "many": lambda array: many(engine, array),
        "agree": lambda _: agree(engine),
    }
    while (order := talk.hear()) is not None:
        array = np.zeros(max(1, order["bytes"] // 4), np.float32)
        step = steps[order["what"]]
        for _ in range(3):
            step(array)
        engine.barrier(name="start").wait()
        walls = []
        cpu = time.process_time()
        for _ in range(order["steps"]):
            began = time.perf_counter()
            step(array)
            walls.append(time.perf_counter() - began)
        talk.say({"wall": walls, "cpu": (time.process_time() - cpu) / order["steps"]})


def agree(engine: Engine) -> None:
    """Submit a step of agreement without data, and wait for it."""
    for work in [engine.barrier(name=f"barrier {i}") for i in range(MANY)]:
        work.wait()


def start(engine: Engine, name: str, array: Any) -> Any:
    address = array.ctypes.data
    view = TensorView(address, address, array.shape)
    return engine.allreduce(
        [view], name=name, dtype=DType.FLOAT32, reduction=Reduction(ReduceOp.SUM), keep=array
    )


def many(engine: Engine, array: Any) -> None:
    # Each its own memory: operations in flight must not share their tensors.
    arrays = [array.copy() for _ in range(MANY)]
    works = [start(engine, f"tensor {i}", one) for i, one in enumerate(arrays)]
    for work in works:
        work.wait()
