"""`run_elastic` on a cluster: executors are lost and come, and a client of Spark Connect."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.cluster import Cluster, run_client
from tests.harness.processes import wait_for_no_trainers
from tests.harness.soak import soak
from tests.harness.spark import with_folder

# Executors are killed and come again; on a machine that does other things too this may take long.
pytestmark = pytest.mark.timeout(300)

LOSS = """
from sparkhvd.runner import run_elastic
from tests.harness.elastic_fn import train

results = run_elastic(train, (FOLDER, 2, "executor"), num_proc=2, min_num_proc=1, spark=spark)
assert [rank for rank, *_ in results] == [0, 1], results
for _, sizes, steps, weight in results:
    assert sizes[0] == 2 and sizes[-1] == 2 and 1 in sizes, results
    assert weight == -steps, results
print("ALL WELL")
"""


def test_a_lost_executor_leaves_and_its_successor_joins(cluster: Cluster, tmp_path: Path) -> None:
    output = cluster.run(with_folder(LOSS, tmp_path))
    assert "ALL WELL" in output
    assert "Relaunching" not in output
    assert "was lost with its Spark task" in output
    assert wait_for_no_trainers() == set()


CONNECT = """
from sparkhvd.runner import run_elastic
from tests.harness.elastic_fn import train

results = run_elastic(train, (FOLDER, 2, "process"), num_proc=2, min_num_proc=1, spark=spark)
assert [rank for rank, *_ in results] == [0, 1], results

import torch
from sparkhvd import TorchEstimator

df = spark.range(200).selectExpr("cast(id as double) / 200 as x", "cast(id as double) as y")
model = torch.nn.Linear(1, 1)
fit = TorchEstimator(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
    loss=torch.nn.MSELoss(),
    feature_cols=["x"],
    label_cols=["y"],
    epochs=3,
    num_proc=(1, 2),
    store=FOLDER + "/store",
)
history = fit.fit(df).history
assert [record["epoch"] for record in history] == [1, 2, 3], history
assert {record["rows"] for record in history} == {200}, history
print("ALL WELL")
"""


@soak("the same port, in runner/test_elastic")
def test_a_client_of_spark_connect_that_executors_reach(cluster: Cluster, tmp_path: Path) -> None:
    output = run_client(cluster.remote, with_folder(CONNECT, tmp_path), tmp_path)
    assert "ALL WELL" in output
    assert wait_for_no_trainers() == set()
