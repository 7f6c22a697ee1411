from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom
from pyspark.sql import types as T  # noqa: N812

from sparkhvd.data.columns.check import check_schema
from sparkhvd.data.columns.schema import DataSchema
from sparkhvd.data.manifest import Manifest
from sparkhvd.data.materialize import materialize
from sparkhvd.data.packed import RowSource, read_packed
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError, PreflightError
from tests.harness.processes import peak_bytes
from tests.harness.soak import amount

pytestmark = pytest.mark.spark

DATA_DIR = "data/k/app"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def schema_of(df: DataFrame, features: list[str], **options: Any) -> DataSchema:
    options.setdefault("label_cols", ["label"])
    return check_schema(df.schema, feature_cols=features, **options)


def rows_of(store: Store, manifest: Manifest) -> dict[str, np.ndarray]:
    with RowSource(store, manifest) as source:
        return source.read([c.name for c in manifest.schema.columns])


def test_every_type_of_column_is_read_back_in_order(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    rows = [
        (
            i % 2 == 0,
            i - 50,
            i * 0.5,
            [i, i + 1],
            [i * 1.5, -1.0],
            Vectors.dense([i, 2.0, 3.0]) if i % 3 else Vectors.sparse(3, {1: float(i)}),
            i,
            i % 4 == 0,
        )
        for i in range(100)
    ]
    fields = [
        T.StructField("flag", T.BooleanType()),
        T.StructField("byte", T.ByteType()),
        T.StructField("a.dotted", T.DoubleType()),
        T.StructField("ints", T.ArrayType(T.IntegerType())),
        T.StructField("doubles", T.ArrayType(T.DoubleType())),
        T.StructField("vec", VectorUDT()),
        T.StructField("label", T.LongType()),
        T.StructField("VEC", T.BooleanType()),  # differs in case only
    ]
    df = (
        spark.createDataFrame(rows, T.StructType(fields))
        .repartitionByRange(3, "label")
        .sortWithinPartitions("label")
    )
    features = ["flag", "byte", "a.dotted", "ints", "doubles", "vec"]
    schema = schema_of(df, features, validation="VEC")
    manifest = materialize(df, schema, store, DATA_DIR)

    assert manifest.num_rows == 100
    assert [c.shape for c in manifest.schema.columns] == [(), (), (), (2,), (2,), (3,), (), ()]
    assert Manifest.load(store, DATA_DIR) == manifest
    assert manifest.ranges == {"byte": (-50, 49), "ints": (0, 100), "label": (0, 99)}
    assert sum(f.rows for f in manifest.files) == 100
    found = rows_of(store, manifest)
    number = np.arange(100)
    np.testing.assert_array_equal(found["label"], number)
    np.testing.assert_array_equal(found["flag"], number % 2 == 0)
    np.testing.assert_array_equal(found["byte"], number - 50)
    np.testing.assert_array_equal(found["a.dotted"], (number * 0.5).astype(np.float32))
    np.testing.assert_array_equal(found["ints"], np.stack([number, number + 1], 1))
    np.testing.assert_array_equal(found["doubles"], np.stack([number * 1.5, np.full(100, -1)], 1))
    expected = np.stack([number, np.full(100, 2.0), np.full(100, 3.0)], 1)
    expected[::3] = np.stack([np.zeros(34), number[::3], np.zeros(34)], 1)
    np.testing.assert_array_equal(found["vec"], expected)
    np.testing.assert_array_equal(found["VEC"], number % 4 == 0)
    np.testing.assert_array_equal(read_packed(tmp_path / "store" / DATA_DIR)["vec"], expected)


def test_one_error_lists_all_problems_with_counts(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    df = spark.range(0, 1000, 1, 3).select(
        F.when(F.col("id") % 100 == 0, None).otherwise(F.col("id").cast("double")).alias("holes"),
        F.when(F.col("id") < 3, F.lit(float("nan"))).otherwise(F.lit(1.0)).alias("nans"),
        F.when(F.col("id") == 999, F.lit(1e300)).otherwise(F.lit(1.0)).alias("big"),
        F.when(F.col("id") > 989, F.array(F.lit(1.0)))
        .otherwise(F.array(F.lit(1.0), F.lit(2.0)))
        .alias("ragged"),
        F.when(F.col("id") == 5, F.lit(0.5)).otherwise(F.lit(1.0)).alias("label"),
    )
    schema = schema_of(df, ["holes", "nans", "big", "ragged"], label_dtypes={"label": "int64"})
    with pytest.raises(InvalidArgumentError) as caught:
        materialize(df, schema, store, DATA_DIR)
    assert str(caught.value) == (
        "The data cannot be used for training:\n"
        "  column 'holes' (double): 10 of 1,000 rows are null or hold a null. Every row needs a value: df.na.drop() or "
        "df.na.fill(...), an Imputer, or handle_invalid='skip' or {column: value}.\n"
        "  column 'nans' (double): 3 of 1,000 rows hold NaN. Every value must be a number: drop or replace them, or give "
        "handle_invalid='skip' or {column: value}. If NaN is meant, as for a loss that masks it, give handle_invalid={'nans': 'keep'}.\n"
        "  column 'big' (double): 1 of 1,000 rows hold a number that float32 cannot hold, for example 1e+300. Scale the "
        "column, choose a wider type with feature_dtypes or label_dtypes, or give handle_invalid.\n"
        "  column 'ragged' (array<double>): rows have different lengths: 990 rows of 2 elements, but 10 of 1. Every "
        "row must have the same number of elements: pad or cut them, or give collate_fn={'ragged': pad(0)} "
        "(sparkhvd.estimator.pad).\n"
        "  column 'label' (double): 1 of 1,000 rows hold a number that is not whole, but it is to be stored as int64. "
        "Choose a floating type, or round the column."
    )
    assert not (tmp_path / "store" / DATA_DIR).exists()


def test_array_widths_that_differ_between_tasks_raise(spark: SparkSession, store: Store) -> None:
    df = spark.range(0, 4, 1, 2).select(
        F.when(F.col("id") < 2, F.array(F.lit(1.0)))
        .otherwise(F.array(F.lit(1.0), F.lit(2.0)))
        .alias("x"),
        F.lit(1).alias("label"),
    )
    with pytest.raises(
        InvalidArgumentError, match="rows have different lengths: 2 rows of 1 elements, but 2 of 2"
    ):
        materialize(df, schema_of(df, ["x"]), store, DATA_DIR)


@pytest.mark.parametrize("partitions", [1, 3])
def test_empty_data_raise_an_error(spark: SparkSession, store: Store, partitions: int) -> None:
    df = spark.range(0, 10, 1, partitions).select("id", F.lit(1).alias("label")).filter("id > 100")
    with pytest.raises(InvalidArgumentError, match="The DataFrame has no rows"):
        materialize(df, schema_of(df, ["id"]), store, DATA_DIR)
    assert store.list("data", recursive=True) == []


def test_empty_arrays_raise_an_error(spark: SparkSession, store: Store) -> None:
    df = spark.range(3).select(F.array().cast("array<double>").alias("x"), F.lit(1).alias("label"))
    with pytest.raises(
        InvalidArgumentError, match=r"column 'x' \(array<double>\): every row is empty"
    ):
        materialize(df, schema_of(df, ["x"]), store, DATA_DIR)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ("id - 2.0D", r"'w' \(double\): 2 of 6 rows hold a sample weight below 0"),
        ("0.0D", r"'w' \(double\): all 6 rows hold the sample weight 0"),
    ],
)
def test_negative_or_all_zero_sample_weights_raise(
    spark: SparkSession, store: Store, weight: str, message: str
) -> None:
    df = spark.range(6).selectExpr("id", "1 AS label", f"{weight} AS w")
    with pytest.raises(InvalidArgumentError, match=message):
        materialize(df, schema_of(df, ["id"], sample_weight_col="w"), store, DATA_DIR)


def test_empty_partitions_write_no_file(spark: SparkSession, store: Store) -> None:
    df = spark.range(0, 10, 1, 5).filter("id in (2, 3, 8)").select("id", F.lit(1).alias("label"))
    manifest = materialize(df, schema_of(df, ["id"]), store, DATA_DIR)
    assert [f.rows for f in manifest.files] == [2, 1]
    np.testing.assert_array_equal(rows_of(store, manifest)["id"], [2, 3, 8])
    # Other readers of the folder see only Parquet with binary values.
    by_spark = spark.read.parquet(store.full_url(DATA_DIR))
    assert by_spark.dtypes == [("id", "binary"), ("label", "binary")]
    assert by_spark.count() == 3
    fewer = materialize(df, schema_of(df, ["id"]), store, "data/k/fewer", num_partitions=1)
    np.testing.assert_array_equal(rows_of(store, fewer)["id"], [2, 3, 8])
    assert len(fewer.files) == 1


def test_rows_of_a_group_are_written_consecutively_in_order(
    spark: SparkSession, store: Store
) -> None:
    # The position of a row in its group has a name of its own.
    columns = ("id", "1 AS label", "concat('q', id % 7) AS q", "-id AS place")
    df = spark.range(0, 60, 1, 5).selectExpr(*columns)
    schema = schema_of(df, ["id"], group_col="q")
    manifest = materialize(df, schema, store, DATA_DIR, num_partitions=2)
    assert manifest.schema == schema
    assert len(manifest.files) == 2
    rows = rows_of(store, manifest)
    groups = np.split(rows["id"], np.flatnonzero(np.diff(rows["q"])) + 1)
    assert sorted(group.tolist() for group in groups) == [list(range(r, 60, 7)) for r in range(7)]
    assert len(np.unique(rows["q"])) == 7
    lacking = df.withColumn("q", F.expr("if(id < 3, NULL, q)"))
    with pytest.raises(InvalidArgumentError, match="column 'q' .*: 3 of 60 rows are null"):
        materialize(lacking, schema, store, DATA_DIR)
    policies = {"q": "skip"}
    skipping = schema_of(df, ["id"], group_col="q", handle_invalid=policies)
    assert materialize(lacking, skipping, store, DATA_DIR).num_skipped == 3
    with pytest.raises(InvalidArgumentError, match="'q' of type DoubleType. It must hold integers"):
        schema_of(df.withColumn("q", F.lit(0.5)), ["id"], group_col="q")
    with pytest.raises(InvalidArgumentError, match="'id' is given as .* and as group_col"):
        schema_of(df, ["id"], group_col="id")


def test_files_of_other_task_attempts_are_ignored_and_deleted(
    spark: SparkSession, store: Store
) -> None:
    store.write_bytes(
        f"{DATA_DIR}/part-00000-999.parquet", b"left by an attempt that Spark gave up"
    )
    df = spark.range(10).select("id", F.lit(1).alias("label"))
    manifest = materialize(df, schema_of(df, ["id"]), store, DATA_DIR)
    assert "part-00000-999" not in manifest.to_json()
    assert store.list(DATA_DIR) == [f"{DATA_DIR}/_manifest.json", *(f.path for f in manifest.files)]
    np.testing.assert_array_equal(rows_of(store, manifest)["id"], np.arange(10))


class MeasuredStore(Store):
    """Records the growth of a task process's peak memory while it writes a file."""

    @contextlib.contextmanager
    def open_output(self, path: str) -> Iterator[Any]:
        if TaskContext.get() is None:
            with super().open_output(path) as sink:
                yield sink
            return
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = peak_bytes()
        with super().open_output(path) as sink:
            yield sink
        folder = self.local_path("")
        assert folder is not None
        Path(folder, "grown").write_text(str(peak_bytes() - before))


def test_writer_holds_only_part_of_its_data_in_memory(spark: SparkSession, tmp_path: Path) -> None:
    # 80 KB per row, in one task: 400 MB as Spark has them.
    rows = amount(5000, 20_000)
    df = spark.range(0, rows, 1, 1).selectExpr("array_repeat(id * 1D, 10000) AS x", "id AS label")
    store = MeasuredStore.create(tmp_path / "measured")
    manifest = materialize(df, schema_of(df, ["x"]), store, DATA_DIR, row_group_bytes=8 << 20)
    assert manifest.num_bytes > rows * 40_000
    grown = int((tmp_path / "measured" / "grown").read_text())
    # A batch of 32 MiB in several forms, earlier batches that the allocator keeps, and a row group.
    assert 20 << 20 < grown < 256 << 20, f"{grown >> 20} MiB"


def test_a_store_invisible_to_the_driver_raises(
    spark: SparkSession, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    df = spark.range(10).select("id", F.lit(1).alias("label"))
    monkeypatch.setattr(Store, "list", lambda *_args, **_options: [])
    with pytest.raises(
        PreflightError,
        match=r"The executors wrote 2 files to file://.*/data/k/app, but this process",
    ):
        materialize(df, schema_of(df, ["id"]), store, DATA_DIR)


def test_failed_spark_plan_leaves_no_files(spark: SparkSession, store: Store) -> None:
    def explode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch
            raise RuntimeError("on purpose")

    df = spark.range(10).select("id", F.lit(1).alias("label"))
    df = df.mapInArrow(explode, df.schema)
    with pytest.raises(Exception, match="on purpose"):
        materialize(df, schema_of(df, ["id"]), store, DATA_DIR)
    assert store.list("data", recursive=True) == []


def test_small_partitions_of_local_master_become_one_ordered_file(
    spark: SparkSession, store: Store
) -> None:
    number = spark.range(0, 300, 1, 40).selectExpr("id AS label", "id * 0.5 AS x").filter("x != 7")
    shuffled = number.repartition(40)
    for name, df in {"range": number, "repartition": shuffled}.items():
        manifest = materialize(df, schema_of(df, ["x"]), store, f"data/{name}/app")
        assert len(manifest.files) == 1
        found = rows_of(store, manifest)
        assert found["label"].tolist() == [row["label"] for row in df.collect()]
        assert found["x"].tolist() == [n * 0.5 for n in found["label"]]


@pytest.mark.parametrize("text", ["twice(id)", "explode(array(id, id))", "id"])
def test_partitions_with_possibly_costly_rows_are_not_merged(
    spark: SparkSession, store: Store, text: str
) -> None:
    spark.udf.register("twice", lambda n: 2 * n, "long")
    partitions = 8 if text == "id" else 10
    df = spark.range(0, 20, 1, partitions).selectExpr("id AS x", f"{text} AS label")
    manifest = materialize(df, schema_of(df, ["x"]), store, DATA_DIR)
    assert len(manifest.files) == partitions
