"""The page of the corpus's results."""

from __future__ import annotations

from typing import Any

import pytest

from tests.corpus import page

pytestmark = pytest.mark.pure

EQUAL = {"difference": 0.0, "ok": True}


def record(case: str, **checks: Any) -> page.Record:
    return {"case": case, "date": "2026-11-29", "seconds": 1.0, "checks": checks}


def test_page_counts_passed_programs_and_names_failed_programs() -> None:
    found = {
        "a.one": record("a.one", **{"one rank": EQUAL, "two ranks": EQUAL}),
        "a.two": record(
            "a.two", **{"one rank": {"ok": False, "error": "Refused: it | has no name"}}
        ),
        "b.three": record(
            "b.three",
            **{
                "one rank": {"difference": 1e-7, "ok": True},
                "two ranks": {"ok": True, "no reference": "random"},
            },
        ),
    }
    found["b.three"]["because"] = "sums of its own"
    text = page.text(found, ["a.one", "a.two", "b.three", "b.four"], ["torch"])
    assert "**2 of 3 programs" in text
    assert "1 more cases have not run yet." in text
    assert "| a | 1 of 2 | 1 of 2, 1 | 1 of 1, 1 | - | - | - | - |" in text
    assert "| all | 2 of 3 | 2 of 3, 1 | 1 of 1, 1 | - | - | - | - |" in text
    assert "- **a.two**, a plain loop: Refused: it has no name" in text
    assert "- sums of its own: b.three" in text
    assert "- DDP on 2 ranks: random (1)" in text
