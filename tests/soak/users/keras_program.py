"""Trainings by Keras that give the same result on any number of ranks, because they divide the global batch.

sparkhvdrun -np 2 python -m tests.soak.users.keras_program FILE CASE...     rank 0 writes the file
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sparkhvd.keras as hvd
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.keras.backend import keras

BATCH, ROWS, WIDTH = 12, 60, 5
Row = dict[str, Any]


def rows() -> tuple[Any, Any]:
    """Return this rank's part of every batch."""
    x = np.random.default_rng(3).normal(size=(ROWS, WIDTH)).astype("float32")
    y = (x.sum(1, keepdims=True) + 0.1 * x[:, :1] ** 2).astype("float32")
    part = BATCH // hvd.size()
    mine = slice(hvd.rank() * part, (hvd.rank() + 1) * part)
    return tuple(
        a.reshape(ROWS // BATCH, BATCH, -1)[:, mine].reshape(-1, a.shape[1]) for a in (x, y)
    )


def network(seed: int | None = None) -> Any:
    """Return a model. If ranks do not share rank 0's weights, each rank's weights differ."""
    keras.utils.set_random_seed(hvd.rank() if seed is None else seed)
    layers = keras.layers
    return keras.Sequential(
        [layers.Input((WIDTH,)), layers.Dense(8, activation="tanh"), layers.Dense(1)]
    )


def fitted(optimizer: Any, callbacks: list[Any] | None = None, **options: Any) -> Row:
    model = options.pop("model", None) or network()
    model.compile(optimizer=optimizer, loss="mse", metrics=["mae"], **options)
    return trained(model, callbacks)


def trained(model: Any, callbacks: list[Any] | None = None, epochs: int = 3) -> Row:
    x, y = rows()
    given = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        *(callbacks or ()),
    ]
    history = model.fit(
        x,
        y,
        batch_size=BATCH // hvd.size(),
        epochs=epochs,
        shuffle=False,
        validation_data=(x, y),
        callbacks=given,
        verbose=0,
    )
    return {"numbers": numbers(model), "metrics": sum(history.history.values(), [])}


def numbers(model: Any) -> list[float]:
    """Return the weights, and the variables of the optimizer."""
    variables = [*model.variables, *model.optimizer.variables]
    arrays = [keras.ops.convert_to_numpy(v).astype("float64").reshape(-1) for v in variables]
    # Generators of random numbers differ by rank, as they should.
    return np.concatenate(
        [a for v, a in zip(variables, arrays, strict=True) if "seed" not in v.path]
    ).tolist()


def momentum() -> Row:
    return fitted(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)))


def adam() -> Row:
    return fitted(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), groups=2))


def clipped() -> Row:
    """Clip by the norm of the reduced gradients, with weight decay."""
    return fitted(hvd.DistributedOptimizer(keras.optimizers.AdamW(0.01, global_clipnorm=0.1)))


def schedule() -> Row:
    rates = keras.optimizers.schedules.ExponentialDecay(0.05, 4, 0.5)
    return fitted(
        hvd.DistributedOptimizer(keras.optimizers.SGD(rates, nesterov=True, momentum=0.5))
    )


def half() -> Row:
    optimizer = keras.optimizers.SGD(0.05)
    return fitted(hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.fp16))


def scaled() -> Row:
    """The gradients of a step overflow on one rank. All ranks skip the step, and halve the scale."""
    return overflowing(lambda adam: hvd.DistributedOptimizer(scaling(adam)))


def scaled_inside() -> Row:
    return overflowing(lambda adam: scaling(hvd.DistributedOptimizer(adam)))


def scaling(optimizer: Any) -> Any:
    return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**10)


def overflowing(wrapped: Callable[[Any], Any]) -> Row:
    model = network()
    model.compile(wrapped(keras.optimizers.Adam(0.01)), "mse")
    x, y = rows()
    if hvd.rank() == hvd.size() - 1:
        y[-1] = 1e38  # the last row of all
    hvd.broadcast_global_variables(0, model)
    model.fit(x, y, batch_size=BATCH // hvd.size(), epochs=3, shuffle=False, verbose=0)
    found = numbers(model)
    assert model.optimizer.dynamic_scale == 2.0**7
    return {"numbers": found}


def passes() -> Row:
    """Five batches for each step."""
    optimizer = keras.optimizers.Adam(0.01)
    return fitted(
        hvd.DistributedOptimizer(
            optimizer, backward_passes_per_step=5, average_aggregated_gradients=True
        )
    )


def unused() -> Row:
    """A layer that no loss needs, and a layer that only rank 0 uses in its step."""
    keras.utils.set_random_seed(hvd.rank())

    class Model(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.used, self.sometimes = keras.layers.Dense(1), keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            out = self.used(x)
            extra = self.sometimes(x)
            return out if x.device.type != "meta" and hvd.rank() else out + 0.0 * extra

    return fitted(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), model=Model())


def own_loop() -> Row:
    """A user's loop with gradients from autograd itself and from backward."""
    x, y = (torch.from_numpy(each) for each in rows())
    model, loss_of = network(), keras.losses.MeanSquaredError()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    hvd.broadcast_global_variables(0, model)
    part = BATCH // hvd.size()
    for step in range(8):
        mine = slice(step % 5 * part, (step % 5 + 1) * part)
        weights = model.trainable_variables
        loss = loss_of(y[mine], model(x[mine], training=True))
        if step % 2:
            gradients = torch.autograd.grad(loss, [v.value for v in weights])
        else:
            model.zero_grad()
            loss.backward()
            gradients = [v.value.grad for v in weights]
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
    model.optimizer = optimizer
    return {"numbers": numbers(model)}


def saved() -> Row:
    """A model is saved after one epoch and continues with its optimizer's state."""
    model = network()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse", metrics=["mae"])
    trained(model, epochs=1)
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/model.keras")
        plain = keras.saving.load_model(f"{folder}/model.keras")
        loaded = hvd.load_model(f"{folder}/model.keras")
    found = trained(loaded, epochs=2)
    assert type(plain.optimizer) is type(keras.optimizers.Adam())
    assert isinstance(loaded.optimizer, type(plain.optimizer))
    assert type(loaded.optimizer) is type(model.optimizer)
    return found


def whole() -> Row:
    """The expected result of `saved`."""
    model = network()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse", metrics=["mae"])
    return {"numbers": trained(model)["numbers"]}


@keras.saving.register_keras_serializable("tests", "Halved")
class Halved(keras.optimizers.SGD):  # type: ignore[misc]
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, learning_rate / 2)


def own_class() -> Row:
    """A user's optimizer, registered and saved."""
    model = network()
    model.compile(hvd.DistributedOptimizer(Halved(0.1)), "mse", metrics=["mae"])
    trained(model, epochs=1)
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/model.keras")
        loaded = hvd.load_model(f"{folder}/model.keras")
    assert type(loaded.optimizer) is type(model.optimizer)
    return trained(loaded, epochs=1)


def compiled() -> Row:
    """A training step that torch.compile has compiled."""
    return fitted(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), jit_compile=True)


CASES: dict[str, Callable[[], Row]] = {
    f.__name__: f
    for f in (
        *(momentum, adam, clipped, schedule, half, scaled, scaled_inside, passes, unused, own_loop),
        *(saved, whole, own_class, compiled),
    )
}


def results(names: list[str]) -> dict[str, Row]:
    hvd.init()
    return {name: CASES[name]() for name in names}


class Rates(keras.callbacks.Callback):  # type: ignore[misc]
    """Notes the rate and the momentum of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        optimizer = self.model.optimizer
        self.seen.append([float(optimizer.learning_rate), optimizer.momentum])


def rates(callback: str, options: dict[str, Any], momentum_correction: bool) -> Row:
    """Train with a callback of rates, and return each step's rate and the logged rates."""
    hvd.init()
    kind, seen = getattr(hvd.callbacks, callback), Rates()
    schedule = kind(initial_lr=0.1, momentum_correction=momentum_correction, **options)
    model = network(0)
    # The note comes first, so that it sees the momentum of the step.
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse")
    x, y = rows()
    history = model.fit(x, y, BATCH // hvd.size(), 4, 0, [seen, schedule], shuffle=False)
    return {"steps": seen.seen, "lr": history.history["lr"]}


def stopped() -> Row:
    """All ranks stop together, by metrics that differ between ranks."""
    hvd.init()
    x, y = rows()
    model = network()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.2)), "mse")
    history = model.fit(
        x + hvd.rank(),
        y,
        BATCH // hvd.size(),
        epochs=40,
        verbose=0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            keras.callbacks.ReduceLROnPlateau("loss", patience=1),
            keras.callbacks.EarlyStopping("loss", min_delta=0.01, patience=2),
        ],
    )
    return history.history  # type: ignore[no-any-return]


def fails(how: str, folder: str) -> None:
    """Train until rank 1 fails in its third step. Rank 0 writes the error that it gets."""
    hvd.init()

    class Failing(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if hvd.rank() == 1 and batch == 2:
                Path(folder, "failed").write_text(repr(time.time()))
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("the third step")

    try:
        fitted(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), [Failing()])
    except hvd.HorovodInternalError as error:
        seconds = time.time() - float(Path(folder, "failed").read_text())
        Path(folder, "learned").write_text(f"{type(error).__name__} {seconds} {error}")
        raise


def refused() -> list[str]:
    """Return the messages of wrong calls, on two ranks."""
    hvd.init()
    sgd, callbacks = keras.optimizers.SGD(0.1), hvd.callbacks
    decay = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5))
    warm = callbacks.LearningRateWarmupCallback(0.1)
    wrong = [
        lambda: hvd.DistributedOptimizer("sgd"),
        lambda: hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd)),
        lambda: hvd.DistributedOptimizer(sgd, op=hvd.Adasum),
        lambda: hvd.DistributedOptimizer(sgd, backward_passes_per_step=0),
        lambda: hvd.broadcast_global_variables(0),
        lambda: hvd.broadcast_global_variables(0, keras.Sequential([keras.layers.Dense(1)])),
        lambda: callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=0),
        lambda: callbacks.LearningRateScheduleCallback(None, 1.0),
        lambda: fitted(hvd.DistributedOptimizer(decay), [warm]),
    ]
    messages = []
    for call in wrong:
        try:
            call()
        except InvalidArgumentError as error:
            messages.append(str(error))
    return messages


if __name__ == "__main__":
    found = results(sys.argv[2:])
    if hvd.rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
