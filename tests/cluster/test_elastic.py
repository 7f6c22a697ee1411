"""`run_elastic` on a cluster: executors are lost and added, and executors reach a Spark Connect client or not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.cluster import Cluster, run_client
from tests.harness.processes import wait_for_no_trainers
from tests.harness.soak import soak
from tests.harness.spark import with_folder

# Executors are killed and replaced, which may take long on a busy machine.
pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

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


@soak("runner/test_elastic_spark; cluster/test_losses loses executors")
def test_ranks_of_lost_executor_leave_and_ranks_of_its_replacement_join(
    cluster: Cluster, tmp_path: Path
) -> None:
    output = cluster.run(with_folder(LOSS, tmp_path))
    assert "ALL WELL" in output
    assert "Relaunching" not in output
    assert "was lost with its Spark task" in output
    assert wait_for_no_trainers() == set()


# A client of Spark Connect that no executor reaches, for example behind NAT.
BEHIND_NAT = """
from sparkhvd import Store
from sparkhvd.runner import run_elastic
from sparkhvd.spark import SparkShim
from tests.harness.elastic_fn import train

SparkShim.own_addresses = lambda shim: ("127.0.0.1", "192.0.2.1")

def run(fault, **given):
    os.makedirs(FOLDER + "/" + fault)
    results = run_elastic(
        train, (FOLDER + "/" + fault, 2, fault), num_proc=2, min_num_proc=1, spark=spark, **given)
    assert [rank for rank, *_ in results] == [0, 1], results
    for _, sizes, steps, weight in results:
        assert sizes[-1] == 2 and weight == -steps, results
"""

LOST_COORDINATOR = """
store = Store.create(FOLDER + "/store")
run("coordinator", store=store)
assert os.listdir(FOLDER + "/store/elastic") == []

import torch
import sparkhvd.torch as hvd
from sparkhvd import TorchEstimator
from sparkhvd.estimator import Callback

class Kill(Callback):
    def on_step_end(self, ctx, loss):
        from tests.harness import faults

        if hvd.rank() == 1 and ctx.step >= 3 and not os.path.exists(FOLDER + "/killed"):
            open(FOLDER + "/killed", "w").close()
            faults.kill_self()
        if hvd.size() == 1:
            time.sleep(0.3)  # until another one joins

df = spark.range(200).selectExpr("cast(id as double) / 200 as x", "cast(id as double) as y")
fit = TorchEstimator(
    model=torch.nn.Linear(1, 1), optimizer="sgd", learning_rate=0.01, loss="mse", feature_cols=["x"], label_cols=["y"],
    batch_size=8, epochs=3, num_proc=(1, 2), callbacks=[Kill()], store=store)
history = fit.fit(df).history
assert [record["epoch"] for record in history] == [1, 2, 3], history
assert {record["rows"] for record in history} == {200}, history
print("ALL WELL")
"""


@soak("elastic/test_coordinator, elastic: the store; a lost executor: here")
def test_job_finds_coordinator_through_store_and_survives_its_loss(
    cluster: Cluster, tmp_path: Path
) -> None:
    body = with_folder(BEHIND_NAT + LOST_COORDINATOR, tmp_path)
    output = run_client(cluster.remote, body, tmp_path)
    assert "ALL WELL" in output
    lost = "The elastic job cannot continue: its coordinator was lost with its Spark task"
    assert output.count(lost) == output.count("Relaunching (1 of 2)") == 1, output
    # Lines about changes also arrive through the store.
    assert re.search(r"^sparkhvd: 2 -> 1 rank in .* ended with signal SIGKILL", output, re.M), (
        output
    )
    assert re.search(r"^sparkhvd: 1 -> 2 ranks in .* joined as rank 1", output, re.M), output
    assert wait_for_no_trainers() == set()


OTHER_WAYS = """
run("process", store=Store.create(FOLDER + "/store"))
try:
    run("unreached")
except Exception as e:
    print("REFUSED", type(e).__name__, e)
SparkShim.own_addresses = reach
run("executor")
print("ALL WELL")
"""


@soak("the coordinator in a task: here; the same port: runner/test_elastic_spark")
def test_connect_client_runs_elastic_with_store_and_reports_unreachable_driver_without(
    cluster: Cluster, tmp_path: Path
) -> None:
    kept = "from sparkhvd.spark import SparkShim\nreach = SparkShim.own_addresses\n"
    body = with_folder(kept + BEHIND_NAT + OTHER_WAYS, tmp_path)
    output = run_client(cluster.remote, body, tmp_path)
    assert "ALL WELL" in output
    assert "REFUSED PreflightError The tasks cannot reach the driver (" in output, output
    assert "over Spark Connect give a store" in output, output
    assert wait_for_no_trainers() == set()
