"""Cost of a timeline for a small training step: the same step with and without one, in turns.

    .venv/bin/python benchmarks/timeline.py [--rounds 20] [--write] [--json FILE]

Two processes train an MLP 64-512-512-1 with batches of 256 through `DistributedOptimizer`. Every round times
blocks of steps without a timeline, with rank 0's, and with all ranks', in an order that rotates. A block's time
is the median of its steps; a round's overhead is the ratio to the block without a timeline of the same round.
Target: less than 3 % longer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from common import Report, Target

STEPS = 150
WARM_UP = 20
MAY_ADD_PERCENT = 3.0
LEGS = ("no timeline", "rank 0's", "all ranks'")


def measure(rounds: int, folder: str) -> dict[str, list[float]]:
    """Measure the seconds of a step in a rank, one median per round and leg."""
    import torch
    from torch import nn

    import sparkhvd.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    x, y = torch.randn(256, 64), torch.randn(256, 1)
    model = nn.Sequential(
        nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)
    )
    plain = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())

    def block() -> float:
        times = []
        for _ in range(STEPS):
            began = time.perf_counter()
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            times.append(time.perf_counter() - began)
        return statistics.median(times[WARM_UP:])

    found: dict[str, list[float]] = {leg: [] for leg in LEGS}
    for number in range(rounds + 1):
        for turn in range(len(LEGS)):
            leg = LEGS[(number + turn) % len(LEGS)]
            if leg != "no timeline":
                path = Path(folder) / f"{number}-{turn}.json"
                hvd.start_timeline(path, all_ranks=leg == "all ranks'")
            hvd.barrier()
            seconds = block()
            hvd.barrier()
            hvd.stop_timeline()
            if number > 0:  # the first round warms up
                found[leg].append(seconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", help="a file for the raw numbers")
    parser.add_argument("--write", action="store_true", help="keep the table in docs/results/")
    options = parser.parse_args()
    from sparkhvd.runner import run_local

    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="sparkhvd-bench-") as folder:
        ranks = run_local(measure, args=(options.rounds, folder), num_proc=2)
    times = {
        leg: [max(pair) for pair in zip(*(rank[leg] for rank in ranks), strict=True)]
        for leg in LEGS
    }
    report = Report(f"timeline: a training step of 2 processes, load {load:.1f} at the start")
    report.raw = times
    rows: list[list[str | list[Target]]] = []
    for leg in LEGS:
        ratios = [a / b for a, b in zip(times[leg], times[LEGS[0]], strict=True)]
        percent = (statistics.median(ratios) - 1) * 100
        target = Target("longer", percent, MAY_ADD_PERCENT, at_least=False, unit="%")
        step = f"{statistics.median(times[leg]) * 1e6:.0f} us"
        rows.append([leg, step, [target] if leg != LEGS[0] else ""])
    report.table(["timeline", "a step", "target"], rows)
    report.note(
        f"Medians of {options.rounds} rounds of {STEPS} steps; the overhead is the median of the rounds' ratios."
    )
    return report.finish("benchmarks/timeline.py", write=options.write, json_path=options.json)


if __name__ == "__main__":
    main()
