"""Compare the engines of this checkout and another one: cost and gain of a change.

    .venv/bin/python benchmarks/engines.py OTHER [--rounds 9] [--ranks 64] [--json FILE] [--write]

OTHER is a checkout with its library in sparkhvd/lib/ (`git worktree add OTHER COMMIT`, then `make native` there). The ranks of both
live at the same time, and measure by turns: an allreduce by size, and a step of 32 of 4 bytes submitted together, two ranks on one
host, on one CPU of it, and over TCP; then the step with many ranks, where rank 0's CPU time counts. No torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from common import ROOT, Report, Target, median_and_quartiles, shown

SIZES = {
    "4 B": 4,
    "64 KiB": 64 << 10,
    "1 MiB": 1 << 20,
    "16 MiB": 16 << 20,
    "64 MiB": 64 << 20,
}
STEP = "step of 32 x 4 B"
WAYS = ("one host", "one CPU", "TCP")
# Of these, for many ranks.
LARGE_WAYS = ("one host", "TCP")
# Nothing may get slower by more.
MOST = 1.03
# Runs in each checkout, with that one's own modules: ranks that measure what lines of the input say.
DRIVER = """
import json, sys
from scale import BODY, TIMEOUT_S, Settings, end, ordered, rank_processes
size, tcp_only = int(sys.argv[1]), sys.argv[2] == "TCP"
settings = Settings(connect_timeout_s=TIMEOUT_S, **({} if size == 2 else {"slot_bytes": 4096}))
with rank_processes(BODY, size, settings=settings, tcp_only=tcp_only) as ranks:
    for line in sys.stdin:
        print(json.dumps(ordered(ranks, *json.loads(line))), flush=True)
    end(ranks)
"""


class Engines:
    """Ranks of one checkout."""

    def __init__(self, root: str, size: int, way: str) -> None:
        paths = os.pathsep.join([root, os.path.join(root, "benchmarks")])
        confined = ["taskset", "-c", "0"] if way == "one CPU" else []
        self._process = subprocess.Popen(
            [*confined, sys.executable, "-c", DRIVER, str(size), way],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env={**os.environ, "PYTHONPATH": paths},
        )

    def measure(self, what: str, num_bytes: int, steps: int) -> dict[str, Any]:
        """Measure the seconds of each step, and the CPU seconds per step.

        The CPU seconds are those of rank 0 and of the others.
        """
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps([what, num_bytes, steps]) + "\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        """End the ranks."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def both(other: str, size: int, way: str) -> Iterator[dict[str, Engines]]:
    """Start the ranks of both checkouts."""
    engines = {"before": Engines(other, size, way), "now": Engines(str(ROOT), size, way)}
    try:
        yield engines
    finally:
        for each in engines.values():
            each.close()


def steps_of(num_bytes: int) -> int:
    return max(5, min(300, (64 << 20) // num_bytes))


def small_worlds(report: Report, other: str, rounds: int) -> dict[str, Any]:
    """Add the table of two ranks."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    rows: list[list[str | list[Target]]] = []
    for way in WAYS:
        found[way] = {}
        with both(other, 2, way) as engines:
            for _ in range(rounds):
                for name, each in engines.items():
                    for label, num_bytes in SIZES.items():
                        wall = each.measure("one", num_bytes, steps_of(num_bytes))["wall"]
                        found[way].setdefault(label, {}).setdefault(name, []).append(
                            statistics.median(wall)
                        )
                    wall = each.measure("many", 4, 30)["wall"]
                    found[way].setdefault(STEP, {}).setdefault(name, []).append(
                        statistics.median(wall)
                    )
        for label, times in found[way].items():
            ratio = statistics.median(
                now / before for now, before in zip(times["now"], times["before"], strict=True)
            )
            cells = [median_and_quartiles(times[name]) for name in ("before", "now")]
            rows.append([way, label, *cells, [Target("now / before", ratio, MOST, at_least=False)]])
    report.table(["two ranks", "allreduce", "before", "now", "target"], rows)
    return found


def large_world(report: Report, other: str, size: int, rounds: int) -> dict[str, Any]:
    """Add the table of many ranks."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    rows: list[list[str | list[Target]]] = []
    for way in LARGE_WAYS:
        found[way] = {"before": [], "now": []}
        with both(other, size, way) as engines:
            for _ in range(rounds):
                for name, each in engines.items():
                    found[way][name].append(each.measure("many", 4, 5))
        for name, measured in found[way].items():
            walls = [wall for each in measured for wall in each["wall"]]
            cpu = [
                shown(statistics.median(each[key] for each in measured))
                for key in ("cpu_rank_0", "cpu_others")
            ]
            rows.append([way, name, median_and_quartiles(walls), *cpu])
    columns = ["", "time", "CPU of rank 0", "CPU of another rank"]
    report.table([f"{size} ranks, {STEP}", *columns], rows)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", help="a checkout with its library")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--json", help="a file for the raw numbers")
    parser.add_argument("--write", action="store_true", help="keep the tables in docs/results/")
    options = parser.parse_args()
    other = os.path.abspath(options.other)
    commit = subprocess.run(
        ["git", "-C", other, "log", "-1", "--format=%h of %cs"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    report = Report(
        f"The engine before ({commit}) and now, load {os.getloadavg()[0]:.1f} at the start"
    )
    report.raw["two ranks"] = small_worlds(report, other, options.rounds)
    report.raw["many ranks"] = large_world(
        report, other, options.ranks, max(3, options.rounds // 3)
    )
    report.note(
        f"{options.rounds} rounds, in turn. A ratio is the median of the ratios of the rounds."
    )
    report.finish("benchmarks/engines.py", write=options.write, json_path=options.json)


if __name__ == "__main__":
    main()
