"""The page of results, from the records of cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHECKS = {
    "one rank": "`fit` with one rank equals the plain loop",
    "two ranks": "two ranks equal a script of DistributedDataParallel with the same rows per rank",
    "twice the batch": "two ranks equal one process with twice the batch",
    "transform": "`transform` equals the module",
    "saved": "a saved and loaded model equals the fitted one",
    "resumed": "a run whose rank was killed equals one that was not",
}
COMMAND = "make corpus"

Record = dict[str, Any]


def load(path: Path) -> dict[str, Record]:
    """Return the last record of each case."""
    if not path.exists():
        return {}
    records = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return {record["case"]: record for record in records}


def is_equal(record: Record) -> bool:
    return all(check["ok"] for check in record["checks"].values())


def state(check: Record | None) -> str:
    """Return the outcome of a check in a word or two."""
    if check is None:
        return "-"
    if "error" in check:
        return "plain DDP fails" if check.get("reference") else "error"
    if "no reference" in check:
        return "ran"
    value = check.get("difference")
    if value is None:
        return "ok" if check["ok"] else "failed"
    return ("equal bits" if value == 0 else f"{value:.0e}") + ("" if check["ok"] else " differs")


def line(record: Record) -> str:
    """Return a case in a line, with errors."""
    parts = [f"{name}: {state(check)}" for name, check in record["checks"].items()]
    errors = [f"\n    {n}: {c['error'][:600]}" for n, c in record["checks"].items() if "error" in c]
    mark = "ok  " if is_equal(record) else "FAIL"
    return f"{mark} {record['case']} ({record['seconds']} s) " + ", ".join(parts) + "".join(errors)


def text(records: dict[str, Record], names: list[str], versions: dict[str, str]) -> str:
    """Return the page."""
    known = {n: records[n] for n in names if n in records}
    return "\n".join(f"{line(r)}" for r in known.values()) + "\n"
