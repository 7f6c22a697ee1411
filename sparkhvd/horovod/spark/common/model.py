"""Horovod's models: `transform` by a subclass's function on rows, else sparkhvd's on batches."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import functions as sql
from pyspark.sql.types import ArrayType, DoubleType, StructField, StructType

from sparkhvd import as_horovod
from sparkhvd import estimator as own
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.transform.local import LocalModel
from sparkhvd.horovod.spark.common.params import OUTPUTS_ALONE, ModelParams
from sparkhvd.horovod.spark.common.store import Store
from sparkhvd.runner.protocol import bytes_of, dumps, kept_carried
from sparkhvd.spark import SparkShim
from sparkhvd.training.torch_settings import settings_here

if TYPE_CHECKING:
    from pyspark import Broadcast
    from pyspark.sql import DataFrame

__all__ = ["HorovodModel"]

_NAMES = ("history", "model", "run_id", "_metadata", "optimizer", "loss", "loss_constructors")

# Stands for the next base class of a subclass: its model of sparkhvd.
_Base: Any = object


class HorovodModel(ModelParams, _Base):  # type: ignore[misc]
    """Mixin with Horovod's behaviour, in front of a model of sparkhvd."""

    _trusts_own_files: ClassVar[bool] = True
    _store_class: ClassVar[type[Store]] = Store
    _other_defaults: ClassVar[Mapping[str, object]] = OUTPUTS_ALONE
    # Model class of sparkhvd. Accessors of Params here have the names of its methods, and call those methods.
    _own_class: ClassVar[type[own.TorchModel]] = own.TorchModel

    def __init__(self, *positional: object, **keywords: Any) -> None:
        own = {name: keywords.pop(name, None) for name in _NAMES}
        super().__init__(*positional, **keywords)
        self._set(**own)

    def _set(self, **values: Any) -> Any:
        made = super()._set(**values)
        if values.get("model") is not None and self._fitted is None:
            self._own_class.setModel(self, values["model"])
        return made

    def _take(self, fitted: Any) -> None:
        """Store a fit's module and its columns."""
        self._fitted = fitted._fitted
        for param, value in fitted._paramMap.items():
            if self.hasParam(param.name) and not self.isSet(param.name):
                self._set(**{param.name: value})
        for param, value in fitted._defaultParamMap.items():
            # A subclass may have its own defaults.
            if self.hasParam(param.name) and self._get(param.name) is None:
                self._defaultParamMap[self.getParam(param.name)] = value

    def setModel(self, module: Any) -> Any:  # noqa: N802 - Horovod's name
        """Predict with another module, and return this object."""
        self._own_class.setModel(self, module)
        return self._set(model=module)

    def getModel(self) -> Any:  # noqa: N802
        module = self._get("model")
        return self._own_class.getModel(self) if module is None else module

    def getHistory(self) -> Any:  # noqa: N802
        """Records of the epochs, set as a Param or recorded by the fit."""
        records = self._get("history")
        return self._own_class.getHistory(self) if records is None else records

    def getRunId(self) -> Any:  # noqa: N802
        run_id = self._get("run_id")
        return self._own_class.getRunId(self) if run_id is None and self._fitted else run_id

    def get_prediction_fn(self) -> Callable[[Any, Mapping[str, Any]], Any]:
        """Create the prediction function, from the module and a row (a dict by column) to outputs.

        Subclasses may override this method.
        """
        features = self._get("feature_cols") or []
        shapes = self._get("input_shapes") or [[-1]] * len(features)

        def predict(model: Any, row: Mapping[str, Any]) -> Any:
            inputs = [
                torch.as_tensor(np.asarray(row[name]), dtype=torch.float32).reshape(shape)
                for name, shape in zip(features, shapes, strict=True)
            ]
            with torch.no_grad():
                return model(*inputs)

        return predict

    def _transform(self, dataset: DataFrame) -> DataFrame:
        is_own = type(self).get_prediction_fn is not HorovodModel.get_prediction_fn
        # A fit has not tried the module on the columns if the user's own batches fed it.
        is_known = self._fitted is not None and (self._fitted.widths or not self._fitted.columns)
        if is_known and not is_own:
            transformed: DataFrame = super()._transform(dataset)
            return transformed
        return _by_rows(dataset, *self._row_function(), self._output_names())

    def local(self) -> LocalModel:
        """Make a predictor without Spark, unless a subclass has its own row function for rows of Spark."""
        if type(self).get_prediction_fn is not HorovodModel.get_prediction_fn:
            raise InvalidArgumentError(
                f"local: {type(self).__name__} has a get_prediction_fn of its own, which transform calls. Call it on getModel() and a dict of "
                "a row's values."
            )
        return self._own_class.local(self)

    def _row_function(self) -> tuple[Callable[[Any, Mapping[str, Any]], Any], torch.nn.Module]:
        """The row function and the module, in the form sent to Spark's workers."""
        return self.get_prediction_fn(), self.getModel()

    def _output_names(self) -> list[str]:
        return list(
            self._get("outputCols")
            or [f"{name}__output" for name in self._get("label_cols") or ["prediction"]]
        )

    def getOutputCols(self) -> list[str]:  # noqa: N802
        """Columns that `transform` adds."""
        return self._output_names()


def _by_rows(
    dataset: DataFrame, predict: Callable[..., Any], model: Any, names: Sequence[str]
) -> DataFrame:
    """Add a column for each output: a number, or a vector if the function returns several numbers for a row.

    Starts a job for one row to find out; without a row, outputs are vectors.
    """
    rows = sql.struct(*[sql.col(f"`{name}`") for name in dataset.columns])
    # Pickled to bytes: the module and the function may be from a library that imports `horovod`, and the worker
    # registers that name before it unpickles them.
    carried = kept_carried(
        SparkShim(dataset.sparkSession), dumps((predict, model, settings_here()))
    )
    outputs = _row_outputs(carried)
    as_lists = sql.udf(lambda row: outputs(row), ArrayType(ArrayType(DoubleType())))
    first = dataset.limit(1).select(as_lists(rows).alias("outputs")).collect()
    widths = [len(each) for each in first[0]["outputs"]] if first else [2] * len(names)
    kinds = [DoubleType() if width == 1 else VectorUDT() for width in widths]

    def converted(row: Any) -> tuple[Any, ...]:
        pairs = zip(outputs(row), widths, strict=True)
        return tuple(v[0] if width == 1 else Vectors.dense(v) for v, width in pairs)

    result = StructType([StructField(n, k) for n, k in zip(names, kinds, strict=True)])
    made = sql.udf(lambda row: converted(row), result)(rows)
    whole = dataset.withColumn("sparkhvd outputs", made)
    columns = [sql.col(f"`sparkhvd outputs`.`{name}`").alias(name) for name in names]
    kept = [sql.col(f"`{name}`") for name in dataset.columns if name not in names]
    return whole.select(*kept, *columns)


def _row_outputs(carried: bytes | Broadcast[bytes]) -> Callable[[Any], list[list[float]]]:
    """Make a function to call the user's function for a row.

    A task unpickles the user's function at its first row.

    The returned function refers only to plain data, so that a worker checks itself and registers the name `horovod`
    first.
    """
    is_as_horovod = as_horovod.is_installed()
    loaded: list[Any] = []

    def outputs(row: Any) -> list[list[float]]:
        if not loaded:
            from sparkhvd.runner.preflight import enter_worker

            enter_worker(is_as_horovod=is_as_horovod)
            predict, model, settings = pickle.loads(bytes_of(carried))  # noqa: S301 - the driver's
            model.eval()
            from sparkhvd.training.torch_settings import as_on_driver

            loaded.extend((predict, model, lambda: as_on_driver(settings)))
        predict, model, prepared = loaded
        with prepared():
            made = predict(model, row.asDict())
        several = made if isinstance(made, (list, tuple)) else [made]
        return [np.asarray(each, np.float64).reshape(-1).tolist() for each in several]

    return outputs
