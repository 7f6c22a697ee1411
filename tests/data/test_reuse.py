from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.functions import array_to_vector, vector_to_array
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from sparkhvd.data import ownership, reuse
from sparkhvd.data.columns.check import check_schema
from sparkhvd.data.columns.schema import DataSchema
from sparkhvd.data.manifest import DAMAGED_NAME, TableVersion
from sparkhvd.data.ownership import release, renew_leases
from sparkhvd.data.packed import read_packed
from sparkhvd.data.reuse import PreparedData, ReuseScope, plan_key, prepare
from sparkhvd.data.store.locks import LEASE_NAME, LEASE_S, Lease, lease_of, write_lease
from sparkhvd.data.store.store import Store
from sparkhvd.data.tables import plan_facts
from sparkhvd.errors import InvalidArgumentError
from tests.harness.ranks import run_threads

pytestmark = pytest.mark.spark


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    yield Store.create(tmp_path / "store")
    release()


def schema_of(df: DataFrame, model_dtype: str = "float32") -> DataSchema:
    return check_schema(
        df.schema, feature_cols=["id"], label_cols=["label"], model_dtype=model_dtype
    )


def prepared(df: DataFrame, store: Store, *, app_id: str = "app", **options: Any) -> PreparedData:
    schema = schema_of(df, options.pop("model_dtype", "float32"))
    return prepare(df, schema, store, app_id=app_id, **options)


def numbers(spark: SparkSession, rows: int = 20) -> DataFrame:
    # In one partition: each costs a Python worker.
    return spark.range(0, rows, 1, 1).select("id", (F.col("id") * 0.5).alias("label"))


def assembled(df: DataFrame) -> DataFrame:
    return VectorAssembler(inputCols=["x"], outputCol="vector").transform(df)


def without_a_key(spark: SparkSession, label: float) -> DataFrame:
    return spark.createDataFrame([(1, label)], "id int, label double").coalesce(1)


def test_same_spark_plan_is_materialized_once(
    spark: SparkSession, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def materialized(*_: Any, **__: Any) -> Any:
        raise AssertionError("materialized again")

    first = prepared(numbers(spark), store)
    with monkeypatch.context() as patch:
        patch.setattr(reuse, "materialize", materialized)
        again = prepared(numbers(spark), store)
    assert (first.reused, again.reused) == (False, True)
    assert again.manifest == first.manifest
    assert again.data_dir == first.data_dir
    assert again.reason == "same plan, files and columns"


def test_data_of_a_table_changed_during_the_write_are_not_reused(
    spark: SparkSession, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = iter(range(9))

    def key_of(*_: Any) -> tuple[str, str, tuple[TableVersion, ...]]:
        return "key", "same tables", (TableVersion("delta", "t", "t", "u", next(versions)),)

    monkeypatch.setattr(reuse, "_key_of", key_of)
    first, again = (prepared(numbers(spark), store) for _ in range(2))
    assert first.reason == "a table has got a newer version while it was written"
    assert first.manifest.tables == ()
    assert not again.reused


def test_cache_key_depends_on_plan_dtype_time_zone_and_data_key(spark: SparkSession) -> None:
    def key(rows: int = 20, model_dtype: str = "float32", data_key: str | None = None) -> str:
        df = numbers(spark, rows)
        found, _ = plan_key(df, schema_of(df, model_dtype), data_key)
        assert found is not None
        return found

    keys = [key(), key(21), key(model_dtype="float64")]
    keys += [
        key(data_key="mine"),
        key(data_key="other"),
        key(data_key="mine", model_dtype="float64"),
    ]
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        keys.append(key())
    finally:
        spark.conf.unset("spark.sql.session.timeZone")
    assert len(set(keys)) == len(keys) == 7
    assert key() == keys[0]


@pytest.mark.parametrize(
    ("rows", "others"),
    [
        ("(1D, 2D, 3D), (4D, 5D, 6D)", "(-1D, -2D, 3D), (-4D, -5D, 6D)"),
        (
            "(array(1D, 2D), 0, 0L), (array(3D, 4D), 0, 1L)",
            "(array(1D, 2D), 0, -1L), (array(3D, 4D), 0, 1L)",
        ),
    ],
)
def test_plans_with_inline_rows_have_no_cache_key(
    spark: SparkSession, rows: str, others: str
) -> None:
    both = [spark.sql(f"SELECT * FROM VALUES {v} AS t(id, c, label)") for v in (rows, others)]
    assert both[0].semanticHash() == both[1].semanticHash()  # otherwise this test shows nothing
    for df in both:
        key, reason = plan_key(df, schema_of(df), None)
        assert key is None
        assert "the plan reads LocalRelation" in reason


def test_scan_options_change_the_cache_key(spark: SparkSession) -> None:
    def text() -> str:
        return plan_facts(numbers(spark)).plan

    before = text()
    key = "spark.sql.files.ignoreCorruptFiles"
    spark.conf.set(key, "true")
    try:
        assert text() != before
    finally:
        spark.conf.unset(key)
    assert text() == before


def test_columns_truncated_in_printed_plan_change_the_cache_key(spark: SparkSession) -> None:
    def text(value: float) -> str:
        many = [F.col("id").alias(f"c{i}") for i in range(30)]
        return plan_facts(spark.range(2).select(*many, F.lit(value).alias("last"))).plan

    assert text(1.5) != text(2.5)
    assert text(1.5) == text(1.5)


def deep(df: DataFrame, value: int) -> DataFrame:
    """Make a plan whose text is longer than Spark's print limit, with `value` in the middle."""
    condition = "id <> -1"
    for i in range(60):
        condition += f" and id + {value if i == 30 else i} <> -{i + 2}"
    return df.where(condition)


def renamed(df: DataFrame, names: str) -> DataFrame:
    return df.select("id", "label").toDF(*names.split())


def scanned(spark: SparkSession, path: str, schema: str, **options: Any) -> DataFrame:
    return spark.read.schema(schema).options(**options).csv(path)


@pytest.fixture(scope="module")
def source(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Parquet files of numbers, which no test changes."""
    path = str(tmp_path_factory.mktemp("source") / "numbers")
    numbers(spark).write.parquet(path)
    return path


@pytest.mark.parametrize(
    ("make", "one", "other"),
    [
        (deep, 30, 31),
        (
            lambda df, at: df.select(
                *[F.col("label" if i == at else "id").alias(f"c{i}") for i in range(60)]
            ),
            30,
            31,
        ),
        (lambda df, v: df.select("id", F.lit(v).cast("string").alias("label")), 1, "1"),
        (lambda df, v: df.select("id", F.lit(v).alias("label")), ["a, b"], ["a", "b"]),
        (lambda df, v: df.select("id", F.lit(v).alias("label")), b"1", b"2"),
        (renamed, "id label", "label id"),
        (
            lambda df, f: df.select("id", F.transform(F.array("id"), f)),
            lambda x: x + 1,
            lambda x: -x,
        ),
    ],
)
def test_plans_that_give_different_rows_have_different_keys(
    spark: SparkSession, source: str, make: Any, one: Any, other: Any
) -> None:
    def text(value: Any) -> str:
        facts = plan_facts(make(spark.read.parquet(source), value))
        assert facts.obstacle == ""
        return facts.plan

    first = text(one)
    assert text(one) == first
    assert text(other) != first


def test_file_format_options_change_the_cache_key(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "source")
    spark.range(3).selectExpr("id", "id + 1").write.csv(path)
    schemas = ("a int, b int", "b int, a int", "a int, b string")
    frames = [scanned(spark, path, schema) for schema in schemas]
    frames += [scanned(spark, path, schemas[0], header=header) for header in (True, False)]
    frames.append(spark.read.schema(schemas[0]).json(path))
    assert len({plan_facts(df).plan for df in frames}) == len(frames)
    assert plan_facts(scanned(spark, path, schemas[0])).plan == plan_facts(frames[0]).plan


def test_ansi_mode_of_an_expression_changes_the_cache_key(spark: SparkSession) -> None:
    def text() -> str:
        df = spark.range(3).selectExpr("cast(cast(id as string) as int) as a")
        spark.conf.unset("spark.sql.ansi.enabled")
        return plan_facts(df).plan

    found = set()
    for mode in ("true", "false"):
        spark.conf.set("spark.sql.ansi.enabled", mode)
        found.add(text())
    assert len(found) == 2


def test_catalog_partition_values_change_the_cache_key(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "part"
    numbers(spark, 3).write.parquet(str(path))
    found = set()
    for year in (2024, 2025):
        spark.sql(
            f"create table years (id long, label double, year int) using parquet partitioned by (year) "
            f"location '{tmp_path}/table'"
        )
        try:
            spark.sql(f"alter table years add partition (year = {year}) location '{path}'")
            found.add(plan_facts(spark.table("years")).plan)
            assert plan_facts(spark.table("years")).plan in found
        finally:
            spark.sql("drop table years")
    assert len(found) == 2


def labels(store: Store, data: PreparedData) -> list[float]:
    return sorted(read_packed(store.full_url(data.data_dir))["label"].tolist())


def test_source_is_read_again_only_after_a_change(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    path, root = str(tmp_path / "source"), tmp_path / "store"

    def files() -> dict[Path, tuple[int, int]]:
        every = (p for p in root.rglob("*") if p.is_file() and p.name != LEASE_NAME)
        states = ((p, p.stat()) for p in every)
        return {p: (s.st_ino, s.st_mtime_ns) for p, s in states}

    numbers(spark, 4).write.parquet(path)
    assert not prepared(spark.read.parquet(path), store).reused
    before = files()
    # Another DataFrame of the same plan writes nothing.
    assert prepared(spark.read.parquet(path), store).reused
    assert files() == before

    numbers(spark, 2).write.mode("append").parquet(path)
    longer = prepared(spark.read.parquet(path).coalesce(1), store)
    assert not longer.reused
    assert labels(store, longer) == [0, 0, 0.5, 0.5, 1, 1.5]

    # Same plan and same path: only size and time differ.
    numbers(spark, 4).withColumn("label", F.lit(9.0)).write.mode("overwrite").parquet(path)
    changed = prepared(spark.read.parquet(path), store)
    assert not changed.reused
    assert labels(store, changed) == [9, 9, 9, 9]


@pytest.mark.parametrize(
    ("log", "reader"),
    [("_delta_log/0.json", "format('delta')"), ("metadata/v1.metadata.json", "format('iceberg')")],
)
def test_reading_a_table_without_its_log_warns_once(
    spark: SparkSession, store: Store, tmp_path: Path, log: str, reader: str
) -> None:
    table = tmp_path / "a table"
    frame = numbers(spark, 4).withColumn("k", F.col("id") % 2)
    frame.coalesce(1).write.partitionBy("k").parquet(str(table / "data"))
    df = spark.read.parquet(str(table / "data" / "k=0")).where("id >= 0")
    df = df.union(spark.read.parquet(str(table / "data")).select("id", "label"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared(df, store)
        (table / log).parent.mkdir()
        (table / log).write_text("{}")
        prepared(numbers(spark), store)  # reads no files
    with pytest.warns(UserWarning, match="The DataFrame reads files") as warned:
        assert prepared(df, store).manifest.num_rows == 6
    (text,) = [str(w.message) for w in warned]
    assert f"in 'file:{table}' without the log {log.partition('/')[0]!r}" in text
    assert f"Read the table instead: spark.read.{reader}.load('file:{table}')." in text


def test_a_file_rewritten_in_place_is_read_again(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    file = tmp_path / "source" / "part-0.parquet"
    file.parent.mkdir()

    def write(label: float) -> int:
        table = pa.table({"id": [1, 2], "label": [label, label]})
        pq.write_table(table, file)
        return file.stat().st_size

    size = write(1.0)
    first = prepared(spark.read.parquet(str(file.parent)), store)
    # The same name and the same size: only the time differs.
    assert write(2.0) == size
    spark.catalog.refreshByPath(str(file.parent))
    again = prepared(spark.read.parquet(str(file.parent)), store)
    assert (first.reused, again.reused) == (False, False)
    assert (labels(store, first), labels(store, again)) == ([1, 1], [2, 2])


def test_cached_dataframe_is_prepared_from_its_cached_rows(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    path = str(tmp_path / "source")
    numbers(spark, 3).write.parquet(path)
    held = spark.read.parquet(path).cache()
    assert held.count() == 3
    try:
        # Rows of the cache, whatever happens to the files.
        assert not prepared(held, store).reused
        assert prepared(held, store).reused
    finally:
        held.unpersist(blocking=True)
    changed = F.lit(9.0).alias("label")
    numbers(spark, 3).select("id", changed).write.mode("overwrite").parquet(path)
    held = spark.read.parquet(path).cache()
    try:
        again = prepared(held, store)
        assert not again.reused
        assert labels(store, again) == [9, 9, 9]
    finally:
        held.unpersist(blocking=True)


def from_jdbc(spark: SparkSession) -> DataFrame:
    """Read rows of a table in Derby, the database that comes with Spark."""
    url = "jdbc:derby:memory:sparkhvd;create=true"
    driver = "org.apache.derby.iapi.jdbc.AutoloadedDriver"
    options = {"url": url, "dbtable": "numbers", "driver": driver}
    numbers(spark, 5).write.format("jdbc").options(**options).mode("overwrite").save()
    return spark.read.format("jdbc").options(**options).load().toDF("id", "label")


def by_python(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def test_spark_ml_functions_change_the_cache_key(spark: SparkSession, store: Store) -> None:
    columns = vector_to_array(array_to_vector(F.array("label")))
    df = numbers(spark).select("id", columns.getItem(0).alias("label"))
    assert not prepared(df, store).reused
    assert prepared(df, store).reused


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            lambda s: without_a_key(s, 2.0),
            "the plan reads LogicalRDD",
        ),
        (from_jdbc, "the plan reads JDBCRelation"),
        (
            lambda s: numbers(s).withColumn("label", F.udf(float, "double")("label")),
            "the plan calls a user-defined function",
        ),
        (
            lambda s: numbers(s).mapInArrow(by_python, "id long, label double"),
            "the plan calls a user-defined function",
        ),
        (lambda s: numbers(s).withColumn("label", F.rand(1)), "other values each time"),
        (
            lambda s: numbers(s).withColumn("label", F.unix_timestamp(F.current_timestamp())),
            "other values each time",
        ),
        (
            lambda s: assembled(numbers(s).withColumn("x", F.rand(1))),
            "other values each time",
        ),
        (lambda s: assembled(numbers(s).withColumn("x", F.col("id"))), "a stage of Spark ML"),
        (
            lambda s: assembled(numbers(s).withColumn("x", F.col("id"))).withColumn(
                "label", F.spark_partition_id()
            ),
            "other values each time",
        ),
        (
            lambda s: numbers(s).filter("id >= (select min(id) from range(5))"),
            "the plan has a subquery",
        ),
    ],
)
def test_data_from_unidentifiable_plans_have_no_cache_key(
    spark: SparkSession, make: Any, why: str
) -> None:
    df = make(spark)
    key, reason = plan_key(df, schema_of(df), None)
    assert key is None
    assert why in reason
    assert "data_key= would tell" in reason


def test_data_without_cache_key_are_reused_only_by_data_key(
    spark: SparkSession, store: Store
) -> None:
    df = without_a_key(spark, 2.0)
    assert not prepared(df, store).reused
    again = prepared(df, store)
    assert not again.reused
    assert "the plan reads LogicalRDD" in again.reason
    assert not prepared(df, store, data_key="mine").reused
    assert prepared(df, store, data_key="mine").reused


def test_data_without_cache_key_are_shared_only_within_a_scope(
    spark: SparkSession, store: Store
) -> None:
    df, other = without_a_key(spark, 2.0), without_a_key(spark, 3.0)
    with ReuseScope() as scope:
        first = prepared(df, store, scope=scope)
        again = prepared(df, store, scope=scope)
        assert (first.reused, again.reused, again.data_dir) == (False, True, first.data_dir)
        assert again.reason.startswith("the same DataFrame of one fold (the plan reads LogicalRDD")
        assert not prepared(other, store, scope=scope).reused
        assert not prepared(df, store, scope=scope, model_dtype="float64").reused
        kept = prepared(other.select("*"), store, scope=scope, keep_data=True)
        with ReuseScope() as beside:
            assert not prepared(df, store, scope=beside).reused
            assert len(store.data_directories()) == 5
        assert len(store.data_directories()) == 4
        # Objects that the plan names outlive the scope.
        named = prepared(numbers(spark), store, scope=scope)
    assert store.data_directories() == sorted([kept.data_dir, named.data_dir])
    assert prepared(numbers(spark), store).reused
    store.delete(kept.data_dir)


def test_concurrent_fits_materialize_data_once(spark: SparkSession, store: Store) -> None:
    outcomes = run_threads([lambda: prepared(numbers(spark), store)] * 3)
    assert sorted(o.reused for o in outcomes) == [False, True, True]


def test_release_deletes_all_but_kept_data(spark: SparkSession, store: Store) -> None:
    gone = prepared(numbers(spark, 5), store)
    kept = prepared(numbers(spark, 6), store, keep_data=True)
    release()
    assert store.data_directories() == [kept.data_dir]
    assert not store.exists(gone.data_dir.rpartition("/")[0])
    # Another application reuses only the kept data.
    assert prepared(numbers(spark, 6), store, app_id="other").reused
    assert store.clean() == [kept.data_dir]


def test_release_deletes_no_data_of_another_application(spark: SparkSession, store: Store) -> None:
    first = prepared(numbers(spark), store, app_id="one")
    second = prepared(numbers(spark), store, app_id="two")
    assert not second.reused
    assert first.data_dir != second.data_dir
    assert release("two") == [second.data_dir]
    assert store.exists(first.data_dir)


def test_data_with_leases_older_than_a_day_are_deleted(spark: SparkSession, store: Store) -> None:
    now = time.time()
    write_lease(store, "data/k/silent", Lease("silent", now - LEASE_S - 10))
    write_lease(store, "data/k/alive", Lease("alive", now - LEASE_S + 100))
    store.write_bytes("models/abc", b"m")
    prepared(numbers(spark), store)
    assert not store.exists("data/k/silent")
    assert store.exists("data/k/alive")
    assert store.exists("models/abc")


def test_a_lease_is_renewed_every_hour(spark: SparkSession, store: Store) -> None:
    found = prepared(numbers(spark), store)
    before = lease_of(store, found.data_dir)
    assert before is not None
    renew_leases(now=before.renewed + 60)
    assert lease_of(store, found.data_dir) == before
    renew_leases(now=before.renewed + 4000)
    after = lease_of(store, found.data_dir)
    assert after is not None
    assert after.renewed == before.renewed + 4000


def test_data_with_invalid_values_leave_no_files(spark: SparkSession, store: Store) -> None:
    df = spark.range(5).select("id", F.lit(None).cast("double").alias("label"))
    with pytest.raises(InvalidArgumentError, match="5 of 5 rows are null"):
        prepared(df, store)
    assert store.list("data") == []
    assert not any(store == s for s, _ in ownership._owned.directories)


def test_data_with_a_missing_or_damaged_file_are_written_again(
    spark: SparkSession, store: Store
) -> None:
    found = prepared(numbers(spark), store)
    store.delete(found.manifest.files[0].path)
    found = prepared(numbers(spark), store)
    assert not found.reused
    store.write_bytes(f"{found.data_dir}/{DAMAGED_NAME}", b"a flipped bit")
    assert not prepared(numbers(spark), store).reused
    assert prepared(numbers(spark), store).reused
