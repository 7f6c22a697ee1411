"""How long an allreduce of two processes takes, next to torch.distributed with Gloo.

    .venv/bin/python benchmarks/allreduce.py [--rounds 30] [--write]

Both ranks hold both libraries and use them in turns, in the same processes, on the same float32 tensors in private
memory. Each call is timed from a barrier to the moment when this rank has the result; a round's time is
the slower rank's. Also: one training step of `DistributedOptimizer` on an MLP 32-64-1 with batches of 256, next
to the same step without communication. Targets: at least 5 times Gloo from 64 KiB to 16 MiB, 4 times at 64 and 256
MiB; 4 bytes in at most 50 us; the step at most 300 us longer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from common import Table

SIZES = {"4 B": 4, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20, "64 MiB": 64 << 20}
STEPS = 300


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """In a rank: seconds by tensor size and library, of every round."""
    import torch
    import torch.distributed as dist

    import sparkhvd.torch as hvd

    hvd.init()
    dist.init_process_group("gloo", rank=hvd.rank(), world_size=hvd.size())

    def with_sparkhvd(tensor: Any) -> None:
        hvd.allreduce_(tensor, name="x", op=hvd.Sum)

    def with_gloo(tensor: Any) -> None:
        dist.all_reduce(tensor)

    calls: dict[str, Callable[[Any], None]] = {"sparkhvd": with_sparkhvd, "gloo": with_gloo}
    times: dict[str, dict[str, list[float]]] = {}
    for label, num_bytes in SIZES.items():
        tensor = torch.zeros(num_bytes // 4)
        times[label] = {name: [] for name in calls}
        # Small ones in runs of calls, as a training loop makes them: one call alone measures the barrier.
        repeats = max(1, min(50, (1 << 20) // num_bytes))
        for number in range(rounds + 3):
            for name, call in calls.items():
                hvd.barrier()
                began = time.perf_counter()
                for _ in range(repeats):
                    call(tensor)
                took = (time.perf_counter() - began) / repeats
                if number >= 3:
                    times[label][name].append(took)
    times["training step"] = steps()
    dist.destroy_process_group()
    hvd.shutdown()
    return times


def steps() -> dict[str, list[float]]:
    """Seconds of training steps with and without the exchange of gradients, in turns."""
    import torch
    from torch import nn

    import sparkhvd.torch as hvd

    torch.manual_seed(0)
    x, y = torch.randn(256, 32), torch.randn(256, 1)
    loops: dict[str, Callable[[], None]] = {}

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def step() -> None:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()

        return step

    for name in ("sparkhvd", "no communication"):
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if name == "sparkhvd":
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        loops[name] = loop(model, optimizer)
    times: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(STEPS + 20):
        for name, step in loops.items():
            if number % 20 == 0:
                hvd.barrier()
            began = time.perf_counter()
            step()
            if number >= 20:
                times[name].append(time.perf_counter() - began)
    return times


def slower(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Each round's longest time."""
    return [max(times) for times in zip(*ranks, strict=True)]


def shown(seconds: float) -> str:
    """Microseconds up to a millisecond, then milliseconds."""
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


class Comparison(Table):
    """One line per size: both medians, the 99th percentile and the ratio."""

    def __init__(self, title: str) -> None:
        super().__init__(title, [])
        self.lines: list[str] = []

    def compare(self, label: str, ours: list[float], peer: str, theirs: list[float]) -> None:
        mine, other = statistics.median(ours), statistics.median(theirs)
        p99 = sorted(ours)[min(len(ours) - 1, round(0.99 * len(ours)))]
        self.lines.append(
            f"| {label} | {shown(mine)} | {shown(p99)} | {peer} {shown(other)} | {other / mine:.1f} x |"
        )

    def markdown(self) -> str:
        head = ["| what | sparkhvd | its p99 | beside it | ratio |", "|---|---|---|---|---|"]
        return "\n".join([*head, *self.lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--write", action="store_true", help="keep the table in docs/results/")
    options = parser.parse_args()
    from sparkhvd.runner import run_local

    load = os.getloadavg()[0]
    ranks = run_local(measure, (options.rounds,), num_proc=2)
    table = Comparison(f"allreduce: 2 processes, float32, load {load:.1f} at the start")
    for label in ranks[0]:
        by_name = {name: slower([rank[label][name] for rank in ranks]) for name in ranks[0][label]}
        (_, ours), (peer, theirs) = by_name.items()
        table.compare(label, ours, peer, theirs)
    table.finish("benchmarks/allreduce.py", write=options.write)


if __name__ == "__main__":
    main()
