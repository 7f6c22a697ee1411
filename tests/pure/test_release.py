"""tools/release.py: what was not tried is written as not tried, with the reason, and what failed as failed."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from tools import release
from tools.wheel_tests import python_of


def test_pythons_are_those_of_the_metadata() -> None:
    assert release.versions()[0] == "3.10"
    assert "3.13" in release.versions()


def test_a_file_for_another_machine_is_not_tried() -> None:
    other = {"x86_64": "aarch64"}.get(platform.machine(), "x86_64")
    outcome = release.try_one(other, Path("x.whl"), "3.11", "3.11")
    assert outcome == f"not tried: this machine is {platform.machine()}"
    assert release.try_one("source", Path("x.gz"), "3.12", "3.11").startswith(
        "not tried: the wheels"
    )
    assert release.try_one("any", None, "3.11", "3.11").startswith("not tried: `make wheel`")


def test_outcomes_tell_what_is_missing_and_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> str:
        return release.run(["python3", "-c", "raise SystemExit('no such thing')"], Path.cwd())

    assert release.attempt("x", lambda: python_of("3.99")).startswith(
        "not tried: no such Python here"
    )
    assert release.attempt("x", fails) == "**failed**"
    assert "no such thing" in capsys.readouterr().err
    text = release.page(["3.11"], [["`a.whl`", "**failed**"]], [["a fit", "not tried: no torch"]])
    assert "| file | Python 3.11 |" in text
    assert "| a fit | not tried: no torch |" in text
