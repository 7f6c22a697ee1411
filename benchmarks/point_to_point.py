"""Time of a message from one rank to another, beside Gloo, a bare TCP connection and iperf3: on one host and between two.

    .venv/bin/python benchmarks/point_to_point.py [--rounds 15] [--json FILE] [--write]

The hosts are two network namespaces of this machine, joined by a veth pair (needs root and `ip`). All legs run in the
same two processes, by turns: a message of so many bytes goes to the other rank and comes back, which counts half. Between
hosts iperf3 measures the cable in one direction after each round, where it is installed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from common import ROOT, Report, Target, median_and_quartiles

sys.path.insert(0, str(ROOT))
from benchmarks import iperf  # noqa: E402 - of the checkout
from benchmarks.iperf import Iperf  # noqa: E402
from benchmarks.point_to_point_rank import SIZES  # noqa: E402
from tests.harness.netns import Host, two_hosts, why_not  # noqa: E402
from tests.harness.ranks_on_hosts import ranks_on  # noqa: E402

TIMEOUT_S = 600.0
# Times Gloo's, where it counts; and the share of a bare connection's rate.
FASTER_THAN_GLOO = {"one host": 3, "veth": 1.5}
COMPARED_WITH_GLOO = ("4 B", "64 KiB")
SHARE_OF_SOCKET = 0.8
# Of iperf3's rate in the same run.
SHARE_OF_IPERF = 0.8


def measure(
    hosts: list[Host], rounds: int, peer: Iperf | None
) -> tuple[dict[str, dict[str, list[float]]], list[float]]:
    """Measure messages between two hosts: seconds by size and leg, and iperf3's bytes/s."""
    rates = []
    body = "benchmarks.point_to_point_rank:rank"
    with ranks_on(hosts, body, with_engine=False) as ranks:
        for rank, host in zip(ranks, hosts, strict=True):
            rank.tell(
                {
                    "device": host.device,
                    "gloo": f"tcp://{hosts[0].address}:29577",
                    "socket": (hosts[0].address, 29578),
                    "rounds": rounds,
                }
            )
        for _ in range(rounds):
            assert ranks[0].expect(TIMEOUT_S) == "round"
            if peer is not None:
                rates.append(peer.measure())
            ranks[0].tell("continue")
        found: dict[str, dict[str, list[float]]] = ranks[0].expect(TIMEOUT_S)
        return found, rates


def targets(
    place: str, size: str, medians: Mapping[str, float], rates: Sequence[float]
) -> list[Target]:
    found = []
    if size in COMPARED_WITH_GLOO:
        ratio = medians["Gloo"] / medians["sparkhvd"]
        found.append(Target("Gloo", ratio, FASTER_THAN_GLOO[place], at_least=True))
    if place == "veth" and size == "64 MiB":
        share = medians["socket"] / medians["sparkhvd"]
        found.append(Target("of the socket's rate", share, SHARE_OF_SOCKET, at_least=True))
        if rates:
            share = SIZES[size] / medians["sparkhvd"] / statistics.median(rates)
            found.append(Target("of iperf3", share, SHARE_OF_IPERF, at_least=True))
    return found


def add_table(
    report: Report,
    place: str,
    found: Mapping[str, Mapping[str, list[float]]],
    rates: Sequence[float],
) -> None:
    rows: list[list[Any]] = []
    for size, legs in found.items():
        medians = {leg: statistics.median(times) for leg, times in legs.items()}
        rate = f"{SIZES[size] / medians['sparkhvd'] * 8e-9:.3g} Gbit/s"
        times = [median_and_quartiles(times) for times in legs.values()]
        rows.append([size, *times, rate, targets(place, size, medians, rates)])
    report.table([place, *legs, "sparkhvd's rate", "targets"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="a file for the raw numbers")
    parser.add_argument("--write", action="store_true", help="keep the tables in docs/results/")
    options = parser.parse_args()
    if reason := why_not():
        print(f"benchmarks/point_to_point.py measures nothing here: {reason}.")
        return
    load = os.getloadavg()[0]
    report = Report(f"A message from one of two ranks to the other, load {load:.1f} at the start")
    with two_hosts() as (a, b):
        found, _ = measure([a, a], options.rounds, None)
        report.raw["one host"] = found
        add_table(report, "one host", found, [])
        no_iperf = iperf.why_not()
        peer = None if no_iperf else Iperf(b, a, both_ways=False)
        try:
            found, rates = measure([a, b], options.rounds, peer)
        finally:
            if peer is not None:
                peer.close()
        report.raw["veth"] = {**found, "iperf3": rates}
        add_table(report, "veth", found, rates)
    if no_iperf:
        report.note(f"Without iperf3: {no_iperf}.")
    else:
        report.note(f"iperf3 moves {statistics.median(rates) * 8e-9:.3g} Gbit/s one way.")
    report.note("Median (25 % to 75 %) of half a round trip. `socket` is a bare TCP connection.")
    report.finish("benchmarks/point_to_point.py", write=options.write, json_path=options.json)


if __name__ == "__main__":
    main()
