"""All checks and figures of one GPU in one table: `python -m tests.gpu` (`make gpu`). Needs torch, but neither pytest nor Spark.

    python -m tests.gpu [--only TEXT] [--no-benchmarks] [--rounds 7] [--results FOLDER] [--limit-s 470]
                        [--check-limit-s 120] [--stand-in]

Checks run first, then the figures of benchmarks/gpu.py. Each has its own deadline, and the program ends after 8
minutes, or after `--limit-s`. Tables are kept as gpu.md in FOLDER: `$OUT` if it is set, else docs/results. The exit status is 0 if
all checks passed (a figure that misses its target is no failure), 1 if a check failed, 2 without a GPU.

`--stand-in` runs the same on the CPU with the stand-in for CUDA and NCCL: this tests the checks, and no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import os
import platform
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
# The part of them that is reserved for the figures.
FIGURES_S = {"step": 60.0, "overhead": 25.0, "pack": 25.0}


class Row(NamedTuple):
    """Line of the table."""

    name: str
    outcome: str
    seconds: float
    detail: str

    def line(self) -> str:
        cells = (self.name, self.outcome, f"{self.seconds:.1f} s", self.detail)
        return " | ".join(cell.replace("|", "/") for cell in cells)


class Results:
    """Results so far. They are written after every step, because the next step may be the last."""

    def __init__(self, path: Path | None, head: str) -> None:
        self._path = path
        self._head = head
        self.rows: list[Row] = []
        self.figures: list[str] = []
        self.num_failed = 0

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.num_failed += row.outcome == "**failed**"
        print(row.line(), flush=True)
        self.write()

    def text(self) -> str:
        lines = ["## One GPU", "", self._head, "", "| check | outcome | time | detail |"]
        lines += ["|---|---|---|---|", *(f"| {row.line()} |" for row in self.rows)]
        return "\n".join([*lines, "", *self.figures])

    def write(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(self.text())


def main() -> int:
    arguments = parse()
    if arguments.stand_in:
        os.environ["SPARKHVD_TEST_STAND_IN"] = "1"
    began = time.monotonic()
    # The last resort, for a process that SIGKILL does not end, or a bug of ours.
    faulthandler.dump_traceback_later(arguments.limit_s + 8, exit=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks are ended, too
    try:
        from tests.gpu.machine import description, why_not
    except ImportError as error:
        return refuse(f"it needs torch with CUDA, and the engine's library: {error}")
    if reason := why_not():
        return refuse(reason)
    date = datetime.datetime.now(datetime.timezone.utc)
    head = (
        f"{date:%Y-%m-%d %H:%M} UTC, {description()}, Python {platform.python_version()}, "
        f"{len(os.sched_getaffinity(0))} cores. Command: `make gpu`"
    )
    print(head, flush=True)
    folder = arguments.results or ("" if arguments.stand_in else default_folder())
    results = Results(Path(folder) / "gpu.md" if folder else None, head)
    with_figures = [
        name
        for name in FIGURES_S
        if arguments.only in f"figures: {name}" and not arguments.no_benchmarks
    ]
    end = began + arguments.limit_s
    with tempfile.TemporaryDirectory(prefix="sparkhvd-gpu-") as logs:
        os.environ["SPARKHVD_TEST_GPU_LOGS"] = logs
        check_end = end - sum(FIGURES_S[name] for name in with_figures)
        check(results, arguments.only, arguments.check_limit_s, check_end)
        del os.environ["SPARKHVD_TEST_GPU_LOGS"]
    for name in with_figures:
        measure(results, name, arguments.rounds, end)
    results.write()
    print(f"\n{results.text()}\n{time.monotonic() - began:.0f} s, {results.num_failed} failed")
    faulthandler.cancel_dump_traceback_later()
    return 1 if results.num_failed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="what has this text in its name")
    parser.add_argument("--no-benchmarks", action="store_true")
    parser.add_argument("--rounds", type=int, default=7, help="of the benchmarks")
    parser.add_argument("--results", default="", help="the folder for gpu.md")
    parser.add_argument("--limit-s", type=float, default=470.0, help="seconds for everything")
    parser.add_argument("--check-limit-s", type=float, default=120.0, help="seconds for a check")
    parser.add_argument("--stand-in", action="store_true", help="no GPU: the stand-in on the CPU")
    return parser.parse_args()


def refuse(reason: str) -> int:
    print(
        f"make gpu: there is no GPU to check: {reason}. Run it on a machine with an NVIDIA GPU and a torch that is "
        "built for CUDA, or try the checks themselves with GPU_FLAGS=--stand-in.",
        file=sys.stderr,
    )
    return 2


def default_folder() -> str:
    return os.environ.get("OUT") or str(ROOT / "docs" / "results")


def check(results: Results, only: str, limit_s: float, end: float) -> None:
    """Run all checks, each for `limit_s` at most. A failed check does not stop the others."""
    from tests.gpu.parts import SKIPPED, parts
    from tests.gpu.ranks import RankPool

    with RankPool() as pool:
        for part in parts(pool):
            if only not in part.name:
                continue
            began = time.monotonic()
            left = end - began
            if left < 5:
                results.add(Row(part.name, "**failed**", 0, "not run: the time was up"))
                continue
            try:
                detail, outcome = part.run(min(part.seconds, limit_s, left)), "ok"
                if detail.startswith(SKIPPED):
                    detail, outcome = detail.removeprefix(SKIPPED), "skipped"
            except Exception as error:
                traceback.print_exc()
                show_warnings()
                outcome = "**failed**"
                detail = " ".join(f"{type(error).__name__}: {error}".split())[:400]
            results.add(Row(part.name, outcome, time.monotonic() - began, detail))


def show_warnings() -> None:
    """Print NCCL's warnings since the last call."""
    for log in sorted(Path(os.environ["SPARKHVD_TEST_GPU_LOGS"]).iterdir()):
        print(f"NCCL in process {log.suffix[1:]}:\n{log.read_text()[-2000:]}", file=sys.stderr)
        log.unlink()


def measure(results: Results, name: str, rounds: int, end: float) -> None:
    """Measure one table of benchmarks/gpu.py."""
    from tests.gpu.parts import finish

    began = time.monotonic()
    seconds = min(FIGURES_S[name], end - began)
    command = [sys.executable, "-X", "faulthandler", "benchmarks/gpu.py", "--only", name]
    status, output = finish([*command, "--rounds", str(rounds)], seconds)
    found = output.partition("\n## ")[2]
    if status == 0 and found:
        results.figures += [f"## {found.strip()}", ""]
        outcome, detail = "ok", next((s for s in found.splitlines() if "Targets met" in s), "")
        detail = detail.partition(". ")[0]
    else:
        print(output[-6000:], file=sys.stderr)
        outcome = "**failed**"
        last = [line for line in output.splitlines() if line.strip()][-1:]
        detail = f"stopped after {seconds:.0f} s" if status is None else " ".join(last)[:300]
    results.add(Row(f"figures: {name}", outcome, time.monotonic() - began, detail))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
