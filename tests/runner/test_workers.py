"""The Python of Spark's workers: chosen on local masters, and checked before long work."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from sparkhvd import TorchEstimator
from sparkhvd.errors import PreflightError
from sparkhvd.spark import SparkShim

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture
def chosen(spark: SparkSession) -> Iterator[SparkSession]:
    """Restore the session's Python of workers."""
    before = spark.sparkContext.pythonExec
    yield spark
    spark.sparkContext.pythonExec = before


def test_local_master_workers_run_the_python_of_the_driver(
    chosen: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = chosen.sparkContext
    context.pythonExec = "python3"
    SparkShim(chosen)
    assert context.pythonExec == "python3"  # the harness has named one
    monkeypatch.delenv("PYSPARK_PYTHON")
    SparkShim(chosen)
    assert context.pythonExec == sys.executable


def test_error_names_a_python_without_packages_before_data_are_written(
    chosen: SparkSession, tmp_path: Path
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    chosen.sparkContext.pythonExec = str(tmp_path / "bare/bin/python")
    model = torch.nn.Linear(1, 1)
    estimator = TorchEstimator(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=torch.nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        store=str(tmp_path / "store"),
    )
    df = chosen.createDataFrame([([1.0], 1.0)], "x array<double>, y double")
    with pytest.raises(
        PreflightError, match=r"run .*bare/bin/python.* no (module )?.*Set PYSPARK_PYTHON"
    ):
        estimator.fit(df)
    assert not (tmp_path / "store" / "data").exists()
