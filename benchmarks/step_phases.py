"""Time each phase of a training step, with malloc keeping freed memory or returning it.

    .venv/bin/python benchmarks/step_phases.py [--model mlp] [--variants none,barrier,sparkhvd,sharded] [--rounds 5] [--steps 8]

Two ranks train by turns with each variant (see benchmarks/step.py); "barrier" does not communicate, but both ranks wait for
each other before the optimizer steps. Medians in milliseconds of rank 0 and rank 1.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

PHASES = ("zero_grad", "forward", "backward", "reduce", "optimizer", "step")
WITHOUT = ("none", "barrier")
WARM_UP = 2


def measure(name: str, variants: Sequence[str], rounds: int, steps: int) -> dict[str, list[float]]:
    """Measure the medians of the phases by variant, in milliseconds. Runs on every rank."""
    import torch
    from step_models import MODELS
    from step_rank import OURS

    import sparkhvd.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    model = MODELS[name]
    runs: dict[str, Any] = {}
    for variant in variants:
        torch.manual_seed(0)
        network = model.build()
        optimizer: Any = model.optimizer(network)
        if variant not in WITHOUT:
            optimizer = hvd.DistributedOptimizer(
                optimizer, network.named_parameters(), **OURS[variant]()
            )
        runs[variant] = network, optimizer, itertools.cycle([model.batch() for _ in range(4)])
    found: dict[str, list[list[float]]] = {variant: [] for variant in variants}
    for number in range(rounds + 1):
        for variant, (network, optimizer, batches) in runs.items():
            hvd.barrier()
            for step in range(steps):
                inputs, targets = next(batches)
                times = [time.perf_counter()]
                optimizer.zero_grad()
                times.append(time.perf_counter())
                loss = model.loss(network(inputs), targets)
                times.append(time.perf_counter())
                loss.backward()
                times.append(time.perf_counter())
                if variant == "barrier":
                    hvd.barrier()
                elif variant not in WITHOUT:
                    optimizer.synchronize()
                times.append(time.perf_counter())
                optimizer.step()
                times.append(time.perf_counter())
                if number > 0 and step >= WARM_UP:
                    phases = [after - before for before, after in itertools.pairwise(times)]
                    found[variant].append([*phases, times[-1] - times[0]])
    hvd.shutdown()
    return {
        variant: [statistics.median(column) * 1e3 for column in zip(*rows, strict=True)]
        for variant, rows in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--variants", default="none,barrier,sparkhvd,sharded")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    from sparkhvd.runner import run_local
    from sparkhvd.settings import Settings

    print(f"| {options.model}, ms | malloc | {' | '.join(PHASES)} |")
    print("|---" * (2 + len(PHASES)) + "|")
    for keep in (False, True):
        arguments = (options.model, options.variants.split(","), options.rounds, options.steps)
        settings = Settings(keep_freed_memory=keep)
        first, second = run_local(measure, arguments, num_proc=2, settings=settings)
        for variant, times in first.items():
            cells = [f"{a:.1f}, {b:.1f}" for a, b in zip(times, second[variant], strict=True)]
            kind = "freed memory kept" if keep else "as it is"
            print(f"| {variant} | {kind} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
