"""Folders of Horovod's stores and of a program's own stores: runs, and data for `fit_on_parquet` and data modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.sql import DataFrame, SparkSession

import sparkhvd
from sparkhvd import Store
from sparkhvd.errors import InvalidArgumentError, UntrustedError
from sparkhvd.estimator.saving import encoding
from sparkhvd.estimator.saving.trust import OwnFiles
from sparkhvd.horovod.spark.common.store import FilesystemStore, LocalStore
from sparkhvd.horovod.spark.common.store import Store as HorovodStore
from sparkhvd.horovod.spark.torch import TorchEstimator, TorchModel
from tests.harness.soak import soak

pytestmark = pytest.mark.spark


class Own(LocalStore):
    """Has an own folder for each kind of file that may have one."""

    def get_train_data_path(self, idx: int | None = None) -> str:
        return f"{self.prefix_path}/training{'' if idx is None else f'-{idx}'}"

    def get_val_data_path(self, idx: int | None = None) -> str:
        return f"{self.prefix_path}/held-out{'' if idx is None else f'-{idx}'}"

    def get_run_path(self, run_id: str) -> str:
        return f"{self.prefix_path}/trainings/{run_id}"


def estimator(store: Any, **options: Any) -> TorchEstimator:
    torch.manual_seed(3)
    net = torch.nn.Linear(1, 1)
    given = {
        "model": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
        "loss": torch.nn.functional.mse_loss,
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 8,
        "num_proc": 1,
        "random_seed": 1,
        "verbose": 0,
        "store": store,
    }
    return TorchEstimator(**{**given, **options})


@pytest.fixture
def df(spark: SparkSession) -> DataFrame:
    rows = [(n / 40, 2.0 * n / 40, n % 5 == 0) for n in range(40)]
    return spark.createDataFrame(rows, ["x", "y", "held_out"])


def test_run_is_stored_at_the_path_from_the_store_methods(df: DataFrame, tmp_path: Path) -> None:
    """A second fit continues the run there, and `from_run` loads it."""
    store = Own(str(tmp_path))
    estimator(store, run_id="mine").fit(df)
    estimator(store, run_id="mine").fit(df)
    assert (tmp_path / "trainings" / "mine" / "warm-1").is_dir()
    assert not (tmp_path / "runs").exists()
    assert store.exists(f"{store.get_run_path('mine')}/finished.json")
    assert TorchModel.from_run(store, "mine", trust=True).getRunId() == "mine/warm-1"
    store.delete_run("mine")
    assert list((tmp_path / "trainings").iterdir()) == []


def test_save_runs_false_deletes_the_run_folder(df: DataFrame, tmp_path: Path) -> None:
    store = FilesystemStore(
        str(tmp_path / "store"), runs_path=str(tmp_path / "runs"), save_runs=False
    )
    model = estimator(store, run_id="mine").fit(df)
    assert model.getRunId() == "mine"
    assert list((tmp_path / "runs").iterdir()) == []


def test_overridden_path_that_a_fit_cannot_use_raises_early(df: DataFrame, tmp_path: Path) -> None:
    class Logs(LocalStore):
        def get_logs_path(self, run_id: str) -> str:
            return f"/logs/{run_id}"

    with pytest.raises(InvalidArgumentError, match=r"Logs.get_logs_path\('a-run'\) is '/logs/a-ru"):
        estimator(Logs(str(tmp_path))).fit(df)


def test_fit_on_parquet_finds_the_data_of_an_earlier_fit(df: DataFrame, tmp_path: Path) -> None:
    """It writes the fit's rows to the folders that the store's methods name, on the first request and only once."""
    store = Own(str(tmp_path))
    fitted = estimator(store, validation="held_out", lr_scaling=None).fit(df)
    assert not (tmp_path / "training-0").exists()
    again = estimator(store, validation="held_out", lr_scaling=None)
    first, second = again.fit_on_parquet(), again.fit_on_parquet(dataset_idx=0)
    assert len(pq.read_table(tmp_path / "training-0")) == 32
    assert pq.read_table(tmp_path / "held-out-0").column_names == ["x", "y"]
    assert not (tmp_path / "training-1").exists()
    records = [model._fitted.history[0] for model in (fitted, first, second)]
    assert [record["rows"] for record in records] == [32, 32, 32]
    assert records[1]["val_loss"] == records[2]["val_loss"]
    with pytest.raises(
        InvalidArgumentError, match="no fit of this process has used the store as data set 3"
    ):
        again.fit_on_parquet(dataset_idx=3)


def test_fit_on_parquet_finds_data_written_by_a_program(df: DataFrame, tmp_path: Path) -> None:
    store = FilesystemStore(str(tmp_path / "store"), train_path=str(tmp_path / "rows"))
    with pytest.raises(
        InvalidArgumentError, match="path is not given, there is no Parquet in file:"
    ):
        estimator(store).fit_on_parquet()
    df.where("NOT held_out").write.parquet(store.get_train_data_path())
    df.where("held_out").write.parquet(store.get_val_data_path())
    model = estimator(store, validation=0.2).fit_on_parquet()
    assert model._fitted.history[0]["rows"] == 32
    assert "val_loss" in model._fitted.history[0]


class Doubled(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_files_saved_by_this_process_load_without_trust_until_changed(
    df: DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Doubled(1, 1)
    model = TorchModel(model=net, feature_columns=["x"], label_columns=["y"])
    stages = estimator(LocalStore(str(tmp_path / "store")), model=net, optimizer=torch.optim.SGD)
    path = str(tmp_path / "pipeline")
    Pipeline(stages=[stages]).save(path)
    (loaded,) = Pipeline.load(path).getStages()
    assert isinstance(loaded.getModel(), Doubled)
    assert loaded.getStore().url == Store.create(tmp_path / "store").url
    path = str(tmp_path / "model")
    PipelineModel([model]).save(path)
    expected = model.transform(df).collect()
    assert PipelineModel.load(path).transform(df).collect() == expected

    (code,) = Path(path).glob("stages/*/code/part-*")
    saved = code.read_bytes()
    for checksum in code.parent.glob(".*.crc"):
        checksum.unlink()
    code.write_bytes(saved + b"\0")
    with pytest.raises(UntrustedError, match="Doubled, and loading it runs code from that file"):
        PipelineModel.load(path)
    # A client of Connect writes text, with a separator after it.
    code.write_bytes(saved + b"\n")
    with monkeypatch.context() as connect:
        connect.setattr(encoding, "is_connect", lambda session: True)
        PipelineModel.load(path)
        code.write_bytes(saved + b"\n\n")
        with pytest.raises(UntrustedError):
            PipelineModel.load(path)
    code.write_bytes(saved)
    PipelineModel.load(path)
    # The same pickles, and other places.
    (metadata,) = Path(path).glob("stages/*/metadata/part-*")
    metadata.write_text(metadata.read_text().replace('["y"]', '["z"]'))
    for checksum in metadata.parent.glob(".*.crc"):
        checksum.unlink()
    with pytest.raises(UntrustedError):
        PipelineModel.load(path)
    PipelineModel([model]).write().overwrite().save(path)
    # As in another process.
    monkeypatch.setattr(OwnFiles, "_of_process", {})
    with pytest.raises(UntrustedError):
        PipelineModel.load(path)


def test_files_saved_by_this_process_with_different_functions_load(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Functions that a loop makes have the same name."""
    del spark
    paths = [str(tmp_path / str(n)) for n in range(3)]
    for n, path in enumerate(paths):
        estimator(None, transformation_fn=lambda row, n=n: n).save(path)
    loaded = [TorchEstimator.load(path).getTransformationFn()({}) for path in paths]
    assert loaded == [0, 1, 2]


@soak("saving/test_encoding; where a run is: here")
def test_a_loaded_estimator_writes_to_the_paths_of_its_store(df: DataFrame, tmp_path: Path) -> None:
    own = Own(str(tmp_path / "own"))
    none_saved = FilesystemStore(str(tmp_path / "none"), runs_path=str(tmp_path), save_runs=False)
    plain = LocalStore(str(tmp_path / "plain"))
    for store in (own, none_saved, plain):
        path = str(tmp_path / "saved")
        estimator(store, run_id="mine").write().overwrite().save(path)
        loaded = TorchEstimator.load(path).getStore()
        assert isinstance(loaded, HorovodStore)
        assert loaded.get_run_path("a") == store.get_run_path("a")
        assert loaded.get_train_data_path() == store.get_train_data_path()
        assert loaded.saving_runs() == store.saving_runs()
        assert (loaded == store) == (store is not own)
        TorchEstimator.load(path).fit(df)
    assert (tmp_path / "own" / "trainings" / "mine").is_dir()
    assert (tmp_path / "plain" / "runs" / "mine").is_dir()
    assert not (tmp_path / "mine").exists()


class Elsewhere:
    """A backend whose ranks are not Spark tasks, and are more than the slots."""

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, env: Any = None) -> Any:
        return sparkhvd.run_local(fn, args, kwargs, num_proc=3, env=env)

    def num_processes(self) -> int:
        return 3


@soak("runner/test_admission; a backend of the program's own: test_as_horovod_in_workers")
def test_custom_backend_may_have_more_ranks_than_slots(df: DataFrame, tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    model = estimator(store, num_proc=None, backend=Elsewhere(), batch_size=4).fit(df)
    assert model._fitted.history[0]["rows"] == 36  # of 40, those in full steps of three ranks
