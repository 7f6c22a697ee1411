"""Python blocks of the README, run as a reader would: one behind the other, in a program's main module."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from tests.harness.soak import soak
from tests.harness.spark import ROOT, run_here, run_script

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def check(output: str) -> None:
    assert re.findall(r"^epoch (\d)/3 ", output, re.MULTILINE) == ["1", "2", "3"]
    assert "y__output" in output
    assert "[0.5, 0.5]" in output


def test_readme_examples_run_as_they_stand(spark: SparkSession, tmp_path: Path) -> None:
    """Run the blocks in this process, where their `getOrCreate` finds a session of the same master."""
    check(run_here(spark, "\n".join(BLOCKS), tmp_path))


@soak("the same in a session that is there, here")
def test_readme_examples_run_in_a_fresh_process(tmp_path: Path) -> None:
    script = tmp_path / "readme.py"
    script.write_text("\n".join(BLOCKS))
    result = run_script(script)
    assert result.returncode == 0, result.output
    check(result.output)


def test_readme_example_is_about_twenty_lines() -> None:
    lines = [line for line in BLOCKS[0].splitlines() if line.strip()]
    assert len(lines) <= 22
