"""CPU of Spark's Python workers in the first `transform` of a session, with and without `sparkhvd.python_daemon`.

    .venv/bin/python benchmarks/daemon.py [--rounds 5] [--other CHECKOUT] [--write]

A round is a new `local[2]` session of each kind in turn. Its first Python workers transform 2,000 rows in two partitions: CPU seconds of the daemon and of
both workers, from /proc. A minute later Spark has ended the workers, and the next transform gets new ones. `--other` adds sessions of another checkout
with a compiled library.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import ROOT, Report, Target, spread

# Spark ends workers that are idle for a minute, and looks every 10 s.
MOST_IDLE_S = 100
MODULE = "sparkhvd.python_daemon"
# CPU with the daemon, of the CPU of the other checkout without it.
MOST = 0.5
ROUND_S = 300
WITHOUT, WITH, OTHER = "pyspark's daemon", "sparkhvd's daemon", "pyspark's daemon, other checkout"


def cpu_seconds() -> dict[int, float]:
    """Read the CPU seconds of the daemon and its workers, by pid; the daemon's include its ended workers'."""
    own, tick = os.getpid(), os.sysconf("SC_CLK_TCK")
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        if words[1:2] == [b"-m"] and words[2] in (b"pyspark.daemon", MODULE.encode()):
            is_own = f"SPARKHVD_BENCH={own}".encode() in (folder / "environ").read_bytes()
            if is_own:
                found[int(folder.name)] = sum(map(int, fields[11:15])) / tick
    return found


def one(module: str) -> None:
    """Measure a new session of the checkout imported by this process."""
    os.environ["SPARKHVD_BENCH"] = str(os.getpid())
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    if module:
        builder = builder.config("spark.python.daemon.module", module)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    from torch import nn

    from sparkhvd import TorchModel

    model = TorchModel(model=nn.Linear(2, 1), feature_cols=["a", "b"], label_cols=["y"])
    rows = spark.range(2_000, numPartitions=2).selectExpr("float(id) as a", "float(id) as b")
    found: dict[str, float] = {}
    for when in ("first", "new workers"):
        before, began = cpu_seconds(), time.monotonic()
        assert len(model.transform(rows).collect()) == 2_000
        found[f"{when}, wall"] = time.monotonic() - began
        after = cpu_seconds()
        found[f"{when}, CPU"] = sum(after.values()) - sum(before.values())
        if when == "first":
            until = time.monotonic() + MOST_IDLE_S
            while len(cpu_seconds()) > 1:
                assert time.monotonic() < until, "Spark has not ended its idle workers"
                time.sleep(1)
    spark.stop()
    print(json.dumps(found))


def new_session(kind: str, other: Path | None) -> dict[str, Any]:
    place = (other or ROOT).resolve() if kind == OTHER else ROOT
    done = subprocess.run(
        [sys.executable, __file__, "--one", MODULE if kind == WITH else ""],
        env={**os.environ, "PYTHONPATH": str(place)},
        cwd=place,
        stdout=subprocess.PIPE,
        text=True,
        timeout=ROUND_S,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--other", type=Path)
    parser.add_argument("--write", action="store_true", help="keep the table in docs/results/")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        one(options.one)
        return
    kinds = [WITHOUT, WITH, *([OTHER] if options.other else [])]
    rounds = []
    for _ in range(options.rounds):
        rounds.append({kind: new_session(kind, options.other) for kind in kinds})
        print(rounds[-1], flush=True)
    report = Report("daemon: transforms of 2,000 rows by two new Python workers")
    base = OTHER if options.other else WITHOUT
    lines: list[list[Any]] = []
    for what in rounds[0][WITHOUT]:
        ratios = [each[WITH][what] / each[base][what] for each in rounds]
        target = []
        if what.endswith("CPU"):
            target = [Target("ratio", statistics.median(ratios), MOST, at_least=False)]
        lines.append(
            [what, *(spread([each[kind][what] for each in rounds]) for kind in kinds)]
            + [spread(ratios), target]
        )
    report.table(
        ["what, s", *kinds, f"{WITH} / {base}", "target"],
        lines,
    )
    report.note(f"Median (smallest to largest) of {options.rounds} rounds.")
    report.finish("benchmarks/daemon.py", write=options.write, json_path=None)


if __name__ == "__main__":
    main()
