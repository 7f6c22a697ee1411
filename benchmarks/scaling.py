"""Scaling of training: 1 to 8 ranks on this host, measured, and up to 1,024 GPUs, modelled.

    .venv/bin/python benchmarks/scaling.py [--ranks 1,2,4,8] [--rounds 9] [--quick] [--model-only] [--json FILE] [--write]

**Measured.** Each rank trains the same small network with batches of its own; without communication, with
`hvd.DistributedOptimizer` and with DDP on Gloo, by turns in the same processes (see benchmarks/step.py). More ranks
than cores share them, so what counts is the ratio to as many ranks that do not communicate.

**Model.** See docs/scaling.md, whose tables `--write` renews; with `--model-only` nothing is measured.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from scaling_model import (
    table_of_buckets,
    table_of_computations,
    table_of_efficiency,
    table_of_published,
)
from step import chosen, ratio_shown, ratios, run
from step_models import MODELS
from step_rank import Found, Plan

from common import ROOT, Report, Target, median_and_quartiles

DOCUMENT = ROOT / "docs" / "scaling.md"
NETWORKS = ("small mlp", "small cnn")
VARIANTS = ("none", "DDP", "sparkhvd")
TABLES = {
    "computations": table_of_computations,
    "published": table_of_published,
    "efficiency": table_of_efficiency,
    "buckets": table_of_buckets,
}


def measured(network: str, sizes: Sequence[int], rounds: int, shorter: int) -> dict[int, Found]:
    """Measure a network with each number of ranks."""
    found = {}
    for size in sizes:
        # One rank does not communicate, also with DDP.
        variants = VARIANTS if size > 1 else ("none", "sparkhvd")
        found[size] = run(Plan(network, variants, rounds, shorter), size)
        print(f"{network}, {size} ranks: measured", flush=True)
    return found


def report_network(report: Report, network: str, by_size: Mapping[int, Found]) -> None:
    """Add the table of a network: the throughput of all ranks together, by their number and variant."""
    batch = len(MODELS[network].batch()[0])
    rows: list[list[str | Sequence[Target]]] = []
    for size, found in by_size.items():
        for name in (name for name in VARIANTS if name in found.wall):
            times = found.wall[name]
            rates = sorted(size * batch / seconds for seconds in times)
            rows.append(
                [
                    str(size),
                    name,
                    median_and_quartiles(times),
                    f"{rates[len(rates) // 2]:.0f}",
                    ratio_shown(ratios(found.wall, "none", name)) if name != "none" else "1",
                ]
            )
        rows += [
            [str(size), name, f"error: {error}", "", ""] for name, error in found.errors.items()
        ]
    columns = ["ranks", MODELS[network].title, "a step", "samples per second, all ranks"]
    report.table([*columns, "efficiency: share of none"], rows)


def renew_document() -> None:
    """Put the model's tables into docs/scaling.md, each between its markers."""
    text = DOCUMENT.read_text()
    for name, table in TABLES.items():
        block = f"<!-- {name} -->\n{table()}\n<!-- end of {name} -->"
        text = re.sub(
            rf"<!-- {name} -->.*<!-- end of {name} -->", lambda _, b=block: b, text, flags=re.S
        )
    DOCUMENT.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="1,2,4,8")
    parser.add_argument("--models", help=f"with commas, of {','.join(NETWORKS)}")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="3 rounds, shorter")
    parser.add_argument("--model-only", action="store_true", help="measure nothing")
    parser.add_argument("--json", help="a file for the raw numbers")
    parser.add_argument("--write", action="store_true", help="keep the tables in docs/")
    options = parser.parse_args()
    if options.model_only:
        print("\n\n".join(table() for table in TABLES.values()))
    else:
        rounds, shorter = (3, 2) if options.quick else (options.rounds, 1)
        sizes = [int(size) for size in options.ranks.split(",")]
        load = os.getloadavg()[0]
        report = Report(f"Scaling: ranks of one thread on this host, load {load:.1f} at the start")
        for network in chosen(options.models, NETWORKS):
            by_size = measured(network, sizes, rounds, shorter)
            report.raw[network] = {size: asdict(found) for size, found in by_size.items()}
            report_network(report, network, by_size)
        report.note(f"Median (25 % to 75 %) of {rounds} rounds. Every round measures each variant.")
        report.note("The model for 8 to 1,024 GPUs is in docs/scaling.md.")
        report.finish("benchmarks/scaling.py", write=options.write, json_path=options.json)
    if options.write:
        renew_document()


if __name__ == "__main__":
    main()
