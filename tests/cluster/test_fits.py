"""The same estimator in every Spark mode, a fit that survives the loss of its executor, and data and conf of an application."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sparkhvd.data.ownership import release
from sparkhvd.data.store.store import Store
from tests.harness.cluster import Cluster, run_client
from tests.harness.processes import wait_for_no_trainers
from tests.harness.soak import soak
from tests.harness.spark import run_here, run_on, with_folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The start of several JVMs may take long on a busy machine.
pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

PRELUDE = """
import hashlib, os, time
import torch
from torch import nn
from sparkhvd import Store, TorchClassificationModel, TorchEstimator, TorchRegressionModel, TorchRegressor, load_local

def digest(module):
    parts = (value.numpy().tobytes() for value in module.state_dict().values())
    return hashlib.sha256(b"".join(parts)).hexdigest()
"""

# Fit, transform, save, load and evaluate; the weights are the same in every mode.
PROGRAM = """
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
rows = [(i, [float(i % 5), float(i % 3)], float(i % 7)) for i in range(40)]
df = spark.createDataFrame(rows, "id bigint, x array<double>, y double")
estimator = TorchRegressor(
    model=net, optimizer=torch.optim.Adam(net.parameters(), lr=0.01), featuresCol="x", labelCol="y", batch_size=4, epochs=2, num_proc=2, random_seed=3, validation=0.2,
    store=Store.create(FOLDER + "/store"), max_retries=0)
model = estimator.fit(df)
model.write().overwrite().save(FOLDER + "/saved")
loaded = TorchRegressionModel.load(FOLDER + "/saved")
# In one partition, as every Python worker that computes rows imports torch.
found = [row[0] for row in model.transform(df.coalesce(1)).orderBy("id").select("prediction").collect()]
expected = sum((value - row[2]) ** 2 for value, row in zip(found, rows)) / len(rows)
alone = load_local(FOLDER + "/saved").predict({"x": [row[1] for row in rows]})["prediction"]
assert max(abs(alone - found)) < 1e-6
assert abs(loaded.evaluate(df.coalesce(1)).meanSquaredError - expected) < 1e-9
assert digest(loaded.getModel()) == digest(model.getModel())
print("LOSSES", [record["val_loss"] for record in model.history])
print("WEIGHTS", digest(model.getModel()))
"""

# A summary of classes for a model without a fit. Files of a pipeline that Spark only reads, as MLflow has them.
CLASSES = """
from pyspark.ml import PipelineModel
from sparkhvd.estimator.saving.local_pipeline import LocalPipeline

LocalPipeline(model).saveToLocal(FOLDER + "/pipeline")
(stage,) = PipelineModel.load(FOLDER + "/pipeline").stages
assert (stage.uid, digest(stage.getModel())) == (model.uid, digest(model.getModel()))
weight = torch.tensor([[0.0, 0.0], [1.0, 0.0]])  # class 1 where x[0] is above 0
net = nn.Linear(2, 2, bias=False)
net.weight = nn.Parameter(weight)
classes = TorchClassificationModel.from_module(net, loss="cross_entropy", featuresCol="x", input_shapes=[[-1, 2]])
summary = classes.evaluate(df.selectExpr("x", "double(x[0] > 0) AS label").coalesce(1))
assert (summary.accuracy, summary.areaUnderROC) == (1.0, 1.0)
"""

# Ranks of this host: optimizers, and torch.distributed on the engine.
RANKS = """
def average():
    import torch.distributed as dist
    import sparkhvd.distributed
    import sparkhvd.torch as hvd

    hvd.init()
    net = nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    dist.init_process_group("sparkhvd")
    group = dist.new_group([0, 1])
    dist.all_reduce(ones := torch.ones(1), group=group)
    dist.destroy_process_group()
    return ones.item()

import sparkhvd
from sparkhvd.runner.zygote_client import of_this_process

of_this_process._useful.add("torch")  # imported once, where each rank would
assert sparkhvd.run_local(average, num_proc=2) == [2.0, 2.0]
"""
# Like `python -W error`, in ranks too.
STRICT = ("env", "PYTHONWARNINGS=error")


def said(output: str) -> list[str]:
    """Return the program's lines about its model, without progress and Spark's log."""
    lines = [line for line in output.splitlines() if re.match("LOSSES|WEIGHTS", line)]
    assert len(lines) == 2, output
    return lines


def check(output: str) -> None:
    assert [line[:9] for line in output.splitlines() if line.startswith("epoch")] == [
        "epoch 1/2",
        "epoch 2/2",
    ]
    assert wait_for_no_trainers() == set()


def test_fit_transform_save_load_and_ranks_work_over_connect(
    cluster: Cluster, tmp_path: Path
) -> None:
    program = with_folder(PRELUDE + PROGRAM + CLASSES + RANKS, tmp_path)
    output = run_client(cluster.remote, program, tmp_path, timeout_s=600, prefix=STRICT)
    # Python prints a warning when it frees objects such as unclosed files, and continues.
    assert "Warning" not in output
    check(output)


@soak("Connect, here; classic Spark: estimator/test_fit and test_losses")
def test_fit_transform_save_and_load_agree_in_classic_and_connect(
    cluster: Cluster, tmp_path: Path
) -> None:
    folders = [tmp_path / mode for mode in ("classic", "connect")]
    for folder in folders:
        folder.mkdir()
    classic = cluster.run(with_folder(PRELUDE + PROGRAM, folders[0]), timeout_s=600)
    program = with_folder(PRELUDE + PROGRAM, folders[1])
    connect = run_client(cluster.remote, program, folders[1], timeout_s=600)
    assert said(classic) == said(connect)
    for output in (classic, connect):
        check(output)


@soak("classic and Connect on a standalone cluster, here; a local master: estimator/test_fit")
def test_fit_transform_save_and_load_agree_in_every_spark_mode(
    spark_mode: Callable[[str, Path], str], spark: SparkSession, tmp_path: Path
) -> None:
    folders = [tmp_path / mode for mode in ("local", "other")]
    for folder in folders:
        folder.mkdir()
    local = run_here(spark, PRELUDE + PROGRAM + CLASSES, folders[0])
    output = spark_mode(PRELUDE + PROGRAM + CLASSES, folders[1])
    assert said(output) == said(local)
    for printed in (local, output):
        check(printed)


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
# If it was killed, it resumed inside the epoch: not every step was made again.
assert NUM_STEPS <= steps < NUM_STEPS + KILL_AT, steps
assert not os.path.exists(FOLDER + "/kill")
print("LOSSES", [record["loss"] for record in model.history])
print("WEIGHTS", digest(model.getModel()))
"""


@soak(
    "estimator/test_faults: a relaunched fit equals an undisturbed one; test_losses: a killed executor"
)
def test_fit_survives_loss_of_executor_with_the_same_weights(
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


KEPT = """
from sparkhvd.data.reuse import prepare
from sparkhvd.data.columns.check import check_schema
from sparkhvd.data.store.store import Store

store = Store.create(FOLDER + "/store")
source = FOLDER + "/source"
shuffles = spark.conf.get("spark.sql.shuffle.partitions")
if not os.path.exists(source):
    spark.range(20).selectExpr("id", "id * 0.5D as label").coalesce(1).write.parquet(source)
    spark.read.parquet(source).count()  # what was done before must not matter
else:
    spark.conf.set("spark.sql.shuffle.partitions", int(shuffles) + 1)
try:
    read = spark.read.option("mergeSchema", "true").parquet(source)
    for df in (read, read.where("id > 1").select("id", "label")):
        schema = check_schema(df.schema, feature_cols=["id"], label_cols=["label"])
        found = prepare(df, schema, store, app_id=spark.sparkContext.applicationId, keep_data=True)
        print("RESULT", found.reused, found.manifest.num_rows)
finally:
    spark.conf.set("spark.sql.shuffle.partitions", shuffles)
"""


@soak("data/test_reuse")
def test_another_application_reuses_kept_data_of_files(
    spark: SparkSession, cluster: Cluster, tmp_path: Path
) -> None:
    first = run_here(spark, f"import os\n{KEPT}", tmp_path)
    release()
    second = cluster.run(with_folder(KEPT, tmp_path))
    for output, is_second in ((first, False), (second, True)):
        found = [line for line in output.splitlines() if line.startswith("RESULT")]
        assert found == [f"RESULT {is_second} 20", f"RESULT {is_second} 18"]
    assert len(Store(str(tmp_path / "store")).data_directories()) == 2


OF_A_CLIENT = """
from sparkhvd.data.reuse import plan_key, prepare
from sparkhvd.data.columns.check import check_schema
from sparkhvd.data.store.store import Store

store = Store.create(FOLDER + "/store")
df = spark.range(20).selectExpr("id", "id * 0.5D as label")
schema = check_schema(df.schema, feature_cols=["id"], label_cols=["label"])
found = [prepare(df, schema, store, app_id="app", data_key=k) for k in (None, None, "mine", "mine")]
print("RESULT", json.dumps([[f.reused, f.manifest.num_rows, f.reason] for f in found]))
print("HELD", len(store.data_directories()))

# Another client of the same server is the same application to Spark, and ends earlier.
if "--second" not in sys.argv:
    import subprocess
    subprocess.run([sys.executable, __file__, "--second"], check=True, timeout=200)
    again = prepare(df, schema, store, app_id="app", data_key="mine")
    print("AGAIN", again.reused, len(store.data_directories()))

    import warnings
    from sparkhvd.data.tables import warn_of_tables

    spark.range(4).selectExpr("id", "id % 2 AS k").write.partitionBy("k").parquet(FOLDER + "/table")
    plain = spark.read.parquet(FOLDER + "/table/k=1").where("id > 0").select("id")
    as_it_is = spark.read.format("text").load(FOLDER + "/table/k=1").selectExpr("length(value) AS id")
    os.mkdir(FOLDER + "/table/_delta_log")
    open(FOLDER + "/table/_delta_log/0.json", "w").close()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for frame in (df, as_it_is, as_it_is.union(plain)):
            warn_of_tables(frame, store)
    print("WARNED", len(caught), *(w.message for w in caught))

    from sparkhvd import TorchEstimator
    from sparkhvd.estimator.fitting.cluster import resolve_cluster
    from sparkhvd.spark import SparkShim

    options = TorchEstimator(max_retries=3)._options()
    shim = SparkShim(spark)
    asked, ask = [], spark.client.config
    spark.client.config = lambda operation: (asked.append(operation), ask(operation))[1]
    found = resolve_cluster(shim, options)
    spark.client.config = ask
    print("ASKED", len(asked))
    print("FOUND", found.num_proc, found.max_retries, found.start_timeout, found.settings.values.spin_us)
    spark.conf.set("spark.sparkhvd.num_proc", "-3")
    try:
        resolve_cluster(SparkShim(spark), options)
    except ValueError as e:
        print("ERROR", e)
"""


@pytest.fixture(scope="module")
def of_a_client(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of the program of a client with its own conf, and its output."""
    folder = tmp_path_factory.mktemp("client")
    conf = {
        "spark.sparkhvd.num_proc": "1",
        "spark.sparkhvd.max_retries": "5",
        "spark.sparkhvd.start_timeout": "112.5",
        "spark.sparkhvd.verbose": "0",
    }
    body = with_folder(OF_A_CLIENT, folder)
    return folder, run_client(cluster.remote, body, folder, conf=conf)


def test_connect_client_applies_conf_of_server_and_session(of_a_client: tuple[Path, str]) -> None:
    """The conf of the server's application applies, and the conf of the client's session."""
    _, output = of_a_client
    assert "FOUND 1 3 112.5 9" in output  # the last value is the application's
    assert "ASKED 1\n" in output  # a request takes milliseconds, and there are dozens of keys
    assert "ERROR spark.sparkhvd.num_proc is -3; it must be at least 1." in output


def test_connect_client_warns_of_a_table_read_without_its_log(
    of_a_client: tuple[Path, str],
) -> None:
    folder, output = of_a_client
    assert (
        f"WARNED 1 The DataFrame reads files in '{folder}/table' without the log '_delta_log'"
        in output
    )


def test_connect_reuses_data_only_by_key_and_deletes_them_at_exit(
    of_a_client: tuple[Path, str],
) -> None:
    folder, output = of_a_client
    line = next(x for x in output.splitlines() if x.startswith("RESULT"))
    unseen = "a Spark Connect client does not see what a plan reads; data_key= would tell that data are the same"
    assert json.loads(line[7:]) == [
        [False, 20, unseen],
        [False, 20, unseen],
        [False, 20, "no earlier data of this key"],
        [True, 20, "data_key='mine'"],
    ]
    assert "HELD 3" in output
    assert "HELD 6" in output
    assert "AGAIN True 3" in output
    assert os.listdir(folder / "store" / "data") == []
