"""`KerasEstimator`: a model of Keras, trained on a DataFrame or on Parquet files by Keras' own `fit` on ranks."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from pyspark.ml.util import MLWriter

import sparkhvd.torch as hvd
from sparkhvd.data.columns.binding import model_dtype
from sparkhvd.data.columns.decoders import RowFunctions
from sparkhvd.data.columns.schema import DataSchema
from sparkhvd.data.dataset import Dataset
from sparkhvd.data.reading.source import open_source
from sparkhvd.data.source import ParquetFiles, Target
from sparkhvd.data.store.store import TIMELINE_NAME
from sparkhvd.data.store.temporary import default_store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.base import RankEstimator
from sparkhvd.estimator.fitting.cluster import fixed_num_proc
from sparkhvd.estimator.fitting.inputs import (
    FitData,
    FitSources,
    check_inputs,
    check_split,
    prepare_sources,
)
from sparkhvd.estimator.fitting.progress import report_skipped
from sparkhvd.estimator.fitting.recorder import masked_params
from sparkhvd.estimator.fitting.runs import Run
from sparkhvd.estimator.fitting.status_line import of_this_process
from sparkhvd.estimator.params.base import accessors, with_signature
from sparkhvd.estimator.params.converters import any_value, to_float, to_mapping, to_whole
from sparkhvd.estimator.params.generated import FitOptions
from sparkhvd.estimator.params.groups import (
    ClusterParams,
    DataParams,
    IgnoredParams,
    PredictParams,
    TrainingParams,
)
from sparkhvd.estimator.params.table import above, at_least, param
from sparkhvd.estimator.saving.persistence import EstimatorWriter
from sparkhvd.keras.backend import keras
from sparkhvd.keras.model import KerasModel, link_of
from sparkhvd.keras.network import CompiledNetwork, Network
from sparkhvd.keras.optimizer import follows_schedule
from sparkhvd.keras.training import KerasTrainSpec, LoggerBridge, ProgressFile, Trained, train
from sparkhvd.observe.loggers.base import Fit
from sparkhvd.observe.loggers.fanout import LoggerFanout
from sparkhvd.runner import run
from sparkhvd.training.modules.copies import copied
from sparkhvd.training.modules.modes import in_mode
from sparkhvd.training.torch_settings import settings_here
from sparkhvd.training.user_code.transformations import (
    Transformations,
    flat_columns,
    resolve_transformations,
    transformed_by,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkhvd.data.reuse import PreparedData
    from sparkhvd.data.store.store import Store


# ----------------------------------------------------------------------------------------------------
# Params of `KerasEstimator`: Keras objects, plus the shared Params that keep their meaning.

# Params replaced by Keras' own knowledge of the model, or without a counterpart in its data.
_NOT_HERE = {
    "inputs": "give feature_cols in the order of the model's inputs",
    "input_shapes": "the model's inputs have them",
    "collate_fn": "make rows of one length, or use TorchEstimator",
    "sparse_cols": "make vectors dense, or use TorchEstimator",
    "precision": "call keras.mixed_precision.set_global_policy, or give layers a dtype",
}

model_param = functools.partial(param, group="model")
training_param = functools.partial(param, group="training")


def to_model(value: object) -> Any:
    """Convert a saved model to a Keras model, and return anything else unchanged."""
    return value.model if isinstance(value, Network) else value


@accessors
class KerasParams(IgnoredParams, PredictParams):
    """Params of a fit of a Keras model."""

    model = model_param(to_model, "keras.Model to train: built, compiled or not", annotation="Any")
    optimizer = model_param(
        any_value, "of Keras, or its name; default the one that the model is compiled with"
    )
    loss = model_param(any_value, "as of compile; default likewise")
    loss_weights = model_param(any_value, "as of compile; default likewise")
    metrics = training_param(any_value, "as of compile; default likewise")
    learning_rate = training_param(
        to_float,
        "learning rate of the optimizer; default its own",
        aliases=("stepSize",),
        check=above(0),
    )
    lr_scaling = TrainingParams.lr_scaling
    gradient_compression = TrainingParams.gradient_compression
    callbacks = training_param(any_value, "keras.callbacks.Callback objects, copied to every rank")
    checkpoint_callback = training_param(
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
                    f"KerasEstimator: {name} has no effect on a Keras model. Leave it out; instead: {instead}."
                )
        self._check_model()

    def _check_model(self) -> None:
        """Reject a model that ranks cannot train, or objects from other libraries than Keras."""
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
                f"KerasEstimator: the model has {len(outputs)} outputs, but label_cols has {len(labels)} columns. Give one column per output."
            )
        self._check_rate(model)
        checkpoint = self._get("checkpoint_callback")
        if checkpoint is not None and not isinstance(checkpoint, keras.callbacks.ModelCheckpoint):
            raise InvalidArgumentError(
                f"KerasEstimator: checkpoint_callback is {type(checkpoint).__name__}; it must be a ModelCheckpoint, as "
                "sparkhvd.keras.callbacks.BestModelCheckpoint."
            )

    def _check_rate(self, model: Any) -> None:
        """Reject scaling of a learning rate with a schedule."""
        optimizer = self._get("optimizer") or getattr(model, "optimizer", None)
        is_asked = self.isSet("lr_scaling") and self._get("lr_scaling") is not None
        if is_asked and self._get("learning_rate") is None and follows_schedule(optimizer):
            raise InvalidArgumentError(
                f"KerasEstimator: lr_scaling is {self._get('lr_scaling')!r}, but the optimizer's learning rate is a schedule. Multiply the "
                "schedule's rates by num_proc, and leave lr_scaling out."
            )

    def _compiling(self) -> dict[str, Any]:
        """The compile arguments of the ranks.

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


# ----------------------------------------------------------------------------------------------------
# The estimator.


@with_signature
class KerasEstimator(KerasParams, RankEstimator[KerasModel]):
    """Estimator of a Keras 3 model: Keras' `fit` on Spark ranks, over rows of a DataFrame, or of Parquet files in place.

        estimator = KerasEstimator(
            model=model, optimizer=keras.optimizers.Adam(0.001), loss="mse", feature_cols=["x"], label_cols=["y"], epochs=10,
            num_proc=2)
        fitted = estimator.fit(df)  # KerasModel

    Every row is used once per epoch over all ranks. The gradient of a step is the mean of all its rows, also in a last step with
    unequal ranks; metrics are those of all rows. The learning rate is used as given, and the model is not modified.
    `explainParams()` describes all arguments.
    """

    def __init__(self, *positional: object, **keywords: Any) -> None:
        super().__init__()
        self._set_keywords(positional, keywords)

    def _fit_sources(self, sources: FitSources) -> KerasModel:
        """Train on sources of rows.

        Raises:
            InvalidArgumentError: a Param or column is wrong, before any job.
            RankError: a rank failed.
        """
        options = self._options()
        compiling = self._compiling()
        network = Network(self._get("model"), self._get("custom_objects"))
        store = default_store(sources.training.spark, options.store)
        name = options.run_id or f"{self.uid}-{os.urandom(4).hex()}"
        with self._following(options, store, name) as bridge:
            run = Run(store, f"keras_runs/{name}")
            stays = [TIMELINE_NAME] if options.timeline else []
            try:
                model = self._train(sources, options, network, compiling, run, bridge)
                bridge.ended(model.history)
                bridge.fanout.finished(model, {})
            except BaseException as e:
                has_state = ProgressFile(store, name).explain_failure(e, options.epochs)
                if not (has_state or options.run_id or isinstance(e, KeyboardInterrupt)):
                    run.delete(stays)
                bridge.fanout.failed(e, {})
                raise
            if options.run_id is None:
                run.delete(stays)
        return model

    def _train(
        self,
        sources: FitSources,
        options: FitOptions,
        network: Network,
        compiling: Mapping[str, Any],
        run: Run,
        bridge: LoggerBridge,
    ) -> KerasModel:
        data = self._prepared(sources, options, network, run)
        order = KerasTrainSpec(
            network=network,
            dataset=data.training,
            held_out=data.validation,
            split=None if isinstance(sources.split, str) else sources.split,
            run_dir=run.run_dir,
            timeline=options.timeline,
            logs_epochs=bridge.fanout.has_loggers,
            **compiling,
            **self._training(options, data),
            torch_settings=settings_here(),
        )
        found = self._run_ranks(order, options, sources.training.spark, bridge)
        assert found[0] is not None  # rank 0's
        if options.timeline and options.verbose:
            of_this_process.print(f"timeline: {run.timeline_url} (open it in ui.perfetto.dev)")
        return self._model(order, data, *found[0])

    @contextlib.contextmanager
    def _following(self, options: FitOptions, store: Store, name: str) -> Iterator[LoggerBridge]:
        """Attach the loggers to a fit."""
        values = vars(options)
        given = {n: values[n] for n in options.explicit if n in values}
        facts = {"num_proc": str(options.num_proc), "random_seed": str(options.random_seed)}
        done = ProgressFile(store, options.run_id).num_epochs() if options.run_id else 0
        fit = Fit(
            run_id=name,
            params={**masked_params(given, store.hide), **facts},
            tags={"sparkhvd.store": store.url, "sparkhvd.estimator": type(self).__name__},
            label=self._label,
            epochs_done=done,
        )
        say = of_this_process.print if options.verbose else lambda line: None
        with LoggerFanout(options.loggers or (), lambda: fit, say) as fanout:
            yield LoggerBridge(fanout, done)

    def _run_ranks(
        self,
        order: KerasTrainSpec,
        options: FitOptions,
        spark: SparkSession,
        bridge: LoggerBridge,
        **arguments: Any,
    ) -> Sequence[Trained | None]:
        """Train on the ranks, with further arguments of `run`."""
        given = {
            "verbose": options.verbose,
            "start_timeout": options.start_timeout,
            **arguments,
        }
        return run(
            train,
            loggers=bridge.take if bridge.fanout.has_loggers else None,
            args=(order,),
            num_proc=fixed_num_proc(options, "KerasEstimator"),
            spark=spark,
            settings=options.settings,
            max_retries=options.max_retries,
            use_gpu=options.use_gpu,
            **{"env": self._variables(), **given},
        )

    def _variables(self) -> dict[str, str]:
        return {**(self._get("backend_env") or {}), "KERAS_BACKEND": "torch"}

    def _columns(self) -> tuple[list[str], list[str], str | None]:
        """Columns of features, of labels, and of weights."""
        return self._get("feature_cols"), self._get("label_cols"), self._get("sample_weight_col")

    def _prepared(
        self, sources: FitSources, options: FitOptions, network: Network, run: Run
    ) -> _FitData:
        """Prepare the rows for ranks: write them into the store, find them there, or list the files."""
        functions = RowFunctions(options.decoders or {})
        store = run.store
        features, labels, weight = self._columns()
        # A batch of Keras only has columns; their roles for the model are known when they are arranged.
        columns = list(dict.fromkeys([*features, *labels, *filter(None, [weight])]))
        plain = replace(
            options, feature_cols=columns, label_cols=[], sample_weight_col=None, input_shapes=None
        )
        schema = check_inputs(
            plain,
            sources,
            functions=functions,
            model_dtype="float32",
            class_labels=[],
            keeps_types=options.transformation_fn is not None,
        )
        is_read_in_place = isinstance(sources.training, ParquetFiles)
        if is_read_in_place and any(c.invalid[0] == "skip" for c in schema.columns):
            raise InvalidArgumentError(
                "KerasEstimator: handle_invalid is 'skip', but fit_on_parquet cannot skip rows. Give values to fill in, or call fit(df)."
            )
        target = Target(
            store,
            run.run_dir,
            self._scope,
            options.data_key,
            keep_data=options.keep_data,
            num_partitions=options.num_partitions,
        )
        made = prepare_sources(sources, schema, target)
        check_split(made.manifest, sources.split, self._full_step(options))
        report_skipped(made.skipped, options.verbose)
        return self._data_of(made, store, options, functions, model_dtype(network))

    def _data_of(
        self,
        made: FitData,
        store: Store,
        options: FitOptions,
        functions: RowFunctions,
        model_dtype: str,
    ) -> _FitData:
        """Describe prepared rows.

        The user's functions run on the first rows, to learn their results.
        """
        transformations = resolve_transformations(
            options.transformation_fn, options.batch_transform_fn
        )
        seen, transformed = made.schema, None
        if functions.decoders or transformations:
            with open_source(made.training.files or store, made.manifest) as source:
                if names := functions.needs_example(seen):
                    seen = functions.with_decoded(seen, source.read(names, source.examples(1)))
                if transformations:
                    transformed = transformed_by(
                        transformations,
                        source,
                        _by_role(seen, *self._columns()),
                        functions,
                        inputs=None,
                        model_dtype=model_dtype,
                    )
        validation = None if made.validation is None else _dataset(store, made.validation)
        training = _dataset(store, made.training)
        return _FitData(training, validation, seen, functions, transformations, transformed)

    def _full_step(self, options: FitOptions) -> int:
        """Compute the minimum of training rows. If it is unknown here, the ranks check it."""
        if not options.drop_last or options.group_col:
            return 1
        return (fixed_num_proc(options, "KerasEstimator") or 1) * options.batch_size

    def _training(self, options: FitOptions, data: _FitData) -> dict[str, Any]:
        """The training options of the ranks."""
        get = self._get
        return {
            "columns": self._columns(),
            "transformed": None
            if data.transformed is None
            else (data.transformations, data.transformed),
            "reading": {
                "decoders": data.functions.decoders,
                "num_workers": options.num_workers,
                "shuffle_bytes": options.shuffle_bytes,
            },
            "val_num_workers": options.val_reader_num_workers or options.num_workers,
            "learning_rate": options.learning_rate,
            "scales_rate": options.lr_scaling == "linear",
            "distributing": {
                "compression": options.gradient_compression or hvd.Compression.none,
                "backward_passes_per_step": get("backward_passes_per_step"),
            },
            "batch_size": options.batch_size,
            "val_batch_size": options.val_batch_size or options.batch_size,
            "drop_last": options.drop_last,
            "max_steps": (options.train_steps_per_epoch, options.validation_steps_per_epoch),
            "epochs": options.epochs,
            "callbacks": list(options.callbacks or ()),
            "checkpoint": get("checkpoint_callback"),
            "shuffle": options.shuffle,
            "seed": options.random_seed,
            "verbose": 2 if options.verbose else 0,  # 1 is a progress bar, which needs a terminal
            "run_id": options.run_id,
        }

    def _model(
        self,
        order: KerasTrainSpec,
        data: _FitData,
        values: Sequence[torch.Tensor],
        history: list[dict[str, float]],
    ) -> KerasModel:
        """Make the model from trained variables, with this estimator's uid and Params."""
        trained = copied(order.network)
        with torch.no_grad():
            for variable, value in zip(trained.variables, values, strict=True):
                variable.copy_(value)
        features, labels, _ = self._columns()
        loss = order.compiling.get("loss")
        if loss is None:
            loss = (order.compiled or {}).get("loss")
        outputs: Sequence[Any] = getattr(trained.model, "outputs", None) or ()
        links = [link_of(loss, outputs[0].shape)] if len(outputs) == 1 else None
        model = KerasModel.from_module(
            in_mode(trained, is_training=False),
            link=links,
            history=history,
            run_id=order.run_id,
            feature_cols=features,
            label_cols=labels,
            input_shapes=[[-1, *shape] for shape in data.shapes(features)],
        )
        model._resetUid(self.uid)
        self._copyValues(model)
        if model._get("use_gpu"):  # Param of the ranks; a transform task may have no GPU
            model.clear(model.use_gpu)
        model._set(store=data.training.store)
        return model

    def write(self) -> MLWriter:
        """Create a writer: `estimator.write().overwrite().save(path)`."""
        that = self.copy()
        if (model := self._get("model")) is not None:
            # Keras' own pickle lacks the classes of user-defined layers.
            that._paramMap[that.model] = CompiledNetwork(model, self._get("custom_objects"))
        return EstimatorWriter(that)


@dataclass(frozen=True)
class _FitData:
    """Prepared rows of a fit, and the functions on them.

    Attributes:
        training: rows to train on.
        validation: rows of a validation source, or None.
        schema: columns of the rows, with shape and dtype of decoded columns.
        functions: the user's decoders.
        transformations: the user's functions on rows.
        transformed: the columns that these return, or None.
    """

    training: Dataset
    validation: Dataset | None
    schema: DataSchema
    functions: RowFunctions
    transformations: Transformations
    transformed: DataSchema | None

    def shapes(self, features: Sequence[str]) -> list[tuple[int, ...]]:
        """List the shapes of feature rows in a DataFrame of `transform`."""
        columns = [self.schema.column(name) for name in features]
        if self.transformed is not None:
            columns = list(flat_columns(self.transformed.features, columns))
        return [tuple(column.row_shape or ()) or (1,) for column in columns]


def _dataset(store: Store, data: PreparedData) -> Dataset:
    return Dataset(store, data.data_dir, data.files)


def _by_role(
    schema: DataSchema, features: Sequence[str], labels: Sequence[str], weight: str | None
) -> DataSchema:
    return DataSchema(
        tuple(schema.column(name) for name in features),
        tuple(schema.column(name) for name in labels),
        None if weight is None else schema.column(weight),
        schema.validation,
        schema.group,
    )
