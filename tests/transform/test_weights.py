"""Weights of a `TorchModel` when rows are computed: lazily, in a stream, long after the model was deleted."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql.types import IntegerType, StructField, StructType
from torch import nn

from sparkhvd import InvalidArgumentError, Store
from sparkhvd.data.ownership import release
from sparkhvd.training.modules.weights import CLOSURE_BYTES
from tests.estimator.fits import estimator, fitted, mlp
from tests.harness.by_value import by_value
from tests.harness.soak import left_to_soak, soak
from tests.harness.spark import run_on
from tests.harness.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

travels_by_value = by_value(__name__)

SCHEMA = StructType([StructField("x", VectorUDT()), StructField("k", IntegerType())])


def large(seed: int = 0) -> nn.Module:
    """Make a module slightly too large for the plan."""
    torch.manual_seed(seed)
    middle = CLOSURE_BYTES // 4 // 4096 + 1
    module = nn.Sequential(nn.Linear(2, 4096), nn.Linear(4096, middle), nn.Linear(middle, 1))
    assert sum(p.nbytes for p in module.parameters()) > CLOSURE_BYTES
    return module


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    rows = [(Vectors.dense(i / 9, 1 - i / 5), i) for i in range(20)]
    return spark.createDataFrame(rows, SCHEMA)  # in two partitions: each costs a Python worker


def expected(module: nn.Module, k: int) -> float:
    with torch.no_grad():
        return float(module(torch.tensor([[k / 9, 1 - k / 5]], dtype=torch.float32)))


def assert_right(rows: list[Any], module: nn.Module, name: str = "y__output") -> None:
    assert sorted(r.k for r in rows) == list(range(20))
    for row in rows[:: len(rows) // 2]:
        assert row[name] == pytest.approx(expected(module, row.k), rel=1e-4, abs=1e-5)


@soak("test_transform_worker_loads_a_model_once, here; training/test_weights")
def test_large_weights_survive_model_deletion_cleaning_and_another_fit(
    df: DataFrame, tmp_path: Path
) -> None:
    module, store = large(), Store.create(tmp_path / "store")
    model = fitted(module).setStore(store)
    lazy = model.transform(df)
    (path,) = store.list("models")
    del model
    data = df.selectExpr("double(k) AS x", "1.0D AS y")
    estimator(mlp(1), store, num_proc=1, keep_data=True).fit(data)
    assert store.clean(runs=True)
    release()
    gc.collect()
    assert_right(lazy.collect(), module)
    assert_right(lazy.collect(), module)
    fitted(module).setStore(store).transform(df)
    assert store.list("models") == [path]


def of_size(mebibytes: float, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    middle = int(mebibytes * 2**18 / 1024)
    return nn.Sequential(nn.Linear(2, 1000), nn.Linear(1000, middle), nn.Linear(middle, 1)).eval()


def broadcast_files(spark: SparkSession) -> set[str]:
    return set(os.listdir(spark.sparkContext._temp_dir))  # type: ignore[attr-defined]  # the folder has no public name


def collect_garbage(spark: SparkSession) -> None:
    for _ in range(3):
        gc.collect()
        spark._jvm.System.gc()  # type: ignore[union-attr]  # classic
        time.sleep(0.2)


@pytest.mark.parametrize(
    "mebibytes", [0.8, 40.0, *left_to_soak("a smaller and a larger one, here", 5.0)]
)
def test_repeated_transforms_write_no_more_weights_files(df: DataFrame, mebibytes: float) -> None:
    model, spark = fitted(of_size(mebibytes)), df.sparkSession
    before = broadcast_files(spark)
    first = model.transform(df)
    left = broadcast_files(spark) - before
    assert len(left) <= 1
    again = [model.transform(df.limit(i + 1)) for i in range(3)]
    assert broadcast_files(spark) - before == left
    assert again[0].count() == 1
    assert_right(first.collect(), model.getModel())
    assert broadcast_files(spark) - before == left


def test_broadcast_weights_survive_until_the_last_plan_is_deleted(df: DataFrame) -> None:
    spark, module = df.sparkSession, of_size(2.0)
    before = broadcast_files(spark)
    model = fitted(module)
    model.transform(df).createOrReplaceTempView("predicted")  # no Python object holds the plan
    del model
    (own,) = broadcast_files(spark) - before
    for seed in range(1, 6):  # more than are kept
        fitted(of_size(2.0, seed)).transform(df)
    collect_garbage(spark)
    fitted(of_size(2.0, 9)).transform(df)
    assert own in broadcast_files(spark)
    assert_right(spark.table("predicted").collect(), module)
    spark.catalog.dropTempView("predicted")

    def has_gone() -> bool:
        collect_garbage(spark)
        fitted(of_size(2.0, 9)).transform(df)
        return own not in broadcast_files(spark)

    wait_until(has_gone, "the file of the dropped view has gone")
    assert len(broadcast_files(spark) - before) <= 5


def test_streaming_micro_batches_leave_no_weights_files(
    spark: SparkSession, df: DataFrame, tmp_path: Path
) -> None:
    model, folder = fitted(of_size(2.0)), str(tmp_path / "in")
    seen: list[set[str]] = []

    def batch(rows: DataFrame, number: int) -> None:
        assert model.transform(rows).count()
        seen.append(broadcast_files(rows.sparkSession))

    df.repartition(3).write.parquet(folder)
    stream = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(folder)
    query = stream.writeStream.foreachBatch(batch).trigger(availableNow=True).start()
    try:
        assert query.awaitTermination(200)
    finally:
        query.stop()
    assert len(seen) == 3
    assert seen[0] == seen[-1]


def test_transform_planning_starts_no_job(df: DataFrame, tmp_path: Path) -> None:
    context = df.sparkSession.sparkContext
    tracker = context.statusTracker()
    context.setJobGroup("planning", "transform only")
    try:
        for module in (mlp(2), large()):
            out = fitted(module).setStore(Store.create(tmp_path / "store")).transform(df)
            assert out.columns == ["x", "k", "y__output"]
        assert list(tracker.getJobIdsForGroup("planning")) == []
        out.count()
        # Spark's listeners learn of it a little later.
        wait_until(lambda: tracker.getJobIdsForGroup("planning"), "the job is known to Spark")
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]  # None clears


class Counted(nn.Module):
    """Writes a line whenever a process loads it."""

    def __init__(self, log: str) -> None:
        super().__init__()
        self.log = log
        self.layers = mlp(2)

    def __setstate__(self, state: dict[str, Any]) -> None:
        import os

        super().__setstate__(state)
        with open(state["log"], "a") as file:
            file.write(f"{os.getpid()}\n")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_transform_worker_loads_a_model_once(df: DataFrame, tmp_path: Path) -> None:
    log = tmp_path / "loads"
    out = fitted(Counted(str(log))).transform(df.repartition(4))
    for _ in range(3):
        assert len(out.collect()) == 20
    pids = log.read_text().split()
    # 12 tasks in about two processes. Spark may start more, depending on its pace.
    assert len(pids) == len(set(pids)) < 12


def test_streaming_dataframe_is_transformed(
    spark: SparkSession, df: DataFrame, tmp_path: Path
) -> None:
    """One model has its weights in the plan, the other in the store."""
    small, stored = mlp(2), large()
    df.limit(10).write.parquet(str(tmp_path / "in"))
    stream = spark.readStream.schema(SCHEMA).parquet(str(tmp_path / "in"))
    model = fitted(stored).setStore(Store.create(tmp_path / "store"))
    out = fitted(small).setOutputCols(["small"]).transform(model.transform(stream))
    assert out.isStreaming
    del model
    sink = {"checkpointLocation": str(tmp_path / "checkpoint"), "path": str(tmp_path / "out")}
    query = out.writeStream.format("parquet").options(**sink).start()
    try:
        query.processAllAvailable()
        gc.collect()
        df.subtract(spark.read.parquet(str(tmp_path / "in"))).write.mode("append").parquet(
            str(tmp_path / "in")
        )
        query.processAllAvailable()
        assert query.exception() is None
    finally:
        query.stop()
    rows = spark.read.parquet(str(tmp_path / "out")).collect()
    assert_right(rows, stored)
    assert_right(rows, small, "small")


CLUSTER = """
    import shutil
    import torch
    from sparkhvd import Store, TorchModel
    from tests.estimator.fits import fitted, mlp
    from tests.transform.test_weights import SCHEMA, assert_right, large
    from pyspark.ml.linalg import Vectors

    df = spark.createDataFrame([(Vectors.dense(i / 9, 1 - i / 5), i) for i in range(20)], SCHEMA).repartition(4)
    for module in (mlp(2), large()):
        model = fitted(module).setStore(Store.create(sys.argv[1]))
        model.save({path!r})
        model = TorchModel.load({path!r}, trust=True)  # with its store
        shutil.rmtree({path!r})
        assert_right(model.transform(df).collect(), module)
        print("transformed")
"""


@soak("test_transform_worker_loads_a_model_once, here")
@pytest.mark.timeout(430)
def test_transform_works_if_executors_cannot_see_the_load_path(tmp_path: Path) -> None:
    store, path = str(tmp_path / "store"), str(tmp_path / "saved")
    body = CLUSTER.format(path=path).replace("sys.argv[1]", repr(store))
    out = run_on("local-cluster[1,2,1024]", body, tmp_path, timeout_s=400)
    assert out.count("transformed") == 2


def test_horovod_names_of_model_params_and_accessors_work(df: DataFrame) -> None:
    model = fitted(mlp(2))
    assert model.getFeatureColumns() == ["x"]
    assert model.getLabelColumns() == ["y"]
    assert model.getRunId() == ""
    assert model.setRunId("r").setHistory([{"loss": 1.0}]).getRunId() == "r"
    assert model.history == [{"loss": 1.0}]
    assert model.getHistory() == [{"train": {"loss": 1.0, "all_metrics": []}}]
    other = nn.Linear(2, 1)
    assert_right(model.setModel(other).transform(df).collect(), other)
    renamed = df.withColumnRenamed("x", "z")
    found = model.setFeatureColumns(["z"]).setLabelColoumns(["a"]).transform(renamed)
    assert found.columns == ["z", "k", "a__output"]
    assert model.getFeatureColumns() == ["z"]
    with pytest.raises(InvalidArgumentError) as wrong:
        model.setModel(nn.Linear(2, 3))
    assert str(wrong.value) == (
        "setModel: the module's outputs have (3,) elements per row, but the trained module's outputs have (1,). Give a "
        "module with the same outputs, or fit it."
    )
