"""All Params of a fit, and the parts of their values that others need: the ranks, the fingerprint, a `train_fn`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparkhvd.estimator.params.cluster import ClusterParams
from sparkhvd.estimator.params.compatibility import CompatibilityParams
from sparkhvd.estimator.params.data import DataParams
from sparkhvd.estimator.params.model import ModelParams
from sparkhvd.estimator.params.options import FitOptions
from sparkhvd.estimator.params.prediction import PredictParams
from sparkhvd.estimator.params.table import rows_of
from sparkhvd.estimator.params.training import TrainingParams

__all__ = [
    "TrainParams",
    "changed_options",
    "columns_in",
    "fingerprint_options",
    "rank_options",
    "train_fn_effects",
]


class TrainParams(
    CompatibilityParams, ClusterParams, TrainingParams, DataParams, ModelParams, PredictParams
):
    """All Params of a fit."""

    def _options(self) -> FitOptions:
        """Check the values and read them.

        Raises:
            InvalidArgumentError: one is out of range, cannot be used here, or contradicts another.
        """
        self._check_values()
        # The columns in `inputs` are the features where nothing else says so.
        options = self._read_options(FitOptions)
        functions = (options.transformation_fn, options.batch_transform_fn)
        is_transformed = any(function is not None for function in functions)
        if "feature_cols" in options.explicit or not options.inputs or is_transformed:
            return options
        return replace(options, feature_cols=columns_in(options.inputs))


def columns_in(inputs: Mapping[str, str | Sequence[str]]) -> list[str]:
    """List the columns in the Param `inputs`, each once."""
    groups = [[v] if isinstance(v, str) else v for v in inputs.values()]
    return list(dict.fromkeys(itertools.chain.from_iterable(groups)))


def rank_options(options: FitOptions) -> dict[str, Any]:
    """Select the fields of `TrainSpec` that are Params as they are."""
    return {n: getattr(options, n) for n, row in rows_of(TrainParams).items() if row.to_ranks}


def fingerprint_options(options: FitOptions) -> dict[str, object]:
    """Select the values that two fits must share so that one can resume the other."""
    return {n: getattr(options, n) for n, row in rows_of(TrainParams).items() if row.fingerprint}


def changed_options(options: FitOptions) -> dict[str, object]:
    """Select the values that were set to something else than the default."""
    rows = {n: row for n, row in rows_of(TrainParams).items() if row.is_option}
    values = {n: getattr(options, n) for n in options.explicit & rows.keys()}
    return {n: value for n, value in values.items() if value != rows[n].default}


def train_fn_effects() -> dict[str, str]:
    """List the Params that a `train_fn` does not see, or sees by way of the optimizer."""
    return {name: row.train_fn for name, row in rows_of(TrainParams).items() if row.train_fn}
