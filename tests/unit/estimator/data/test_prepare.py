from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.data import prepare as prepare_module
from sparkhvd.estimator.data.packed import read_packed
from sparkhvd.estimator.data.prepare import PreparedData, prepare, release, renew_leases
from sparkhvd.estimator.data.schema import check_schema
from sparkhvd.estimator.data.store import LEASE_S, Lease, Store
from tests.harness.ranks import run_threads
from tests.harness.spark import run_on

pytestmark = pytest.mark.spark


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    yield Store.create(tmp_path / "store")
    release()


def prepared(df: DataFrame, store: Store, *, app_id: str = "app", **options: Any) -> PreparedData:
    model_dtype = options.pop("model_dtype", "float32")
    schema = check_schema(
        df.schema, feature_cols=["id"], label_cols=["label"], model_dtype=model_dtype
    )
    return prepare(df, schema, store, app_id=app_id, **options)


def numbers(spark: SparkSession, rows: int = 20) -> DataFrame:
    return spark.range(rows).select("id", (F.col("id") * 0.5).alias("label"))


def test_the_same_plan_is_materialized_once(spark: SparkSession, store: Store) -> None:
    first = prepared(numbers(spark), store)
    again = prepared(numbers(spark), store)
    assert (first.reused, again.reused) == (False, True)
    assert again.manifest == first.manifest
    assert again.data_dir == first.data_dir
    assert again.reason == "same plan, files and columns"
    assert again.seconds < 0.5


def test_another_plan_type_or_time_zone_is_another_key(spark: SparkSession, store: Store) -> None:
    prepared(numbers(spark), store)
    assert not prepared(numbers(spark, 21), store).reused
    assert not prepared(numbers(spark), store, model_dtype="float64").reused
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        assert not prepared(numbers(spark), store).reused
    finally:
        spark.conf.set("spark.sql.session.timeZone", str(zone))


def test_a_source_that_changed_is_read_again(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    path = str(tmp_path / "source")
    numbers(spark).coalesce(1).write.parquet(path)
    assert not prepared(spark.read.parquet(path), store).reused
    assert prepared(spark.read.parquet(path), store).reused
    # Same plan and same path: only size and time tell.
    numbers(spark).coalesce(1).withColumn("label", F.lit(9.0)).write.mode("overwrite").parquet(path)
    changed = prepared(spark.read.parquet(path), store)
    assert not changed.reused
    assert set(read_packed(store.full_url(changed.data_dir))["label"]) == {9.0}


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            lambda s: s.createDataFrame([(1, 2.0)], "id int, label double"),
            "the plan reads LogicalRDD",
        ),
        (lambda s: numbers(s).withColumn("label", F.rand(1)), "other values each time"),
        (
            lambda s: numbers(s).withColumn("label", F.unix_timestamp(F.current_timestamp())),
            "other values each time",
        ),
        (
            lambda s: numbers(s).filter("id >= (select min(id) from range(5))"),
            "the plan has a subquery",
        ),
    ],
)
def test_what_the_plan_does_not_tell_is_not_reused(
    spark: SparkSession, store: Store, make: Any, why: str
) -> None:
    assert not prepared(make(spark), store).reused
    again = prepared(make(spark), store)
    assert not again.reused
    assert why in again.reason
    assert "data_key= would tell" in again.reason


def test_data_key_is_the_users_word(spark: SparkSession, store: Store) -> None:
    df = spark.createDataFrame([(1, 2.0)], "id int, label double")
    assert not prepared(df, store, data_key="mine").reused
    assert prepared(df, store, data_key="mine").reused
    assert not prepared(df, store, data_key="other").reused
    assert not prepared(df, store, data_key="mine", model_dtype="float64").reused


def test_fits_at_the_same_time_materialize_once(spark: SparkSession, store: Store) -> None:
    outcomes = run_threads([lambda: prepared(numbers(spark), store)] * 3)
    assert sorted(o.reused for o in outcomes) == [False, True, True]


def test_release_deletes_all_but_what_is_kept(spark: SparkSession, store: Store) -> None:
    gone = prepared(numbers(spark, 5), store)
    kept = prepared(numbers(spark, 6), store, keep_data=True)
    release()
    assert store.data_directories() == [kept.data_dir]
    assert not store.exists(gone.data_dir.rpartition("/")[0])
    # Another application reuses what was kept, and only that.
    assert prepared(numbers(spark, 6), store, app_id="other").reused
    assert store.clean() == [kept.data_dir]


def test_live_data_of_another_application_are_left_alone(spark: SparkSession, store: Store) -> None:
    first = prepared(numbers(spark), store, app_id="one")
    second = prepared(numbers(spark), store, app_id="two")
    assert not second.reused
    assert first.data_dir != second.data_dir
    assert release("two") == [second.data_dir]
    assert store.exists(first.data_dir)


def test_owners_silent_for_a_day_are_swept(spark: SparkSession, store: Store) -> None:
    now = time.time()
    store.write_lease("data/k/silent", Lease("silent", now - LEASE_S - 10))
    store.write_lease("data/k/alive", Lease("alive", now - LEASE_S + 100))
    store.write_bytes("models/abc", b"m")
    prepared(numbers(spark), store)
    assert not store.exists("data/k/silent")
    assert store.exists("data/k/alive")
    assert store.exists("models/abc")


def test_a_lease_is_renewed_every_hour(spark: SparkSession, store: Store) -> None:
    found = prepared(numbers(spark), store)
    before = store.lease(found.data_dir)
    assert before is not None
    renew_leases(now=before.renewed + 60)
    assert store.lease(found.data_dir) == before
    renew_leases(now=before.renewed + 4000)
    after = store.lease(found.data_dir)
    assert after is not None
    assert after.renewed == before.renewed + 4000


def test_data_that_cannot_be_used_leave_nothing(spark: SparkSession, store: Store) -> None:
    df = spark.range(5).select("id", F.lit(None).cast("double").alias("label"))
    with pytest.raises(InvalidArgumentError, match="5 of 5 rows are null"):
        prepared(df, store)
    assert store.list("data") == []
    assert not any(store == s for s, _ in prepare_module._owned.directories)


def test_a_file_that_went_missing_is_made_again(spark: SparkSession, store: Store) -> None:
    found = prepared(numbers(spark), store)
    store.delete(found.manifest.files[0].path)
    assert not prepared(numbers(spark), store).reused


def test_data_go_when_the_process_ends_and_connect_needs_a_key(tmp_path: Path) -> None:
    root = str(tmp_path / "store")
    body = f"""
        from sparkhvd.estimator.data.prepare import prepare
        from sparkhvd.estimator.data.schema import check_schema
        from sparkhvd.estimator.data.store import Store
        store = Store.create({root!r})
        df = spark.range(20).selectExpr("id", "id * 0.5D as label")
        schema = check_schema(df.schema, feature_cols=["id"], label_cols=["label"])
        found = [prepare(df, schema, store, app_id="app", data_key=k) for k in (None, None, "mine", "mine")]
        print("RESULT", json.dumps([[f.reused, f.manifest.num_rows, f.reason] for f in found]))
        print("HELD", len(store.data_directories()))
    """
    output = run_on("local[2]", body, tmp_path, remote=True)
    line = next(x for x in output.splitlines() if x.startswith("RESULT"))
    unseen = "a Spark Connect client does not see what a plan reads; data_key= would tell that data are the same"
    assert json.loads(line[7:]) == [
        [False, 20, unseen],
        [False, 20, unseen],
        [False, 20, "no earlier data of this key"],
        [True, 20, "data_key='mine'"],
    ]
    assert "HELD 3" in output
    assert os.listdir(tmp_path / "store" / "data") == []
