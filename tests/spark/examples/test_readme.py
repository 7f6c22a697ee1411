"""Python blocks of the README and of pages for newcomers, run as a reader would: in a program's main module."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.harness.soak import soak
from tests.harness.spark import ROOT, run_here, run_script

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def blocks(page: str, mark: str = "") -> list[str]:
    """Return the blocks of a page; with a mark those behind it."""
    behind = f"<!-- {mark} -->\n" if mark else ""
    return re.findall(rf"{behind}```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


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


def test_program_of_the_quickstart_runs_as_it_stands(spark: SparkSession, tmp_path: Path) -> None:
    program = "\n".join(blocks("docs/quickstart.md"))
    output = run_here(spark, program.replace("/tmp/", f"{tmp_path}/"), tmp_path)
    assert re.findall(r"^epoch (\d)/5 ", output, re.MULTILINE) == ["1", "2", "3", "4", "5"]
    for name in ("area under ROC", "accuracy"):
        value = re.search(rf"^{name} ([\d.]+)$", output, re.MULTILINE)
        assert value
        assert float(value[1]) > 0.95
    assert output.count("|left|") == 2  # of the model, and of the loaded one
    assert "val_accuracy" in output


@soak("spark/estimator/test_fit, test_tuning: grids; spark/estimator/test_predictors: summaries")
def test_search_of_the_page_on_pipelines_finds_the_better_rate(
    spark: SparkSession, tmp_path: Path
) -> None:
    output = run_here(spark, blocks("docs/pipelines.md")[0], tmp_path)
    errors = re.findall(r"^rate [\d.]+ rmse ([\d.e-]+)$", output, re.MULTILINE)
    assert float(errors[1]) < float(errors[0])


def test_a_loop_over_petastorms_converter_runs(spark: SparkSession, tmp_path: Path) -> None:
    run_here(spark, blocks("docs/coming_from_petastorm.md", "petastorm")[0], tmp_path)


@soak("processes/distributed: torch.distributed in ranks; spark/runner/test_run: run")
def test_a_function_for_torchdistributor_runs_unmodified(
    spark: SparkSession, tmp_path: Path
) -> None:
    page = "docs/coming_from_torchdistributor.md"
    program = blocks(page, "torchdistributor") + blocks(page, "sparkhvd")
    first, second = map(float, run_here(spark, "\n".join(program), tmp_path).split()[-2:])
    assert first == pytest.approx(second, rel=1e-4)


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
