"""Reports of ranks on the progress of an epoch, and the driver's line about rank 0."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def report_of_step(
    epoch: int,
    step: int,
    *,
    epochs: int = 2,
    num_steps: int = 9,
    rows_per_s: float = 1000.0,
    left_s: float = 3.0,
    means: Mapping[str, float] | None = None,
    waited: float = 0.0,
    size: int = 2,
) -> str:
    """Return a report of rank 0. With the defaults its line is "epoch 1/2  step 1/9  1,000 rows/s  3 s left"."""
    report: dict[str, Any] = {"rank": 0, "epoch": epoch, "waited": waited, "epochs": epochs}
    report["size"] = size
    report |= {"step": step, "num_steps": num_steps, "rows_per_s": rows_per_s, "left_s": left_s}
    return json.dumps({**report, "means": dict(means or {})})
