"""Params of `KerasEstimator`, and the links of Keras' losses, without ranks or a session."""

from __future__ import annotations

import io
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from pyspark.ml.tuning import ParamGridBuilder

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="runs where keras is: pip install 'sparkhvd[keras]'")

from sparkhvd import TorchEstimator, load_local  # noqa: E402 - after importorskip
from sparkhvd.errors import InvalidArgumentError, UntrustedError  # noqa: E402
from sparkhvd.estimator.params.base import camel_case  # noqa: E402
from sparkhvd.estimator.params.table import rows_of  # noqa: E402
from sparkhvd.keras import KerasEstimator, KerasModel  # noqa: E402
from sparkhvd.keras.model import link_of  # noqa: E402
from sparkhvd.keras.network import CompiledNetwork, Network  # noqa: E402
from tests.transform.test_local import WITHOUT_PYSPARK, save  # noqa: E402

pytestmark = pytest.mark.pure


def network(width: int = 1) -> Any:
    return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(width)])


def test_every_param_has_a_doc_getter_setter_and_explanation() -> None:
    estimator = KerasEstimator(model=network(), feature_cols=["x"], label_cols="y", maxIter=3)
    for param in estimator.params:
        assert param.doc
        assert hasattr(estimator, f"get{camel_case(param.name)}")
        assert hasattr(estimator, f"set{camel_case(param.name)}")
    assert estimator.getLabelCols() == ["y"]
    assert estimator.setEpochs(4).getMaxIter() == 4
    text = estimator.explainParams()
    assert "epochs: passes over the data (default: 1, current: 4)" in text
    assert re.search(r"model: keras.Model to train.* \(current: <Sequential: 4 parameters>\)", text)
    assert "random_seed: decides order and dropout (default: 0)" in text


def test_saved_keras_model_predicts_without_spark(tmp_path: Path) -> None:
    model = network(2)
    fitted = KerasModel.from_module(
        Network(model), feature_cols=["x"], label_cols=["y"], input_shapes=[[-1, 3]]
    )
    rows = np.random.default_rng(0).random((5, 3))
    path = save(fitted, tmp_path / "model")
    with pytest.raises(UntrustedError):
        load_local(path)
    for alone in (fitted.local(), load_local(path, trust=True)):
        found = alone.predict({"x": rows})["y__output"]
        np.testing.assert_allclose(found, model.predict(rows, verbose=0), rtol=1e-5)
    np.save(tmp_path / "rows.npy", rows)
    program = f"""{WITHOUT_PYSPARK}
import numpy as np, sparkhvd
rows = np.load({str(tmp_path / "rows.npy")!r})
found = sparkhvd.load_local({str(path)!r}, trust=True).predict({{"x": rows}})
np.save({str(tmp_path / "found.npy")!r}, found["y__output"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(np.load(tmp_path / "found.npy"), found, rtol=1e-5)


def test_torch_and_keras_estimators_share_most_param_definitions() -> None:
    of_torch, of_keras = rows_of(TorchEstimator), rows_of(KerasEstimator)
    own = {
        name for name in of_torch.keys() & of_keras.keys() if of_torch[name] is not of_keras[name]
    }
    assert own == {
        *("model", "optimizer", "loss", "loss_weights", "metrics", "learning_rate"),
        *("callbacks", "random_seed"),
    }


def test_param_grids_and_maps_change_only_the_copy() -> None:
    estimator = KerasEstimator(model=network(), feature_cols=["x"], label_cols=["y"])
    grid = (
        ParamGridBuilder()
        .addGrid(estimator.learning_rate, [0.1, 0.2])
        .addGrid(estimator.maxIter, [1])
        .build()
    )
    copies = [estimator.copy(each) for each in grid]
    assert [each.getLearningRate() for each in copies] == [0.1, 0.2]
    assert not estimator.isSet("learning_rate")
    assert copies[0].uid == estimator.uid


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epoch": 3}, "unexpected keyword argument 'epoch'. Did you mean 'epochs'?"),
        ({"batch_size": 1.5}, "batch_size"),
    ],
)
def test_unknown_and_invalid_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        KerasEstimator(**options)


@pytest.mark.parametrize("name", ["model", "feature_cols", "label_cols"])
def test_error_names_a_missing_argument(name: str) -> None:
    given = {"model": network(), "feature_cols": ["x"], "label_cols": ["y"]}
    del given[name]
    with pytest.raises(InvalidArgumentError, match=f"{name} is required"):
        KerasEstimator(**given)._check_values()


def test_horovod_arguments_without_effect_warn_once() -> None:
    with pytest.warns(UserWarning, match="partitions_per_process has no effect in sparkhvd"):
        KerasEstimator(partitions_per_process=4)


losses = keras.losses


@pytest.mark.parametrize(
    ("loss", "width", "link"),
    [
        ("mse", 1, "value"),
        (losses.Huber(), 1, "value"),
        (losses.mean_absolute_error, 1, "value"),
        ("binary_crossentropy", 1, "probability"),
        (losses.BinaryCrossentropy(from_logits=True), 1, "sigmoid"),
        ("binary_crossentropy", 4, "identity"),  # labels of which several may hold
        ("sparse_categorical_crossentropy", 4, "probability"),
        ([losses.CategoricalCrossentropy(from_logits=True)], 4, "softmax"),
        ("kl_divergence", 4, "identity"),
        ("mine", 1, "identity"),
        (["mse", "mse"], 1, "identity"),
        (None, 1, "identity"),
    ],
)
def test_the_loss_determines_the_link_of_the_output(loss: Any, width: int, link: str) -> None:
    assert link_of(loss, (None, width)) == link
    assert link_of(loss, (None, 5, width)) == ("value" if link == "value" else "identity")


class Tripled(keras.layers.Layer):  # type: ignore[misc]
    """A layer that is registered nowhere."""

    def call(self, x: Any) -> Any:
        return 3.0 * x


def own_loss(y: Any, predicted: Any) -> Any:
    return keras.ops.mean(keras.ops.square(y - predicted), axis=-1)


def test_saved_compiled_model_keeps_optimizer_weights_and_user_classes() -> None:
    model = keras.Sequential([keras.layers.Input((3,)), Tripled(), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.25), own_loss)
    saved = cloudpickle.dumps(CompiledNetwork(model, {"own_loss": own_loss}))
    estimator = KerasEstimator(model=pickle.load(io.BytesIO(saved)))
    found = estimator.getModel()
    assert float(found.optimizer.learning_rate) == 0.25
    for a, b in zip(found.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


# Of the documentation of Horovod's estimators.
OF_HOROVOD = ["num_proc", "backend", "store", "model", "optimizer", "loss", "metrics", "loss_weights", "sample_weight_col", "feature_cols", "label_cols", "continuous_cols", "categorical_cols", "validation", "gradient_compression", "compress_sparse_cols", "batch_size", "val_batch_size", "epochs", "train_steps_per_epoch", "validation_steps_per_epoch", "callbacks", "random_seed", "shuffle_buffer_size", "shuffle", "verbose", "partitions_per_process", "run_id", "transformation_fn", "transformation_edit_fields", "transformation_removed_fields", "reader_pool_type", "label_shapes", "inmemory_cache_all", "use_gpu", "mp_start_method", "backward_passes_per_step", "tensorflow_dataset_prefetch_buffer_size", "custom_objects", "checkpoint_callback", "data_module", "backend_env"]  # fmt: skip


def test_horovod_keras_estimator_has_horovod_params_setters_and_defaults() -> None:
    from sparkhvd.horovod.spark.keras import KerasEstimator as OfHorovod

    estimator = OfHorovod(model=network(), feature_cols=["x"], label_cols=["y"])
    for name in OF_HOROVOD:
        assert estimator.hasParam(name), name
        assert hasattr(estimator, f"get{camel_case(name)}"), name
        assert hasattr(estimator, f"set{camel_case(name)}"), name
    assert estimator.setTrainReaderNumWorker(3).getTrainReaderNumWorker() == 3
    assert estimator.setInMemoryCacheAll(True)._options().shuffle_bytes == 1 << 62
    assert estimator.getCallbacks() == []
    assert estimator.getOrDefault("run_id") is None
    assert estimator.getLrScaling() == "linear"
    assert estimator.getUseGpu() is True
    assert estimator._options().use_gpu is None
    best = keras.callbacks.ModelCheckpoint("best.keras")
    assert estimator.setCheckpointCallback(best).getCheckpointCallback() is best
    with pytest.raises(InvalidArgumentError, match="it must be a ModelCheckpoint"):
        estimator.setCheckpointCallback(keras.callbacks.History())._options()
