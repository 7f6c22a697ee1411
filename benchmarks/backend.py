"""torch.distributed over this engine beside Gloo, two ranks on this host, in turns inside the same two processes.

    python -m benchmarks.backend

all_reduce by size, what the adapter adds to `hvd.allreduce_`, and steps of DDP and FSDP2 beside one without communication.
A round is one turn of each; the tables have medians over rounds and the spread between the quartiles.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sparkhvd.torch as hvd
from sparkhvd.runner import run_local

SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
ROUNDS = 9
TARGETS = {4: 1.5, 64 << 10: 3, 1 << 20: 5, 16 << 20: 5, 64 << 20: 5}

Times = dict[str, list[float]]


def in_turns(calls: dict[str, Callable[[], object]], repeats: int) -> Times:
    """Measure each call by rounds, in us; the first round warms up."""
    times: Times = {name: [] for name in calls}
    for number in range(ROUNDS + 1):
        for name, call in calls.items():
            hvd.barrier()
            began = time.perf_counter()
            for _ in range(repeats):
                call()
            if number:
                times[name].append((time.perf_counter() - began) / repeats * 1e6)
    return times


def mlp() -> nn.Module:
    """Build 18.9 M parameters in few tensors."""
    return nn.Sequential(
        nn.Linear(1024, 3072), nn.ReLU(), nn.Linear(3072, 4096), nn.ReLU(), nn.Linear(4096, 784)
    )


def deep() -> nn.Module:
    """Build 121 small layers."""
    return nn.Sequential(*[nn.Linear(128, 128) for _ in range(121)])


def step(model: Any, width: int) -> Callable[[], object]:
    """Return a training step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(64, width)

    def run() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return run


def steps(ours: Any, gloo: Any) -> dict[str, Times]:
    """Measure steps of models under DDP and FSDP2."""
    measured = {}
    for name, make, width in (("MLP", mlp, 1024), ("121 layers", deep, 128)):
        models = {
            "none": make(),
            "sparkhvd": DistributedDataParallel(make(), process_group=ours),
            "Gloo": DistributedDataParallel(make(), process_group=gloo),
        }
        calls = {label: step(model, width) for label, model in models.items()}
        measured[f"DDP, {name}"] = in_turns(calls, 4)
    sharded: dict[str, Callable[[], object]] = {"none": step(mlp(), 1024)}
    for label, group in (("sparkhvd", ours), ("Gloo", gloo)):
        model = mlp()
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        sharded[label] = step(model, 1024)
    measured["FSDP2, MLP"] = in_turns(sharded, 4)
    return measured


def rank() -> tuple[dict[int, Times], dict[str, Times]]:
    """Measure on both ranks; rank 0's times count."""
    import sparkhvd.distributed  # noqa: F401 - this function travels by value, without the module's imports

    hvd.init()
    dist.init_process_group("gloo")
    gloo: Any = dist.group.WORLD
    ours = dist.new_group(backend="sparkhvd")
    reduced = {}
    for size in SIZES:
        tensor = torch.zeros(size // 4)
        calls: dict[str, Callable[[], object]] = {
            "hvd": lambda tensor=tensor: hvd.allreduce_(tensor, op=hvd.Sum),  # type: ignore[misc]
            "sparkhvd": lambda tensor=tensor: dist.all_reduce(tensor, group=ours),  # type: ignore[misc]
            "Gloo": lambda tensor=tensor: dist.all_reduce(tensor, group=gloo),  # type: ignore[misc]
        }
        reduced[size] = in_turns(calls, max(2, min(300, (32 << 20) // size)))
    return reduced, steps(ours, gloo)


def shown(times: list[float], unit: float = 1.0) -> str:
    """Write a median and its quartiles."""
    low, middle, high = [each / unit for each in statistics.quantiles(times, n=4)]
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


def main() -> None:
    """Print the tables, with the load of the machine before and after."""
    before = os.getloadavg()[0]
    reduced, stepped = run_local(rank, num_proc=2)[0]
    print(f"Load of the machine: {before:.1f} before, {os.getloadavg()[0]:.1f} after.\n")
    print(
        "| all_reduce, bytes | hvd.allreduce_, us | sparkhvd, us | Gloo, us | Gloo / sparkhvd | target |"
    )
    print("|---|---|---|---|---|---|")
    for size, times in reduced.items():
        ratio = statistics.median(times["Gloo"]) / statistics.median(times["sparkhvd"])
        cells = [shown(times[name]) for name in ("hvd", "sparkhvd", "Gloo")]
        print(f"| {size} | {' | '.join(cells)} | {ratio:.1f} | {TARGETS.get(size, '')} |")
    print("\n| step | none, ms | sparkhvd, ms | Gloo, ms | sparkhvd / none | Gloo / none |")
    print("|---|---|---|---|---|---|")
    for name, times in stepped.items():
        cells = [shown(times[each], 1000) for each in ("none", "sparkhvd", "Gloo")]
        none, ours, gloo = [statistics.median(times[n]) for n in ("none", "sparkhvd", "Gloo")]
        print(f"| {name} | {' | '.join(cells)} | {ours / none:.2f} | {gloo / none:.2f} |")


if __name__ == "__main__":
    main()
