"""`TorchEstimator.fit(df)`: check, prepare the data, launch the ranks, collect the trained model."""

from __future__ import annotations

import copy
import json
import os
import re
import secrets
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from pyspark.ml import Estimator
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator import heads
from sparkhvd.estimator.binding import (
    InputBinding,
    bind_inputs,
    bind_labels,
    is_class_index,
    model_dtype,
)
from sparkhvd.estimator.checkpoint import Checkpoints
from sparkhvd.estimator.defaults import default_store
from sparkhvd.estimator.manifest import Manifest
from sparkhvd.estimator.metrics import resolve_metrics
from sparkhvd.estimator.model import Fitted, TorchModel, fitted_widths
from sparkhvd.estimator.params import TrainParams, with_signature
from sparkhvd.estimator.predict import output_widths
from sparkhvd.estimator.prepare import PreparedData, prepare
from sparkhvd.estimator.program import (
    Program,
    check_model,
    check_optimizer,
    describe_program,
    dump_program,
    resolve_losses,
)
from sparkhvd.estimator.progress import EpochReporter
from sparkhvd.estimator.sampler import split_validation
from sparkhvd.estimator.schema import DataSchema, check_schema
from sparkhvd.estimator.store import Store
from sparkhvd.estimator.train import PROGRAM_NAME, TrainResult, TrainSpec, train
from sparkhvd.runner import placement, preflight
from sparkhvd.runner.job import JobReport, LaunchOptions, launch
from sparkhvd.runner.spark_shim import SparkShim
from sparkhvd.settings import Settings

if TYPE_CHECKING:
    from pyspark.ml.param import Param
    from pyspark.sql import DataFrame

__all__ = ["TorchEstimator"]


@dataclass(frozen=True)
class _Request:
    """A fit whose arguments have been checked; no Spark job has run yet."""

    spark: Any
    store: Store
    num_proc: int
    schema: DataSchema
    program: Program
    pickled: bytes
    sha256: str
    links: tuple[str, ...]
    loss_weights: tuple[float, ...]
    settings: Settings
    seed: int
    run_dir: str
    data_key: str | None


@with_signature
class TorchEstimator(TrainParams, Estimator[TorchModel], MLWritable, MLReadable["TorchEstimator"]):
    """Trains a PyTorch module on a Spark DataFrame, one rank per Spark task, all started together.

        estimator = TorchEstimator(
            model=net, optimizer=torch.optim.Adam(net.parameters()), loss=nn.CrossEntropyLoss(),
            feature_cols=["features"], label_cols=["label"], batch_size=32, epochs=10, num_proc=2)
        model = estimator.fit(df)  # TorchModel

    N ranks with batch size b train as one process with batch size N * b; the learning rate is used as given. The
    module and the optimizer given are not modified. Arguments and their meaning: `explainParams()`.
    """

    def __init__(self, **keywords: Any) -> None:
        super().__init__()
        self._set_keywords(keywords)

    def _fit(self, dataset: DataFrame) -> TorchModel:
        """Train; the driver waits until the model is there.

        Raises:
            InvalidArgumentError: a param or column is wrong (before any job), or the data hold what cannot be used
                (before any rank starts).
            PreflightError: the cluster or the store cannot run this.
            RankError: a rank failed. The checkpoint of the last whole epoch stays in the store, under
                `runs/<run_id>`; a fit with this run_id goes on from it.
        """
        request = self._checked(dataset)
        data = prepare(
            dataset,
            request.schema,
            request.store,
            app_id=SparkShim(request.spark).application(),
            data_key=request.data_key,
            keep_data=self.getOrDefault("keep_data"),
        )
        spec, widths = self._specify(request, data)
        request.store.write_bytes(f"{request.run_dir}/{PROGRAM_NAME}", request.pickled)
        report = self._launch(request, spec)
        return self._collect(request, spec, data, report, widths)

    def fitMultiple(  # noqa: N802 - Spark's name
        self,
        dataset: DataFrame,
        paramMaps: Sequence[dict[Param[Any], Any]],  # noqa: N803
    ) -> Iterator[tuple[int, TorchModel]]:
        """Fit with each of several param maps; they share the materialized data."""
        shared = self.copy()
        if shared._get("data_key") is None:
            shared._set(data_key=f"fold-{uuid.uuid4().hex}")
        return Estimator.fitMultiple(shared, dataset, paramMaps)

    # -- check: everything that can be known before the first job -------------------------------------

    def _checked(self, dataset: DataFrame) -> _Request:
        model = check_model(self._get("model"))
        check_optimizer(self._get("optimizer"), model)
        self._check_numbers()
        labels = self._required("label_cols", "the columns with the labels")
        features = self._required("feature_cols", "the columns that become the model's input")
        weight_col = self._get("sample_weight_col")
        losses, is_sum = resolve_losses(
            self._get("loss"), len(labels), per_row=weight_col is not None
        )
        user_losses = self._user_losses(len(labels))
        schema = check_schema(
            dataset.schema,
            feature_cols=features,
            label_cols=labels,
            sample_weight_col=weight_col,
            validation=self._get("validation"),
            model_dtype=model_dtype(model),
            feature_dtypes=self._get("feature_dtypes"),
            label_dtypes=self._get("label_dtypes"),
            class_labels=[
                n for n, one in zip(labels, user_losses, strict=True) if is_class_index(one)
            ],
        )
        bind_labels(schema, user_losses)
        inputs = self._bind_inputs(model, schema)
        if all(c.shape is not None for c in schema.features):
            _try_model(model, inputs, schema)
        links = tuple(heads.link_of(loss) for loss in user_losses)
        program = Program(
            model=model,
            optimizer=self._get("optimizer"),
            losses=losses,
            is_sum=is_sum,
            metrics=resolve_metrics(self._get("metrics"), labels, links),
            lr_scheduler=self._get("lr_scheduler"),
        )
        pickled, sha256 = dump_program(program)
        spark = dataset.sparkSession
        num_proc = _check_slots(spark, self._get("num_proc"))
        store = default_store(spark, self._get("store"))
        run_dir = self._run_dir()
        return _Request(
            spark=spark,
            store=store,
            num_proc=num_proc,
            schema=schema,
            program=program,
            pickled=pickled,
            sha256=sha256,
            links=links,
            loss_weights=self._loss_weights(len(labels)),
            settings=self._settings(),
            seed=self._seed(store, run_dir),
            run_dir=run_dir,
            data_key=self._get("data_key"),
        )

    def _check_numbers(self) -> None:
        at_least = {
            "batch_size": 1,
            "val_batch_size": 1,
            "epochs": 1,
            "shuffle_bytes": 1,
            "max_retries": 0,
            "verbose": 0,
        }
        for name, least in at_least.items():
            value = self._get(name)
            if value is not None and value < least:
                raise InvalidArgumentError(f"{name} is {value}; it must be at least {least}.")
        for name in ("gradient_clip_norm", "start_timeout"):
            value = self._get(name)
            if value is not None and not value > 0:
                raise InvalidArgumentError(f"{name} is {value}; it must be more than 0.")
        if self.getOrDefault("restore_best") and not self._get("validation"):
            raise InvalidArgumentError(
                "restore_best needs validation rows to tell which epoch is best. Set validation, for example 0.1."
            )

    def _required(self, name: str, meaning: str) -> list[str]:
        value = self._get(name)
        if not value:
            raise InvalidArgumentError(f"{name} is required: name {meaning}.")
        return list(value)

    def _user_losses(self, num_labels: int) -> list[Any]:
        loss = self._get("loss")
        return list(loss) if isinstance(loss, (list, tuple)) else [loss] * num_labels

    def _loss_weights(self, num_labels: int) -> tuple[float, ...]:
        given = self._get("loss_weights")
        if given is None:
            return (1.0 / num_labels,) * num_labels
        if len(given) != num_labels:
            raise InvalidArgumentError(
                f"loss_weights has {len(given)} numbers and label_cols {num_labels} columns. Give one per label."
            )
        return tuple(given)

    def _settings(self) -> Settings:
        given = self._get("settings")
        if given is not None and not isinstance(given, Settings):
            raise InvalidArgumentError(
                f"settings is {given!r:.100}; it must be a sparkhvd.Settings."
            )
        return Settings.resolve() if given is None else given

    def _bind_inputs(self, model: torch.nn.Module, schema: DataSchema) -> Any:
        shapes, inputs = self._get("input_shapes"), self._get("inputs")
        return bind_inputs(model, schema, input_shapes=shapes, inputs=inputs)

    def _run_dir(self) -> str:
        run_id = self._get("run_id")
        if run_id is None:
            run_id = f"{self.uid}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
        if not re.fullmatch(r"[A-Za-z0-9._-]*[A-Za-z0-9_-][A-Za-z0-9._-]*", run_id):
            raise InvalidArgumentError(
                f"run_id is {run_id!r}; it names a folder and may hold letters, digits, '.', '_' and '-'."
            )
        return f"runs/{run_id}"

    def _seed(self, store: Store, run_dir: str) -> int:
        """The seed given; else the one that this run had before; else a new one, which the run remembers."""
        path = f"{run_dir}/seed.json"
        seed = self._get("random_seed")
        if seed is None and self._get("run_id") is not None and store.exists(path):
            seed = json.loads(store.read_bytes(path))
        seed = secrets.randbits(32) if seed is None else seed
        store.write_bytes(path, json.dumps(seed).encode())
        return int(seed)

    # -- run ------------------------------------------------------------------------------------------

    def _specify(self, request: _Request, data: PreparedData) -> tuple[TrainSpec, tuple[int, ...]]:
        """What the ranks get, now that the shapes of the columns are known; the model is tried on them."""
        schema, program = data.manifest.schema, request.program
        inputs = self._bind_inputs(program.model, schema)
        widths = _try_model(program.model, inputs, schema)
        labels = [c.name for c in schema.labels]
        validation = self._get("validation")
        fraction = None if isinstance(validation, str) or not validation else float(validation)
        batch_size = self.getOrDefault("batch_size")
        drop_last = self.getOrDefault("drop_last")
        full = request.num_proc * batch_size if drop_last else 1
        _check_split(data.manifest, validation, full)
        weight = schema.sample_weight
        spec = TrainSpec(
            store=request.store,
            run_dir=request.run_dir,
            program_sha256=request.sha256,
            data_dir=data.data_dir,
            inputs=inputs,
            labels=bind_labels(schema, self._user_losses(len(labels))),
            sample_weight=weight.name if weight is not None else None,
            loss_weights=request.loss_weights,
            batch_size=batch_size,
            val_batch_size=self._get("val_batch_size") or batch_size,
            epochs=self.getOrDefault("epochs"),
            seed=request.seed,
            shuffle=self.getOrDefault("shuffle"),
            shuffle_bytes=self.getOrDefault("shuffle_bytes"),
            drop_last=drop_last,
            has_validation=bool(validation),
            validation=fraction,
            gradient_clip_norm=self._get("gradient_clip_norm"),
            restore_best=self.getOrDefault("restore_best"),
            fingerprint=self._fingerprint(request, data),
        )
        return spec, widths

    def _fingerprint(self, request: _Request, data: PreparedData) -> str:
        """What two fits must share so that one can go on where the other stopped."""
        names = ("batch_size", "shuffle", "drop_last", "validation", "gradient_clip_norm")
        manifest = data.manifest
        facts = {
            **describe_program(request.program),
            **{name: self._get(name) for name in names},
            "num_proc": request.num_proc,
            "random_seed": request.seed,
            "rows": manifest.num_rows,
            "columns": manifest.schema.to_dict(),
            "files": [f.rows for f in manifest.files],
        }
        return json.dumps(facts, sort_keys=True)

    def _launch(self, request: _Request, spec: TrainSpec) -> JobReport:
        checkpoints = Checkpoints(request.store, request.run_dir)
        verbose = self.getOrDefault("verbose")
        options = LaunchOptions(
            settings=request.settings,
            start_timeout_s=self._get("start_timeout"),
            max_retries=self.getOrDefault("max_retries"),
            verbose=verbose,
            shared=request.store,
            run_dir=request.run_dir,
            progress=checkpoints.latest_epoch,
            requirements=("torch", "pyarrow", "numpy", "cloudpickle"),
        )
        reporter = EpochReporter(
            checkpoints, epochs=spec.epochs, verbose=verbose, progress=self._get("progress")
        )
        with reporter:
            return launch(request.spark, train, (spec,), {}, request.num_proc, options)

    def _collect(
        self,
        request: _Request,
        spec: TrainSpec,
        data: PreparedData,
        report: JobReport,
        widths: tuple[int, ...],
    ) -> TorchModel:
        """A TorchModel with the trained weights, this estimator's uid and its params."""
        result: TrainResult = report.results[0]
        checkpoint = Checkpoints(request.store, request.run_dir).load(result.epoch)
        module = copy.deepcopy(request.program.model)
        module.load_state_dict(checkpoint.model)
        for parameter in module.parameters():
            parameter.grad = None
        model = TorchModel()
        model._resetUid(self.uid)
        model._fitted = Fitted(
            module=module.eval(),
            columns=data.manifest.schema.features,
            labels=tuple(c.name for c in data.manifest.schema.labels),
            inputs=spec.inputs,
            links=request.links,
            widths=widths,
            history=result.history,
            timings={
                "materialize": data.seconds,
                "launch": report.launch_s,
                "train": report.run_s,
            },
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


def _try_model(model: torch.nn.Module, inputs: InputBinding, schema: DataSchema) -> tuple[int, ...]:
    """Elements per row of the model's outputs, one per label, from a run on zeros; the model is not changed."""
    trial = copy.deepcopy(model).eval()
    widths = output_widths(trial, inputs, schema.features)
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
            f"one full step of num_proc * batch_size = {full:,} rows. Lower batch_size, or set drop_last=False."
        )


def _check_slots(spark: Any, num_proc: int | None) -> int:
    """The number of ranks, if the configured cluster can run them at once."""
    conf = SparkShim(spark).conf((*placement.CONF_KEYS, *preflight.CONF_KEYS))
    preflight.check_conf(conf)
    slots = placement.configured_slots(conf, os.cpu_count() or 1)
    return placement.choose_num_proc(num_proc, slots)
