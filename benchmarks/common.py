"""Shared parts of the benchmarks: a local session, medians with their spread, tables with machine and versions."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"


@contextlib.contextmanager
def local_session(cores: int, memory: str = "2g", master: str = "") -> Iterator[Any]:
    """Start a classic session, `local[cores]` without another master, with a heap of `memory`, and its Python workers."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    with tempfile.TemporaryDirectory(prefix="sparkhvd-bench-") as scratch:
        spark = (
            SparkSession.builder.master(master or f"local[{cores}]")
            .appName("sparkhvd-benchmark")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.memory", memory)
            .config("spark.local.dir", scratch)
            .config("spark.sql.warehouse.dir", f"{scratch}/warehouse")
            .getOrCreate()
        )
        try:
            warm_up(spark, cores)
            yield spark
        finally:
            spark.stop()


def warm_up(spark: Any, cores: int) -> None:
    """Start the JVM's and Python's workers before the first round."""

    def identity(batches: Any) -> Any:
        yield from batches

    spark.range(cores, numPartitions=cores).mapInArrow(identity, "id long").collect()


def native_program(name: str, report: Report) -> str:
    """Build a program of native/bench if possible, and return its path, or "" if it is missing."""
    program = ROOT / "build" / "native" / name
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if cmake and (program.parent / "CMakeCache.txt").exists():
        command = [cmake, "--build", str(program.parent), "--target", name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    if program.exists():
        return str(program)
    report.note(f"Without the C++ loops: {program} is missing; run `make native`.")
    return ""


class Table:
    """Markdown table of the seconds per row over several rounds."""

    def __init__(self, title: str, columns: Sequence[str]) -> None:
        self.title = title
        self.columns = columns
        self.rounds: dict[str, list[Mapping[str, float]]] = {}

    def add(self, name: str, seconds: Mapping[str, float]) -> None:
        """Add a round to the row `name`."""
        self.rounds.setdefault(name, []).append(seconds)
        shown = ", ".join(f"{column} {seconds[column]:.2f} s" for column in self.columns)
        print(f"{name}: {shown}", flush=True)

    def markdown(self) -> str:
        """Format the table: median (smallest to largest) of every column."""
        lines = [
            f"| what | rounds | {' | '.join(f'{c}, s' for c in self.columns)} |",
            "|---|---|" + "---|" * len(self.columns),
        ]
        for name, rounds in self.rounds.items():
            cells = [spread([seconds[column] for seconds in rounds]) for column in self.columns]
            lines.append(f"| {name} | {len(rounds)} | {' | '.join(cells)} |")
        return "\n".join(lines)

    def finish(self, command: str, *, write: bool) -> None:
        """Print the table and its environment. With `write`, also save it in docs/results/."""
        text = (
            f"## {self.title}\n\n{self.markdown()}\n\nMedian (smallest to largest)."
            f" {where()}\nCommand: `{command}`\n"
        )
        print("\n" + text)
        if write:
            RESULTS.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"[^a-z0-9]+", "-", Path(command.split()[0]).stem.lower())
            path = RESULTS / f"{name}.md"
            path.write_text(text)
            print(f"written to {path.relative_to(ROOT)}")


def median_and_quartiles(seconds: Sequence[float]) -> str:
    """Format times as `median (25 % to 75 %)`, each in a suitable unit."""
    low, _, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
    return f"{shown(statistics.median(seconds))} ({shown(low)} to {shown(high)})"


def percentile(values: Sequence[float], share: float) -> float:
    """Compute the nearest-rank percentile of the values at `share` (0 to 1)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def shown(seconds: float) -> str:
    """Format a time: microseconds up to a millisecond, then milliseconds, then seconds."""
    if seconds < 1e-5:
        return f"{seconds * 1e6:.1f} us"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


@dataclass(frozen=True)
class Target:
    """Lower or upper limit for a figure.

    Attributes:
        what: the figure in words.
        found: its value.
        limit: what it is held against.
        at_least: whether more is better.
        unit: written behind both.
    """

    what: str
    found: float
    limit: float
    at_least: bool
    unit: str = "x"

    @property
    def is_met(self) -> bool:
        """True if the figure is on the right side of its limit."""
        return self.found >= self.limit if self.at_least else self.found <= self.limit

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        outcome = "met" if self.is_met else "**missed**"
        found, limit = (f"{value:.3g}" for value in (self.found, self.limit))
        return f"{self.what} {found} {self.unit} ({sign} {limit}: {outcome})"


class Report:
    """Tables of lines with targets, and the raw numbers behind them."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.notes: list[str] = []
        self.blocks: list[str] = []
        self.raw: dict[str, Any] = {}
        self.targets: list[Target] = []

    def table(
        self, columns: Sequence[str], rows: Sequence[Sequence[str | Sequence[Target]]]
    ) -> None:
        """Add a table. A cell is text, or targets for the final count."""
        lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        for row in rows:
            cells = []
            for cell in row:
                if not isinstance(cell, str):
                    self.targets += cell
                    cell = "; ".join(map(str, cell)) or "-"
                cells.append(cell)
            lines.append(f"| {' | '.join(cells)} |")
        self.blocks.append("\n".join(lines))

    def note(self, text: str) -> None:
        """Add a sentence below the tables, and print it at once."""
        print(text, flush=True)
        self.notes.append(text)

    def finish(self, command: str, *, write: bool, json_path: str | None) -> None:
        """Print the report.

        With `write`, also save it in docs/results/. With `json_path`, save the raw numbers there.
        """
        met = sum(target.is_met for target in self.targets)
        text = f"## {self.title}\n\n" + "\n\n".join(self.blocks) + "\n\n"
        text += "".join(f"{note}\n" for note in self.notes)
        text += f"Targets met: {met} of {len(self.targets)}. {where()}\nCommand: `{command}`\n"
        print("\n" + text)
        if json_path:
            Path(json_path).write_text(json.dumps({"where": where(), **self.raw}, indent=1) + "\n")
            print(f"raw numbers in {json_path}")
        if write:
            RESULTS.mkdir(parents=True, exist_ok=True)
            path = RESULTS / f"{Path(command.split()[0]).stem}.md"
            path.write_text(text)
            print(f"written to {path.relative_to(ROOT)}")


def spread(values: Sequence[float]) -> str:
    """Format values as `median (smallest to largest)`, two decimals."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def where() -> str:
    """Describe date, processor and versions in one line."""
    versions = []
    for package in ("sparkhvd", "torch", "lightning", "pyspark", "pyarrow", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    cores = len(os.sched_getaffinity(0))
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return (
        f"{date}, {cores} cores of {cpu[1].strip() if cpu else platform.machine()},"
        f" Python {platform.python_version()}, {', '.join(versions)}."
    )
