"""examples/cluster_check.py: a line per rank, a fit through the store, and an error for what a cluster lacks."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.harness.spark import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def test_cluster_check_prints_a_line_per_rank(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = str(tmp_path / "store")
    monkeypatch.setattr(sys, "argv", ["cluster_check.py", "--num-proc", "2", "--store", store])
    runpy.run_path(str(ROOT / "examples" / "cluster_check.py"), run_name="__main__")
    output = capsys.readouterr().out
    lines = output.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("rank  host"))
    assert [line.split()[0] for line in lines[begin + 1 : begin + 3]] == ["0", "1"]
    assert re.search(r"\d+ ms\s*$", lines[begin + 2])
    assert "a fit through the store: loss " in output
    assert lines[-1] == "all is well"
