"""Cost of waiting for the reduced gradients in `backward()` instead of `step()`.

    .venv/bin/python benchmarks/step_wait.py [--models mlp,layers] [--rounds 100]

Two ranks train in turns of a few steps with each option, in an order that is turned around every round; every turn is compared with the one
of "waits in step" in the same round. "waits in step, again" is the same option a second time: its distance from 1 is what this machine makes of equal things.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

BASE = "waits in step"
AGAIN = f"{BASE}, again"
VARIANTS = (BASE, "sparkhvd", AGAIN)
STEPS = {"mlp": 5, "layers": 20}
WARM_UP = 2


def measure(name: str, rounds: int) -> dict[str, list[float]]:
    """Measure the seconds of a step by variant and round. Runs on every rank."""
    import torch
    from step_models import MODELS
    from step_rank import OURS

    import sparkhvd.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    model = MODELS[name]
    runs: dict[str, Any] = {}
    for variant in VARIANTS:
        torch.manual_seed(0)
        network = model.build()
        options = OURS[variant.removesuffix(", again")]()
        optimizer: Any = hvd.DistributedOptimizer(
            model.optimizer(network), network.named_parameters(), **options
        )
        runs[variant] = network, optimizer, itertools.cycle([model.batch() for _ in range(4)])
    found: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for number in range(rounds + WARM_UP):
        for variant in VARIANTS if number % 2 else reversed(VARIANTS):
            network, optimizer, batches = runs[variant]
            hvd.barrier()
            begin = time.perf_counter()
            for _ in range(STEPS[name]):
                inputs, targets = next(batches)
                optimizer.zero_grad()
                model.loss(network(inputs), targets).backward()
                optimizer.step()
            if number >= WARM_UP:
                found[variant].append((time.perf_counter() - begin) / STEPS[name])
    hvd.shutdown()
    return found


def describe(times: Sequence[float], base: Sequence[float]) -> str:
    """Format the cells: a step, its ratio to the base with quartiles, and the standard error."""
    ratios = [one / other for one, other in zip(times, base, strict=True)]
    first, middle, last = statistics.quantiles(ratios, n=4)
    error = 1.253 * statistics.stdev(ratios) / len(ratios) ** 0.5
    return f"{statistics.median(times) * 1e3:.2f} ms | {middle:.3f} ({first:.3f} to {last:.3f}) | {error:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="mlp,layers")
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    from sparkhvd.runner import run_local

    print("| model | variant | a step | x waits in step | standard error |\n|---|---|---|---|---|")
    for name in options.models.split(","):
        found = run_local(measure, (name, options.rounds), num_proc=2)[0]
        for variant in VARIANTS:
            cells = describe(found[variant], found[BASE])
            print(f"| {name} | {variant} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
