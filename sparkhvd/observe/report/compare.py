"""Compare the reports of two runs: different settings, final metrics and times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from sparkhvd.observe.report.charts import format_number, format_seconds
from sparkhvd.observe.report.page import Document, is_number, measures, number, total
from sparkhvd.terminal import visible

_MISSING = "-"
_DAMAGED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def compare(first: Document, second: Document) -> str:
    """Format the differences of two runs as text, with a table per differing subject."""
    names = [str(each.get("run_id") or "") for each in (first, second)]
    tables = (
        ("settings that differ", _different),
        ("at the end", _at_the_end),
        ("time", _times),
    )
    parts = []
    for title, build in tables:
        try:
            if rows := build(first, second):
                parts.append(format_table([title, *names], rows))
        except _DAMAGED as error:  # a document may be damaged, or written by hand
            problem = f"{type(error).__name__}: {str(error)[:200]}"
            parts.append(visible(f"{title}: cannot be shown: {problem}"))
    return "\n\n".join(parts)


def _different(first: Document, second: Document) -> list[list[str]]:
    rows = []
    for kind in ("data", "params", "settings", "versions"):
        found: list[Mapping[str, object]] = [each.get(kind) or {} for each in (first, second)]
        for name in sorted({*found[0], *found[1]}):
            values = [str(each.get(name, _MISSING)) for each in found]
            if values[0] != values[1]:
                rows.append([name, *values])
    return rows


def _row(
    name: str, values: Sequence[object], form: Callable[[float], str] = format_number
) -> list[str]:
    """Make a row with both numbers and the relative change. None means a missing value."""
    shown = [form(number(v)) if is_number(v) else _MISSING for v in values]
    first, second = map(number, values)
    if math.isfinite(first) and math.isfinite(second) and first:
        change = second / first - 1
        shown[1] += f"  ({change:+.1%})" if change else "  (equal)"
    return [name, *shown]


def _at_the_end(first: Document, second: Document) -> list[list[str]]:
    ends = [(each.get("history") or [{}])[-1] for each in (first, second)]
    epochs = [float(len(each.get("history") or ())) for each in (first, second)]
    names = dict.fromkeys([*measures(first), *measures(second)])
    rows = [_row(name, [end.get(name) for end in ends]) for name in names]
    return [_row("epochs", epochs), *rows]


def _times(first: Document, second: Document) -> list[list[str]]:
    both = (first, second)
    phases = [{p["name"]: p["seconds"] for p in each.get("phases") or ()} for each in both]
    rows = [_row("whole fit", [each.get("seconds") for each in both], format_seconds)]
    for name in dict.fromkeys([*phases[0], *phases[1]]):
        rows.append(_row(name, [p.get(name) for p in phases], format_seconds))
    rates: list[int | None] = []
    for each in both:
        history = each.get("history") or ()
        rows_trained = total([r.get("rows") for r in history])
        seconds = total([r.get("seconds") for r in history])
        rates.append(round(rows_trained / seconds) if seconds else None)
    return [*rows, _row("rows/s in training", rates)]


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table as text with aligned columns."""
    cells = [[visible(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    )
    return "\n".join(line.rstrip() for line in padded)
