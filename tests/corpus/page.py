"""The page of results, from the records of cases."""

from __future__ import annotations

import json
import os
import platform
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

CHECKS = {
    "one rank": "a plain loop",
    "two ranks": "DDP on 2 ranks",
    "twice the batch": "twice the batch",
    "transform": "transform",
    "saved": "save and load",
    "resumed": "a killed rank",
}

Record = dict[str, Any]


def load(path: Path) -> dict[str, Record]:
    """Return the last record of each case."""
    if not path.exists():
        return {}
    records = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return {record["case"]: record for record in records}


def is_equal(record: Record) -> bool:
    """Return True if all checks passed."""
    return all(check["ok"] for check in record["checks"].values())


def state(check: Record) -> str:
    """Return the outcome of a check in a few words."""
    if "error" in check:
        return "DDP fails" if check.get("reference") else "error"
    if "no reference" in check:
        return "no reference"
    value = check.get("difference")
    if value is None:
        return "ran"
    return ("equal bits" if value == 0 else f"{value:.0e}") + ("" if check["ok"] else " differs")


def line(record: Record) -> str:
    """Return a case in a line, with errors below it."""
    parts = [f"{name}: {state(check)}" for name, check in record["checks"].items()]
    errors = [f"\n    {n}: {c['error'][:600]}" for n, c in record["checks"].items() if "error" in c]
    mark = "ok  " if is_equal(record) else "FAIL"
    return f"{mark} {record['case']} ({record['seconds']} s) " + ", ".join(parts) + "".join(errors)


def text(records: Mapping[str, Record], cases: Sequence[str], libraries: Sequence[str]) -> str:
    """Return the page.

    Args:
        records: by case.
        cases: names of all cases, in order.
        libraries: distributions whose versions the page names.
    """
    known = {name: records[name] for name in cases if name in records}
    equal = sum(map(is_equal, known.values()))
    parts = [
        "## The corpus: programs of users, by a plain loop and by fit",
        f"**{equal} of {len(known)} programs train in `fit` as in plain PyTorch.** Each program is trained on the same rows in the same order:",
        "- by a plain loop and by `fit` on one rank;\n"
        "- by a script of DistributedDataParallel over gloo and by `fit` on two ranks, with the same rows per rank;\n"
        "- by a plain loop with twice the batch, if the mathematics gives the same result.",
        "Weights, buffers and outputs are compared bit by bit. Then `transform` is compared with the module, and a saved and loaded model with "
        "the fitted model. For some programs a run with a killed rank is compared with an undisturbed run.",
        _not_run(len(cases) - len(known)),
        _table(known),
        "Each cell has the number of equal cases, the number of compared cases, and the number of equal cases with equal bits.",
        _failures(known),
        _tolerances(known),
        _without_reference(known),
        _facts(known, libraries),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _not_run(number: int) -> str:
    return f"{number} more cases have not run yet." if number else ""


def _table(known: Mapping[str, Record]) -> str:
    tables: dict[str, list[Record]] = defaultdict(list)
    for name, record in known.items():
        tables[name.partition(".")[0]].append(record)
    rows = [["table", "programs", *CHECKS.values()], ["---"] * (2 + len(CHECKS))]
    for table, found in [*tables.items(), ("all", list(known.values()))]:
        counts = [f"{sum(map(is_equal, found))} of {len(found)}"]
        rows.append([table.replace("_", " "), *counts, *(_count(found, check) for check in CHECKS)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _count(records: Sequence[Record], name: str) -> str:
    found = [r["checks"][name] for r in records if name in r["checks"]]
    found = [check for check in found if "no reference" not in check]
    equal = sum(check["ok"] for check in found)
    bits = sum(check.get("difference") == 0 for check in found)
    return f"{equal} of {len(found)}, {bits}" if found else "-"


def _failures(known: Mapping[str, Record]) -> str:
    lines = [
        f"- **{name}**, {CHECKS.get(check, check)}: {_reason(found)}"
        for name, record in known.items()
        for check, found in record["checks"].items()
        if not found["ok"]
    ]
    return "### Refused, or different\n\n" + "\n".join(lines) if lines else ""


def _reason(check: Record) -> str:
    if "error" not in check:
        return f"differs by {check['difference']:.1e}"
    words = re.sub(r"[|<>`]", "", check["error"].split("\nTraceback")[0])
    words = " ".join(words.split())
    return ("the script of DistributedDataParallel fails: " if check.get("reference") else "") + (
        words if len(words) < 300 else words[:300] + " ..."
    )


def _tolerances(known: Mapping[str, Record]) -> str:
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, record in known.items():
        parts = [record["checks"].get(check, {}) for check in ("one rank", "two ranks")]
        if is_equal(record) and any(part.get("difference") for part in parts):
            reasons[record.get("because", "other order of sums")].append(name)
    lines = [f"- {reason}: {', '.join(names)}" for reason, names in reasons.items()]
    return "### Equal up to rounding\n\n" + "\n".join(lines) if lines else ""


def _without_reference(known: Mapping[str, Record]) -> str:
    lines = []
    for check in ("two ranks", "twice the batch"):
        reasons: dict[str, int] = defaultdict(int)
        for record in known.values():
            if reason := record["checks"].get(check, {}).get("no reference"):
                reasons[reason] += 1
        listed = "; ".join(
            f"{reason} ({number})"
            for reason, number in sorted(reasons.items(), key=lambda pair: -pair[1])
        )
        if listed:
            lines.append(f"- {CHECKS[check]}: {listed}")
    return "### Trained without a comparison, and why\n\n" + "\n".join(lines) if lines else ""


def _facts(known: Mapping[str, Record], libraries: Sequence[str]) -> str:
    dates = sorted({record["date"] for record in known.values()})
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    names = ["torch", "pyspark", "numpy", *libraries]
    installed = {d.metadata["Name"].lower() for d in metadata.distributions()}
    versions = [f"{name} {metadata.version(name)}" for name in names if name.lower() in installed]
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}" if dates else ""
    return (
        f"{when}, {len(os.sched_getaffinity(0))} cores of {cpu[1].strip() if cpu else platform.machine()}, Python "
        f"{platform.python_version()}, {', '.join(versions)}.\nCommand: `make corpus`"
    )
