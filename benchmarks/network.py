"""Time of an allreduce between two hosts, beside Gloo and beside iperf3 over the same cable.

    .venv/bin/python benchmarks/network.py [--rounds 9] [--json FILE] [--write]

The hosts are two network namespaces of this machine, joined by a veth pair (needs root, `ip`, `tc` and `iperf3`).
One rank on each, float32 tensors in private memory, both libraries in the same processes; every round measures each
of them, and iperf3 in both directions at once, by turns. A call takes as long as its slower rank. An allreduce of S
bytes between two ranks sends S bytes each way, so S / time stands beside iperf3's rate per direction. Then the same
on the cable limited to 1 Gbit/s.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from common import ROOT, Report, Target, median_and_quartiles, shown

sys.path.insert(0, str(ROOT))
from benchmarks import iperf  # noqa: E402 - of the checkout
from benchmarks.iperf import Iperf  # noqa: E402
from tests.harness.netns import two_hosts, why_not  # noqa: E402
from tests.harness.ranks_on_hosts import ranks_on  # noqa: E402

SIZES = {"4 KiB": 4 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20, "64 MiB": 64 << 20}
SHAPED = {"16 MiB": 16 << 20, "64 MiB": 64 << 20}
SHAPED_RATE = "1gbit"
# Times Gloo's, by size; iperf3's rate counts from LARGE on.
FASTER_THAN_GLOO = {4 << 10: 1.5, 1 << 20: 1.5, 16 << 20: 1.5, 64 << 20: 1.3}
LARGE = 16 << 20
SHARE_OF_IPERF = 0.8
SHARE_OF_SHAPED = 0.95
TIMEOUT_S = 60.0


class Pair:
    """The two ranks, and what was measured: seconds (or bytes per second for iperf3) by leg and size."""

    def __init__(self, ranks: Sequence[Any], iperf: Iperf) -> None:
        self.ranks = ranks
        self.iperf = iperf

    def measure(self, library: str, num_bytes: int, repeats: int) -> tuple[list[float], float]:
        """Measure the slower rank's seconds of each call, and both ranks' CPU seconds per call."""
        for rank in self.ranks:
            rank.tell({"library": library, "bytes": num_bytes, "repeats": repeats})
        reports = [rank.expect(TIMEOUT_S) for rank in self.ranks]
        walls = [max(pair) for pair in zip(*(each["wall"] for each in reports), strict=True)]
        return walls, sum(each["cpu"] for each in reports)

    def rounds(
        self, sizes: dict[str, int], libraries: Sequence[str], rounds: int
    ) -> dict[str, Any]:
        """Measure all legs by turns. The first round warms up and is dropped."""
        found: dict[str, Any] = {label: {name: [] for name in libraries} for label in sizes}
        for legs in found.values():
            legs |= {f"{name}, CPU": [] for name in libraries}
        found["iperf3"] = []
        for number in range(rounds + 1):
            for label, num_bytes in sizes.items():
                # In runs of calls, as a training loop makes them: one alone measures the barrier.
                repeats = max(2, min(50, (16 << 20) // num_bytes))
                for name in libraries:
                    walls, cpu = self.measure(name, num_bytes, repeats)
                    if number > 0:
                        found[label][name] += walls
                        found[label][f"{name}, CPU"].append(cpu)
            if number > 0:
                found["iperf3"].append(self.iperf.measure())
        return found


def gbit(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8e-9:.2f} Gbit/s"


def report_fast(report: Report, found: dict[str, Any]) -> None:
    limit = statistics.median(found["iperf3"])
    rows: list[list[str | list[Target]]] = []
    for label, num_bytes in SIZES.items():
        ours = statistics.median(found[label]["sparkhvd"])
        gloo = statistics.median(found[label]["gloo"])
        targets = [Target("Gloo", gloo / ours, FASTER_THAN_GLOO[num_bytes], at_least=True)]
        if num_bytes >= LARGE:
            share = num_bytes / ours / limit
            targets.append(Target("of iperf3", share, SHARE_OF_IPERF, at_least=True))
        rows.append(
            [
                label,
                median_and_quartiles(found[label]["sparkhvd"]),
                median_and_quartiles(found[label]["gloo"]),
                gbit(num_bytes / ours),
                " / ".join(
                    shown(statistics.median(found[label][f"{name}, CPU"]))
                    for name in ("sparkhvd", "gloo")
                ),
                targets,
            ]
        )
    report.table(
        ["veth", "sparkhvd", "Gloo", "sparkhvd, each way", "CPU, both ranks", "targets"], rows
    )
    report.note(f"iperf3 --bidir moves {gbit(limit)} each way.")


def report_shaped(report: Report, found: dict[str, Any]) -> None:
    limit = statistics.median(found["iperf3"])
    rows: list[list[str | list[Target]]] = []
    for label, num_bytes in SHAPED.items():
        rate = num_bytes / statistics.median(found[label]["sparkhvd"])
        target = Target("of iperf3", rate / limit, SHARE_OF_SHAPED, at_least=True)
        rows.append([label, median_and_quartiles(found[label]["sparkhvd"]), gbit(rate), [target]])
    report.table([f"limited to {SHAPED_RATE}", "sparkhvd", "each way", "targets"], rows)
    report.note(f"iperf3 --bidir moves {gbit(limit)} each way over the limited cable.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-shaping", action="store_true", help="leave the limited cable out")
    parser.add_argument("--json", help="a file for the raw numbers")
    parser.add_argument("--write", action="store_true", help="keep the tables in docs/results/")
    options = parser.parse_args()
    if reason := why_not() or iperf.why_not():
        print(f"benchmarks/network.py measures nothing here: {reason}.")
        return
    load = os.getloadavg()[0]
    report = Report(
        f"allreduce between two hosts: veth, one rank each, float32, load {load:.1f} at the start"
    )
    with (
        two_hosts() as (a, b),
        ranks_on([a, b], "benchmarks.network_rank:rank", with_engine=False) as ranks,
    ):
        for rank, host in zip(ranks, (a, b), strict=True):
            rank.tell({"device": host.device, "address": f"tcp://{a.address}:29577"})
        for rank in ranks:
            rank.expect(TIMEOUT_S)
        peer = Iperf(b, a, both_ways=True)
        try:
            pair = Pair(ranks, peer)
            report.raw["veth"] = pair.rounds(SIZES, ("sparkhvd", "gloo"), options.rounds)
            if not options.no_shaping:
                for host in (a, b):
                    host.shape(SHAPED_RATE)
                report.raw[SHAPED_RATE] = pair.rounds(
                    SHAPED, ("sparkhvd",), max(1, options.rounds // 3)
                )
        finally:
            peer.close()
        for rank in ranks:
            rank.tell(None)
            rank.expect(TIMEOUT_S)
    report_fast(report, report.raw["veth"])
    if not options.no_shaping:
        report_shaped(report, report.raw[SHAPED_RATE])
    report.finish("benchmarks/network.py", write=options.write, json_path=options.json)


if __name__ == "__main__":
    main()
