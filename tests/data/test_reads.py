"""Bytes of the data that a fit reads from the store."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom
from torch import nn

from sparkhvd.data.store.store import Store
from tests.estimator.fits import estimator
from tests.harness.soak import soak

pytestmark = pytest.mark.spark

ROWS = 200_000


class CountingStore(Store):
    """Counts the bytes that each process reads from data files, in a file per process beside the store."""

    def local_path(self, path: str) -> str | None:
        return None if path.endswith(".parquet") else super().local_path(path)

    def open_input(self, path: str) -> pa.NativeFile:
        root = super().local_path("")
        assert root is not None
        if not path.endswith(".parquet"):
            return super().open_input(path)
        return pa.PythonFile(Counted(f"{root}/{path}", f"{root}-reads/{os.getpid()}"), "r")


class Counted(io.FileIO):
    """A file that records the bytes of each read."""

    def __init__(self, path: str, counts: str) -> None:
        super().__init__(path)
        self._counts = counts

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(-1 if size is None else size)
        with open(self._counts, "a") as file:
            file.write(f"{len(data)}\n")
        return data


@soak("data/test_host_rows: rows that a validation column divides are read once")
def test_host_reads_data_with_validation_column_once(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "store-reads").mkdir()
    store = CountingStore.create(tmp_path / "store")
    columns = [(F.col("id") * (i + 1) % 7).cast("float") for i in range(8)]
    # The last tenth of each of the two files.
    held_out = F.col("id") % (ROWS // 2) >= 0.9 * (ROWS // 2)
    df = spark.range(0, ROWS, 1, 2).select(
        F.array(*columns).alias("x"),
        (F.col("id") % 3).cast("float").alias("y"),
        held_out.alias("v"),
    )
    fit = estimator(nn.Linear(8, 1), store, validation="v", batch_size=4096, keep_data=True)
    fit.fit(df)
    num_bytes = sum(f.stat().st_size for f in (tmp_path / "store/data").rglob("*.parquet"))
    reads = {
        int(f.name): sum(map(int, f.read_text().split()))
        for f in (tmp_path / "store-reads").iterdir()
    }
    reads.pop(os.getpid(), None)
    assert len(reads) == 2
    assert 0.99 * num_bytes <= sum(reads.values()) <= 1.1 * num_bytes, (reads, num_bytes)
