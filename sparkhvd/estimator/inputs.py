"""What a fit reads: the columns of its DataFrames, checked before any job, and materialized after."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.data.functions import RowFunctions
from sparkhvd.estimator.data.manifest import Manifest
from sparkhvd.estimator.data.packed import RowSource
from sparkhvd.estimator.data.prepare import PreparedData, prepare
from sparkhvd.estimator.data.schema import DataSchema, check_schema
from sparkhvd.estimator.data.store import Store

__all__ = ["FitData", "check_inputs", "is_dataframe", "prepare_inputs", "row_functions"]


@dataclass(frozen=True)
class FitData:
    """The materialized data of a fit.

    Attributes:
        training: data of the DataFrame given to `fit`.
        validation: data of a second DataFrame, or None.
        schema: of the training data, with shape and dtype of decoded columns.
        examples: collated columns for two rows, to try the model on.
    """

    training: PreparedData
    validation: PreparedData | None
    schema: DataSchema
    examples: Mapping[str, Any] = field(default_factory=dict)

    @property
    def manifest(self) -> Manifest:
        """Of the training data."""
        return self.training.manifest

    @property
    def seconds(self) -> float:
        """How long it took to have the data."""
        return self.training.seconds + (self.validation.seconds if self.validation else 0.0)

    def describe(self) -> dict[str, Any]:
        """What two fits must share so that one can go on where the other stopped."""
        manifests = [self.manifest, *([self.validation.manifest] if self.validation else [])]
        return {
            "rows": self.manifest.num_rows,
            "columns": self.schema.to_dict(),
            "files": [f.rows for f in self.manifest.files],
            "validation rows": [f.rows for m in manifests[1:] for f in m.files],
        }


def is_dataframe(value: Any) -> bool:
    """Whether a value is a DataFrame, classic or Connect."""
    return hasattr(value, "sparkSession") and hasattr(value, "schema")


def row_functions(get: Callable[[str], Any]) -> RowFunctions:
    """The user's decoders and collate functions from the Params."""
    return RowFunctions(get("decoders") or {}, get("collate_fn") or {})


def check_inputs(
    get: Callable[[str], Any],
    dataset: Any,
    *,
    functions: RowFunctions,
    model_dtype: str,
    class_labels: Sequence[str],
) -> DataSchema:
    """Check the columns of both DataFrames; starts no job.

    Args:
        get: the value of a Param by its name.
        dataset: the DataFrame given to `fit`.
        functions: what `row_functions` gave.
        model_dtype: dtype of the model's parameters.
        class_labels: label columns that hold class indices.

    Raises:
        InvalidArgumentError: a column cannot be used, or `validation` is a DataFrame with other columns.
    """
    validation, sparse_cols = get("validation"), get("sparse_cols")
    if sparse_cols is None and get("input_shapes") is not None:
        sparse_cols = []  # a shape is one of a dense tensor
    options: dict[str, Any] = {
        "feature_cols": get("feature_cols"),
        "label_cols": get("label_cols"),
        "sample_weight_col": get("sample_weight_col"),
        "model_dtype": model_dtype,
        "feature_dtypes": get("feature_dtypes"),
        "label_dtypes": get("label_dtypes"),
        "class_labels": class_labels,
        "decoders": functions.decoders,
        "collated": functions.collate,
        "sparse_cols": sparse_cols,
        "handle_invalid": get("handle_invalid") or "error",
    }
    has_frame = is_dataframe(validation)
    schema = check_schema(dataset.schema, validation=None if has_frame else validation, **options)
    if has_frame:
        try:
            other = check_schema(validation.schema, **options)
        except InvalidArgumentError as e:
            raise InvalidArgumentError(f"The DataFrame given as validation: {e}") from e
        for ours, theirs in zip(schema.columns, other.columns, strict=True):
            if (ours.kind, ours.dtype) != (theirs.kind, theirs.dtype):
                raise InvalidArgumentError(
                    f"The DataFrame given as validation has column {ours.name!r} of type {theirs.source}; in the training "
                    f"data it is {ours.source}. Cast one of them."
                )
    return schema


def prepare_inputs(
    dataset: Any,
    validation: Any,
    schema: DataSchema,
    functions: RowFunctions,
    store: Store,
    *,
    app_id: str,
    data_key: str | None,
    validation_key: str | None,
    keep_data: bool,
) -> FitData:
    """Materialize the DataFrame, and the second one if `validation` is one; or reuse what there is.

    `validation_key` is to the second DataFrame what `data_key` is to the first.

    Raises:
        InvalidArgumentError: the data cannot be used, see `materialize`; or a decoder fails on the first row.
    """
    training = prepare(
        dataset, schema, store, app_id=app_id, data_key=data_key, keep_data=keep_data
    )
    held_out = None
    if is_dataframe(validation):
        plain = DataSchema(schema.features, schema.labels, schema.sample_weight)
        try:
            held_out = prepare(
                validation,
                plain,
                store,
                app_id=app_id,
                data_key=validation_key,
                keep_data=keep_data,
            )
        except InvalidArgumentError as e:
            raise InvalidArgumentError(f"The DataFrame given as validation: {e}") from e
        _check_shapes(training.manifest.schema, held_out.manifest.schema)
    seen, examples = _look(training.manifest, functions, store)
    return FitData(training, held_out, seen, examples)


def _check_shapes(training: DataSchema, validation: DataSchema) -> None:
    pairs = zip(training.features + training.labels, validation.columns, strict=False)
    for ours, theirs in pairs:
        if (ours.kind, ours.shape) != (theirs.kind, theirs.shape):
            raise InvalidArgumentError(
                f"The DataFrame given as validation has shape {theirs.shape} per row in column {ours.name!r}; the "
                f"training data have {ours.shape}. Both must have one shape."
            )


def _look(
    manifest: Manifest, functions: RowFunctions, store: Store
) -> tuple[DataSchema, dict[str, Any]]:
    """The schema after decoders, and examples of collated columns, both from the first row."""
    names = functions.needs_example(manifest.schema)
    if not names:
        return manifest.schema, {}
    with RowSource(store, manifest) as source:
        first = source.read(names, np.zeros(1, np.int64))
    schema = functions.with_decoded(manifest.schema, first)
    columns = [c for c in schema.columns if c.is_collated]
    # Two rows, so that an output with one entry in all is told from one entry per row.
    twice = np.zeros(2, np.int64)
    rows = functions.decode(columns, {c.name: first[c.name].take(twice) for c in columns})
    return schema, functions.collate_batch(rows)
