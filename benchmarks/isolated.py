"""Time of an allreduce after other work, as in training: two processes, beside Gloo.

    .venv/bin/python benchmarks/isolated.py [--rounds 15] [--work-us 300] [--json FILE] [--write]

Both ranks compute for `--work-us` before each call, so neither is in a call when the other begins one. Rounds take
turns between the libraries, in the same two processes; a call counts as the slower rank's. Back to back, the same calls
take less: see allreduce.py.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Mapping
from typing import Any

from allreduce import SIZES, Times, python_legs, slower

from common import Report, Target, percentile, shown

NAMES = ("4 B", "64 KiB", "1 MiB")
CALLS = 100


def measure(plan: Mapping[str, Any]) -> Times:
    """Measure the seconds of every call, by size and leg, in a rank."""
    import torch

    import sparkhvd.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    legs = python_legs(None)
    legs.pop("registered", None)
    found: Times = {name: {leg: [] for leg in legs} for name in NAMES}
    for number in range(plan["rounds"] + 1):
        for name in NAMES:
            tensor = torch.zeros(SIZES[name] // 4)
            for leg, call in legs.items():
                hvd.barrier()
                times = []
                for _ in range(CALLS):
                    until = time.perf_counter() + plan["work_s"]
                    while time.perf_counter() < until:
                        pass
                    began = time.perf_counter()
                    call(tensor)
                    times.append(time.perf_counter() - began)
                if number > 0:  # the first round warms up
                    found[name][leg] += times
    return found


def spread(values: list[float]) -> str:
    """Format median, 90th and 99th percentile."""
    return " / ".join(
        shown(value)
        for value in (
            statistics.median(values),
            percentile(values, 0.9),
            percentile(values, 0.99),
        )
    )


def targets(name: str, legs: Mapping[str, list[float]]) -> list[Target]:
    ours, gloo = statistics.median(legs["arbitrary"]), statistics.median(legs["Gloo"])
    if name not in ("4 B", "64 KiB"):
        return []
    found = [Target("of Gloo's median", ours / gloo, 0.5, at_least=False)]
    if name == "4 B":
        p90 = percentile(legs["arbitrary"], 0.9) / gloo
        found.append(Target("p90 of Gloo's median", p90, 1, at_least=False))
    return found


def main() -> None:
    from sparkhvd.runner import run_local

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--work-us", type=float, default=300)
    parser.add_argument("--json", help="a file for the raw numbers")
    parser.add_argument("--write", action="store_true", help="keep the table in docs/results/")
    options = parser.parse_args()
    report = Report(
        f"allreduce after {options.work_us:g} us of work: 2 processes of one host, float32,"
        f" load {os.getloadavg()[0]:.1f} at the start"
    )
    plan = {"rounds": options.rounds, "work_s": options.work_us * 1e-6}
    report.raw = slower(list(run_local(measure, (plan,), num_proc=2)))
    report.table(
        ["", "sparkhvd", "Gloo", "targets"],
        [
            [name, spread(legs["arbitrary"]), spread(legs["Gloo"]), targets(name, legs)]
            for name, legs in report.raw.items()
        ],
    )
    report.note(f"Median / 90 % / 99 % of {options.rounds} rounds of {CALLS} calls.")
    return report.finish("benchmarks/isolated.py", write=options.write, json_path=options.json)


if __name__ == "__main__":
    main()
