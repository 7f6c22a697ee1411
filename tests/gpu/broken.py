"""Functions that fail, for the tests of `make gpu` with failures."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

import sparkhvd.torch as hvd
from sparkhvd.engine.engine import Engine
from tests.gpu import rank
from tests.gpu.bodies import BODIES
from tests.gpu.machine import Machine
from tests.harness.rank_process import Talk


def fails(gpu: Machine) -> str:
    """Rank 1 alone finds an error, while rank 0 waits for it."""
    if hvd.rank() == 1:
        raise AssertionError("seven is not eight")
    hvd.allreduce(gpu.tensor(torch.ones(3)))
    return ""


def hangs(gpu: Machine) -> str:
    """No rank returns."""
    time.sleep(3600)
    return ""


def dies(gpu: Machine) -> str:
    """End a process silently, like a fault in a library."""
    if hvd.rank() == 1:
        os._exit(139)
    hvd.allreduce(gpu.tensor(torch.ones(3)))
    return ""


def works(gpu: Machine) -> str:
    return str(float(hvd.allreduce(gpu.tensor(torch.ones(3)), op=hvd.Sum)[0]))


def serve(engine: Engine, talk: Talk) -> Any:
    """Serve like the real one, with these bodies."""
    BODIES.update({body.__name__: body for body in (fails, hangs, dies, works)})
    return rank.serve(engine, talk)
