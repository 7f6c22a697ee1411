"""`horovod.spark.keras`: Horovod's Params, setters, backends and hooks with models of Keras 3, on 2 ranks, classic and over Connect."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="runs where keras is: make test-users")

import sparkhvd.keras  # noqa: E402 - after importorskip
from sparkhvd.errors import InvalidArgumentError  # noqa: E402
from sparkhvd.horovod.spark import run  # noqa: E402
from sparkhvd.horovod.spark.common.backend import SparkBackend  # noqa: E402
from sparkhvd.horovod.spark.common.store import LocalStore, Store  # noqa: E402
from sparkhvd.horovod.spark.keras import KerasEstimator, KerasModel  # noqa: E402
from tests.harness.by_value import by_value  # noqa: E402
from tests.harness.cluster import run_client  # noqa: E402
from tests.harness.spark import connect_server  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
travels_by_value = by_value(__name__)


class Doubled(keras.layers.Layer):  # type: ignore[misc]  # untyped
    def call(self, x: Any) -> Any:
        return 2.0 * x


def network() -> Any:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Input((2,)), Doubled(), keras.layers.Dense(1)]
    return keras.Sequential(layers)


class Ranks:
    """Has the required methods of a backend."""

    asked = 0

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, env: Any = None) -> Any:
        self.asked += 1
        return run(fn, args=args, kwargs=kwargs, num_proc=2, env=env)

    def num_processes(self) -> int:
        return 2


class Own(KerasEstimator):
    def get_model_class(self) -> Any:
        return OwnModel

    def _get_model_kwargs(self, *given: Any, **named: Any) -> Any:
        return {**super()._get_model_kwargs(*given, **named), "outputCols": ["own"]}


class OwnModel(KerasModel):
    def get_prediction_fn(self) -> Any:
        (column,) = self.getFeatureColumns()
        return lambda model, row: model.predict(np.array([row[column]], "float32"), verbose=0)


def rows_in(spark: SparkSession) -> DataFrame:
    rows = [([n / 60, n % 7 / 7], n / 60 - n % 7 / 7, n % 4 == 0) for n in range(60)]
    return spark.createDataFrame(rows, ["x", "y", "held_out"])


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    return rows_in(spark)


def estimator(kind: Any, store: Any, **options: Any) -> Any:
    """Return an estimator with Params set as Horovod's users set them."""
    made = kind(model=network(), optimizer=keras.optimizers.SGD(0.05), loss="mse", store=store)
    made.setFeatureCols(["x"]).setLabelCols(["y"]).setBatchSize(6).setEpochs(2).setVerbose(0)
    made.setShuffle(False).setRandomSeed(3)
    return made._set(**options)


def test_keras_subclass_with_a_custom_backend_fits_and_transforms(
    df: DataFrame, tmp_path: Path
) -> None:
    backend = Ranks()
    store = LocalStore(str(tmp_path / "store"))
    model = estimator(Own, store, backend=backend, validation=0.2, custom_objects={}).fit(df)
    assert backend.asked == 1
    assert isinstance(model, OwnModel)
    assert set(model.getHistory()) == {"loss", "val_loss"}
    assert model.getOrDefault("_metadata")["x"]["spark_data_type"].__name__ == "ArrayType"
    assert model.getRunId()
    rows = model.transform(df).limit(3).collect()
    x = np.array([row.x for row in rows], "float32")
    wanted = model.getModel().predict(x, verbose=0)[:, 0].tolist()
    assert [row.own for row in rows] == pytest.approx(wanted, abs=1e-5)
    model.write().save(str(tmp_path / "model"))
    again = OwnModel.load(str(tmp_path / "model"), trust=True)
    assert [row.own for row in again.transform(df).limit(3).collect()] == pytest.approx(wanted)
    assert again.getHistory() == model.getHistory()


def test_learning_rates_equal_those_of_horovod_and_a_run_resumes(
    df: DataFrame, tmp_path: Path
) -> None:
    def weights(model: Any) -> Any:
        return np.concatenate([each.ravel() for each in model.getModel().get_weights()])

    store = Store.create(str(tmp_path / "store"))
    backend = SparkBackend(num_proc=2, env={"OWN": "1"}, stdout=None)
    fitted = estimator(KerasEstimator, store, backend=backend, run_id="one").fit(df)
    ours = estimator(sparkhvd.keras.KerasEstimator, str(tmp_path / "ours"), num_proc=2)
    ours.setOptimizer(keras.optimizers.SGD(0.1))
    np.testing.assert_allclose(weights(fitted), weights(ours.fit(df)), atol=1e-6)
    assert fitted.transform(df).columns == ["x", "y", "held_out", "y__output"]
    further = estimator(KerasEstimator, store, num_proc=2, run_id="one", epochs=3).fit(df)
    assert len(further.getHistory()["loss"]) == 3
    assert further.getHistory()["loss"][:2] == fitted.getHistory()["loss"]


def test_keras_fit_on_parquet_uses_data_of_an_earlier_fit(df: DataFrame, tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "store"))
    by_rows = estimator(KerasEstimator, store, num_proc=2, validation="held_out").fit(df)
    by_files = estimator(KerasEstimator, store, num_proc=2, validation="held_out").fit_on_parquet()
    assert isinstance(by_files, KerasModel)
    for name, values in by_rows.getHistory().items():
        assert by_files.getHistory()[name] == pytest.approx(values, abs=1e-5)
    other = Store.create(str(tmp_path / "other"))
    estimator(KerasEstimator, other, num_proc=1, epochs=1).fit(df)
    with pytest.raises(InvalidArgumentError, match="which had no validation rows"):
        estimator(KerasEstimator, other, num_proc=1, validation=0.2).fit_on_parquet()


def test_keras_estimator_refuses_a_data_module(df: DataFrame, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="data_module is .*ranks take their batches"):
        estimator(KerasEstimator, str(tmp_path), num_proc=2, data_module=object).fit(df)


def fit_in(spark: SparkSession, folder: Path) -> None:
    """Fit and transform with a subclass and its backend, and fit on the files that the fit leaves."""
    df = rows_in(spark)
    store = LocalStore(str(folder / "store"))
    made = estimator(Own, store, backend=Ranks(), validation="held_out")
    model = made.fit(df)
    found = model.transform(df).select("x", "own").collect()
    wanted = model.getModel().predict(np.array([row.x for row in found], "float32"), verbose=0)
    assert np.allclose([row.own for row in found], wanted[:, 0], atol=1e-5)
    again = made.fit_on_parquet(spark=spark)
    assert np.allclose(again.getHistory()["val_loss"], model.getHistory()["val_loss"], atol=1e-5)


def test_horovod_keras_estimator_fits_over_connect(tmp_path: Path) -> None:
    body = f"""
from pathlib import Path
from tests.soak.users.test_horovod_keras import fit_in
fit_in(spark, Path({str(tmp_path)!r}))
print("FITTED")
"""
    with connect_server(tmp_path / "server") as remote:
        assert "FITTED" in run_client(remote, body, tmp_path, timeout_s=480)
