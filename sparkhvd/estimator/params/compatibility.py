"""Names taken for compatibility: second names of values of other Params, and Params of Horovod without effect.

Other names of a whole Param (`maxIter` for `epochs`) are in its own row.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from pyspark.ml.param import TypeConverters

from sparkhvd.estimator.params.base import TorchParams, accessors
from sparkhvd.estimator.params.converters import any_value
from sparkhvd.estimator.params.table import TableParam, param

__all__ = ["CompatibilityParams", "IgnoredParams"]


def _switch(target: str, value: object, doc: str, *, accessors: Sequence[str] = ()) -> TableParam:
    """Make a Param whose True sets another Param to a value."""
    return param(
        TypeConverters.toBoolean,
        doc,
        default=False,
        stands_for=(target, value),
        accessors=accessors,
    )


def _no_effect(instead: str, *, accessors: Sequence[str] = ()) -> TableParam:
    """Make a Param of Horovod that has no effect."""
    return param(any_value, "no effect", no_effect=instead, accessors=accessors)


@accessors
class IgnoredParams(TorchParams):
    """Params of Horovod without effect; setting one of these warns once per estimator and its copies."""

    backend = _no_effect(
        "give num_proc, and variables as spark.executorEnv.NAME in Spark's configuration"
    )
    partitions_per_process = _no_effect(
        "rows are shared out evenly whatever the partitions are; give num_partitions to write fewer files, or repartition the DataFrame"
    )
    reader_pool_type = _no_effect("data are read by threads")
    mp_start_method = _no_effect("ranks are always processes of their own")
    tensorflow_dataset_prefetch_buffer_size = _no_effect("batches are always read ahead")
    shuffle_buffer_size = _no_effect("give shuffle_bytes", accessors=("ShufflingBufferSize",))
    continuous_cols = _no_effect("give feature_cols, and inputs={...} to pass columns by name")
    categorical_cols = _no_effect("give feature_cols, and inputs={...} to pass columns by name")
    data_module = _no_effect(
        "batches come from the materialized data; read them yourself in a function for sparkhvd.runner.run"
    )
    compress_sparse_cols = _no_effect("how a sparse vector is stored follows from the column")
    transformation_edit_fields = _no_effect("shapes follow from the data")
    transformation_removed_fields = _no_effect("only the columns that the model needs are read")

    def __init__(self) -> None:
        super().__init__()
        self._warned: set[str] = set()  # a copy of the estimator has the same set

    def _set(self, **values: object) -> Any:
        """Set Params; warns about those without effect."""
        for name, value in values.items():
            instead = self._row(name).no_effect
            if instead and value is not None and name not in self._warned:
                self._warned.add(name)
                warnings.warn(f"{name} has no effect in sparkhvd: {instead}.", stacklevel=4)
        return super()._set(**values)


@accessors
class CompatibilityParams(IgnoredParams):
    """Params that are other words for values of others, are refused, or have no effect."""

    restore_best = _switch("return_model", "best", "the same as return_model='best'")
    inmemory_cache_all = _switch(
        "shuffle_bytes",
        1 << 62,  # more than any data have
        "keep all data in memory, whatever they take",
        accessors=("InMemoryCacheAll",),
    )

    train_minibatch_fn = param(
        any_value,
        "Horovod's: give train_step",
        refused="is Horovod's. Give train_step instead, a function of (model, batch, ctx) that returns the loss: the loop calls backward() "
        "and steps",
    )
