"""tools/release.py: skipped checks are listed as not tried, with the reason, and failed checks as failed."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

from tools import release
from tools.wheel_tests import Missing, python_of

pytestmark = pytest.mark.pure


def test_python_versions_match_the_package_metadata() -> None:
    assert release.versions()[0] == "3.10"
    assert "3.13" in release.versions()


def test_wheel_for_another_machine_is_not_tried() -> None:
    other = {"x86_64": "aarch64"}.get(platform.machine(), "x86_64")
    outcome = release.try_one(other, Path("x.whl"), "3.11", "3.11")
    assert outcome == f"not tried: this machine is {platform.machine()}"
    assert release.try_one("source", Path("x.gz"), "3.12", "3.11").startswith(
        "not tried: the wheels"
    )
    assert release.try_one("any", None, "3.11", "3.11").startswith("not tried: `make wheel`")


def test_release_table_shows_missing_tools_and_failures(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> str:
        return release.run(["python3", "-c", "raise SystemExit('no such thing')"], Path.cwd())

    assert release.attempt("x", lambda: python_of("3.99")).startswith(
        "not tried: finds no Python 3.99"
    )
    assert release.attempt("x", fails) == "**failed**"
    assert "no such thing" in capsys.readouterr().err
    fit = [["a fit", "not tried: no torch"]]
    text = release.page(["3.11"], [["`a.whl`", "**failed**"]], fit, [["newest", "2.15.0"]])
    assert "| file | Python 3.11 |" in text
    assert "| a fit | not tried: no torch |" in text
    assert "| newest | 2.15.0 |" in text


def test_unavailable_torch_version_is_listed_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def environment(main: Path, name: str, requirement: str) -> Path:
        raise Missing(f"skipped {requirement}: No matching distribution found for {requirement}")

    monkeypatch.setattr(release, "torch_environment", environment)
    row = release.torch_row(Path(sys.executable), "oldest", "torch==2.4.*")
    assert row[:3] == [
        "oldest",
        "not tried: skipped torch==2.4.*: No matching distribution found for torch==2.4.*",
        "-",
    ]
    assert len(row) == len(release.TORCH_HEADER)


def test_failed_test_suite_is_reported_with_its_counts(tmp_path: Path) -> None:
    def suite(closing: str) -> Path:
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\necho '===== {closing} ====='\n")
        python.chmod(0o755)
        return python

    assert release.python_tests(suite("4 passed in 2s")) == "4 passed in 2s"
    assert release.python_tests(suite("1 failed, 3 passed in 2s")).startswith("**failed**: 1")
    assert release.python_tests(suite("no tests ran in 0s")).startswith("**failed**")
