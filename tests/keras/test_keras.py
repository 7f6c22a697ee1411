"""`sparkhvd.keras` without ranks: its optimizers and models as Keras sees them, and their pickles."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="runs where keras is: pip install 'sparkhvd[keras]'")

import sparkhvd.keras as hvd  # noqa: E402 - after importorskip
from sparkhvd.keras.network import Network  # noqa: E402

pytestmark = pytest.mark.pure


@pytest.fixture(autouse=True)
def joined() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def network() -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])


X, Y = np.eye(6, 3, dtype="float32"), np.arange(6, dtype="float32")[:, None]


def test_distributed_optimizer_has_the_class_name_and_state_of_the_original(tmp_path: Path) -> None:
    plain, model = keras.optimizers.Adam(0.1), network()
    optimizer = hvd.DistributedOptimizer(plain)
    assert isinstance(optimizer, type(plain))
    assert type(optimizer).__name__ == "Adam"
    model.compile(optimizer, "mse")
    model.fit(X, Y, batch_size=2, epochs=2, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = hvd.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is type(optimizer)
    for copied in (loaded.optimizer, keras.saving.load_model(tmp_path / "model.keras").optimizer):
        for a, b in zip(copied.variables, optimizer.variables, strict=True):
            np.testing.assert_array_equal(
                keras.ops.convert_to_numpy(a), keras.ops.convert_to_numpy(b)
            )
    assert type(pickle.loads(pickle.dumps(optimizer))) is type(plain)


@pytest.mark.parametrize("is_mean", [True, False])
def test_accumulated_batches_equal_one_large_batch(is_mean: bool) -> None:
    several, whole = network(), network()
    several.compile(
        hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.9),
            backward_passes_per_step=3,
            average_aggregated_gradients=is_mean,
        ),
        "mse",
    )
    whole.compile(keras.optimizers.SGD(0.1 if is_mean else 0.3, momentum=0.9), "mse")
    several.fit(X, Y, batch_size=2, epochs=4, shuffle=False, verbose=0)
    whole.fit(X, Y, batch_size=6, epochs=4, shuffle=False, verbose=0)
    assert int(several.optimizer.iterations) == 4
    for a, b in zip(several.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


class Tripled(keras.layers.Layer):  # type: ignore[misc]
    """A layer that is registered nowhere."""

    def call(self, x: Any) -> Any:
        return 3.0 * x


def test_pickled_model_has_its_layer_classes_but_no_optimizer() -> None:
    model = keras.Sequential(
        [keras.layers.Input((3,)), Tripled(), keras.layers.Dropout(0.5), keras.layers.Dense(2)]
    )
    model.compile("adam", "mse")
    there = pickle.load(io.BytesIO(cloudpickle.dumps(Network(model))))
    assert not there.model.compiled
    np.testing.assert_array_equal(there.model.predict(X, verbose=0), model.predict(X, verbose=0))
    columns = [keras.ops.convert_to_tensor(X[:, :2]), keras.ops.convert_to_tensor(X[:, 2])]
    found = keras.ops.convert_to_numpy(there(*columns))  # joined, as the model has one input
    np.testing.assert_allclose(found, model.predict(X, verbose=0), atol=1e-6)


def test_pickled_model_loads_in_a_process_without_its_registered_classes() -> None:
    @keras.saving.register_keras_serializable("mine")
    class Doubled(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return 2 * x

    @keras.saving.register_keras_serializable()
    def halved(x: Any) -> Any:
        return x / 2

    model = keras.Sequential(
        [keras.layers.Input((3,)), Doubled(), keras.layers.Dense(1, activation=halved)]
    )
    expected = keras.ops.convert_to_numpy(model(X))
    pickled = cloudpickle.dumps(Network(model))
    registry = keras.saving.get_custom_objects()
    for name in ("mine>Doubled", "Custom>halved"):
        del registry[name]
    there = pickle.loads(cloudpickle.dumps(pickle.loads(pickled))).model
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(there(X)), expected)
