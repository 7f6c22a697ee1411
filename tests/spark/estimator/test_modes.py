"""The same estimator in every Spark mode, and a fit that outlives its executor."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.harness.processes import wait_for_no_trainers
from tests.harness.soak import soak
from tests.harness.spark import run_here, run_on

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Several JVMs start; on a machine that does other things too this may take long.
pytestmark = pytest.mark.timeout(900)

PRELUDE = """
import hashlib, os, time
import torch
from torch import nn
from sparkhvd import Store, TorchEstimator, TorchModel

def digest(module):
    parts = (value.numpy().tobytes() for value in module.state_dict().values())
    return hashlib.sha256(b"".join(parts)).hexdigest()
"""

# Fit, transform, save and load; the weights are the same in every mode.
PROGRAM = """
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
rows = [(i, [float(i % 5), float(i % 3)], float(i % 7)) for i in range(40)]
df = spark.createDataFrame(rows, "id bigint, x array<double>, y double")
estimator = TorchEstimator(
    model=net, optimizer=torch.optim.Adam(net.parameters(), lr=0.01), loss=nn.MSELoss(), feature_cols=["x"],
    label_cols=["y"], batch_size=4, epochs=2, num_proc=2, random_seed=3, validation=0.2,
    store=Store.create(FOLDER + "/store"), max_retries=0)
model = estimator.fit(df)

def predictions(model):
    return [row[0] for row in model.transform(df).orderBy("id").select("y__output").collect()]

model.write().overwrite().save(FOLDER + "/saved")
loaded = TorchModel.load(FOLDER + "/saved")
assert predictions(loaded) == predictions(model)
assert digest(loaded.getModel()) == digest(model.getModel())
print("LOSSES", [record["val_loss"] for record in model.history])
print("WEIGHTS", digest(model.getModel()))
"""


@pytest.fixture(scope="module")
def expected(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return said(run_here(spark, PRELUDE + PROGRAM, tmp_path_factory.mktemp("expected")))


def said(output: str) -> list[str]:
    """Return the program's lines about its model, without progress and Spark's log."""
    lines = [line for line in output.splitlines() if re.match("LOSSES|WEIGHTS", line)]
    assert len(lines) == 2, output
    return lines


def test_fit_transform_save_and_load_are_the_same_in_every_mode(
    spark_mode: Callable[[str, Path], str], expected: list[str], tmp_path: Path
) -> None:
    output = spark_mode(PRELUDE + PROGRAM, tmp_path)
    assert said(output) == expected
    assert [line[:9] for line in output.splitlines() if line.startswith("epoch")] == [
        "epoch 1/2",
        "epoch 2/2",
    ]
    assert wait_for_no_trainers() == set()


# Rank 1 kills its executor's JVM in the middle of the first epoch, once.
LOSS = """
from tests.harness import faults

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1))

    def forward(self, x):
        if self.training and os.environ.get("RANK") == "1":
            time.sleep(0.02)
            with open(FOLDER + "/steps", "a") as log:
                log.write(".")
            if os.path.exists(FOLDER + "/kill") and os.path.getsize(FOLDER + "/steps") == KILL_AT:
                os.remove(FOLDER + "/kill")
                faults.kill_executor()
        return self.layers(x)

NUM_STEPS, KILL_AT = 160, 60
rows = [([float(i % 5), float(i % 3)], float(i % 7)) for i in range(640)]
df = spark.createDataFrame(rows, "x array<double>, y double")

model = TorchEstimator(
    model=Net(), optimizer=lambda p: torch.optim.Adam(p, lr=0.01), loss=nn.MSELoss(), feature_cols=["x"],
    label_cols=["y"], batch_size=4, epochs=2, num_proc=2, random_seed=3, max_retries=1,
    store=Store.create(FOLDER + "/store"), checkpoint_interval_s=0.4).fit(df)
steps = os.path.getsize(FOLDER + "/steps")
# If it was killed, it went on inside the epoch: not every step was made again.
assert NUM_STEPS <= steps < NUM_STEPS + KILL_AT, steps
assert not os.path.exists(FOLDER + "/kill")
print("LOSSES", [record["loss"] for record in model.history])
print("WEIGHTS", digest(model.getModel()))
"""


@soak(
    "test_faults here: a relaunched fit equals an undisturbed one; runner/test_faults: a killed executor"
)
def test_a_fit_outlives_its_executor_and_ends_with_the_same_weights(
    spark: SparkSession, tmp_path: Path
) -> None:
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    undisturbed.mkdir()
    disturbed.mkdir()
    (disturbed / "kill").touch()
    body = f"FOLDER = {str(disturbed)!r}\n{PRELUDE}{LOSS}"
    output = run_on("local-cluster[2,1,1024]", body, tmp_path, timeout_s=600)
    assert said(output) == said(run_here(spark, PRELUDE + LOSS, undisturbed))
    assert "ExecutorLostFailure" in output, output
    assert "Relaunching (1 of 1)" in output, output
    assert wait_for_no_trainers() == set()
