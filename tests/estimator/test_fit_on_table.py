"""`fit_on_table`: the same training as on files, no job over the data, and the model's record of its table."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from sparkhvd import InvalidArgumentError, Store, TorchModel, UntrustedError
from sparkhvd.data.store.locks import dump_sealed, load_sealed
from sparkhvd.estimator.saving.recipe import PARAMS_NAME, RECIPE_NAME, load_recipe, reproduce
from tests.estimator.fits import assert_same_weights, estimator, mlp
from tests.harness import tables
from tests.harness.soak import soak

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

deltalake = pytest.importorskip("deltalake")


@pytest.fixture(scope="module", autouse=True)
def threads(tmp_path_factory: pytest.TempPathFactory) -> None:
    tables.start_threads(tmp_path_factory.mktemp("threads"))


def rows(first: int, count: int) -> pa.Table:
    x = np.random.default_rng(first).standard_normal((count, 2))
    ids = np.arange(first, first + count)
    columns = {"id": ids, "a": x[:, 0], "b": x[:, 1], "y": x[:, 0] - 2 * x[:, 1]}
    return pa.table({**columns, "day": [f"d{i % 2}" for i in ids.tolist()]})


def test_concurrent_fits_read_their_own_table_versions(spark: SparkSession, tmp_path: Path) -> None:
    table = tmp_path / "table"
    deltalake.write_deltalake(table, rows(0, 60), partition_by=["day"])
    deltalake.write_deltalake(table, rows(60, 40), mode="append")
    deltalake.DeltaTable(table).delete("id < 10")
    store = Store.create(tmp_path / "store")
    model = mlp(2)
    options: dict[str, Any] = {"feature_cols": ["a", "b"], "num_proc": 1, "keep_checkpoints": 1}
    found: dict[int, TorchModel] = {}

    def fit(version: int) -> None:
        made = estimator(model, store, **options, run_id=f"v{version}")
        trained = made.fit_on_table(table, version=version, where="day = 'd0' OR id >= 5")
        assert isinstance(trained, TorchModel)
        found[version] = trained

    workers = [threading.Thread(target=fit, args=(version,)) for version in (0, 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(240)
    assert {v: m.history[0]["rows"] for v, m in found.items()} == {0: 58, 2: 90}
    # Only the runs were written.
    assert store.data_directories() == []
    data = found[2].training_data
    (known,) = data["tables"]
    assert (data["rows"], known["version"], known["format"]) == (90, 2, "delta")
    assert known["uuid"] == str(deltalake.DeltaTable(table).metadata().id)
    assert data["columns"] == ["a", "b", "y"]
    assert found[2].history[0]["data"].startswith(f"{table}@2 where ")
    report = found[2].report().document["data"]
    assert report["version of table"].startswith("2 of 20")
    assert report["rows"] == "90"
    found[2].save(str(tmp_path / "model"))
    assert TorchModel.load(str(tmp_path / "model")).training_data == data
    assert TorchModel.from_run(store, "v2").training_data == data
    # A later commit changes nothing: the run is repeated on its version.
    deltalake.DeltaTable(table).update(updates={"y": "0.0"})
    run = store.below("runs/v2")
    again = reproduce(run, spark, key=found[2].run_key)
    assert (again.text, again.is_equal, again.environment) == ("equal bits", True, {})
    assert TorchModel.load(str(tmp_path / "model")).run_key == found[2].run_key
    with pytest.raises(UntrustedError, match="Give the key of the run"):
        reproduce(run, spark)
    with pytest.raises(UntrustedError, match="was not written by the fit with this key"):
        reproduce(run, spark, key=found[0].run_key)
    forged = load_sealed(run.read_bytes(RECIPE_NAME)) or {}
    run.write_bytes(RECIPE_NAME, dump_sealed({**forged, "seed": 4}))
    with pytest.raises(UntrustedError, match="was not written by the fit with this key"):
        load_recipe(run, key=found[2].run_key)
    assert load_recipe(run, trusted=True)[0].seed == 4
    run.write_bytes(PARAMS_NAME, b"other")
    with pytest.raises(InvalidArgumentError, match="It was not loaded"):
        load_recipe(run, trusted=True)


@soak("rows of versions: data/test_table_formats; training on files: here, test_fit_on_parquet")
def test_table_of_one_file_gives_the_weights_of_the_file(
    spark: SparkSession, tmp_path: Path
) -> None:
    store, model = Store.create(tmp_path / "store"), mlp(2)
    options: dict[str, Any] = {"feature_cols": ["a", "b"], "num_proc": 1}
    deltalake.write_deltalake(tmp_path / "one", rows(0, 60))
    (file,) = deltalake.DeltaTable(tmp_path / "one").file_uris()
    (tmp_path / "plain").mkdir()
    shutil.copy(file, tmp_path / "plain" / "file.parquet")
    whole = estimator(model, store, **options).fit_on_table(tmp_path / "one")
    plain = estimator(model, store, **options).fit_on_parquet(tmp_path / "plain")
    assert isinstance(whole, TorchModel)
    assert isinstance(plain, TorchModel)
    assert_same_weights(whole.getModel(), plain.getModel(), 0)


def test_invalid_tables_and_params_are_refused_before_any_job(
    spark: SparkSession, tmp_path: Path
) -> None:
    made = estimator(mlp(2), Store.create(tmp_path / "store"), feature_cols=["a", "b"])
    with pytest.raises(InvalidArgumentError, match="not a Delta or Iceberg table"):
        made.fit_on_table(tmp_path)
    with pytest.raises(InvalidArgumentError, match="Iceberg catalog cannot be used.*catalog="):
        made.fit_on_table("nowhere.db.t")
    table = tmp_path / "table"
    deltalake.write_deltalake(table, rows(0, 6))
    with pytest.raises(InvalidArgumentError, match="num_partitions is 3.*fit_on_table reads"):
        made.copy({made.num_partitions: 3}).fit_on_table(table)
    with pytest.raises(InvalidArgumentError, match="have no rows where .*nothing to train on"):
        made.fit_on_table(table, where="id > 100")
    with pytest.raises(InvalidArgumentError, match="names column 'zz'"):
        made.copy({made.feature_cols: ["zz"]}).fit_on_table(table)
