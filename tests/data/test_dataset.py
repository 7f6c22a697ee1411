"""Data sets for a user's loop, prepared from DataFrames."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from sparkhvd.data import Dataset, load, make_spark_converter, prepare
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.runner import run
from tests.harness.by_value import by_value
from tests.harness.paths import ROOT

pytestmark = pytest.mark.spark

travels_by_value = by_value(__name__)

ROWS = 103

READ = """
import sys
from sparkhvd.data import load
loader = load(sys.argv[1], sys.argv[2]).loader(batch_size=10, shuffle=False)
print(sum(int(batch["id"].sum()) for batch in loader))
"""


def total(dataset: Dataset) -> int:
    batches = dataset.loader(batch_size=10, shuffle=False)
    return sum(int(batch["id"].sum()) for batch in batches)


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    rows = [
        (n, n / 2, [float(n), 1.0], Vectors.dense([n, -n]), n % 2 == 0, f"{n}", n % 10 == 0)
        for n in range(ROWS)
    ]
    columns = ["id", "half", "pair", "vector", "even", "text", "held_out"]
    return spark.createDataFrame(rows, columns).repartition(3)


def test_other_processes_read_data_prepared_by_a_driver(df: DataFrame, tmp_path: Path) -> None:
    store = tmp_path / "store"
    columns = ["id", "half", "pair", "vector", "even", "text"]
    dataset = prepare(
        df,
        store,
        columns=columns,
        dtypes={"pair": "float64"},
        decoded=["text"],
        validation="held_out",
        data_key="numbers",
    )
    assert dataset.columns == columns
    assert len(dataset) == ROWS
    (batch,) = list(dataset.loader(0, 1, ROWS, subset="all", decoders={"text": float}))
    assert {name: (tensor.dtype, tensor.shape[1:]) for name, tensor in batch.items()} == {
        "id": (torch.int64, ()),
        "half": (torch.float32, ()),
        "pair": (torch.float64, (2,)),
        "vector": (torch.float32, (2,)),
        "even": (torch.bool, ()),
        "text": (torch.float32, ()),
    }
    numbers = batch["id"].numpy()
    assert sorted(numbers) == list(range(ROWS))
    np.testing.assert_array_equal(batch["vector"], np.stack([numbers, -numbers], 1))
    np.testing.assert_array_equal(batch["text"], numbers)
    assert len(list(dataset.loader(0, 1, 1, subset="validation", columns=["id"]))) == 11
    # Found again by the key, by its path in another process, and after pickling.
    again = prepare(df, store, columns=["id"], data_key="ids")
    assert pickle.loads(pickle.dumps(again)) == again
    mine = sum(int(batch["id"].sum()) for batch in again.loader(0, 2, 10, shuffle=False))
    launched = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    theirs = subprocess.run(
        [sys.executable, "-c", READ, store, again.path],
        cwd=ROOT,
        env={**os.environ, **launched},
        check=True,
        capture_output=True,
        timeout=120,
    ).stdout
    assert 0 < mine < mine + int(theirs) == sum(range(ROWS))
    # In ranks on Spark the dataset itself is sent, with the ranks' own rank and size.
    assert run(total, (again,), num_proc=2, spark=df.sparkSession) == [mine, int(theirs)]
    again.delete()
    with pytest.raises(InvalidArgumentError, match="There is no data set"):
        load(store, again.path)
    with pytest.raises(InvalidArgumentError, match="text"):
        prepare(df, store)


def test_petastorm_scripts_find_their_converter(df: DataFrame, tmp_path: Path) -> None:
    numbers = df.select("id", F.col("half").cast("double"))
    converter = make_spark_converter(numbers, store=tmp_path / "store")
    assert len(converter) == converter.dataset_size == ROWS
    seen = []
    for shard in range(2):
        with converter.make_torch_dataloader(
            batch_size=10, num_epochs=2, cur_shard=shard, shard_count=2
        ) as loader:
            seen += [number for batch in loader for number in batch["id"].tolist()]
    assert sorted(seen) == sorted([*range(ROWS)] * 2)
    endless = converter.make_torch_dataloader(cur_shard=0, shard_count=1, workers_count=4)
    with pytest.warns(UserWarning, match="workers_count has no effect"):
        loader = endless.__enter__()
    for number, batch in enumerate(loader):
        assert batch["half"].dtype == torch.float32
        if number > 10:
            break
    endless.__exit__(None, None, None)
    with (
        pytest.raises(InvalidArgumentError, match="transform_spec is not supported"),
        converter.make_torch_dataloader(transform_spec=print),
    ):
        pass
    converter.delete()
