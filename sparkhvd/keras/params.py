"""Params of `KerasEstimator`: those of Keras' own objects, and of the table those that mean the same here."""

from __future__ import annotations

import functools
from typing import Any

from pyspark.ml.param import TypeConverters

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.params.base import accessors
from sparkhvd.estimator.params.cluster import ClusterParams
from sparkhvd.estimator.params.compatibility import IgnoredParams
from sparkhvd.estimator.params.converters import any_value, to_mapping, to_whole
from sparkhvd.estimator.params.data import DataParams
from sparkhvd.estimator.params.model import ModelParams
from sparkhvd.estimator.params.prediction import PredictParams
from sparkhvd.estimator.params.table import above, at_least, param
from sparkhvd.estimator.params.training import TrainingParams
from sparkhvd.keras.backend import keras
from sparkhvd.keras.network import Network

__all__ = ["KerasParams"]

# Params of a model that follow from what Keras knows, or that its data have no place for.
_NOT_HERE = {
    "inputs": "give feature_cols in the order of the model's inputs",
    "input_shapes": "the model's inputs have them",
    "collate_fn": "make rows of one length, or use TorchEstimator",
    "sparse_cols": "make vectors dense, or use TorchEstimator",
}

model_param = functools.partial(param, group="model")


def to_model(value: object) -> Any:
    """Convert a saved model to one of Keras; keep anything else."""
    return value.model if isinstance(value, Network) else value


def to_column(value: object) -> str:
    """Require the name of a column, which is all that marks rows of validation here."""
    if not isinstance(value, str):
        raise TypeError(
            "expected the name of a boolean or numeric column that marks rows of validation, such as "
            "df.withColumn('held_out', rand(1) < 0.2) makes"
        )
    return value


@accessors
class KerasParams(IgnoredParams, PredictParams):
    """Params of a fit of a model of Keras."""

    model = model_param(to_model, "keras.Model to train: built, compiled or not", annotation="Any")
    optimizer = model_param(
        any_value, "of Keras, or its name; default the one that the model is compiled with"
    )
    loss = model_param(any_value, "as of compile; default likewise")
    loss_weights = model_param(any_value, "as of compile; default likewise")
    metrics = model_param(any_value, "as of compile; default likewise")
    learning_rate = model_param(
        TypeConverters.toFloat,
        "learning rate of the optimizer; default its own",
        aliases=("stepSize",),
        check=above(0),
    )
    gradient_compression = ModelParams.gradient_compression
    callbacks = model_param(any_value, "keras.callbacks.Callback objects, copied to every rank")
    checkpoint_callback = model_param(
        any_value, "a ModelCheckpoint, run by rank 0: fit returns what it has kept"
    )
    custom_objects = model_param(
        to_mapping, "functions and classes of the model's configuration, by name"
    )

    sample_weight_col = DataParams.sample_weight_col
    validation = param(
        to_column,
        "column that is true for validation rows",
        group="data",
        annotation="str",
        aliases=("validationIndicatorCol",),
    )
    num_workers = DataParams.num_workers
    val_reader_num_workers = DataParams.val_reader_num_workers
    shuffle = DataParams.shuffle
    transformation_fn = DataParams.transformation_fn
    batch_transform_fn = DataParams.batch_transform_fn
    data_key = DataParams.data_key
    keep_data = DataParams.keep_data
    num_partitions = DataParams.num_partitions

    batch_size = TrainingParams.batch_size
    val_batch_size = TrainingParams.val_batch_size
    epochs = TrainingParams.epochs
    random_seed = param(
        to_whole,
        "decides order and dropout",
        default=0,
        group="training",
        aliases=("seed",),
    )
    run_id = TrainingParams.run_id
    backward_passes_per_step = param(
        to_whole,
        "batches per rank whose gradients add up to one step",
        default=1,
        check=at_least(1),
        group="training",
    )

    num_proc = ClusterParams.num_proc
    verbose = ClusterParams.verbose
    settings = ClusterParams.settings
    max_retries = ClusterParams.max_retries
    start_timeout = ClusterParams.start_timeout
    backend_env = param(to_mapping, "environment variables of the ranks", group="cluster")

    def _check_values(self) -> None:
        super()._check_values()
        for name, instead in _NOT_HERE.items():
            if self._get(name) is not None:
                raise InvalidArgumentError(
                    f"KerasEstimator: {name} is not used with a model of Keras: {instead}."
                )
        self._check_model()

    def _check_model(self) -> None:
        """Refuse a model that ranks cannot train, or objects that are none of Keras."""
        model, labels = self._get("model"), self._get("label_cols")
        for name, what in (
            ("model", "a keras.Model"),
            ("feature_cols", "the columns that become the model's inputs, in their order"),
            ("label_cols", "the columns with the labels, one for each output"),
        ):
            if self._get(name) in (None, []):
                raise InvalidArgumentError(f"KerasEstimator: {name} is required: {what}.")
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
        if outputs and len(outputs) != len(labels):
            raise InvalidArgumentError(
                f"KerasEstimator: the model has {len(outputs)} outputs, and label_cols names {len(labels)} columns. Give one for each output."
            )
        checkpoint = self._get("checkpoint_callback")
        if checkpoint is not None and not isinstance(checkpoint, keras.callbacks.ModelCheckpoint):
            raise InvalidArgumentError(
                f"KerasEstimator: checkpoint_callback is {type(checkpoint).__name__}; it must be a ModelCheckpoint, as "
                "sparkhvd.keras.callbacks.BestModelCheckpoint."
            )

    def _compiling(self) -> dict[str, Any]:
        """Return how ranks compile the model.

        Raises:
            InvalidArgumentError: there is no optimizer, or no loss.
        """
        model = self._get("model")
        names = ("optimizer", "loss", "loss_weights", "metrics")
        given = {name: self._get(name) for name in names if self._get(name) is not None}
        if not given and model.compiled:
            return {"compiling": {}, "compiled": model.get_compile_config()}
        missing = [name for name in ("optimizer", "loss") if name not in given]
        if missing:
            raise InvalidArgumentError(
                f"KerasEstimator: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not given. Give both optimizer and loss, or "
                "neither with a model that is compiled."
            )
        return {"compiling": given, "compiled": None}
