"""Horovod's estimators on sparkhvd's data path and engine: backends, hooks of subclasses, and values that differ."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.horovod.spark.common.backend import SparkBackend
from sparkhvd.horovod.spark.common.model import HorovodModel
from sparkhvd.horovod.spark.common.params import EstimatorParams
from sparkhvd.horovod.spark.common.store import Store, checked_for_fit
from sparkhvd.runner.options import JobReport, LaunchOptions
from sparkhvd.training.spec import TrainResult, TrainSpec
from sparkhvd.training.train import train

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from sparkhvd.estimator.fitting.inputs import FitSources
    from sparkhvd.estimator.fitting.request import Request
    from sparkhvd.estimator.params.options import FitOptions

__all__ = ["HorovodEstimator"]

# Arguments of `SparkBackend` that decide how its ranks are launched: names in `LaunchOptions`.
_LAUNCH = {
    "stderr": "stream",  # `stdout`, if it is given, too: lines of both come together
    "stdout": "stream",
    "verbose": "verbose",
    "start_timeout": "start_timeout_s",
    "prefix_output_with_timestamp": "timestamps",
}

# In place of the estimator of sparkhvd that a class has behind this one.
_Base: Any = object


class HorovodEstimator(EstimatorParams, _Base):  # type: ignore[misc]
    """Mixin before an estimator of sparkhvd."""

    # Columns of the fit that hold text, and bytes.
    _texts: frozenset[str] = frozenset()
    _binaries: frozenset[str] = frozenset()

    # --- hooks of subclasses

    def _get_or_create_backend(self) -> Any:
        """Return the backend of a fit: an object with `run(fn, args, kwargs, env)` and `num_processes()`.

        Raises:
            ValueError: both `backend` and `num_proc` are given.
        """
        backend, num_proc = self._get("backend"), self._get("num_proc")
        if backend is None:
            return SparkBackend(num_proc)
        if num_proc is not None and num_proc != backend.num_processes():
            raise InvalidArgumentError(
                f"num_proc is {num_proc}, and the backend has {backend.num_processes()} processes. Give one of them."
            )
        return backend

    def get_model_class(self) -> type[Any]:
        """Return the class of the model that a fit returns."""
        raise NotImplementedError

    def _get_model_kwargs(
        self, model: Any, history: Any, optimizer: Any, run_id: str, metadata: Any
    ) -> dict[str, Any]:
        """Return the keyword arguments of `get_model_class()`."""
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
        """Return the options with the backend's number of ranks, and Horovod's meaning of a run that is there."""
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

    def _fit_sources(self, sources: FitSources) -> Any:
        schema = sources.training.schema
        self._texts, self._binaries = _named(schema, "string"), _named(schema, "binary")
        fitted = super()._fit_sources(sources)
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

    def _history_of(self, fitted: Any) -> list[dict[str, Any]]:
        """Return the records of the epochs, in Horovod's shape."""
        records: list[dict[str, Any]] = fitted.getHistory()
        return records

    def _run_ranks(
        self, request: Request, spec: TrainSpec, options: LaunchOptions
    ) -> JobReport[TrainResult]:
        backend = self._backend
        if getattr(type(backend), "run", None) is SparkBackend.run:
            # Relaunches and live output, which a call of `run` in a backend of the program's own would not have.
            given = {
                option: backend._kwargs[name]
                for name, option in _LAUNCH.items()
                if backend._kwargs.get(name) is not None
            }
            options = replace(options, env={**options.env, **(backend._env or {})}, **given)
            report: JobReport[TrainResult] = super()._run_ranks(request, spec, options)
            return report
        began = time.monotonic()
        results = backend.run(train, args=(spec,), kwargs={}, env={})
        return JobReport(list(results), 1, 0.0, time.monotonic() - began, ())


def _named(schema: StructType, kind: str) -> frozenset[str]:
    return frozenset(each.name for each in schema.fields if each.dataType.typeName() == kind)


def _metadata(schema: StructType) -> dict[str, dict[str, Any]]:
    """Return what Horovod's models know of columns."""
    return {
        each.name: {
            "spark_data_type": type(each.dataType),
            "is_sparse_vector_only": False,
            "shape": None,
            "intermediate_format": "nochange",
            "max_size": None,
        }
        for each in schema.fields
    }
