"""`KerasEstimator`: a model of Keras, trained on a DataFrame by Keras' own `fit` on ranks."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from pyspark.ml import Estimator

import sparkhvd.torch as hvd
from sparkhvd.data.dataset import prepare
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.keras.backend import keras
from sparkhvd.keras.model import KerasModel
from sparkhvd.keras.network import Network
from sparkhvd.keras.training import Order, train
from sparkhvd.runner import run

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["KerasEstimator"]


class KerasEstimator(Estimator[KerasModel]):
    """Estimator of a model of Keras 3: Keras' `fit` on ranks of Spark, over rows that the driver has written into the store.

    Every row comes once per epoch over all ranks. The gradient of a step is the mean of all its rows, also of a last one whose ranks have
    unequally many; metrics are those of all rows. The learning rate is used as given.

    Args:
        model: built, and compiled or not; it is not modified.
        feature_cols: columns of the model's inputs, in their order; all are joined where there is one input.
        label_cols: columns of its outputs, in their order.
        optimizer: of Keras, or its name; None = the one that the model is compiled with.
        loss: as of `compile`; None = likewise.
        loss_weights: likewise.
        metrics: likewise.
        sample_weight_col: column of the rows' weights.
        num_proc: ranks; None = as many as the cluster has task slots.
        batch_size: rows per rank and step.
        val_batch_size: rows per rank and step of validation; None = `batch_size`.
        epochs: passes over the rows.
        validation: boolean or numeric column; True or above 0 marks rows of validation.
        store: that driver and executors share; None = the one of `spark.sparkhvd.store`, or on a local master a temporary folder.
        callbacks: of Keras; copies run on every rank, and see metrics of all rows.
        checkpoint_callback: a `ModelCheckpoint`, as `callbacks.BestModelCheckpoint`; it runs on rank 0, on a file of its own, and what it has
            kept becomes the model that `fit` returns.
        custom_objects: functions and classes by name; classes of layers in the model need none.
        run_id: name of a run: its state is in the store behind each epoch, and a fit with the same name goes on from there.
        shuffle: a new order in each epoch.
        random_seed: decides the order, and random numbers.
        verbose: of Keras' `fit`, on rank 0: 0, or 2 for a line per epoch; 1, Keras' bar, is 2.
        gradient_compression: of gradients, as `Compression.fp16`.
        backward_passes_per_step: batches for each step, whose gradients add up.

    Raises:
        InvalidArgumentError: an argument is wrong, before any job.
    """

    def __init__(
        self,
        *,
        model: Any,
        feature_cols: Sequence[str],
        label_cols: Sequence[str],
        optimizer: Any = None,
        loss: Any = None,
        loss_weights: Any = None,
        metrics: Any = None,
        sample_weight_col: str | None = None,
        num_proc: int | None = None,
        batch_size: int = 32,
        val_batch_size: int | None = None,
        epochs: int = 1,
        validation: str | None = None,
        store: Store | str | PathLike[str] | None = None,
        callbacks: Sequence[Any] = (),
        checkpoint_callback: Any = None,
        custom_objects: Mapping[str, Any] | None = None,
        run_id: str | None = None,
        shuffle: bool = True,
        random_seed: int = 0,
        verbose: int = 1,
        gradient_compression: Any = hvd.Compression.none,
        backward_passes_per_step: int = 1,
    ) -> None:
        super().__init__()
        _check_model(model, label_cols)
        self._model, self._store, self._num_proc = model, store, num_proc
        self._validation = validation
        self._columns = list(feature_cols), list(label_cols), sample_weight_col
        self._custom_objects = dict(custom_objects or {})
        if checkpoint_callback is not None and not isinstance(
            checkpoint_callback, keras.callbacks.ModelCheckpoint
        ):
            raise InvalidArgumentError(
                f"KerasEstimator: checkpoint_callback is {type(checkpoint_callback).__name__}; it must be a ModelCheckpoint, as "
                "sparkhvd.keras.callbacks.BestModelCheckpoint."
            )
        self._training = {
            **_compiling(model, optimizer, loss, loss_weights, metrics),
            "distributing": {
                "compression": gradient_compression,
                "backward_passes_per_step": backward_passes_per_step,
            },
            "batch_size": batch_size,
            "val_batch_size": val_batch_size or batch_size,
            "epochs": epochs,
            "callbacks": list(callbacks),
            "checkpoint": checkpoint_callback,
            "shuffle": shuffle,
            "seed": random_seed,
            "verbose": 2 if verbose else 0,
            "run_id": run_id,
        }

    def _fit(self, dataset: DataFrame) -> KerasModel:
        """Train on a DataFrame; Spark's `fit` calls it.

        Raises:
            RankError: a rank failed.
        """
        features, labels, weight = self._columns
        wanted = [*features, *labels, *([] if weight is None else [weight])]
        rows = prepare(dataset, self._store, columns=wanted, validation=self._validation)
        order = Order(
            network=Network(self._model, self._custom_objects),
            dataset=rows,
            columns=self._columns,
            **self._training,
        )
        found = run(
            train,
            args=(order,),
            num_proc=self._num_proc,
            spark=dataset.sparkSession,
            env={"KERAS_BACKEND": "torch"},
        )
        assert found[0] is not None  # rank 0's
        values, history = found[0]
        trained = copy.deepcopy(order.network)
        with torch.no_grad():
            for variable, value in zip(trained.variables, values, strict=True):
                variable.copy_(value)
        shapes = [rows.schema.column(name).row_shape or (1,) for name in features]
        return KerasModel.from_module(
            trained.eval(),
            history=history,
            run_id=order.run_id,
            feature_cols=features,
            label_cols=labels,
            input_shapes=[[-1, *shape] for shape in shapes],
        )


def _check_model(model: Any, label_cols: Sequence[str]) -> None:
    if not isinstance(model, keras.Model):
        raise InvalidArgumentError(
            f"KerasEstimator: model is a {type(model).__name__}; it must be a keras.Model. sparkhvd.TorchEstimator fits modules of torch."
        )
    if not model.built or not model.variables:
        raise InvalidArgumentError(
            "KerasEstimator: the model is not built, so ranks cannot begin with the same weights. Give it an Input, or call "
            "model.build(input_shape) before."
        )
    outputs = getattr(model, "outputs", None) or ()
    if outputs and len(outputs) != len(label_cols):
        raise InvalidArgumentError(
            f"KerasEstimator: the model has {len(outputs)} outputs, and label_cols names {len(label_cols)} columns. Give one for each output."
        )


def _compiling(
    model: Any, optimizer: Any, loss: Any, loss_weights: Any, metrics: Any
) -> dict[str, Any]:
    """Return how ranks compile the model.

    Raises:
        InvalidArgumentError: there is no optimizer, or no loss.
    """
    given = {"optimizer": optimizer, "loss": loss, "loss_weights": loss_weights, "metrics": metrics}
    given = {name: value for name, value in given.items() if value is not None}
    if not given and model.compiled:
        return {"compiling": {}, "compiled": model.get_compile_config()}
    missing = [name for name in ("optimizer", "loss") if name not in given]
    if missing:
        raise InvalidArgumentError(
            f"KerasEstimator: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not given. Give both optimizer and loss, or "
            "neither with a model that is compiled."
        )
    return {"compiling": given, "compiled": None}
