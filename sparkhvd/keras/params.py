"""Params of `KerasEstimator`: those of Keras' own objects, and of the table those that mean the same here."""

from __future__ import annotations

import functools
from typing import Any

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.params.base import accessors
from sparkhvd.estimator.params.cluster import ClusterParams
from sparkhvd.estimator.params.compatibility import IgnoredParams
from sparkhvd.estimator.params.converters import any_value, to_float, to_mapping, to_whole
from sparkhvd.estimator.params.data import DataParams
from sparkhvd.estimator.params.model import ModelParams
from sparkhvd.estimator.params.options import FitOptions
from sparkhvd.estimator.params.prediction import PredictParams
from sparkhvd.estimator.params.table import above, at_least, param
from sparkhvd.estimator.params.training import TrainingParams
from sparkhvd.keras.backend import keras
from sparkhvd.keras.network import Network
from sparkhvd.keras.optimizer import follows_schedule

__all__ = ["KerasParams"]

# Params of a model that follow from what Keras knows, or that its data have no place for.
_NOT_HERE = {
    "inputs": "give feature_cols in the order of the model's inputs",
    "input_shapes": "the model's inputs have them",
    "collate_fn": "make rows of one length, or use TorchEstimator",
    "sparse_cols": "make vectors dense, or use TorchEstimator",
    "precision": "call keras.mixed_precision.set_global_policy, or give layers a dtype",
}

model_param = functools.partial(param, group="model")


def to_model(value: object) -> Any:
    """Convert a saved model to one of Keras; keep anything else."""
    return value.model if isinstance(value, Network) else value


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
        to_float,
        "learning rate of the optimizer; default its own",
        aliases=("stepSize",),
        check=above(0),
    )
    lr_scaling = ModelParams.lr_scaling
    gradient_compression = ModelParams.gradient_compression
    callbacks = model_param(any_value, "keras.callbacks.Callback objects, copied to every rank")
    checkpoint_callback = model_param(
        any_value, "a ModelCheckpoint, run by rank 0: fit returns what it has kept"
    )
    custom_objects = model_param(
        to_mapping, "functions and classes of the model's configuration, by name"
    )

    sample_weight_col = DataParams.sample_weight_col
    group_col = DataParams.group_col
    validation = DataParams.validation
    num_workers = DataParams.num_workers
    val_reader_num_workers = DataParams.val_reader_num_workers
    shuffle = DataParams.shuffle
    shuffle_bytes = DataParams.shuffle_bytes
    drop_last = DataParams.drop_last
    transformation_fn = DataParams.transformation_fn
    batch_transform_fn = DataParams.batch_transform_fn
    data_key = DataParams.data_key
    keep_data = DataParams.keep_data
    num_partitions = DataParams.num_partitions

    batch_size = TrainingParams.batch_size
    val_batch_size = TrainingParams.val_batch_size
    epochs = TrainingParams.epochs
    train_steps_per_epoch = TrainingParams.train_steps_per_epoch
    validation_steps_per_epoch = TrainingParams.validation_steps_per_epoch
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
    loggers = ClusterParams.loggers
    timeline = ClusterParams.timeline
    settings = ClusterParams.settings
    max_retries = ClusterParams.max_retries
    start_timeout = ClusterParams.start_timeout
    backend_env = param(to_mapping, "environment variables of the ranks", group="cluster")

    def _options(self) -> FitOptions:
        """Check the values and read them.

        Raises:
            InvalidArgumentError: one is out of range, cannot be used here, or contradicts another.
        """
        self._check_values()
        return self._read_options(FitOptions)

    def _check_values(self) -> None:
        super()._check_values()
        for name, instead in _NOT_HERE.items():
            if self.isSet(name) and self._get(name) is not None:
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
        self._check_rate(model)
        checkpoint = self._get("checkpoint_callback")
        if checkpoint is not None and not isinstance(checkpoint, keras.callbacks.ModelCheckpoint):
            raise InvalidArgumentError(
                f"KerasEstimator: checkpoint_callback is {type(checkpoint).__name__}; it must be a ModelCheckpoint, as "
                "sparkhvd.keras.callbacks.BestModelCheckpoint."
            )

    def _check_rate(self, model: Any) -> None:
        """Refuse to scale a learning rate that follows a schedule."""
        optimizer = self._get("optimizer") or getattr(model, "optimizer", None)
        is_asked = self.isSet("lr_scaling") and self._get("lr_scaling") is not None
        if is_asked and self._get("learning_rate") is None and follows_schedule(optimizer):
            raise InvalidArgumentError(
                f"KerasEstimator: lr_scaling is {self._get('lr_scaling')!r}, and the optimizer's learning rate is a schedule. Make the schedule "
                "from rates times num_proc, and leave lr_scaling out."
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
