"""`fit_on_parquet`: the same training as on a DataFrame of the rows, no job over the data, and refused input."""

from __future__ import annotations

import copy
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from sparkhvd import InvalidArgumentError, RankError, Store
from sparkhvd.data.manifest import Manifest
from sparkhvd.data.reading.reader import Reader
from sparkhvd.estimator import Callback, pad
from sparkhvd.training.checkpoints.files import Checkpoints
from tests.estimator.fits import assert_same_weights, estimator, mlp
from tests.harness.by_value import by_value
from tests.harness.plans import batch_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

travels_by_value = by_value(__name__)


ROWS = 90
LR = 0.05


def values(rows: int = ROWS, seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((rows, 2)).astype(np.float32)
    day = np.sort(generator.integers(0, 3, rows))
    return {"x": x, "day": day, "y": (x[:, 0] - 2 * x[:, 1] + day).astype(np.float32)}


def write(folder: Path, given: dict[str, np.ndarray], **more: Any) -> Path:
    """Write one file per day in a folder `day=...`, each with other row groups."""
    at = 0
    for day in range(3):
        count = int((given["day"] == day).sum())
        rows = slice(at, at + count)
        at += count
        place = folder / f"day={day}"
        place.mkdir(parents=True)
        columns = {
            "x": pa.array(given["x"][rows].tolist(), pa.list_(pa.float32())),
            "y": pa.array(given["y"][rows]),
            **{name: pa.array(column[rows]) for name, column in more.items()},
        }
        pq.write_table(pa.table(columns), place / "part.parquet", row_group_size=5 + 9 * day)
    (folder / "_SUCCESS").touch()
    return folder


def reference(
    model: nn.Module, store: Store, given: dict[str, np.ndarray], epochs: int
) -> nn.Module:
    """Train in one process over the global batches of two ranks."""
    (run,) = [d for d in store.list("runs") if store.exists(f"{d}/data/_manifest.json")]
    manifest = Manifest.load(store, f"{run}/data")
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    x = torch.from_numpy(np.column_stack([given["x"], given["day"]]).astype(np.float32))
    y = torch.from_numpy(given["y"]).reshape(-1, 1)
    files = Store(store.url.replace("store", "data"))
    with Reader(files, manifest, rank=0, size=2, batch_size=8, seed=3) as reader:
        for epoch in range(epochs):
            plan = reader.plan(epoch)
            for step in range(plan.num_steps):
                rows = np.concatenate([batch_rows(plan, rank, step) for rank in range(2)])
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
                optimizer.step()
    return model


def test_training_on_files_equals_one_process_on_their_rows(
    spark: SparkSession, tmp_path: Path
) -> None:
    given = values()
    path = write(tmp_path / "data", given)
    held_out = write(tmp_path / "more", values(30, seed=1))
    store = Store.create(tmp_path / "store")
    model = mlp(3)
    fit = estimator(model, store, feature_cols=["x", "day"], epochs=2, keep_checkpoints=1)
    trained = fit.fit_on_parquet(path, validation_path=held_out)
    # Only the run was written.
    assert store.data_directories() == []
    history = trained.getHistory()
    assert [record["rows"] for record in history] == [ROWS, ROWS]
    assert_same_weights(trained.getModel(), reference(model, store, given, 2), 1e-5)
    with torch.no_grad():
        other = values(30, seed=1)
        x = torch.from_numpy(np.column_stack([other["x"], other["day"]]).astype(np.float32))
        loss = nn.functional.mse_loss(trained.getModel()(x).flatten(), torch.from_numpy(other["y"]))
    assert history[-1]["validation"]["loss"] == pytest.approx(float(loss), rel=1e-5)
    # Spark reads the same files for transform, `day` as an int.
    rows = trained.transform(spark.read.parquet(str(path))).collect()
    assert len(rows) == ROWS


class Stop(Callback):
    """Fails rank 0 once in the second epoch, after the checkpoint of one of its steps was written."""

    def __init__(self, store: Store, marker: Path) -> None:
        self.store = store
        self.marker = str(marker)

    def on_step_end(self, ctx: Any, *logs: Any) -> None:
        if ctx.rank or ctx.epoch == 1 or os.path.exists(self.marker):
            return
        time.sleep(0.1)  # checkpoints are written in parallel to the training
        if Checkpoints(self.store, "runs/mine").latest_position() > (1, 0):
            Path(self.marker).touch()
            raise RuntimeError("stopped on purpose")


def test_a_fit_resumes_mid_epoch_only_with_the_same_files(
    spark: SparkSession, tmp_path: Path
) -> None:
    path = write(tmp_path / "data", values())
    store = Store.create(tmp_path / "store")
    model = mlp(2)
    options: dict[str, Any] = {"epochs": 2, "checkpoint_interval_s": 1e-6, "num_proc": 1}
    whole = estimator(model, store, **options).fit_on_parquet(path)
    options |= {"run_id": "mine", "callbacks": [Stop(store, tmp_path / "stopped")]}
    with pytest.raises(RankError, match="stopped on purpose"):
        estimator(model, store, **options).fit_on_parquet(path)
    # Otherwise a run from the beginning would pass, too.
    assert Checkpoints(store, "runs/mine").latest_position() > (1, 0)
    changed = path / "day=1" / "part.parquet"
    before = changed.stat()
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(
        InvalidArgumentError, match=r"Parquet files of training: 'day=1/part.parquet' was"
    ):
        estimator(model, store, **options).fit_on_parquet(path)
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))
    resumed = estimator(model, store, **options).fit_on_parquet(path)
    assert_same_weights(resumed.getModel(), whole.getModel(), 0)


def test_all_ranks_skip_the_same_invalid_rows_and_run_decoders(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = values()
    noise = given["y"].copy()
    noise[::9] = np.nan
    words = np.where(given["y"] > 0, "high", "low")
    test = np.arange(ROWS) % 4 == 0
    path = write(tmp_path / "data", given, noise=noise, word=words, test=test)
    fit = estimator(
        mlp(3, outputs=2),
        Store.create(tmp_path / "store"),
        loss=nn.CrossEntropyLoss(),
        feature_cols=["x", "noise"],
        label_cols=["word"],
        decoders={"word": {"low": 0, "high": 1}},
        handle_invalid={"noise": "skip"},
        validation="test",
        verbose=1,
    )
    usable = ~np.isnan(noise)
    trained = fit.fit_on_parquet(str(path))
    assert trained.getHistory()[-1]["rows"] == int((usable & ~test).sum())
    assert "val_loss" in trained.history[-1]
    printed = capsys.readouterr().out
    assert (
        f"handle_invalid skipped 10 of {ROWS} training rows with a null or an invalid number"
        in printed
    )


def test_error_names_the_file_of_invalid_values_found_by_a_rank(
    spark: SparkSession, tmp_path: Path
) -> None:
    given = values(900)
    given["y"][800:] = np.nan
    path = write(tmp_path / "data", given)
    fit = estimator(mlp(2), Store.create(tmp_path / "store"), num_proc=1)
    with pytest.raises(RankError) as raised:
        fit.fit_on_parquet(path)
    assert "day=2/part.parquet" in str(raised.value)
    assert "column 'y' (float): 100 of " in str(raised.value)


def test_fit_on_parquet_without_path_reads_data_below_the_store(
    spark: SparkSession, tmp_path: Path
) -> None:
    store = Store.create(tmp_path / "store")
    with pytest.raises(InvalidArgumentError, match="there is no such file or folder"):
        estimator(mlp(2), store).fit_on_parquet()
    write(tmp_path / "store" / "intermediate_train_data.3", values())
    write(tmp_path / "store" / "intermediate_val_data.3", values(30, seed=1))
    fit = estimator(mlp(2), store, validation=0.1, num_proc=1, run_id="mine")
    _, trained = fit.fit_on_parquet([{fit.epochs: 1}, {fit.epochs: 2}], dataset_idx=3)
    assert trained.getRunId() == "mine-1"
    assert [record["rows"] for record in trained.getHistory()] == [ROWS, ROWS]
    assert "val_loss" in trained.history[0]


@pytest.mark.parametrize(
    ("options", "places", "message"),
    [
        ({"data_key": "k"}, {}, "data_key is 'k', but it only affects data that fit(df) writes"),
        ({"keep_data": True}, {}, "keep_data is True"),
        ({"group_col": "x"}, {}, "group_col is 'x', but it only affects data that fit(df) writes"),
        (
            {"num_partitions": 2},
            {},
            "num_partitions is 2, but it only affects data that fit(df) writes",
        ),
        ({"validation": 0.1}, {"validation_path": "/tmp"}, "each chooses the validation rows"),
        ({"store": None, "no path": True}, {}, "path is not given, and no store is given"),
        ({}, {"dataset_idx": 1}, "dataset_idx is 1, which chooses data below the store"),
        ({"feature_cols": ["z"]}, {}, "names column 'z', which the Parquet at"),
        ({"reader": "nonsense"}, {}, "reader is 'nonsense'; expected one of 'pyarrow'"),
        ({"reader": "petastorm"}, {}, "pip install 'sparkhvd[petastorm]'"),
        ({}, {"params": ["a.parquet"]}, "params is ['a.parquet']. Give a dict of Params"),
        (
            {"collate_fn": {"y": pad(0)}},
            {},
            "It takes only binary columns, string columns and arrays",
        ),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)
def test_impossible_param_combinations_raise_before_ranks_start(
    spark: SparkSession,
    tmp_path: Path,
    options: dict[str, Any],
    places: dict[str, Any],
    message: str,
) -> None:
    path = write(tmp_path / "data", values())
    store = Store.create(tmp_path / "store")
    given = None if options.pop("no path", False) else path
    fit = estimator(mlp(2), **{"store": store, **options})
    with pytest.raises(InvalidArgumentError) as raised:
        fit.fit_on_parquet(given, **places)
    assert message in str(raised.value)


def test_fit_refuses_paths_and_fit_on_parquet_refuses_dataframes(
    spark: SparkSession, tmp_path: Path
) -> None:
    path = write(tmp_path / "data", values())
    df = spark.range(3)
    with pytest.raises(InvalidArgumentError, match="validation is a DataFrame, which Spark would"):
        estimator(mlp(2), validation=df).fit_on_parquet(path)
    with pytest.raises(InvalidArgumentError, match=r"fit\(df\) writes its own"):
        estimator(mlp(2), reader="petastorm").fit(spark.read.parquet(str(path)))
    shutil.rmtree(path)
