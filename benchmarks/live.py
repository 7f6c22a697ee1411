"""Cost of live output for a training step: a small network on two printing ranks, with and without the channel to the driver.

    .venv/bin/python benchmarks/live.py [--rounds 5] [--steps 1000] [--master 'local-cluster[2,1,1024]'] [--write]

A launch per round and variant, by turns, on executors of their own, whose logs get every line either way. The driver counts what it shows: of ten
lines per step it leaves most out, and says how many. Driver and ranks share the cores, so what the driver does counts, too.
Target: at most 1 % more per step with one line.
"""

from __future__ import annotations

import argparse
import io
from typing import Any

from common import Table, local_session

RANKS = 2


def trains(lines: int, steps: int) -> float:
    """Train a small network, print lines in each step, and return the median seconds of a step."""
    import statistics
    import time

    import torch
    from torch import nn

    import sparkhvd.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters()
    )
    inputs, labels = torch.randn(64, 64), torch.randint(10, (64,))
    times = []
    for step in range(-50, steps):
        began = time.monotonic()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        for line in range(lines):
            print(f"step {step} line {line} loss {loss.item():.4f}")
        times.append(time.monotonic() - began)
    hvd.shutdown()
    return statistics.median(times[50:])


class Count(io.TextIOBase):
    """Output stream with a count of its lines."""

    def __init__(self) -> None:
        self.lines = 0

    def write(self, text: str) -> int:
        """Count the lines of a text."""
        self.lines += text.count("\n")
        return len(text)


def once(spark: Any, lines: int, steps: int, live: str) -> tuple[float, int]:
    """Measure 1,000 median steps in seconds on the slower rank, and count the driver's lines."""
    from sparkhvd.runner import run

    stream: Any = Count()
    env = {"SPARKHVD_LIVE_OUTPUT": live}
    seconds = run(trains, (lines, steps), num_proc=RANKS, spark=spark, env=env, stdout=stream)
    return max(seconds) * 1000, stream.lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--master", default="local-cluster[2,1,1024]")
    parser.add_argument("--write", action="store_true", help="keep the table in docs/results/")
    options = parser.parse_args()
    table = Table(
        f"live: 1,000 times the median step of a small network on {RANKS} ranks that print",
        ["wall"],
    )
    with local_session(RANKS, master=options.master) as spark:
        once(spark, 1, 10, "auto")  # the first launch starts fresh processes
        for number in range(options.rounds):
            for lines in (0, 1, 10):
                # Each is first every other round.
                for live in ("auto", "0") if number % 2 else ("0", "auto"):
                    seconds, shown = once(spark, lines, options.steps, live)
                    way = "live" if live == "auto" else "executors' logs only"
                    table.add(f"{lines} lines per step, {way}", {"wall": seconds})
                    print(f"  {shown:,} lines on the driver", flush=True)
    table.finish(f"benchmarks/live.py --master {options.master}", write=options.write)


if __name__ == "__main__":
    main()
