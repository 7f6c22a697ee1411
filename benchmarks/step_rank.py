"""A rank of `step.py` and `scaling.py`: trains a model in alternating variants and reports the times of the steps."""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from step_born import Born, zero_grad
from step_models import MODELS, Model
from torch import nn

import sparkhvd.torch as hvd

# See step_born.py.
BORN = "born in place"
# Gradients are reduced while backward runs, also where no core is left over for that.
OVERLAPPED = "overlapped"
# Options of sparkhvd's DistributedOptimizer by variant: one line each. What this sparkhvd lacks is left out.
OURS: dict[str, Callable[[], dict[str, Any]]] = {
    "sparkhvd": lambda: {},
    OVERLAPPED: lambda: {},
    # What waiting at the end of backward costs.
    "waits in step": lambda: {"synchronize_in_backward": False},
    "views": lambda: {"gradient_as_bucket_view": True},
    BORN: lambda: {"gradient_as_bucket_view": True},
    "fp16": lambda: {"compression": hvd.Compression.fp16},
    "powersgd": lambda: {"compression": hvd.Compression.powersgd(rank=4)},
    "sharded": lambda: {"sharded": True},
    "sharded shared": lambda: {"sharded": True, "share_parameters": True},
}
# These train with other gradients than the step without communication would.
LOSSY = ("fp16", "powersgd")
DDP: dict[str, dict[str, Any]] = {
    "DDP": {},
    "DDP views": {"gradient_as_bucket_view": True},
}
VARIANTS = ("none", *DDP, *OURS)
# More than one batch: an embedding that meets the same rows in every step has them in the cache.
BATCHES = 4


@dataclass(frozen=True)
class Plan:
    """Plan of a run of ranks.

    Attributes:
        model: a name of MODELS.
        variants: names of VARIANTS; those that this sparkhvd lacks are left out.
        rounds: that count; one more warms up.
        shorter: divides the number of steps in a row.
    """

    model: str
    variants: Sequence[str]
    rounds: int
    shorter: int = 1


@dataclass
class Blocks:
    """Measurements of a rank, one per variant, round and block, and errors of failed variants.

    Attributes:
        spans: when the block began and ended, by the clock that all processes of a host share.
        cpu: seconds of this process.
        steps: in each block.
        errors: the first line of an exception.
    """

    spans: dict[str, list[tuple[float, float]]]
    cpu: dict[str, list[float]]
    steps: int
    errors: dict[str, str]


@dataclass(frozen=True)
class Found:
    """Seconds of a step over all ranks, by variant and round, and errors of failed variants."""

    wall: dict[str, list[float]]
    cpu: dict[str, list[float]]
    errors: dict[str, str]


def measure(plan: Plan) -> Blocks:
    """Measure all variants by turns, in rotating order. Every rank must call this."""
    torch.set_num_threads(1)
    hvd.init()
    model = MODELS[plan.model]
    names = [name for name in plan.variants if is_available(name)]
    if any(name in DDP for name in names):
        dist.init_process_group("gloo")
    runs, errors = started(model, names)
    found = Blocks({}, {}, max(1, model.steps // plan.shorter), errors)
    for number in range(plan.rounds + 1):
        for turn in range(len(runs)):
            name = list(runs)[(number + turn) % len(runs)]
            span, cpu = block(runs[name], model.warm_up, found.steps)
            if number > 0:  # the first round warms up
                found.spans.setdefault(name, []).append(span)
                found.cpu.setdefault(name, []).append(cpu)
    if dist.is_initialized():
        dist.destroy_process_group()
    hvd.shutdown()
    return found


def is_available(variant: str) -> bool:
    """Check whether this sparkhvd has the options of the variant."""
    if variant not in OURS:
        return True
    try:
        options = OURS[variant]()
    except AttributeError:
        return False
    return options.keys() <= inspect.signature(hvd.DistributedOptimizer).parameters.keys()


def started(
    model: Model, names: Sequence[str]
) -> tuple[dict[str, Callable[[], None]], dict[str, str]]:
    """Start every variant, and return its step, or its error if it failed on any rank."""
    runs, failed = {}, {}
    for name in names:
        error = ""
        try:
            runs[name] = step_of(model, name)
            for _ in range(model.warm_up):
                runs[name]()
        except Exception as caught:  # noqa: BLE001 - it is a line of the table
            error = f"{type(caught).__name__}: {str(caught).splitlines()[0]}"
        errors = [each for each in hvd.allgather_object(error) if each]
        if errors:
            runs.pop(name, None)
            failed[name] = errors[0]
    return runs, failed


def step_of(model: Model, variant: str) -> Callable[[], None]:
    """Make a training step, with the same weights and different batches on every rank."""
    torch.manual_seed(0)
    network = model.build()
    torch.manual_seed(1 + hvd.rank())
    batches = itertools.cycle([model.batch() for _ in range(BATCHES)])
    optimizer = model.optimizer(network)
    if variant in DDP:
        network = nn.parallel.DistributedDataParallel(network, **DDP[variant])
    elif variant in OURS:
        optimizer = hvd.DistributedOptimizer(
            optimizer, network.named_parameters(), **OURS[variant]()
        )
    if variant == OVERLAPPED:
        for reducer in optimizer._reducers:
            reducer._overlaps = True
    if variant == BORN:
        for module in network.modules():
            if type(module) is nn.Linear:
                module.__class__ = Born

    def step() -> None:
        x, y = next(batches)
        if variant == BORN:
            zero_grad(optimizer)
        else:
            optimizer.zero_grad()
        model.loss(network(x), y).backward()
        optimizer.step()

    return step


def block(step: Callable[[], None], warm_up: int, steps: int) -> tuple[tuple[float, float], float]:
    """Run `steps` and return their begin and end and their CPU seconds. All ranks start together."""
    hvd.barrier()
    for _ in range(warm_up):
        step()
    hvd.barrier()
    cpu, began = time.process_time(), time.perf_counter()
    for _ in range(steps):
        step()
    return (began, time.perf_counter()), time.process_time() - cpu


def together(ranks: Sequence[Blocks]) -> Found:
    """Join the ranks' blocks to wall and CPU time per step.

    Wall time is from the first rank's start to the last rank's end. CPU time is the sum of all ranks.
    """
    steps = ranks[0].steps
    wall, cpu = {}, {}
    for name in ranks[0].spans:
        rounds = list(zip(*(rank.spans[name] for rank in ranks), strict=True))
        wall[name] = [
            (max(e for _, e in each) - min(b for b, _ in each)) / steps for each in rounds
        ]
        cpu[name] = [sum(each) / steps for each in zip(*(r.cpu[name] for r in ranks), strict=True)]
    return Found(wall, cpu, ranks[0].errors)
