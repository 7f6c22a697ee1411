"""`sparkhvd.keras.KerasEstimator`: a Keras model trained from a DataFrame, equal on 2 ranks and on one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="runs where keras is: make test-users")

import sparkhvd.keras as hvd  # noqa: E402 - after importorskip
from sparkhvd.errors import InvalidArgumentError, RankError  # noqa: E402
from sparkhvd.keras import KerasEstimator, KerasModel  # noqa: E402
from sparkhvd.observe.loggers.base import Fit, Logger, Metric, Sink  # noqa: E402
from tests.harness.by_value import by_value  # noqa: E402
from tests.harness.paths import ROOT  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
travels_by_value = by_value(__name__)


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    return frame(spark, 83)


def frame(spark: SparkSession, number: int) -> DataFrame:
    """Return rows, one in four for validation."""
    rows = [
        ([n / number, n % 7 / 7], n % 5 / 5, n / number + n % 7, n % 3, 0.5 + n % 2, n % 4 == 0)
        for n in range(number)
    ]
    return spark.createDataFrame(rows, ["x", "z", "y", "kind", "weight", "held_out"])


def regression(**layers: Any) -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.layers.Input((3,)),
            keras.layers.Dense(6, activation="tanh"),
            *layers.values(),
            keras.layers.Dense(1),
        ]
    )


def estimator(num_proc: int, store: Path | None = None, **options: Any) -> KerasEstimator:
    given: dict[str, Any] = {
        "model": options.pop("model", None) or regression(),
        "optimizer": keras.optimizers.Adam(0.02),
        "loss": "mse",
        "metrics": ["mae"],
        "feature_cols": ["x", "z"],
        "label_cols": ["y"],
        "batch_size": 12 // num_proc,
        "epochs": 3,
        "validation": "held_out",
        "num_proc": num_proc,
        "store": store,
        "verbose": 0,
    }
    return KerasEstimator(**{**given, **options})


def assert_same(found: KerasModel, wanted: KerasModel) -> None:
    for a, b in zip(found.getModel().get_weights(), wanted.getModel().get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    for record, other in zip(found.history, wanted.history, strict=True):
        assert record == pytest.approx(other, abs=1e-4)


# 62 and 65 training rows: the last step has 2 rows, all on one rank, or 5.
@pytest.mark.parametrize("number", [83, 87])
def test_two_ranks_give_the_model_and_metrics_of_one_rank(
    spark: SparkSession, number: int, tmp_path: Path
) -> None:
    df = frame(spark, number)
    two, one = (estimator(n, tmp_path, sample_weight_col="weight").fit(df) for n in (2, 1))
    assert_same(two, one)
    assert [record["epoch"] for record in two.history] == [0, 1, 2]
    assert set(two.getHistory()) == {"loss", "mae", "val_loss", "val_mae"}
    assert two.history[2]["val_loss"] < two.history[0]["val_loss"]
    held_out = df.where("held_out").toPandas()
    x = np.column_stack([np.stack(held_out.x.to_list()), held_out.z]).astype("float32")
    found = two.getModel()
    found.compile(loss="mse", metrics=["mae"])
    loss, mae = found.evaluate(x, held_out.y.to_numpy("float32"), verbose=0)
    assert mae == pytest.approx(two.history[-1]["val_mae"], abs=1e-4)
    rows = two.transform(df.where("held_out")).collect()
    predicted = found.predict(x, verbose=0)[:, 0]
    assert [row.y__output for row in rows] == pytest.approx(predicted.tolist(), abs=1e-5)


def weights(fitted: KerasModel) -> Any:
    return np.concatenate([each.ravel() for each in fitted.getModel().get_weights()])


def test_validation_is_a_fraction_or_a_separate_dataframe(df: DataFrame, tmp_path: Path) -> None:
    two, one = (estimator(n, tmp_path, validation=0.25, epochs=2).fit(df) for n in (2, 1))
    assert_same(two, one)
    whole = estimator(2, tmp_path, validation=None, epochs=2).fit(df)
    assert "val_loss" not in whole.history[0]
    assert not np.array_equal(weights(whole), weights(two))  # it has seen all rows
    by_column = estimator(2, tmp_path, epochs=2).fit(df)
    by_frame = estimator(2, tmp_path, validation=df.where("held_out"), epochs=2)
    assert_same(by_frame.fit(df.where("not held_out")), by_column)
    with pytest.raises(
        InvalidArgumentError, match="validation is 1.5. A fraction must be at least"
    ):
        estimator(2, tmp_path, validation=1.5).fit(df)


class Rows(keras.callbacks.Callback):  # type: ignore[misc]
    """Records the factor of the loss for each batch."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        rows = self.model.optimizer.loss_share
        (Path(self.folder) / f"{hvd.rank()}-{batch}-{self.params['epochs']}").write_text(str(rows))


def test_groups_stay_on_one_rank_and_steps_are_weighted_by_rows(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = [([n / 60, group / 9], float(group), group) for group in range(9) for n in range(group)]
    df = spark.createDataFrame(rows, ["x", "y", "group"])
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    options: dict[str, Any] = {
        "model": model,
        "optimizer": keras.optimizers.SGD(0.05),
        "feature_cols": ["x"],
        "group_col": "group",
        "validation": 0.3,
        "epochs": 1,
        "shuffle": False,
    }
    (tmp_path / "shares").mkdir()
    two = estimator(2, callbacks=[Rows(str(tmp_path / "shares"))], **options).fit(df)
    shares = [float(file.read_text()) for file in (tmp_path / "shares").iterdir()]
    assert len(set(shares)) > 1  # batches of whole groups differ in length
    # One step has all rows, so its gradient is the mean over them, however they are dealt out.
    options["batch_size"] = 64
    two, one = (estimator(n, **options).fit(df) for n in (2, 1))
    assert_same(two, one)


def test_fit_on_parquet_equals_fit_on_a_dataframe(df: DataFrame, tmp_path: Path) -> None:
    df.where("not held_out").write.parquet(str(tmp_path / "rows"))
    df.where("held_out").write.parquet(str(tmp_path / "held_out"))
    store = tmp_path / "store"
    from_files = estimator(2, store, validation=None, epochs=2, shuffle=False).fit_on_parquet(
        str(tmp_path / "rows"), validation_path=str(tmp_path / "held_out")
    )
    assert isinstance(from_files, KerasModel)
    wanted = estimator(1, store, epochs=2, shuffle=False).fit(df)
    assert_same(from_files, wanted)
    assert from_files.transform(df).count() == 83
    assert not list(store.glob("keras_runs/*"))
    several = estimator(1, store, validation=0.2)
    maps = [{several.epochs: number} for number in (1, 2)]
    one, two = several.fit_on_parquet(str(tmp_path / "rows"), maps)
    assert [len(each.history) for each in (one, two)] == [1, 2]
    skipping = estimator(1, store, validation=None, handle_invalid="skip")
    with pytest.raises(InvalidArgumentError, match="Give values to fill in, or call fit"):
        skipping.fit_on_parquet(str(tmp_path / "rows"))


def test_params_set_steps_per_epoch_and_learning_rates(df: DataFrame, tmp_path: Path) -> None:
    options = {"optimizer": keras.optimizers.SGD(0.1), "validation": None, "epochs": 1}
    scaled = estimator(2, tmp_path, **options, lr_scaling="linear").fit(df)
    given = estimator(2, tmp_path, **{**options, "optimizer": keras.optimizers.SGD(0.2)}).fit(df)
    np.testing.assert_allclose(weights(scaled), weights(given), atol=1e-6)
    first = estimator(2, tmp_path, **options, train_steps_per_epoch=2).fit(df)
    alone = estimator(1, tmp_path, **options, train_steps_per_epoch=2).fit(df)
    assert_same(first, alone)
    assert not np.allclose(weights(first), weights(estimator(2, tmp_path, **options).fit(df)))
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    options["optimizer"] = keras.optimizers.SGD(rate)
    with pytest.raises(InvalidArgumentError, match="the optimizer's learning rate is a schedule"):
        estimator(2, tmp_path, **options, lr_scaling="linear").fit(df)
    del options["optimizer"]
    with pytest.raises(InvalidArgumentError, match="fewer than one full step"):
        estimator(2, tmp_path, **options, drop_last=True).setBatchSize(50).fit(df)


class Doubled(keras.layers.Layer):  # type: ignore[misc]
    """A user's layer without registration."""

    def call(self, x: Any) -> Any:
        return 2.0 * x


def absolute(y: Any, predicted: Any) -> Any:
    return keras.ops.mean(keras.ops.abs(y - predicted), axis=-1)


def test_columns_match_inputs_and_outputs_of_a_compiled_model(
    df: DataFrame, tmp_path: Path
) -> None:
    keras.utils.set_random_seed(1)
    inputs = {"x": keras.Input((2,), name="x"), "z": keras.Input((1,), name="z")}
    hidden = keras.layers.Concatenate()([Doubled()(inputs["x"]), inputs["z"]])
    hidden = keras.layers.Dropout(0.1)(keras.layers.Dense(8, activation="relu")(hidden))
    y = keras.layers.Dense(1, name="y")(hidden)
    kind = keras.layers.Dense(3, activation="softmax", name="kind")(hidden)
    model = keras.Model(inputs, [y, kind])
    model.compile(
        keras.optimizers.SGD(0.02, momentum=0.5),
        loss=[absolute, "sparse_categorical_crossentropy"],
        loss_weights=[1.0, 0.5],
        metrics=[["mae"], ["accuracy"]],
    )
    options = {"model": model, "optimizer": None, "loss": None, "metrics": None}
    fitted = estimator(
        2,
        label_cols=["y", "kind"],
        custom_objects={"absolute": absolute},
        **options,
    ).fit(df)
    assert {"y_mae", "kind_accuracy", "val_kind_loss"} <= set(fitted.history[0])
    fitted.write().overwrite().save(str(tmp_path / "model"))
    loaded = KerasModel.load(str(tmp_path / "model"), trust=True)
    assert loaded.history == fitted.history
    wanted, found = (m.transform(df).orderBy("y").collect() for m in (fitted, loaded))
    assert wanted == found
    assert len(found[0]["kind__output"]) == 3
    assert sum(found[0]["kind__output"]) == pytest.approx(1, abs=1e-5)


def test_callbacks_use_all_rows_and_the_best_model_is_returned(df: DataFrame) -> None:
    stop = keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=10.0)
    best = hvd.callbacks.BestModelCheckpoint("val_loss", mode="max")  # the first
    fitted = estimator(2, epochs=9, callbacks=[stop], checkpoint_callback=best).fit(df)
    assert len(fitted.history) == 2
    first = estimator(2, epochs=1).fit(df)
    for a, b in zip(fitted.getModel().get_weights(), first.getModel().get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


class Kill(keras.callbacks.Callback):  # type: ignore[misc]
    """Kills rank 1 in its third epoch: always, or while a file does not exist."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if hvd.rank() == 1 and epoch == 2 and not os.path.exists(self.file):
            if self.file:
                Path(self.file).touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Kept(Logger):
    """Logger that keeps all entries."""

    def __init__(self) -> None:
        self.sinks: list[KeptSink] = []

    def begin(self, fit: Fit) -> Sink:
        self.sinks.append(KeptSink(fit))
        return self.sinks[-1]


class KeptSink(Sink):
    def __init__(self, fit: Fit) -> None:
        self.fit = fit
        self.metrics: list[Metric] = []
        self.models: list[Any] = []
        self.state = ""

    def log(self, metrics: Sequence[Metric]) -> None:
        self.metrics += metrics

    def log_model(self, model: Any) -> None:
        self.models.append(model)

    def finish(self, state: str, files: object) -> None:
        self.state = state

    def of(self, name: str) -> list[tuple[int, float]]:
        return [(m.step, m.value) for m in self.metrics if m.name == name]


class Slow(keras.callbacks.Callback):  # type: ignore[misc]
    """Makes an epoch longer than a second, and may fail in the last one."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        time.sleep(0.6)
        if self.fails and epoch == 1:
            raise RuntimeError("as asked")


def test_loggers_get_epochs_system_load_and_model(df: DataFrame, tmp_path: Path) -> None:
    kept = Kept()
    given = {"loggers": [kept], "run_id": "mine", "callbacks": [Slow()]}
    fitted = estimator(2, tmp_path, epochs=2, **given).fit(df)
    (sink,) = kept.sinks
    assert sink.state == "finished"
    assert sink.models == [fitted]
    assert (sink.fit.run_id, sink.fit.epochs_done) == ("mine", 0)
    assert sink.fit.params["batch_size"] == "6"
    assert sink.fit.tags["sparkhvd.estimator"] == "KerasEstimator"
    for name in ("loss", "mae", "val_loss", "val_mae"):
        wanted = [(record["epoch"] + 1, record[name]) for record in fitted.history]
        assert sink.of(name) == wanted
    nodes = {m.name.split("/")[1].rpartition("-")[2] for m in sink.metrics if "system/" in m.name}
    assert nodes == {"0", "1"}
    # A resumed fit logs its own epochs alone.
    estimator(2, tmp_path, epochs=3, **given).fit(df)
    assert [step for step, _ in kept.sinks[1].of("loss")] == [3]
    assert kept.sinks[1].fit.epochs_done == 2
    with pytest.raises(RankError, match="as asked"):
        estimator(2, tmp_path, loggers=kept, callbacks=[Slow(fails=True)]).fit(df)
    assert kept.sinks[2].state == "failed"
    assert [step for step, _ in kept.sinks[2].of("loss")][:1] == [1]


@pytest.mark.parametrize("passes", [1, 2])
def test_timeline_has_the_parts_of_each_step_of_all_ranks(
    df: DataFrame, tmp_path: Path, passes: int
) -> None:
    store = tmp_path / "store"
    given = {"timeline": 4, "backward_passes_per_step": passes, "verbose": 1}
    estimator(2, store, epochs=1, **given).fit(df)
    (path,) = store.glob("keras_runs/*/timeline.json")
    events = json.loads(path.read_text())
    spans = [e for e in events if e.get("cat") == "training" and e.get("ph") == "X"]
    for rank in (0, 1):
        names = Counter(e["name"] for e in spans if e["pid"] == rank)
        assert names["step"] == 4
        assert names["forward"] == names["backward"] == 4
        assert names["optimizer"] == 4 // passes
        assert names["data"] >= 4
    for step in (e for e in spans if e["name"] == "step"):
        inside = [
            e["dur"]
            for e in spans
            if e["pid"] == step["pid"]
            and e["name"] in ("forward", "backward", "optimizer")
            and step["ts"] <= e["ts"] <= step["ts"] + step["dur"]
        ]
        assert 0 < sum(inside) <= step["dur"] + 0.01
    assert any("ALLREDUCE" in str(e.get("name")) for e in events)


def test_fit_resumes_after_a_killed_rank_and_in_a_later_fit(df: DataFrame, tmp_path: Path) -> None:
    whole = estimator(2, tmp_path, epochs=4).fit(df)
    kill = Kill(str(tmp_path / "killed"))
    run = {"run_id": "one", "callbacks": [kill]}
    assert len(estimator(2, tmp_path, epochs=3, **run).fit(df).history) == 3
    assert Path(kill.file).exists()
    assert_same(estimator(2, tmp_path, epochs=4, **run).fit(df), whole)
    other = regression(more=keras.layers.Dense(2))
    with pytest.raises(RankError, match="run_id='one' is a run of another model"):
        estimator(1, tmp_path, model=other, run_id="one").fit(df)


def test_error_names_a_repeatedly_killed_rank(df: DataFrame) -> None:
    with pytest.raises(RankError, match="Rank 1 of 2 .* ended with signal SIGKILL"):
        estimator(2, callbacks=[Kill("")]).fit(df)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": object()}, "model is a object; it must be a keras.Model"),
        ({"model": keras.Sequential([keras.layers.Dense(1)])}, "the model is not built"),
        ({"label_cols": ["y", "kind"]}, "the model has 1 outputs, but label_cols has 2"),
        ({"loss": None}, "loss is not given. Give both"),
        ({"optimizer": None, "loss": None, "metrics": None}, "optimizer and loss are not given"),
        ({"checkpoint_callback": keras.callbacks.History()}, "it must be a ModelCheckpoint"),
        (
            {"inputs": {"x": "x"}},
            "inputs has no effect on a Keras model. Leave it out; instead: give feature_cols",
        ),
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
    ],
)
def test_wrong_arguments_are_refused_before_any_job(
    df: DataFrame, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        estimator(2, **options).fit(df)


NAMES = """
import sparkhvd
sparkhvd.install_as_horovod()
import horovod.keras as hvd
from horovod.keras.callbacks import MetricAverageCallback
from horovod.spark.keras import KerasEstimator, KerasModel
import sparkhvd.keras
assert hvd.DistributedOptimizer is sparkhvd.keras.DistributedOptimizer
assert MetricAverageCallback is hvd.callbacks.MetricAverageCallback
assert issubclass(KerasEstimator, sparkhvd.keras.KerasEstimator)
assert issubclass(KerasModel, sparkhvd.keras.KerasModel)
"""


def test_horovod_names_refer_to_sparkhvd_objects() -> None:
    subprocess.run([sys.executable, "-c", NAMES], cwd=ROOT, check=True, timeout=300)


@pytest.mark.parametrize("backend", ["jax", "numpy"])  # of Keras, numpy's needs jax
def test_error_of_an_unsupported_backend_names_the_variable(backend: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", "import sparkhvd.keras"],
        env={**os.environ, "KERAS_BACKEND": backend},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 1
    assert (
        "sparkhvd needs Keras 3 on its torch backend. Set the variable KERAS_BACKEND=torch"
        in ended.stderr
    )


def test_keras_dataframe_example_reaches_its_accuracy() -> None:
    command = [sys.executable, "examples/keras/dataframe.py"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr[-4000:]
    accuracy = float(ended.stdout.split()[-1])
    assert accuracy > 0.9


class Presses(Logger):
    """Presses Ctrl-C when it gets the model."""

    def begin(self, fit: Fit) -> Sink:
        return PressingSink()


class PressingSink(Sink):
    def log(self, metrics: Sequence[Metric]) -> None: ...

    def log_model(self, model: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from 3.11 on")
def test_failure_after_training_names_the_saved_state(df: DataFrame, tmp_path: Path) -> None:
    """The training has finished, so the next fit with this run_id gives the trained model."""
    with pytest.raises(KeyboardInterrupt) as failed:
        estimator(1, tmp_path, loggers=[Presses()]).fit(df)
    (note,) = failed.value.__notes__
    assert note.startswith("The state after epoch 3 of 3 stays: a fit with run_id='KerasEstimator_")
    name = note.split("'")[1]
    assert f"store='file://{tmp_path}'" in note
    found = estimator(1, tmp_path, run_id=name).fit(df)
    assert_same(found, estimator(1, tmp_path).fit(df))
    assert [each.name for each in (tmp_path / "keras_runs").iterdir()] == [name]
