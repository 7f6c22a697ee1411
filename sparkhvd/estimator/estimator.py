"""`TorchEstimator.fit(df)`: check, prepare the data, launch the ranks, collect the trained model."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.ml import Estimator
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter

from sparkhvd.data.columns.labels import bind_labels
from sparkhvd.data.reuse import Scope
from sparkhvd.data.source import Target
from sparkhvd.estimator.fitting.cross_validation import FoldModels
from sparkhvd.estimator.fitting.inputs import (
    FitData,
    FitSources,
    check_split,
    dataframe_sources,
    prepare_inputs,
    reader_packages,
)
from sparkhvd.estimator.fitting.on_parquet import (
    PathLike,
    Places,
    open_sources,
    split_arguments,
)
from sparkhvd.estimator.fitting.options import describe_result
from sparkhvd.estimator.fitting.progress import EpochReporter, poll_interval, report_skipped
from sparkhvd.estimator.fitting.request import Request, bind_features, check_request, try_model
from sparkhvd.estimator.fitting.runs import Folds
from sparkhvd.estimator.model import TorchModel
from sparkhvd.estimator.param_table import rows_of, with_signature
from sparkhvd.estimator.params import TrainParams
from sparkhvd.estimator.saving.persistence import EstimatorReader, EstimatorWriter
from sparkhvd.runner.job import JobReport, LaunchOptions, launch
from sparkhvd.sessions import active_session, check_session
from sparkhvd.training.checkpoints.files import Checkpoints
from sparkhvd.training.modules.architecture import copy_with
from sparkhvd.training.modules.fitted import Fitted
from sparkhvd.training.program import describe_program, store_program
from sparkhvd.training.spec import TrainResult, TrainSpec
from sparkhvd.training.train import train
from sparkhvd.training.user_code.transformations import bind_transformed, flat_columns

if TYPE_CHECKING:
    from pyspark.ml.param import Param
    from pyspark.sql import DataFrame, SparkSession
    from typing_extensions import Unpack

    from sparkhvd.estimator.keywords import EstimatorKeywords

__all__ = ["TorchEstimator"]


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

    def __init__(self, *positional: Any, **keywords: Unpack[EstimatorKeywords]) -> None:
        super().__init__()
        self._scope: Scope | None = None  # what the fits of a fitMultiple share
        self._folds = Folds()  # copies have the same
        self._set_keywords(positional, keywords)

    def _fit(self, dataset: DataFrame) -> TorchModel:
        """Train on a DataFrame; Spark's `fit` calls it."""
        return self._fit_sources(dataframe_sources(dataset, self._get("validation")))

    def fit_on_parquet(
        self,
        path: PathLike | Mapping[Any, Any] | Sequence[Any] | None = None,
        params: Mapping[Any, Any] | Sequence[Any] | None = None,
        *,
        validation_path: PathLike | None = None,
        storage_options: Mapping[str, Any] | None = None,
        dataset_idx: int | None = None,
        spark: SparkSession | None = None,
    ) -> TorchModel | list[TorchModel]:
        """Train on Parquet files as they are: the ranks read them, and Spark only starts the ranks.

        Columns of numbers, lists, ML vectors, decimals, binary and text (with decoders), and folders `column=value`. Every row
        comes once per epoch, whatever files and row groups there are. Nobody may change the files during the fit.

        Horovod's call without a path reads the data below the estimator's store: `intermediate_train_data`, and with
        `validation` set `intermediate_val_data`.

        Args:
            path: a file, or a folder with files and folders in it, as a path or URL that the driver and all executors
                can read. A dict or list here is taken as `params`.
            params: a param map to fit with, or a list of them, which gives a list of models. A `run_id` then gets the
                index of the map, as in `fitMultiple`.
            validation_path: rows to validate with, instead of `validation`.
            storage_options: credentials and such for both paths, as for `Store.create`.
            dataset_idx: Horovod's index of the data in the store.
            spark: the session whose tasks become ranks; None means the active one.

        Raises:
            InvalidArgumentError: a param or column is wrong, or the data cannot be used (before any rank starts, where footers
                or the first rows tell).
            RankError: a rank failed, or found values that cannot be used; the message names file, column and count.
        """
        path, maps, is_list = split_arguments(path, params)
        places = Places(path, validation_path, storage_options, dataset_idx)
        if is_list:
            data = (str(path), str(validation_path), dataset_idx)
            maps = self._with_run_ids(maps, data)
        session = active_session() if spark is None else spark
        check_session(session)
        models = []
        for each in maps:
            estimator = self.copy(each)
            models.append(estimator._fit_sources(open_sources(estimator, places, session)))
        return models if is_list else models[0]

    def _fit_sources(self, sources: FitSources) -> TorchModel:
        """Train; the driver waits until the model is there.

        Raises:
            InvalidArgumentError: a param or column is wrong (before any job), or the data hold what cannot be used
                (before any rank starts).
            PreflightError: the cluster or the store cannot run this.
            RankError: a rank failed. The last checkpoint stays in the store, under `runs/<run_id>`; a fit with this
                run_id goes on from it. Without a run_id a note at the error names it.
        """
        request = check_request(self, sources)
        with request.held:
            try:
                model, epoch = self._train(request)
            except BaseException as e:
                request.run.explain_failure(e, self._get("run_id"))
                raise
            if request.num_checkpoints:
                request.run.finish(epoch, request.num_checkpoints)
        if not request.num_checkpoints:
            request.run.delete()
        return model

    def _train(self, request: Request) -> tuple[TorchModel, int]:
        """Return the model, and the epoch whose weights it has."""
        with contextlib.nullcontext(self._scope) if self._scope else Scope() as scope:
            target = Target(
                request.store,
                request.run.run_dir,
                scope,
                request.data_key,
                keep_data=self.getOrDefault("keep_data"),
            )
            data = prepare_inputs(
                request.sources,
                request.schema,
                request.program,
                target,
                inputs=self._get("inputs"),
            )
            report_skipped(data.skipped, request.cluster.verbose)
            spec, widths = self._specify(request, data)
            request.held.check()
            request.run.check(spec.fingerprint, spec.epochs)
            if data.is_other_each_time:
                request.run.warn_of_other_data()
            given = self._get("model")
            written = store_program(request.store, spec.run_dir, request.pickled, given)
            spec = replace(spec, program_weights=written)
            report = self._launch(request, spec)
        return self._collect(request, spec, data, report, widths), report.results[0].epoch

    def fitMultiple(  # noqa: N802 - Spark's name
        self,
        dataset: DataFrame,
        paramMaps: Sequence[dict[Param[Any], Any]],  # noqa: N803
    ) -> Iterator[tuple[int, TorchModel]]:
        """Fit with each of several param maps; they share the materialized data.

        Data that no plan names (see `reuse`) go when the last of the models is there, or the iterator is dropped.
        A `run_id` gets the index of the param map: `mine-0`, `mine-1`; with the second DataFrame and this run_id, as in
        the second fold of a CrossValidator, `mine-fold2-0`, `mine-fold2-1`. `data_key` is not used: a CrossValidator
        calls this once per fold, with other rows each time.
        """
        shared = self.copy()
        shared.clear(shared.data_key)
        shared._scope = scope = Scope()
        has_run_id = any(given.get(self.run_id, self._get("run_id")) for given in paramMaps)
        maps = self._with_run_ids(paramMaps, dataset.semanticHash() if has_run_id else 0)
        return FoldModels(Estimator.fitMultiple(shared, dataset, maps), len(maps), scope)

    def _with_run_ids(
        self, maps: Sequence[dict[Param[Any], Any]], data: Hashable
    ) -> list[dict[Param[Any], Any]]:
        """Param maps with a run id of their own each, where one is set; equal `data` are one fold."""
        run_ids = [given.get(self.run_id, self._get("run_id")) for given in maps]
        return [
            {**given, self.run_id: self._folds.name(run_id, data, index)} if run_id else given
            for index, (given, run_id) in enumerate(zip(maps, run_ids, strict=True))
        ]

    # -- run ------------------------------------------------------------------------------------------

    def _specify(self, request: Request, data: FitData) -> tuple[TrainSpec, tuple[int, ...] | None]:
        """What the ranks get, now that the shapes of the columns are known; the model is tried on them."""
        program, transformed = request.program, data.transformed
        schema = data.schema if transformed is None else transformed
        inputs = bind_features(self, program.model, schema)
        if transformed is not None:
            inputs = bind_transformed(inputs, transformed)
        widths = try_model(program.model, inputs, schema, data.examples)
        split, held_out = request.sources.split, data.validation
        batch_size = self.getOrDefault("batch_size")
        drop_last = self.getOrDefault("drop_last")
        accumulate = self.getOrDefault("accumulate")
        full = request.cluster.num_proc * batch_size * accumulate if drop_last else 1
        check_split(data.manifest, split, full)
        weight = schema.sample_weight
        spec = TrainSpec(
            store=request.store,
            run_dir=request.run.run_dir,
            start_from=request.run.start_from,
            checkpoint_interval_s=self.getOrDefault("checkpoint_interval_s"),
            num_checkpoints=max(1, request.num_checkpoints),
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
            has_validation=request.sources.has_validation,
            validation=float(split) if split and not isinstance(split, str) else None,
            validation_dir=held_out.data_dir if held_out is not None else None,
            validation_store=held_out.files if held_out is not None else None,
            num_workers=self.getOrDefault("num_workers"),
            val_num_workers=self._get("val_reader_num_workers") or self.getOrDefault("num_workers"),
            **request.training,
            looks_for_gpu=request.cluster.looks_for_gpu,
            transformed=transformed,
            trial=data.examples if widths is None else None,
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

    def _fingerprint(self, request: Request, data: FitData) -> str:
        """What two fits must share so that one can go on where the other stopped."""
        values = {n: self._get(n) for n, row in rows_of(type(self)).items() if row.fingerprint}
        if data.validation is not None:
            values["validation"] = "a DataFrame"
        facts = {
            **describe_program(request.program),
            **values,
            **request.program.functions.describe(),
            **data.describe(),
            **describe_result(
                request.training, has_schedule=request.program.lr_scheduler is not None
            ),
            "num_proc": request.cluster.num_proc,
            "random_seed": request.seed,
            # Decides whether rows are permuted at once or in windows.
            "shuffle_bytes": self._shuffle_bytes() if self.getOrDefault("shuffle") else None,
        }
        return json.dumps(facts, sort_keys=True)

    def _launch(self, request: Request, spec: TrainSpec) -> JobReport[TrainResult]:
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
            early=spec.early(),
            use_gpu=cluster.use_gpu,
            is_alone=cluster.finds_gpu,
        )
        reporter = EpochReporter(
            checkpoints,
            epochs=spec.epochs,
            verbose=cluster.verbose,
            progress=self._get("progress"),
            poll_s=poll_interval(request.store, cluster.num_proc, cluster.slots, cluster.verbose),
            name=spec.run_dir.removeprefix("runs/").removeprefix(f"{self.uid}-"),
        )
        with reporter:
            report = launch(request.shim, train, (spec,), {}, cluster.num_proc, options)
        reporter.ended(report.results[0].stopped, len(report.results[0].history))
        report_skipped(report.results[0].skipped, cluster.verbose)
        if report.results[0].warning:
            warnings.warn(report.results[0].warning, stacklevel=4)
        return report

    def _collect(
        self,
        request: Request,
        spec: TrainSpec,
        data: FitData,
        report: JobReport[TrainResult],
        widths: tuple[int, ...] | None,
    ) -> TorchModel:
        """A TorchModel with the trained weights, this estimator's uid and its params."""
        result: TrainResult = report.results[0]
        checkpoints = Checkpoints(request.store, spec.run_dir)
        state = checkpoints.load_weights(checkpoints.path(result.epoch))
        module = copy_with(request.program.model, state)
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
            widths=result.widths if widths is None else widths,
            history=result.history,
            timings={
                "materialize": data.seconds,
                "launch": report.launch_s,
                "train": report.run_s,
            },
            run_id=spec.run_dir.removeprefix("runs/"),
        )
        self._copyValues(model)
        if model._get("use_gpu"):  # of the ranks; a task of transform may have none
            model.clear(model.use_gpu)
        model._set(store=request.store)
        return model

    # -- save and load ---------------------------------------------------------------------------------

    def write(self) -> MLWriter:
        """A writer: `estimator.write().overwrite().save(path)`."""
        return EstimatorWriter(self)

    @classmethod
    def read(cls) -> MLReader[TorchEstimator]:
        """A reader: `TorchEstimator.read().load(path)`."""
        return EstimatorReader(cls)

    @classmethod
    def load(cls, path: str, *, trust: bool = False) -> TorchEstimator:
        """Load a saved estimator; `trust` as in `TorchModel.load`."""
        loaded: TorchEstimator = EstimatorReader(cls, trusted=trust).load(path)
        return loaded
