from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.ml.functions import array_to_vector
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom
from pyspark.sql import types as T  # noqa: N812 - Spark's own custom

from sparkhvd.data.arrow_limits import (
    BYTES_KEY,
    RECORDS_KEY,
    _Bounds,
    arrow_row_bytes,
    bounded_batches,
)
from tests.harness.ranks import run_threads

pytestmark = pytest.mark.spark

KEYS = (BYTES_KEY, RECORDS_KEY)


@pytest.fixture(autouse=True)
def conf_is_as_before(spark: SparkSession) -> Iterator[None]:
    before = [spark.conf.get(key, None) for key in KEYS]
    yield
    assert [spark.conf.get(key, None) for key in KEYS] == before


def sizes(df: DataFrame) -> list[tuple[int, int]]:
    """(rows, bytes) of every Arrow batch that a Python worker gets."""

    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield pa.RecordBatch.from_pydict({"rows": [batch.num_rows], "bytes": [batch.nbytes]})

    return [(r.rows, r.bytes) for r in df.mapInArrow(look, "rows long, bytes long").collect()]


@pytest.mark.parametrize("knows_bytes", [True, False])
def test_batches_of_wide_rows_are_bounded_in_bytes(spark: SparkSession, knows_bytes: bool) -> None:
    # 8 KB per row; Spark's own bound of 10,000 rows would make one batch of 16 MB.
    df = spark.range(0, 2000, 1, 1).selectExpr("array_repeat(id * 1D, 1000) AS x")
    with bounded_batches(df, batch_bytes=1 << 20, knows_bytes=knows_bytes):
        found = sizes(df)
    assert sum(rows for rows, _ in found) == 2000
    assert max(size for _, size in found) <= 1.1 * (1 << 20)
    assert len(found) < 200


def test_vector_batches_are_bounded_by_the_width_in_metadata(
    spark: SparkSession,
) -> None:
    vector = array_to_vector(F.expr("array_repeat(id * 1D, 1000)"))
    metadata = {"ml_attr": {"num_attrs": 1000}}
    df = spark.range(0, 2000, 1, 1).select(vector.alias("x", metadata=metadata), F.col("id"))
    with bounded_batches(df, batch_bytes=1 << 20):
        assert spark.conf.get(BYTES_KEY) == str(2**31 - 1)
        found = sizes(df)
    assert sum(rows for rows, _ in found) == 2000
    assert 0.8 * (1 << 20) < max(size for _, size in found) <= 1.1 * (1 << 20)


def test_row_larger_than_the_limit_forms_its_own_batch(spark: SparkSession) -> None:
    df = spark.range(0, 5, 1, 1).selectExpr("array_repeat(id * 1D, 20000) AS x")
    with bounded_batches(df, batch_bytes=100_000):
        assert [rows for rows, _ in sizes(df)] == [1] * 5


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("given", [None, "7", "20000"])
def test_batch_limits_of_the_user_are_restored(
    spark: SparkSession, key: str, given: str | None
) -> None:
    df = spark.range(5)
    if given is not None:
        spark.conf.set(key, given)
    try:
        with bounded_batches(df, batch_bytes=16_000):
            inside = spark.conf.get(key)
        assert spark.conf.get(key, None) == given
    finally:
        spark.conf.unset(key)
    # 1,000 rows of 16 bytes. The user's limit in bytes stays, and the user's limit on records if it is smaller.
    ours = str(2**31 - 1) if key == BYTES_KEY else "1000"
    is_theirs = given is not None and (key == BYTES_KEY or given == "7")
    assert inside == (given if is_theirs else ours)


def test_limit_set_by_the_user_inside_the_block_stays(spark: SparkSession) -> None:
    try:
        with bounded_batches(spark.range(5)):
            spark.conf.set(BYTES_KEY, "12345")
        assert spark.conf.get(BYTES_KEY) == "12345"
    finally:
        spark.conf.unset(BYTES_KEY)


def test_limit_that_spark_refuses_is_not_remembered(spark: SparkSession) -> None:
    bounds, key = _Bounds(), ("session", RECORDS_KEY)
    before = spark.conf.get(RECORDS_KEY)
    with pytest.raises(Exception, match="maxRecordsPerBatch"):
        bounds.enter(key, spark.conf, -(2**40))  # no int32
    bounds.enter(key, spark.conf, 77)
    assert spark.conf.get(RECORDS_KEY) == "77"
    bounds.leave(key, spark.conf, 77)
    assert spark.conf.get(RECORDS_KEY) == before


def test_two_threads_use_the_smaller_limit_and_the_last_restores_it(spark: SparkSession) -> None:
    both, one_left = threading.Barrier(2), threading.Event()
    seen: dict[str, Any] = {}
    spark.conf.set(RECORDS_KEY, "5000")

    def first() -> None:
        with bounded_batches(spark.range(5), batch_bytes=16_000):
            seen["alone"] = spark.conf.get(RECORDS_KEY)
            both.wait(10)
            both.wait(10)
            seen["both"] = spark.conf.get(RECORDS_KEY)
        one_left.set()

    def second() -> None:
        both.wait(10)
        with bounded_batches(spark.range(5), batch_bytes=160):
            both.wait(10)
            assert one_left.wait(10)
            seen["second"] = spark.conf.get(RECORDS_KEY)

    try:
        for outcome in run_threads([first, second]):
            if isinstance(outcome, BaseException):
                raise outcome
        assert seen == {"alone": "1000", "both": "10", "second": "10"}
        assert spark.conf.get(RECORDS_KEY) == "5000"
    finally:
        spark.conf.unset(RECORDS_KEY)


def test_the_width_of_a_row_comes_from_types_and_metadata() -> None:
    def vector(width: int) -> T.StructField:
        return T.StructField("v", VectorUDT(), True, {"ml_attr": {"num_attrs": width}})

    assert arrow_row_bytes(T.StructType([vector(10_000)])) == (80_016, 0)
    assert arrow_row_bytes(T.StructType([vector(10_000_000)])) == (0, 1)  # sparse
    plain = [T.StructField(n, T.DoubleType()) for n in "ab"]
    assert arrow_row_bytes(T.StructType(plain)) == (32, 0)
    kinds = (VectorUDT(), T.ArrayType(T.FloatType()), T.StringType(), T.BinaryType())
    others = [T.StructField(f"x{i}", kind) for i, kind in enumerate(kinds)]
    assert arrow_row_bytes(T.StructType([*plain, *others])) == (32, 4)
