"""A Python without pyspark: ranks run, and functions that need Spark say how to install it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparkhvd.runner import doctor
from tests.harness.paths import ROOT

pytestmark = pytest.mark.processes

# Python imports it when it starts, also in ranks.
_ABSENT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pyspark", "py4j"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""

_PROGRAM = """
import json, sys
import sparkhvd

def add(number):
    import sparkhvd.torch as hvd
    import torch

    hvd.init()
    there = sorted({name.partition(".")[0] for name in sys.modules} & {"pyspark", "py4j"})
    return hvd.allreduce(torch.tensor([float(number)]), op=hvd.Sum).item(), there

def refused(call):
    try:
        call()
    except sparkhvd.SparkUnavailableError as e:
        assert isinstance(e, ImportError) and e.name == "pyspark"
        return str(e)

def of_horovod():
    import sparkhvd.horovod.spark.torch

if __name__ == "__main__":
    from sparkhvd.runner.zygote_client import of_this_process

    of_this_process._useful.add("torch")  # imported once, where each rank would
    refusals = {name: refused(lambda: getattr(sparkhvd, name)) for name in sparkhvd.__all__}
    print(json.dumps({
        "ranks": sparkhvd.run_local(add, args=(3,), num_proc=2),
        "refusals": {name: text for name, text in refusals.items() if text},
        "run": refused(lambda: sparkhvd.run(add, args=(3,), num_proc=2)),
        "horovod": refused(of_horovod),
    }))
"""


@pytest.fixture
def without(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a Python that finds no pyspark."""
    (tmp_path / "absent").mkdir()
    (tmp_path / "absent" / "sitecustomize.py").write_text(_ABSENT)
    return {**os.environ, "PYTHONPATH": f"{tmp_path / 'absent'}:{ROOT}"}


def test_functions_run_locally_and_spark_features_report_missing_pyspark(
    without: dict[str, str], tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    done = subprocess.run(
        [sys.executable, program], env=without, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["ranks"] == [[6.0, []]] * 2
    kinds = (
        "Estimator",
        "Model",
        "Classifier",
        "ClassificationModel",
        "Regressor",
        "RegressionModel",
    )
    assert set(answer["refusals"]) == {f"Torch{kind}" for kind in kinds}
    assert answer["refusals"]["TorchEstimator"] == (
        f"sparkhvd.estimator.TorchEstimator needs pyspark, which {sys.executable} does not have. Run `pip install "
        "'sparkhvd[spark]'`, which brings Spark, too; `pip install pyspark-client` for a client of Spark Connect, or "
        "databricks-connect for one of Databricks. In a runtime that has a pyspark of its own, start the program with "
        "its Python."
    )
    assert answer["run"].startswith("A session of Spark needs pyspark, which ")
    assert answer["horovod"].startswith("horovod.spark.torch needs pyspark, which ")


def test_scripts_and_the_doctor_command_run_without_pyspark(
    without: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    # The test before has ranks that import torch.
    script.write_text("from sparkhvd import launchers\nprint('of', launchers.find().job.size)\n")
    command = [sys.executable, "-m", "sparkhvd.runner.command", "-np", "2", sys.executable, script]
    for each, text in ((command, "[1] of 2"), ([*command[:2], "sparkhvd", "doctor"], "ok   torch")):
        done = subprocess.run(each, env=without, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert text in done.stdout


@pytest.mark.parametrize(
    ("installed", "found"),
    [
        ({"databricks-connect": "17.1"}, "17.1 (databricks-connect)"),
        ({"pyspark-client": "4.1.3"}, "4.1.3 (pyspark-client)"),
        ({}, "of this runtime"),
        (None, "is not installed"),
    ],
)
def test_doctor_command_shows_which_package_provides_pyspark(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str] | None, found: str
) -> None:
    monkeypatch.setattr(doctor, "_version", (installed or {}).get)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: installed)
    finding = doctor._pyspark()
    assert finding.found == found
    assert ("pip install 'sparkhvd[spark]'" in finding.remedy) == (installed is None)
