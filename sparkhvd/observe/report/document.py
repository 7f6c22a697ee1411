"""Document of a report: JSON values, with these entries, each of which may be missing.

    run_id, store, state, error    which run; "finished", "failed" or "interrupted", and why
    began, seconds                 time of the start (ISO, UTC); seconds of the whole fit on the driver
    phases                         [{"name", "seconds"}], in order; their sum is `seconds`
    history                        the records of the epochs, as `TorchModel.history`
    epochs                         [{"epoch", "rows", "seconds", "data_wait_s", "gradient_wait_s"}], each a list by rank
    load                           [{"host", "time", "cpu_percent", "rss_megabytes", "gpu_percent", "gpu_megabytes"}] by rank, each a list by
                                   sample, one per second or less; `time` in seconds since 1970, null for what is not known
    steps                          steps of all ranks by duration: `counts[i]` of at least `first_s` * 2 ** (i / `per_octave`) seconds
    collectives, buckets           counters of rank 0's engine, see docs/observe.md; [{"name", "kind", "parameters", "bytes"}]
    ranks                          [{"host", "device", "phases", "peak_rss_bytes", ...}], by rank
    relaunches                     [{"cause", "seconds"}]: why, and how long after the start
    rank_changes                   [{"seconds", "before", "after", "took_s", "why", "epoch", "repeated_rows"}] of ranks that come and go: how long after
                                   the start, from how many to how many; rows of the epoch that are trained on again. The last two may be missing
    params, settings, versions     texts by name; those that were given, or differ from the default

A number that is not finite is a text ("nan", "inf", "-inf"), which JSON can hold.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

from sparkhvd.errors import InvalidArgumentError

__all__ = [
    "HTML_NAME",
    "JSON_NAME",
    "OF_EPOCH",
    "Document",
    "dumps",
    "is_number",
    "loads",
    "number",
    "total",
]

Document: TypeAlias = "Mapping[str, Any]"

JSON_NAME, HTML_NAME = "report.json", "report.html"
_FORMAT = 1
_NOT_FINITE = ("nan", "inf", "-inf")
# Entries of an epoch's record that say how it went, not what was learned.
OF_EPOCH = (
    "epoch",
    "seconds",
    "rows",
    "rows_per_s",
    "data_wait_s",
    "comm_wait_s",
    "rank_wait_s",
    "slowest_rank",
    "lr",
    "ranks",
    "repeated_rows",
    "rank_changes",
    "broken_rows",
    "val_broken_rows",
)


def dumps(document: Document) -> bytes:
    """Return a document as JSON."""
    values = {"format": _FORMAT, **document}
    return json.dumps(_plain(values), allow_nan=False, indent=1).encode()


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value


def loads(data: bytes, place: str) -> dict[str, Any]:
    """Return the document that `dumps` wrote.

    Raises:
        InvalidArgumentError: it is none, or of a newer format; `place` names it.
    """
    try:
        values = json.loads(data)
        version = values["format"]
    except (ValueError, KeyError, TypeError):
        raise InvalidArgumentError(
            f"{place} is no report of a fit. Give a run's folder, or its {JSON_NAME}."
        ) from None
    if version != _FORMAT:
        raise InvalidArgumentError(
            f"{place} has format version {version}; this sparkhvd reads {_FORMAT}. Read it with the sparkhvd that wrote it."
        )
    return dict(values)


def is_number(value: object) -> TypeGuard[float | str]:
    """Return whether a value is a number of a document, finite or not."""
    return isinstance(value, (int, float)) or value in _NOT_FINITE


def number(value: object) -> float:
    """Return a number of a document; NaN for a text or nothing."""
    return float(value) if is_number(value) else math.nan


def total(values: Sequence[object]) -> float:
    """Return the sum of the finite numbers."""
    return math.fsum(x for x in map(number, values) if math.isfinite(x))
