"""Fits and runs of a session beside other checkouts: wall time, and CPU seconds of all processes.

    .venv/bin/python benchmarks/checkouts.py OTHER [OTHER ...] [--rounds 5]

OTHER is a checkout with a compiled library. A round starts a new driver of each checkout in turn, with warm `local[2]`: 14 fits of
20,000 rows x 8 (2 epochs, 2 ranks) and 10 calls of `run`. CPU seconds are those of driver, JVM, zygote and ranks together, from a
control group that needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import local_session, spread

ROOT = Path(__file__).resolve().parents[1]
FITS, RUNS = 14, 10
# The first ones of a session are slower: Java and the zygote are not warm.
COLD_FITS, COLD_RUNS = 4, 2
ROUND_S = 300
V1, V2 = Path("/sys/fs/cgroup/cpuacct"), Path("/sys/fs/cgroup")


def group() -> Path:
    """Create the control group if it does not exist, and return its path."""
    path = (V1 if V1.is_dir() else V2) / "sparkhvd-benchmark"
    path.mkdir(exist_ok=True)
    return path


def cpu_seconds(path: Path) -> float:
    """Read the CPU seconds of a control group."""
    if (usage := path / "cpuacct.usage").exists():
        return int(usage.read_text()) / 1e9
    return int((path / "cpu.stat").read_text().split()[1]) / 1e6


def one() -> None:
    """Measure the checkout imported by this process."""
    path = group()
    (path / "cgroup.procs").write_text(str(os.getpid()))
    import numpy as np
    import pandas as pd
    import torch
    from torch import nn

    from sparkhvd import TorchEstimator, run

    values = np.random.default_rng(0).normal(size=(20_000, 8)).astype("float32")
    names = [f"x{i}" for i in range(8)]
    table = pd.DataFrame({**dict(zip(names, values.T, strict=True)), "y": values.sum(1)})
    with local_session(2) as spark:
        df = spark.createDataFrame(table).cache()
        df.count()

        def fit() -> None:
            TorchEstimator(
                model=nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)),
                optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
                loss=nn.MSELoss(),
                feature_cols=names,
                label_cols=["y"],
                batch_size=64,
                epochs=2,
                num_proc=2,
                verbose=0,
            ).fit(df)

        def measured(fn: Callable[[], Any]) -> tuple[float, float]:
            began, used = time.perf_counter(), cpu_seconds(path)
            fn()
            return time.perf_counter() - began, cpu_seconds(path) - used

        fits = [measured(fit) for _ in range(FITS)]
        runs = [measured(lambda: run(os.getpid, num_proc=2, verbose=0)) for _ in range(RUNS)]
    warm = {"fit": fits[COLD_FITS:], "run": runs[COLD_RUNS:]}
    found = {
        f"later {name}s, {unit}": statistics.median(each[i] for each in pairs)
        for name, pairs in warm.items()
        for i, unit in enumerate(("wall", "CPU"))
    }
    print(json.dumps({**found, "first fit, CPU": fits[0][1]}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("others", nargs="*", type=Path, metavar="OTHER")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        one()
        return
    checkouts = [ROOT, *arguments.others]
    rounds: list[list[dict[str, float]]] = []
    for _ in range(arguments.rounds):
        rounds.append([])
        for checkout in checkouts:
            command = [sys.executable, __file__, "--one"]
            # Python workers find the package in their working directory.
            place = checkout.resolve()
            environ = {**os.environ, "PYTHONPATH": str(place)}
            done = subprocess.run(
                command,
                env=environ,
                cwd=place,
                stdout=subprocess.PIPE,
                text=True,
                timeout=ROUND_S,
                check=True,
            )
            rounds[-1].append(json.loads(done.stdout.splitlines()[-1]))
    print("| what | now |" + "".join(f" x {each.name} |" for each in arguments.others))
    print("|---|---|" + "---|" * len(arguments.others))
    for what in rounds[0][0]:
        now = statistics.median(each[0][what] for each in rounds)
        ratios = [
            spread([each[0][what] / each[i][what] for each in rounds])
            for i in range(1, len(checkouts))
        ]
        print(f"| {what} | {now:.2f} s |" + "".join(f" {ratio} |" for ratio in ratios))


if __name__ == "__main__":
    main()
