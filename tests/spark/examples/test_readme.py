"""Python blocks of the README and of docs/tabular.md, run as a reader would: in a program's main module."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from tests.harness.soak import soak
from tests.harness.spark import ROOT, run_here, run_script

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


BLOCKS = blocks("README.md")


def check(output: str) -> None:
    assert re.findall(r"^epoch (\d)/3 ", output, re.MULTILINE) == ["1", "2", "3"]
    score = re.search(r"^r2 ([\d.]+)$", output, re.MULTILINE)
    assert score
    assert float(score[1]) > 0.9
    assert "|prediction|" in output.replace(" ", "")
    assert "[0.5, 0.5]" in output


def test_readme_examples_run_as_they_stand(spark: SparkSession, tmp_path: Path) -> None:
    """Run the blocks in this process, where their `getOrCreate` finds a session of the same master."""
    check(run_here(spark, "\n".join(BLOCKS), tmp_path))


@soak("pure/estimator/test_params: features by inputs; estimator/test_inputs: arguments by name")
def test_program_for_tabular_data_learns(spark: SparkSession, tmp_path: Path) -> None:
    (program,) = blocks("docs/tabular.md")
    output = run_here(spark, program.replace("/tmp/", f"{tmp_path}/"), tmp_path)
    area = re.search(r"^area under ROC ([\d.]+)$", output, re.MULTILINE)
    assert area
    assert float(area[1]) > 0.9
    assert "|prediction|" in output


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
