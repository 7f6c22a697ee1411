"""Cost of more ranks: the control plane on this host, more ranks than cores, and a model up to 4,096 GPUs.

    .venv/bin/python benchmarks/scale.py [--ranks 2,4,8,16,32,64] [--rounds 5] [--json FILE] [--write]

**Control plane.** Real processes without torch, tiny tensors: a barrier (agreement alone), one named allreduce of 4
bytes, and steps of 32 of either submitted together; once as ranks of one host, which agree through shared memory,
and once as if each were on a host of its own, over TCP. Wall time on a machine with fewer cores than ranks is mostly
other ranks' turns; the CPU time of rank 0, which coordinates, is what one more rank costs it anywhere.

**More ranks than cores.** 2, 4 and 8 ranks reduce tensors on two cores; with N ranks N(2(N-1)/N + 1 + 2/N +
2(N-1)/N) S bytes are read and written, and time may grow no faster than these bytes. "Bare" is the same algorithm in
processes with nothing around it (native/bench), in the same rounds: what the machine makes of the bytes.

**Model.** See docs/scaling.md, whose tables `--write` renews.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from scale_model import WORLDS, table_of_choices, table_of_times

from common import ROOT, Report, Target, median_and_quartiles, native_program, shown

sys.path.insert(0, str(ROOT))
from sparkhvd.settings import Settings  # noqa: E402 - of the checkout
from tests.harness.rank_process import rank_processes  # noqa: E402

DOCUMENT = ROOT / "docs" / "scaling.md"
BODY = "benchmarks.scale_rank:rank"
TINY = {
    "barrier": "barrier",
    "one": "allreduce of 4 B",
    "agree": "step of 32 barriers",
    "many": "step of 32 allreduces of 4 B",
}
AGREEMENT_S = 2e-3  # of rank 0's CPU, for a step at 64 ranks over TCP
WAYS = {"one host": False, "TCP": True}
CROWDED = {"1 MiB": 1 << 20, "16 MiB": 16 << 20, "64 MiB": 64 << 20}
CROWDS = (2, 4, 8)
TIMEOUT_S = 120.0


def ordered(ranks: Sequence[Any], what: str, num_bytes: int, steps: int) -> dict[str, Any]:
    """Measure the slowest rank's seconds of each step, and the CPU seconds per step.

    The CPU seconds are those of rank 0, and the median of the others.
    """
    for rank in ranks:
        rank.tell({"what": what, "bytes": num_bytes, "steps": steps})
    reports = [rank.expect(TIMEOUT_S) for rank in ranks]
    return {
        "wall": [max(walls) for walls in zip(*(each["wall"] for each in reports), strict=True)],
        "cpu_rank_0": reports[0]["cpu"],
        "cpu_others": statistics.median(each["cpu"] for each in reports[1:]),
    }


def end(ranks: Sequence[Any]) -> None:
    for rank in ranks:
        rank.tell(None)
    for rank in ranks:
        rank.expect(TIMEOUT_S)


def control_plane(world_size: int, rounds: int, *, tcp_only: bool) -> dict[str, Any]:
    """Measure every round of each kind of step."""
    found: dict[str, Any] = {what: [] for what in TINY}
    # Slots are of no use to four bytes; 64 ranks' would be 64 MiB.
    settings = Settings(connect_timeout_s=TIMEOUT_S, slot_bytes=4096)
    with rank_processes(BODY, world_size, settings=settings, tcp_only=tcp_only) as ranks:
        for number in range(rounds + 1):
            for what in TINY:
                steps = max(4, (400 if what in ("barrier", "one") else 40) // world_size)
                measured = ordered(ranks, what, 4, steps)
                if number > 0:
                    found[what].append(measured)
        end(ranks)
    return found


def crowded(rounds: int, bare: str) -> dict[str, dict[str, dict[int, list[float]]]]:
    """Measure seconds by leg, size and number of ranks. The worlds take turns. `bare`: the C++ program, or "" without it."""
    legs = ("sparkhvd", "bare") if bare else ("sparkhvd",)
    found: dict[str, dict[str, dict[int, list[float]]]] = {
        leg: {label: {size: [] for size in CROWDS} for label in CROWDED} for leg in legs
    }
    for _ in range(rounds):
        for size in CROWDS:
            with rank_processes(BODY, size) as ranks:
                for label, num_bytes in CROWDED.items():
                    walls = ordered(ranks, "one", num_bytes, calls_of(num_bytes))["wall"]
                    found["sparkhvd"][label][size] += walls
                end(ranks)
            if bare:
                orders = [f"{num_bytes} {calls_of(num_bytes)}\n" for num_bytes in CROWDED.values()]
                for label, line in zip(CROWDED, run_bare(bare, size, orders), strict=True):
                    found["bare"][label][size] += [float(us) / 1e6 for us in line.split()]
    return found


def calls_of(num_bytes: int) -> int:
    return max(3, min(100, (32 << 20) // num_bytes))


def run_bare(program: str, size: int, orders: Sequence[str]) -> list[str]:
    """Run the C++ program, and return its line for each order."""
    ended = subprocess.run(
        [program, str(size)],
        input="".join(orders),
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    )
    return ended.stdout.splitlines()


def bytes_moved(world_size: int) -> float:
    """Read and written by all ranks together, per byte of the tensor: copied in, reduced, copied out."""
    n = world_size
    return n * (2 * (n - 1) / n + (1 + 2 / n) + 2 * (n - 1) / n)


def line_through(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit a line by least squares and return its offset and slope."""
    slope, offset = statistics.linear_regression([x for x, _ in points], [y for _, y in points])
    return offset, slope


def median_of(rounds: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.median(each[key] for each in rounds)


def report_control_plane(
    report: Report, way: str, found: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Add the table and return rank 0's cost by kind of step: (seconds, seconds per rank)."""
    rows: list[list[str | list[Target]]] = []
    for size, kinds in found.items():
        for what, rounds in kinds.items():
            walls = [wall for each in rounds for wall in each["wall"]]
            cpu = [shown(median_of(rounds, key)) for key in ("cpu_rank_0", "cpu_others")]
            target: list[Target] = []
            if (way, size, what) == ("TCP", 64, "agree"):
                spent = median_of(rounds, "cpu_rank_0") * 1e3
                target = [Target("rank 0, ms", spent, AGREEMENT_S * 1e3, at_least=False)]
            rows.append([size, TINY[what], median_and_quartiles(walls), *cpu, target])
    columns = ["ranks", f"step, {way}", "time", "CPU of rank 0", "CPU of another rank", "target"]
    report.table(columns, rows)
    lines = {}
    for what in TINY:
        points = [
            (float(size), median_of(kinds[what], "cpu_rank_0")) for size, kinds in found.items()
        ]
        if len(points) > 1:
            lines[what] = line_through(points)
            offset, slope = lines[what]
            report.note(
                f"CPU of rank 0 per {TINY[what]}, {way}: {offset * 1e6:.1f} us + {slope * 1e6:.2f} us per rank."
            )
    return lines


def report_crowded(report: Report, found: dict[str, dict[str, dict[int, list[float]]]]) -> None:
    rows: list[list[str | list[Target]]] = []
    for label, by_size in found["sparkhvd"].items():
        for size, times in by_size.items():
            row: list[str | list[Target]] = [label, str(size), median_and_quartiles(times)]
            if "bare" in found:
                row.append(median_and_quartiles(found["bare"][label][size]))
                row.append(
                    "" if size == CROWDS[0] else f"{growth(found['bare'][label], size):.3g} x"
                )
            limit = bytes_moved(size) / bytes_moved(CROWDS[0])
            target = Target("growth", growth(by_size, size), limit, at_least=False)
            rows.append([*row, [target] if size > CROWDS[0] else []])
    columns = ["tensor", "ranks", "sparkhvd"]
    columns += ["bare", "growth of bare"] if "bare" in found else []
    report.table([*columns, "target: bytes per core"], rows)


def growth(by_size: dict[int, list[float]], size: int) -> float:
    return statistics.median(by_size[size]) / statistics.median(by_size[CROWDS[0]])


def renew_document(lines: dict[str, Any]) -> None:
    """Put the tables into docs/scaling.md, each between its markers."""
    text = DOCUMENT.read_text()
    for name, table in {"times": table_of_times(lines), "choices": table_of_choices()}.items():
        block = f"<!-- {name} -->\n{table}\n<!-- end of {name} -->"
        text = re.sub(
            rf"<!-- {name} -->.*<!-- end of {name} -->", lambda _, b=block: b, text, flags=re.S
        )
    DOCUMENT.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,4,8,16,32,64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="a file for the raw numbers")
    parser.add_argument("--write", action="store_true", help="keep the tables in docs/")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    report = Report(f"Scale: ranks on this host, load {load:.1f} at the start")
    sizes = [int(size) for size in options.ranks.split(",")]
    lines = {}
    for way, tcp_only in WAYS.items():
        found = {str(n): control_plane(n, options.rounds, tcp_only=tcp_only) for n in sizes}
        report.raw[f"control plane, {way}"] = found
        # The model is of many hosts: what counts for it comes last.
        lines = report_control_plane(report, way, found)
    report.raw["crowded"] = crowded(options.rounds, native_program("crowded_bench", report))
    report_crowded(report, report.raw["crowded"])
    report.note(f"The model for {WORLDS[0]} to {WORLDS[-1]} GPUs is in docs/scaling.md.")
    report.finish("benchmarks/scale.py", write=options.write, json_path=options.json)
    if options.write:
        renew_document(lines)


if __name__ == "__main__":
    main()
