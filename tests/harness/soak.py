"""How long a test runs: a short leg by default, the long one under `make soak`."""

from __future__ import annotations

import os

SOAK = os.environ.get("SPARKHVD_TEST_SOAK", "") not in ("", "0")


def amount(short: int, long: int | None = None) -> int:
    """Examples, rounds or seconds of a test: `short`, or under `make soak` `long` (default 20 times that)."""
    return (20 * short if long is None else long) if SOAK else short
