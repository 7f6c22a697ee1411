"""Run the programs of `ways.py` on a rank, for test_like_ddp.py."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

import sparkhvd.torch as hvd
from tests.torch import (  # noqa: F401 - enters its programs
    programs_of_models,
    programs_of_steps,
)
from tests.torch.ways import BEHAVIOURS, DDP, Ours, Result, Way, flat

TIMEOUT_S = 30


@dataclass(frozen=True)
class Outcome:
    """The end of a program on a rank: its result, the change of its weights, or its error."""

    values: Tensor
    moved: float = 0.0
    error: str = ""


def outcome(program: Callable[[Way], Result], way: Way) -> Outcome:
    """Run a program one way."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DDP's advice, and torch's warnings about new features
        values = flat(program(way))
    start = torch.cat(way.at_start)
    return Outcome(values, float((values[: len(start)] - start[: len(values)]).abs().max()))


def attempted(program: Callable[[Way], Result], way: Way) -> Outcome:
    """Run a program on a rank. An error is an outcome too."""
    try:
        found = outcome(program, way)
        if isinstance(way, Ours):
            hvd.barrier()  # where a rank that continues receives another's error
    except Exception:  # noqa: BLE001 - reported to the test
        return Outcome(torch.empty(0), error=traceback.format_exc())
    return found


def run_all(meeting: str, names: Sequence[str]) -> dict[tuple[str, str], Outcome]:
    """Run programs by DDP and by ours on this rank, and some in one process."""
    hvd.init()
    dist.init_process_group(
        "gloo",
        f"file://{meeting}",
        rank=hvd.rank(),
        world_size=hvd.size(),
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    found: dict[tuple[str, str], Outcome] = {}
    for name in names:
        entry = BEHAVIOURS[name]
        if entry.has_ddp:
            found[name, "ddp"] = attempted(entry.program, DDP())
        for options in entry.options:
            found[name, options] = attempted(entry.program, Ours(options))
            if found[name, options].error:
                hvd.shutdown()  # ends the other rank's wait, which then also comes here
                hvd.init()
    dist.destroy_process_group()
    for name in names[hvd.rank() :: hvd.size()]:
        found[name, "one process"] = attempted(BEHAVIOURS[name].program, Way())
    return found
