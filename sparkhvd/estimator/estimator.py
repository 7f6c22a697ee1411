"""`TorchEstimator.fit(df)`: check, prepare the data, launch the ranks, collect the trained model."""

from __future__ import annotations

import copy
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from pyspark.ml import Estimator
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator import heads
from sparkhvd.estimator.architecture import copy_with
from sparkhvd.estimator.binding import InputBinding, bind_inputs, model_dtype
from sparkhvd.estimator.cluster import Cluster, Given, resolve_cluster
from sparkhvd.estimator.data.defaults import default_store
from sparkhvd.estimator.data.manifest import Manifest
from sparkhvd.estimator.data.sampler import split_validation
from sparkhvd.estimator.data.schema import DataSchema
from sparkhvd.estimator.data.store import Store
from sparkhvd.estimator.inputs import (
    FitData,
    check_inputs,
    prepare_inputs,
    reader_packages,
    row_functions,
)
from sparkhvd.estimator.labels import bind_labels, is_class_index
from sparkhvd.estimator.model import Fitted, TorchModel, fitted_widths
from sparkhvd.estimator.on_parquet import FitOnParquet
from sparkhvd.estimator.params import TrainParams, with_signature
from sparkhvd.estimator.predict import output_widths
from sparkhvd.estimator.runs import Run, new_run_id, open_run
from sparkhvd.estimator.training.building import (
    OVERRIDES,
    Overrides,
    build_model,
    check_compression,
    given_loss,
)
from sparkhvd.estimator.training.checkpoint import Checkpoints
from sparkhvd.estimator.training.metrics import resolve_metrics
from sparkhvd.estimator.training.options import FINGERPRINTED, training_options
from sparkhvd.estimator.training.program import (
    Program,
    check_model,
    check_optimizer,
    describe_program,
    dump_program,
    resolve_losses,
)
from sparkhvd.estimator.training.progress import EpochReporter
from sparkhvd.estimator.training.spec import TrainResult, TrainSpec
from sparkhvd.estimator.training.train import PROGRAM_NAME, train
from sparkhvd.estimator.training.transformations import (
    bind_transformed,
    flat_columns,
    transformed_by,
)
from sparkhvd.estimator.training.user_code import UserCode, check_user_code
from sparkhvd.runner.job import JobReport, LaunchOptions, launch
from sparkhvd.runner.spark_shim import SparkShim

if TYPE_CHECKING:
    from pyspark.ml.param import Param
    from pyspark.sql import DataFrame

__all__ = ["TorchEstimator"]


@dataclass(frozen=True)
class _Request:
    """A fit whose arguments have been checked; no Spark job has run yet."""

    spark: Any
    store: Store
    cluster: Cluster
    schema: DataSchema
    program: Program
    pickled: bytes
    sha256: str
    links: tuple[str, ...]
    losses: tuple[Any, ...]
    loss_weights: tuple[float, ...]
    seed: int
    run: Run
    data_key: str | None
    training: dict[str, Any]


@with_signature
class TorchEstimator(
    FitOnParquet, TrainParams, Estimator[TorchModel], MLWritable, MLReadable["TorchEstimator"]
):
    """Trains a PyTorch module on a Spark DataFrame, one rank per Spark task, all started together.

        estimator = TorchEstimator(
            model=net, optimizer=torch.optim.Adam(net.parameters()), loss=nn.CrossEntropyLoss(),
            feature_cols=["features"], label_cols=["label"], batch_size=32, epochs=10, num_proc=2)
        model = estimator.fit(df)  # TorchModel

    N ranks with batch size b train as one process with batch size N * b; the learning rate is used as given. The
    module and the optimizer given are not modified. Arguments and their meaning: `explainParams()`.
    """

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        super().__init__()
        self._is_shared = (
            False  # whether several fits with this data_key may have other validation DataFrames
        )
        self._set_keywords(positional, keywords)

    def _fit(self, dataset: DataFrame) -> TorchModel:
        """Train; the driver waits until the model is there.

        Raises:
            InvalidArgumentError: a param or column is wrong (before any job), or the data hold what cannot be used
                (before any rank starts).
            PreflightError: the cluster or the store cannot run this.
            RankError: a rank failed. The last checkpoint stays in the store, under `runs/<run_id>`; a fit with this
                run_id goes on from it.
        """
        request = self._checked(dataset)
        data = prepare_inputs(
            dataset,
            self._get("validation"),
            request.schema,
            request.program.functions,
            request.store,
            app_id=SparkShim(request.spark).application(),
            data_key=request.data_key,
            validation_key=self._validation_key(),
            keep_data=self.getOrDefault("keep_data"),
            run_dir=request.run.run_dir,
        )
        spec, widths = self._specify(request, data)
        request.run.check(spec.fingerprint, spec.epochs)
        request.store.write_bytes(f"{spec.run_dir}/{PROGRAM_NAME}", request.pickled)
        report = self._launch(request, spec)
        model = self._collect(request, spec, data, report, widths)
        request.run.finish(report.results[0].epoch)
        return model

    def fitMultiple(  # noqa: N802 - Spark's name
        self,
        dataset: DataFrame,
        paramMaps: Sequence[dict[Param[Any], Any]],  # noqa: N803
    ) -> Iterator[tuple[int, TorchModel]]:
        """Fit with each of several param maps; they share the materialized data.

        A `run_id` gets the index of the param map: `mine-0`, `mine-1`. `data_key` is not used: a CrossValidator calls
        this once per fold, with other rows each time.
        """
        shared = self.copy()
        shared._set(data_key=f"fold-{uuid.uuid4().hex}")
        shared._is_shared = True
        maps = []
        for index, given in enumerate(paramMaps):
            run_id = given.get(self.run_id, self._get("run_id"))
            maps.append({**given, self.run_id: f"{run_id}-{index}"} if run_id else given)
        return Estimator.fitMultiple(shared, dataset, maps)

    # -- check: everything that can be known before the first job -------------------------------------

    def _checked(self, dataset: DataFrame) -> _Request:
        model = check_model(build_model(self._get("model")))
        user = check_user_code(self._changed())
        optimizer = self._get("optimizer")
        overrides = Overrides.of(self._get)
        if user.train_fn is None or optimizer is not None:
            check_optimizer(optimizer, self._get("model"), model)
            overrides.check(optimizer, model)
        self._check_numbers()
        labels = self._required("label_cols", "the columns with the labels")
        self._required("feature_cols", "the columns that become the model's input")
        weight_col = self._get("sample_weight_col")
        loss = given_loss(self._get("loss"), self._get("loss_constructors"), model)
        losses, is_sum = _losses(loss, user, len(labels), per_row=weight_col is not None)
        user_losses = list(loss) if isinstance(loss, (list, tuple)) else [loss] * len(labels)
        functions = row_functions(self._get)
        schema = check_inputs(
            self._get,
            dataset,
            functions=functions,
            model_dtype=model_dtype(model),
            class_labels=[
                n for n, one in zip(labels, user_losses, strict=True) if is_class_index(one)
            ],
        )
        bind_labels(schema, user_losses, self._get("label_shapes"))
        if not user.transformations:  # else what the model gets is known when there are data
            inputs = self._bind_inputs(model, schema)
            if all(c.row_shape is not None for c in schema.features):
                _try_model(model, inputs, schema)
        links = tuple(heads.link_of(loss) for loss in user_losses)
        program = Program(
            model=model,
            optimizer=optimizer,
            losses=losses,
            is_sum=is_sum,
            metrics=resolve_metrics(self._get("metrics"), labels, links),
            lr_scheduler=self._get("lr_scheduler"),
            compression=check_compression(self._get("gradient_compression")),
            functions=functions,
            user=user,
        )
        pickled, sha256 = dump_program(replace(program, model=self._get("model")))
        spark = dataset.sparkSession
        cluster = resolve_cluster(spark, Given(self._get, self.isSet))
        store = default_store(spark, self._get("store"))
        run = open_run(
            store,
            self._get("run_id") or new_run_id(self.uid),
            warm_start=self.getOrDefault("warm_start"),
        )
        return _Request(
            spark=spark,
            store=store,
            cluster=cluster,
            schema=schema,
            program=program,
            pickled=pickled,
            sha256=sha256,
            links=links,
            losses=tuple(user_losses),
            loss_weights=self._loss_weights(len(labels)),
            seed=run.seed(self._get("random_seed")),
            run=run,
            data_key=self._get("data_key"),
            training={
                "overrides": overrides,
                **training_options(
                    self._get, model=model, metric_names=[m.name for m in program.metrics]
                ),
            },
        )

    def _check_numbers(self) -> None:
        at_least = {
            "batch_size": 1,
            "num_workers": 1,
            "val_reader_num_workers": 1,
            "val_batch_size": 1,
            "epochs": 1,
            "shuffle_bytes": 1,
        }
        for name, least in at_least.items():
            value = self._get(name)
            if value is not None and value < least:
                raise InvalidArgumentError(f"{name} is {value}; it must be at least {least}.")
        interval = self._get("checkpoint_interval_s")
        if interval is not None and not interval > 0:
            raise InvalidArgumentError(
                f"checkpoint_interval_s is {interval}; it must be more than 0."
            )

    def _required(self, name: str, meaning: str) -> list[str]:
        value = self._get(name)
        if not value:
            raise InvalidArgumentError(f"{name} is required: name {meaning}.")
        return list(value)

    def _changed(self) -> dict[str, Any]:
        """The params with another value than their default."""
        set_params = {p.name: value for p, value in self._paramMap.items()}
        defaults = {p.name: value for p, value in self._defaultParamMap.items()}
        return {n: v for n, v in set_params.items() if n not in defaults or v != defaults[n]}

    def _validation_key(self) -> str | None:
        """What names a second DataFrame: one data_key names both of a fit."""
        key = self._get("data_key")
        if key is None:
            return None
        # The param maps of a fitMultiple keep their DataFrames alive, so that ids tell them apart.
        which = f"-{id(self._get('validation'))}" if self._is_shared else ""
        return f"{key}/validation{which}"

    def _loss_weights(self, num_labels: int) -> tuple[float, ...]:
        given = self._get("loss_weights")
        if given is None:
            return (1.0 / num_labels,) * num_labels
        if len(given) != num_labels:
            raise InvalidArgumentError(
                f"loss_weights has {len(given)} numbers and label_cols {num_labels} columns. Give one per label."
            )
        return tuple(given)

    def _bind_inputs(self, model: torch.nn.Module, schema: DataSchema) -> Any:
        shapes, inputs = self._get("input_shapes"), self._get("inputs")
        return bind_inputs(model, schema, input_shapes=shapes, inputs=inputs)

    # -- run ------------------------------------------------------------------------------------------

    def _specify(self, request: _Request, data: FitData) -> tuple[TrainSpec, tuple[int, ...]]:
        """What the ranks get, now that the shapes of the columns are known; the model is tried on them."""
        schema, program = data.schema, request.program
        transformed: DataSchema | None = None
        if program.user.transformations:
            schema = transformed = self._transformed(request, data)
        inputs = self._bind_inputs(program.model, schema)
        if transformed is not None:
            inputs = bind_transformed(inputs, transformed)
        widths = _try_model(program.model, inputs, schema, data.examples)
        validation = self._get("validation")
        held_out = data.validation
        is_fraction = bool(validation) and held_out is None and not isinstance(validation, str)
        batch_size = self.getOrDefault("batch_size")
        drop_last = self.getOrDefault("drop_last")
        accumulate = self.getOrDefault("accumulate")
        full = request.cluster.num_proc * batch_size * accumulate if drop_last else 1
        _check_split(data.manifest, None if held_out is not None else validation, full)
        weight = schema.sample_weight
        spec = TrainSpec(
            store=request.store,
            run_dir=request.run.run_dir,
            start_from=request.run.start_from,
            checkpoint_interval_s=self.getOrDefault("checkpoint_interval_s"),
            program_sha256=request.sha256,
            data_dir=data.training.data_dir,
            data_store=data.training.files,
            inputs=inputs,
            labels=bind_labels(schema, request.losses, self._get("label_shapes")),
            sample_weight=weight.name if weight is not None else None,
            loss_weights=request.loss_weights,
            batch_size=batch_size,
            val_batch_size=self._get("val_batch_size") or batch_size,
            epochs=self.getOrDefault("epochs"),
            seed=request.seed,
            shuffle=self.getOrDefault("shuffle"),
            shuffle_bytes=self._shuffle_bytes(),
            drop_last=drop_last,
            has_validation=bool(validation),
            validation=float(validation) if is_fraction else None,
            validation_dir=held_out.data_dir if held_out is not None else None,
            validation_store=held_out.files if held_out is not None else None,
            num_workers=self.getOrDefault("num_workers"),
            val_num_workers=self._get("val_reader_num_workers") or self.getOrDefault("num_workers"),
            **request.training,
            transformed=transformed,
            fingerprint=self._fingerprint(request, data),
        )
        return spec, widths

    def _shuffle_bytes(self) -> int:
        # More than any data have: all of them are kept in memory.
        return (
            1 << 62
            if self.getOrDefault("inmemory_cache_all")
            else self.getOrDefault("shuffle_bytes")
        )

    def _transformed(self, request: _Request, data: FitData) -> DataSchema:
        return transformed_by(
            request.program.user.transformations,
            data.training.files or request.store,
            data.manifest,
            data.schema,
            request.program.functions,
            inputs=self._get("inputs"),
            model_dtype=model_dtype(request.program.model),
        )

    def _fingerprint(self, request: _Request, data: FitData) -> str:
        """What two fits must share so that one can go on where the other stopped."""
        names = ("batch_size", "shuffle", "drop_last", "validation", *OVERRIDES, *FINGERPRINTED)
        values = {name: self._get(name) for name in names}
        if data.validation is not None:
            values["validation"] = "a DataFrame"
        facts = {
            **describe_program(request.program),
            **values,
            **request.program.functions.describe(),
            **data.describe(),
            "num_proc": request.cluster.num_proc,
            "random_seed": request.seed,
        }
        return json.dumps(facts, sort_keys=True)

    def _launch(self, request: _Request, spec: TrainSpec) -> JobReport:
        checkpoints = Checkpoints(request.store, spec.run_dir)
        cluster = request.cluster
        options = LaunchOptions(
            settings=cluster.settings,
            start_timeout_s=cluster.start_timeout,
            max_retries=cluster.max_retries,
            verbose=cluster.verbose,
            shared=request.store,
            run_dir=spec.run_dir,
            progress=checkpoints.latest_position,
            requirements=("torch", "pyarrow", "numpy", "cloudpickle", *reader_packages(self._get)),
        )
        reporter = EpochReporter(
            checkpoints, epochs=spec.epochs, verbose=cluster.verbose, progress=self._get("progress")
        )
        with reporter:
            report = launch(request.spark, train, (spec,), {}, cluster.num_proc, options)
        reporter.ended(report.results[0].stopped, len(report.results[0].history))
        return report

    def _collect(
        self,
        request: _Request,
        spec: TrainSpec,
        data: FitData,
        report: JobReport,
        widths: tuple[int, ...],
    ) -> TorchModel:
        """A TorchModel with the trained weights, this estimator's uid and its params."""
        result: TrainResult = report.results[0]
        checkpoint = Checkpoints(request.store, spec.run_dir).load(result.epoch)
        module = copy_with(request.program.model, checkpoint.model)
        for parameter in module.parameters():
            parameter.grad = None
        model = TorchModel()
        model._resetUid(self.uid)
        model._fitted = Fitted(
            module=module.eval(),
            columns=flat_columns(spec.transformed.features, data.schema.features)
            if spec.transformed
            else data.schema.features,
            labels=tuple(c.name for c in data.schema.labels),
            inputs=spec.inputs,
            links=request.links,
            widths=widths,
            history=result.history,
            timings={
                "materialize": data.seconds,
                "launch": report.launch_s,
                "train": report.run_s,
            },
            run_id=spec.run_dir.removeprefix("runs/"),
        )
        self._copyValues(model)
        model._set(store=request.store)
        return model

    # -- save and load ---------------------------------------------------------------------------------

    def write(self) -> MLWriter:
        """A writer: `estimator.write().overwrite().save(path)`."""
        from sparkhvd.estimator.persistence import EstimatorWriter

        return EstimatorWriter(self)

    @classmethod
    def read(cls) -> MLReader[TorchEstimator]:
        """A reader: `TorchEstimator.read().load(path)`."""
        from sparkhvd.estimator.persistence import EstimatorReader

        return EstimatorReader(cls)

    @classmethod
    def load(cls, path: str, *, trust: bool = False) -> TorchEstimator:
        """Load a saved estimator; `trust` as in `TorchModel.load`."""
        from sparkhvd.estimator.persistence import EstimatorReader

        loaded: TorchEstimator = EstimatorReader(cls, trusted=trust).load(path)
        return loaded


def _losses(
    loss: Any, user: UserCode, num_labels: int, *, per_row: bool
) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
    """The losses, and whether each adds rows up; none where the user's code has its own."""
    if loss is None and user.computes_loss:
        return (), ()
    return resolve_losses(loss, num_labels, per_row=per_row)


def _try_model(
    model: torch.nn.Module,
    inputs: InputBinding,
    schema: DataSchema,
    examples: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Elements per row of the model's outputs, one per label, from a run on zeros; the model is not changed."""
    trial = copy.deepcopy(model).eval()
    widths = output_widths(trial, inputs, schema.features, examples)
    return fitted_widths(widths, [c.name for c in schema.labels])


def _check_split(manifest: Manifest, validation: float | str | None, full: int) -> None:
    """Refuse data that leave nothing to train on or to validate with, before any rank starts.

    Args:
        manifest: of the data.
        validation: fraction, column or None.
        full: rows that the training needs at least.
    """
    total, held_out = manifest.num_rows, manifest.num_validation or 0
    if validation and not isinstance(validation, str):
        held_out = len(split_validation(total, validation, 0)[1])
    if isinstance(validation, str) and manifest.num_validation is None:
        return  # nobody has counted: the ranks will see
    if validation and held_out == 0:
        raise InvalidArgumentError(
            f"validation: column {validation!r} marks none of {total:,} rows. A row with true, or a number above 0, is "
            "a validation row."
        )
    if held_out == total:
        raise InvalidArgumentError(
            f"validation: column {validation!r} marks all {total:,} rows, so none is left to train on."
        )
    if total - held_out < full:
        raise InvalidArgumentError(
            f"drop_last leaves out a step that is not full, and the {total - held_out:,} training rows are less than "
            f"one full step of num_proc * batch_size * accumulate = {full:,} rows. Lower batch_size, or set drop_last=False."
        )
