"""Tests that run only under `make soak`, and larger amounts for other tests there."""

from __future__ import annotations

import os
from typing import Any

import pytest

SOAK = os.environ.get("SPARKHVD_TEST_SOAK", "") not in ("", "0")


def amount(short: int, long: int | None = None) -> int:
    """Number of examples, rounds or seconds of a test: `short`, or under `make soak` `long` (default: 20 times `short`)."""
    return (20 * short if long is None else long) if SOAK else short


def left_to_soak(covered_by: str, *cases: Any) -> list[Any]:
    """Cases of a parameter that run only under `make soak`. Give several arguments as a tuple."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=soak(covered_by))
        for case in cases
    ]


def soak(covered_by: str) -> pytest.MarkDecorator:
    """Mark a test that runs only under `make soak`. `covered_by` names the tests of the same behaviour in every run."""
    return pytest.mark.soak(covered_by)
