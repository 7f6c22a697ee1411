"""What a fit reads: the columns of its DataFrames or Parquet files, checked before any job, and made ready after."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparkhvd.data.columns.check import check_schema
from sparkhvd.data.columns.decoders import RowFunctions
from sparkhvd.data.columns.schema import DataSchema
from sparkhvd.data.manifest import Manifest
from sparkhvd.data.parquet.discover import ParquetDataset, fingerprint, read_manifest
from sparkhvd.data.reading.source import open_source
from sparkhvd.data.reuse import PreparedData, Scope, prepare
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.spark import is_dataframe

__all__ = [
    "FitData",
    "ParquetTable",
    "check_inputs",
    "prepare_inputs",
    "reader_packages",
    "row_functions",
]


READERS = ("pyarrow", "petastorm")


@dataclass(frozen=True)
class ParquetTable:
    """Parquet that others wrote, in the place of a DataFrame: it has columns and a session, and ranks read it as it is."""

    dataset: ParquetDataset
    sparkSession: Any  # noqa: N815 - as of a DataFrame

    @property
    def schema(self) -> Any:
        """The columns as a Spark StructType."""
        return self.dataset.schema


@dataclass(frozen=True)
class FitData:
    """The data of a fit.

    Attributes:
        training: data of the DataFrame given to `fit`, or of the files given to `fit_on_parquet`.
        validation: data of a second DataFrame or folder, or None.
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

    @property
    def is_other_each_time(self) -> bool:
        """Whether a plan that gives other values each time has computed some of them for this fit."""
        return self.training.is_other_each_time or (
            self.validation is not None and self.validation.is_other_each_time
        )

    @property
    def skipped(self) -> dict[str, tuple[int, int]]:
        """By DataFrame, "training" and "validation", rows that `handle_invalid` left out, and rows in all."""
        manifests = {"training": self.manifest}
        if self.validation:
            manifests["validation"] = self.validation.manifest
        return {n: (m.num_skipped, m.num_skipped + m.num_rows) for n, m in manifests.items()}

    def describe(self) -> dict[str, Any]:
        """What two fits must share so that one can go on where the other stopped."""
        manifests = [self.manifest, *([self.validation.manifest] if self.validation else [])]
        return {
            "rows": self.manifest.num_rows,
            "columns": self.schema.to_dict(),
            "files": [f.rows for f in self.manifest.files],
            "validation rows": [f.rows for m in manifests[1:] for f in m.files],
            **{
                f"Parquet files of {role}": fingerprint(data.manifest)
                for role, data in (("training", self.training), ("validation", self.validation))
                if data is not None and data.files is not None
            },
        }


def row_functions(get: Callable[[str], Any]) -> RowFunctions:
    """The user's decoders and collate functions from the Params."""
    return RowFunctions(get("decoders") or {}, get("collate_fn") or {})


def reader_packages(get: Callable[[str], Any]) -> tuple[str, ...]:
    """What the executors need to read the data, besides what every fit needs."""
    return ("petastorm",) if get("reader") == "petastorm" else ()


def _check_reader(reader: str, dataset: Any) -> None:
    if reader not in READERS:
        raise InvalidArgumentError(
            f"reader is {reader!r}; expected one of {', '.join(map(repr, READERS))}."
        )
    if reader == "petastorm" and not isinstance(dataset, ParquetTable):
        raise InvalidArgumentError(
            "reader='petastorm' reads data sets that are there, and fit(df) writes its own, which petastorm cannot read. Give "
            "the data set to fit_on_parquet(path), or leave reader out."
        )


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
        InvalidArgumentError: a column cannot be used, `validation` is a DataFrame with other columns, or `reader` is
            none for these data.
    """
    _check_reader(get("reader"), dataset)
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
    schema = check_schema(
        dataset.schema,
        validation=None if has_frame else validation,
        data_name=_kind(dataset),
        **options,
    )
    if has_frame:
        try:
            other = check_schema(validation.schema, data_name=_kind(validation), **options)
        except InvalidArgumentError as e:
            raise InvalidArgumentError(f"The {_kind(validation)} given as validation: {e}") from e
        for ours, theirs in zip(schema.columns, other.columns, strict=True):
            if (ours.kind, ours.dtype) != (theirs.kind, theirs.dtype):
                raise InvalidArgumentError(
                    f"The {_kind(validation)} given as validation has column {ours.name!r} of type {theirs.source}; in the training "
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
    keep_data: bool,
    run_dir: str,
    scope: Scope,
) -> FitData:
    """Materialize the DataFrame, and the second one if `validation` is one; or reuse what there is.

    One `data_key` names both; `scope` is the fit, or the fits of a fold, see `reuse`. Of Parquet only a list of its
    files is written, into the run's folder.

    Raises:
        InvalidArgumentError: the data cannot be used, see `materialize`; or a decoder fails on the first row.
    """

    def ready(data: Any, columns: DataSchema, key: str | None, data_dir: str) -> PreparedData:
        if isinstance(data, ParquetTable):
            return _listed(data.dataset, columns, store, f"{run_dir}/{data_dir}")
        options: dict[str, Any] = {"app_id": app_id, "data_key": key, "keep_data": keep_data}
        return prepare(data, columns, store, **options, scope=scope)

    training = ready(dataset, schema, data_key, "data")
    held_out = None
    if is_dataframe(validation):
        plain = DataSchema(schema.features, schema.labels, schema.sample_weight)
        try:
            validation_key = None if data_key is None else f"{data_key}/validation"
            held_out = ready(validation, plain, validation_key, "validation")
        except InvalidArgumentError as e:
            raise InvalidArgumentError(f"The {_kind(validation)} given as validation: {e}") from e
        _check_shapes(training.manifest.schema, held_out.manifest.schema, _kind(validation))
    seen, examples = _look(training.manifest, functions, training.files or store)
    return FitData(training, held_out, seen, examples)


def _listed(
    dataset: ParquetDataset, schema: DataSchema, store: Store, data_dir: str
) -> PreparedData:
    """Parquet as it is: a manifest of its files."""
    began = time.monotonic()
    manifest = read_manifest(dataset, schema)
    manifest.save(store, data_dir)
    seconds = time.monotonic() - began
    return PreparedData(manifest, data_dir, True, seconds, "read as it is", dataset.store)


def _kind(data: Any) -> str:
    return f"Parquet at {data.dataset.url!r}" if isinstance(data, ParquetTable) else "DataFrame"


def _check_shapes(training: DataSchema, validation: DataSchema, kind: str) -> None:
    pairs = zip(training.features + training.labels, validation.columns, strict=False)
    for ours, theirs in pairs:
        if (ours.kind, ours.shape) != (theirs.kind, theirs.shape):
            raise InvalidArgumentError(
                f"The {kind} given as validation has shape {theirs.shape} per row in column {ours.name!r}; the "
                f"training data have {ours.shape}. Both must have one shape."
            )


def _look(
    manifest: Manifest, functions: RowFunctions, store: Store
) -> tuple[DataSchema, dict[str, Any]]:
    """The schema after decoders, and examples of collated columns, both from the first row."""
    names = functions.needs_example(manifest.schema)
    if not names:
        return manifest.schema, {}
    with open_source(store, manifest) as source:
        first = source.read(names, source.examples(1))
    schema = functions.with_decoded(manifest.schema, first)
    columns = [c for c in schema.columns if c.is_collated]
    # Two rows, so that an output with one entry in all is told from one entry per row.
    twice = np.zeros(2, np.int64)
    rows = functions.decode(columns, {c.name: first[c.name].take(twice) for c in columns})
    return schema, functions.collate_batch(rows)
