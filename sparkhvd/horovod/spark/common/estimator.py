"""Horovod's estimators on sparkhvd's data path and engine: backends, hooks of subclasses, and differing values."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from pyspark.ml.linalg import VectorUDT
from pyspark.sql import types

from sparkhvd.data.columns.binding import columns_in
from sparkhvd.data.source import DataFrameSource
from sparkhvd.data.store import store as own
from sparkhvd.data.store.temporary import default_store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.fitting.on_parquet import DataPaths, open_sources
from sparkhvd.horovod.spark.common import parquet
from sparkhvd.horovod.spark.common.backend import SparkBackend, launch_arguments
from sparkhvd.horovod.spark.common.model import HorovodModel
from sparkhvd.horovod.spark.common.params import EstimatorParams
from sparkhvd.horovod.spark.common.store import Store, bare_url
from sparkhvd.runner.options import JobReport, LaunchOptions
from sparkhvd.training.spec import TrainResult, TrainSpec
from sparkhvd.training.train import train

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkhvd.data.columns.schema import AnySchema
    from sparkhvd.estimator.fitting.inputs import FitSources
    from sparkhvd.estimator.fitting.request import FitRequest
    from sparkhvd.estimator.params.generated import FitOptions

__all__ = ["HorovodEstimator", "checked_for_fit"]

# Launch arguments of `SparkBackend`, with their names in `LaunchOptions`.
_LAUNCH = {
    "stderr": "stream",  # `stdout` wins if both are given: their lines are joined
    "stdout": "stream",
    "verbose": "verbose",
    "start_timeout": "start_timeout_s",
    "prefix_output_with_timestamp": "timestamps",
}

# Stands for the next base class of a subclass: its estimator of sparkhvd.
_Base: Any = object


class HorovodEstimator(EstimatorParams, _Base):  # type: ignore[misc]
    """Mixin with Horovod's behaviour, in front of an estimator of sparkhvd."""

    _trusts_own_files: ClassVar[bool] = True
    _short_steps = True
    _store_class: ClassVar[type[Store]] = Store
    # Text columns and binary columns of the fit.
    _texts: frozenset[str] = frozenset()
    _binaries: frozenset[str] = frozenset()

    # --- hooks of subclasses

    def _get_or_create_backend(self) -> Any:
        """Choose the backend, an object with `run(fn, args, kwargs, env)` and `num_processes()`.

        Raises:
            InvalidArgumentError: `num_proc` is a pair, or differs from the backend's number of ranks.
        """
        backend, num_proc = self._get("backend"), self._get("num_proc")
        if isinstance(num_proc, tuple):
            raise InvalidArgumentError(
                f"num_proc is {num_proc}; only sparkhvd's own TorchEstimator supports elastic training. Give a number."
            )
        if backend is None:
            return SparkBackend(num_proc)
        if num_proc is not None and num_proc != backend.num_processes():
            raise InvalidArgumentError(
                f"num_proc is {num_proc}, and the backend has {backend.num_processes()} processes. Give one of them."
            )
        return backend

    def get_model_class(self) -> type[Any]:
        """Class of the fitted model."""
        raise NotImplementedError

    def _get_model_kwargs(
        self, model: Any, history: Any, optimizer: Any, run_id: str, metadata: Any
    ) -> dict[str, Any]:
        """Keyword arguments of `get_model_class()`."""
        return {
            "history": history,
            "model": model,
            "feature_columns": self._get("feature_cols"),
            "label_columns": self._get("label_cols"),
            "optimizer": optimizer,
            "run_id": run_id,
            "_metadata": metadata,
            "loss": self._get("loss"),
            "loss_constructors": self._get("loss_constructors"),
            "input_shapes": self._get("input_shapes"),
        }

    # --- a fit

    def _options(self) -> FitOptions:
        return self._with_backend(super()._options())

    def _with_backend(self, options: FitOptions) -> FitOptions:
        """Set the backend's number of ranks, and Horovod's treatment of an existing run."""
        self._backend = backend = self._get_or_create_backend()
        store = checked_for_fit(options.store)
        if not isinstance(store, Store) or store.saving_runs():
            options = replace(options, warm_start=options.warm_start or bool(options.run_id))
        elif "keep_checkpoints" not in options.explicit:
            options = replace(options, keep_checkpoints=0)
        if type(backend) is SparkBackend and backend._num_proc is None:
            return options
        explicit = options.explicit | {"num_proc"}
        return replace(options, num_proc=backend.num_processes(), explicit=explicit)

    def _reads_parquet(self) -> bool:
        """Whether the user's code on the ranks reads the data of a fit as Parquet."""
        return False

    def _fit_sources(self, sources: FitSources) -> Any:
        schema = sources.training.schema
        self._texts, self._binaries = _named(schema, "string"), _named(schema, "binary")
        fitted = super()._fit_sources(self._as_parquet(sources))
        model = self.get_model_class()(
            **self._get_model_kwargs(
                fitted.getModel(),
                self._history_of(fitted),
                self._get("optimizer"),
                fitted.getRunId(),
                _metadata(schema),
            )
        )
        if isinstance(model, HorovodModel):
            model._take(fitted)
        return model

    def _as_parquet(self, sources: FitSources) -> FitSources:
        """Write the data to the store's folders if the ranks read Parquet. Return the sources for the ranks."""
        store = checked_for_fit(self._get("store"))
        if not isinstance(sources.training, DataFrameSource):
            return sources
        weight = self._get("sample_weight_col")
        features = self._get("feature_cols") or columns_in(self._get("inputs") or {})
        labels = self._get("label_cols") or []
        columns = list(dict.fromkeys([*features, *labels, *([weight] if weight else [])]))
        seed = self._get("random_seed")
        if not self._reads_parquet():
            if isinstance(store, (own.Store, str, os.PathLike)):  # else the fit's checks reject it
                parquet.remember(_opened(store), sources, columns, seed)
            return sources
        options = super()._options()
        split = [sources.split] if isinstance(sources.split, str) else []
        if not columns or {*columns, *split} - {*sources.training.schema.names}:
            return sources  # the fit's checks report missing Params
        spark = sources.training.spark
        places = parquet.write(default_store(spark, store), sources, columns, seed)
        return self._open_places(options, places, spark)[0]

    def _open_parquet(
        self, places: DataPaths, spark: SparkSession
    ) -> tuple[FitSources, dict[str, Any] | None]:
        options = super()._options()
        if places.path is not None or options.store is None:
            return open_sources(options, places, spark)
        store = _opened(checked_for_fit(options.store))
        found = parquet.find(store, places, spark, has_validation=bool(options.validation))
        return self._open_places(options, found, spark)

    def _open_places(
        self, options: FitOptions, places: DataPaths, spark: SparkSession
    ) -> tuple[FitSources, dict[str, Any] | None]:
        """Open data, with validation rows in separate files if there are any."""
        if places.validation_path is not None:
            options = replace(options, validation=None)
        return open_sources(options, places, spark)

    def _history_of(self, fitted: Any) -> list[dict[str, Any]]:
        """Records of the epochs, in Horovod's shape."""
        records: list[dict[str, Any]] = fitted.getHistory()
        return records

    def _takes_slots(self) -> bool:
        # A program's own backend may run ranks anywhere. If it starts Spark tasks, their launch checks the slots.
        return launch_arguments(self._backend) is not None

    def _run_ranks(
        self, request: FitRequest, spec: TrainSpec, options: LaunchOptions
    ) -> JobReport[TrainResult]:
        if (launching := launch_arguments(self._backend)) is not None:
            arguments, env = launching
            given = {_LAUNCH[name]: arguments[name] for name in _LAUNCH if name in arguments}
            options = replace(options, env={**options.env, **env}, **given)
            report: JobReport[TrainResult] = super()._run_ranks(request, spec, options)
            return report
        began = time.monotonic()
        results = self._backend.run(train, args=(spec,), kwargs={}, env={})
        return JobReport(list(results), 1, 0.0, time.monotonic() - began, ())


def _opened(store: Any) -> own.Store:
    return store if isinstance(store, own.Store) else own.Store(os.fspath(store))


def _named(schema: AnySchema, kind: str) -> frozenset[str]:
    return frozenset(each.name for each in schema.fields if each.dataType.typeName() == kind)


def _metadata(schema: AnySchema) -> dict[str, dict[str, Any]]:
    """Metadata of columns for Horovod's models. Types are pyspark's classes, because programs compare them."""
    classes = {"VectorUDT": VectorUDT, **vars(types)}
    return {
        each.name: {
            "spark_data_type": classes.get(type(each.dataType).__name__, type(each.dataType)),
            "is_sparse_vector_only": False,
            "shape": None,
            "intermediate_format": "nochange",
            "max_size": None,
        }
        for each in schema.fields
    }


def checked_for_fit(store: Any) -> Any:
    """Check the folders of a run by the store's own methods, and keep runs there.

    Raises:
        InvalidArgumentError: its class has no place, or a method returns a place that a run cannot use.
    """
    if not isinstance(store, Store):
        return store
    kind = type(store).__name__
    if not hasattr(store, "_place"):
        raise InvalidArgumentError(
            f"store is a {kind}, whose __init__ has not called that of its base, so it has no place. Derive it from FilesystemStore and "
            "call super().__init__(prefix_path)."
        )
    name = "a-run"
    run = bare_url(store._absolute(store.get_run_path(name)))
    folder, _, last = run.rpartition("/")
    if last != name or "://" not in run:
        raise InvalidArgumentError(
            f"{kind}.get_run_path({name!r}) is {run!r}, and a run is a folder with the name of its run_id. Return an absolute path or URL "
            "of a folder, '/', and the run_id; or give runs_path."
        )
    for method, wanted in (("get_checkpoint_path", "checkpoints"), ("get_logs_path", "logs")):
        given = getattr(store, method)(name)
        if given is not None and bare_url(store._absolute(given)) not in (f"{run}/{wanted}", run):
            raise InvalidArgumentError(
                f"{kind}.{method}({name!r}) is {given!r}, which a fit would not use: it writes to {run}/{wanted}. Override get_run_path or give "
                f"runs_path to have the whole run elsewhere, and leave {method} as it is."
            )
    if folder != bare_url(store.full_url("runs")):
        store._move_runs(folder)
    return store
