"""A client of Spark Connect with only the package pyspark-client: no pyspark, no py4j, no Java."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.harness.spark import ROOT, connect_server

pytestmark = pytest.mark.soak

PROGRAM = """
import importlib.metadata, sys
import torch
from pyspark.sql import SparkSession
from sparkhvd import TorchRegressionModel, TorchRegressor, load_local, run

url, folder = sys.argv[1:]
spark = SparkSession.builder.remote(url).getOrCreate()
df = spark.range(400).selectExpr("array(rand(1), rand(2)) AS features").selectExpr("*", "features[0] - features[1] AS label")

def rank():
    import sparkhvd.torch as hvd

    hvd.init()
    return hvd.rank()

assert run(rank, num_proc=2, spark=spark) == [0, 1]
model = TorchRegressor(
    model=torch.nn.Linear(2, 1), optimizer="sgd", learning_rate=0.3, epochs=4, num_proc=2, verbose=0, store=folder + "/store").fit(df)
model.write().overwrite().save(folder + "/saved")
rows = df.limit(5)
found = [row.prediction for row in TorchRegressionModel.load(folder + "/saved").transform(rows).collect()]
alone = load_local(folder + "/saved").predict(rows.toPandas())["prediction"]
assert max(abs(alone - found)) < 1e-6
assert "py4j" not in sys.modules
import pyspark
assert pyspark.__file__.startswith(sys.prefix), pyspark.__file__
print("all is well with", importlib.metadata.version("pyspark-client"))
"""
NO_PY4J = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "py4j":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with pyspark-client. The other packages come from this environment, later on the path."""
    folder = tmp_path_factory.mktemp("client") / "env"
    make = "import sys, venv; venv.EnvBuilder(with_pip=True, symlinks=True).create(sys.argv[1])"
    subprocess.run([sys.executable, "-c", make, folder], check=True, timeout=120)
    python = folder / "bin" / "python"
    install = [
        python,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--no-cache-dir",
        "install",
        "-q",
    ]
    done = subprocess.run(
        [*install, "pyspark-client>=4.1,<5"], capture_output=True, text=True, timeout=600
    )
    if "No matching distribution" in done.stderr:
        pytest.skip("pip finds no pyspark-client here")
    assert done.returncode == 0, done.stderr
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "zz_main_environment.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (site / "sitecustomize.py").write_text(NO_PY4J)
    return python


@pytest.mark.timeout(900)
def test_client_with_only_pyspark_client_runs_fits_and_loads(client: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"  # pyspark 4.2 takes `python -c` for a run of its doctests
    program.write_text(PROGRAM)
    with connect_server(tmp_path / "server") as url:
        done = subprocess.run(
            [client, program, url, tmp_path],
            env={**os.environ, "PYTHONPATH": str(ROOT), "JAVA_HOME": "/nonexistent"},
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert done.returncode == 0, done.stderr
    assert "all is well with" in done.stdout
