"""Fits of one application side by side: three 2-rank fits on `local[6]`, beside one alone.

    .venv/bin/python benchmarks/side_by_side.py [--rounds 3] [--sleep 30] [--write]

The ranks sleep instead of computing, as six of them would on six cores; their start (import of torch) is real, and on
two cores it is what three fits pay for. Target: three take at most 1.3 x one.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from typing import Any

from common import Report, Target, local_session, spread

RANKS, FITS, STEPS = 2, 3, 20


def estimator(sleep_s: float) -> Any:
    """Make an estimator with a total sleep of `sleep_s` in each rank."""
    import torch

    from sparkhvd import TorchEstimator

    class Sleeps(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                time.sleep(sleep_s / STEPS)
            return super().forward(x)

    net = Sleeps(2, 1)
    return TorchEstimator(
        model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), loss=torch.nn.MSELoss(), feature_cols=["x"], label_cols=["y"],
        batch_size=4, epochs=STEPS, num_proc=RANKS, verbose=0,
    )  # fmt: skip


def timed_fits(spark: Any, number: int, sleep_s: float) -> float:
    """Fit `number` times at once and return the seconds until the last has ended."""
    rows = [([i / 8, 1 - i / 8], float(i % 2)) for i in range(8)]
    df = spark.createDataFrame(rows, "x array<double>, y double")
    models: list[Any] = []
    threads = [
        threading.Thread(target=lambda: models.append(estimator(sleep_s).fit(df)))
        for _ in range(number)
    ]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - began
    assert len(models) == number, "a fit has failed"
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sleep", type=float, default=30, help="seconds that a rank sleeps")
    parser.add_argument("--write", action="store_true", help="keep the table in docs/results/")
    parser.add_argument("--json", metavar="FILE", help="write the raw numbers there")
    options = parser.parse_args()
    report = Report(f"side_by_side: {FITS} fits of {RANKS} ranks that sleep {options.sleep:g} s")
    seconds: dict[int, list[float]] = {1: [], FITS: []}
    with local_session(RANKS * FITS) as spark:
        timed_fits(spark, 1, 0)
        for _ in range(options.rounds):
            for number, found in seconds.items():
                found.append(timed_fits(spark, number, options.sleep))
                print(f"{number} at once: {found[-1]:.1f} s", flush=True)
    ratio = statistics.median(b / a for a, b in zip(*seconds.values(), strict=True))
    target = Target("beside one", ratio, 1.3, at_least=False)
    report.table(
        ["fits at once", "rounds", "wall, s", "target"],
        [
            ["1", str(options.rounds), spread(seconds[1]), "-"],
            [str(FITS), str(options.rounds), spread(seconds[FITS]), [target]],
        ],
    )
    report.raw = {str(number): found for number, found in seconds.items()}
    report.finish(
        f"benchmarks/side_by_side.py --sleep {options.sleep:g}",
        write=options.write,
        json_path=options.json,
    )


if __name__ == "__main__":
    main()
