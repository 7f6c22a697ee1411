"""Data of a fit: sources by role, checks of columns before any job, and preparation of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkhvd.data.columns.binding import model_dtype
from sparkhvd.data.columns.check import check_fraction, check_schema
from sparkhvd.data.columns.decoders import RowFunctions
from sparkhvd.data.columns.schema import DataSchema
from sparkhvd.data.manifest import Manifest, Range, joined_ranges
from sparkhvd.data.parquet.manifest import fingerprint
from sparkhvd.data.reading.sampler import split_validation
from sparkhvd.data.reading.source import Source, open_source
from sparkhvd.data.reuse import PreparedData
from sparkhvd.data.source import DataFrameSource, DataSource, ParquetFiles, Target
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.params.generated import FitOptions, PredictOptions
from sparkhvd.spark import is_dataframe
from sparkhvd.training.program import Program
from sparkhvd.training.user_code.transformations import transformed_by

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


READERS = ("pyarrow", "petastorm")


@dataclass(frozen=True)
class FitSources:
    """Rows of a fit by role.

    Attributes:
        training: rows to train on.
        validation: rows to validate with, if they are in a separate source.
        split: fraction or column that takes validation rows from the training rows, or None.
    """

    training: DataSource
    validation: DataSource | None = None
    split: float | str | None = None

    @property
    def is_incremental(self) -> bool:
        """True if only new files of a table are read."""
        return isinstance(self.training, ParquetFiles) and self.training.is_incremental

    @property
    def has_validation(self) -> bool:
        """True if the fit validates."""
        return self.validation is not None or bool(self.split)


@dataclass(frozen=True)
class FitData:
    """Data of a fit.

    Attributes:
        training: rows to train on.
        validation: rows of a validation source, or None.
        schema: columns of the training data, with shape and dtype of decoded columns.
        transformed: columns as the user's transformations return them; None without transformations.
        examples: collated columns of two rows, on which the driver tries the model.
    """

    training: PreparedData
    validation: PreparedData | None
    schema: DataSchema
    transformed: DataSchema | None = None
    examples: Mapping[str, Any] = field(default_factory=dict)

    @property
    def manifest(self) -> Manifest:
        """Manifest of the training data."""
        return self.training.manifest

    @property
    def seconds(self) -> float:
        """Seconds spent preparing the data."""
        return self.training.seconds + (self.validation.seconds if self.validation else 0.0)

    @property
    def is_other_each_time(self) -> bool:
        """True if a nondeterministic plan computed some values for this fit."""
        return self.training.is_other_each_time or (
            self.validation is not None and self.validation.is_other_each_time
        )

    @property
    def ranges(self) -> dict[str, Range]:
        """Smallest and largest integer of each column passed unchanged to model and loss."""
        if self.transformed is not None:
            return {}
        manifests = [self.manifest, *([self.validation.manifest] if self.validation else [])]
        return joined_ranges(m.ranges for m in manifests)

    @property
    def skipped(self) -> dict[str, tuple[int, int]]:
        """Rows skipped by `handle_invalid` and rows in total, by "training" and "validation"."""
        manifests = {"training": self.manifest}
        if self.validation:
            manifests["validation"] = self.validation.manifest
        return {n: (m.num_skipped, m.num_skipped + m.num_rows) for n, m in manifests.items()}

    @property
    def origin(self) -> dict[str, Any]:
        """Origin of the rows as JSON values: rows, columns, digest, and versions of tables as far as known."""
        return {
            "rows": self.manifest.num_rows,
            "columns": [column.name for column in self.manifest.schema.columns],
            "digest": self.manifest.digest,
            "tables": [table.to_dict() for table in self.manifest.tables],
        }

    def describe(self) -> dict[str, Any]:
        """Collect the facts that must not change when a fit resumes the run."""
        manifests = [self.manifest, *([self.validation.manifest] if self.validation else [])]
        tables = {"tables": [t.identity for t in self.manifest.tables]}
        return {
            **(tables if self.manifest.tables else {}),
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


def row_functions(options: PredictOptions) -> RowFunctions:
    return RowFunctions(options.decoders or {}, options.collate_fn or {})


def required_modules(options: FitOptions) -> tuple[str, ...]:
    """List the modules that executors need."""
    of_reader = ("petastorm",) if options.reader == "petastorm" else ()
    return ("torch", "pyarrow", "numpy", "cloudpickle", *of_reader)


def dataframe_sources(df: DataFrame, validation: DataFrame | float | str | None) -> FitSources:
    """Make the sources of `fit(df)` from the DataFrame and the Param `validation`."""
    if is_dataframe(validation):
        return FitSources(DataFrameSource(df), DataFrameSource(validation))
    if validation is not None and not isinstance(validation, str):
        check_fraction(validation)
    return FitSources(DataFrameSource(df), split=validation)


def _check_reader(reader: str, source: DataSource) -> None:
    if reader not in READERS:
        raise InvalidArgumentError(
            f"reader is {reader!r}; expected one of {', '.join(map(repr, READERS))}."
        )
    if reader == "petastorm" and not isinstance(source, ParquetFiles):
        raise InvalidArgumentError(
            "reader='petastorm' reads existing data sets, but fit(df) writes its own data in a format that petastorm cannot read. "
            "Give the data set to fit_on_parquet(path), or leave reader out."
        )


def check_inputs(
    options: FitOptions,
    sources: FitSources,
    *,
    functions: RowFunctions,
    model_dtype: str,
    class_labels: Sequence[str],
    keeps_types: bool,
) -> DataSchema:
    """Check the columns of all sources and decide how each is stored, without a Spark job.

    Args:
        options: options of the fit.
        sources: sources of the fit.
        functions: the user's decoders and collate functions.
        model_dtype: dtype of the model's parameters.
        class_labels: label columns that hold class indices.
        keeps_types: True if a user's function receives the numbers before the model.

    Raises:
        InvalidArgumentError: a column cannot be used, the validation source has other columns, or `reader` cannot read
            these data.
    """
    _check_reader(options.reader, sources.training)
    sparse_cols = options.sparse_cols
    if sparse_cols is None and options.input_shapes is not None:
        sparse_cols = []  # input_shapes describe dense tensors, so vectors become dense
    decisions: dict[str, Any] = {
        "feature_cols": options.feature_cols,
        "label_cols": options.label_cols or [],  # a train_step may work without labels
        "sample_weight_col": options.sample_weight_col,
        "group_col": options.group_col,
        "model_dtype": model_dtype,
        "feature_dtypes": options.feature_dtypes,
        "label_dtypes": options.label_dtypes,
        "class_labels": class_labels,
        "decoders": functions.decoders,
        "collated": functions.collate,
        "sparse_cols": sparse_cols,
        "handle_invalid": options.handle_invalid or "error",
        "keeps_types": keeps_types,
    }
    training, validation = sources.training, sources.validation
    schema = check_schema(
        training.schema, validation=sources.split, data_name=training.name, **decisions
    )
    if validation is not None:
        try:
            other = check_schema(validation.schema, data_name=validation.name, **decisions)
        except InvalidArgumentError as e:
            raise InvalidArgumentError(f"The {validation.name} given as validation: {e}") from e
        for ours, theirs in zip(schema.columns, other.columns, strict=True):
            if (ours.kind, ours.dtype) != (theirs.kind, theirs.dtype):
                raise InvalidArgumentError(
                    f"The {validation.name} given as validation has column {ours.name!r} of type {theirs.source}; in the training "
                    f"data it is {ours.source}. Cast one of them."
                )
    return schema


def prepare_inputs(
    sources: FitSources,
    schema: DataSchema,
    program: Program,
    target: Target,
    *,
    inputs: Mapping[str, str | Sequence[str]] | None,
) -> FitData:
    """Prepare all sources, and run the user's functions on the first training rows.

    Args:
        sources: sources of the fit.
        schema: columns of the sources, as `check_inputs` returned them.
        program: the user's objects.
        target: target of the training data.
        inputs: the Param.

    Raises:
        InvalidArgumentError: the data cannot be used, see `materialize`, or a user function fails.
    """
    data = prepare_sources(sources, schema, target)
    training = data.training
    functions, transformations = program.functions, program.user.transformations
    if not functions.needs_example(data.schema) and not transformations:
        return data
    # The source is opened once for both uses, because each open costs several round trips on an object store.
    with open_source(training.files or target.store, training.manifest) as rows:
        seen, examples = _read_examples(rows, data.schema, functions)
        transformed = None
        if transformations:
            transformed = transformed_by(
                transformations,
                rows,
                seen,
                functions,
                inputs=inputs,
                model_dtype=model_dtype(program.model),
            )
    return replace(data, schema=seen, transformed=transformed, examples=examples)


def prepare_sources(sources: FitSources, schema: DataSchema, target: Target) -> FitData:
    """Prepare the rows of all sources.

    Args:
        sources: sources of the fit.
        schema: columns of the sources, as `check_inputs` returned them.
        target: target of the training data.

    Raises:
        InvalidArgumentError: the data cannot be used, see `materialize`.
    """
    training = sources.training.prepare(schema, target)
    held_out = None
    if sources.validation is not None:
        name = sources.validation.name
        plain = replace(schema, validation=None)
        try:
            held_out = sources.validation.prepare(plain, replace(target, role="validation"))
        except InvalidArgumentError as e:
            raise InvalidArgumentError(f"The {name} given as validation: {e}") from e
        _check_shapes(training.manifest.schema, held_out.manifest.schema, name)
    return FitData(training, held_out, training.manifest.schema)


def _check_shapes(training: DataSchema, validation: DataSchema, name: str) -> None:
    pairs = zip(training.columns, validation.columns, strict=False)
    for ours, theirs in pairs:
        if (ours.kind, ours.shape) != (theirs.kind, theirs.shape):
            raise InvalidArgumentError(
                f"The {name} given as validation has shape {theirs.shape} per row in column {ours.name!r}, but the "
                f"training data have {ours.shape}. Both must have the same shape."
            )


def _read_examples(
    rows: Source, schema: DataSchema, functions: RowFunctions
) -> tuple[DataSchema, dict[str, Any]]:
    """Find the schema after decoders, and examples of collated columns, by decoding the first row."""
    names = functions.needs_example(schema)
    if not names:
        return schema, {}
    first = rows.read(names, rows.examples(1))
    decoded = functions.with_decoded(schema, first)
    columns = [c for c in decoded.columns if c.is_collated]
    # The row is used twice, because two rows distinguish an output with one entry per row from one entry in total.
    twice = np.zeros(2, np.int64)
    pair = functions.decode(columns, {c.name: first[c.name].take(twice) for c in columns})
    return decoded, functions.collate_batch(pair)


def check_split(manifest: Manifest, split: float | str | None, full_step: int) -> None:
    """Reject too few training or validation rows before any rank starts.

    Args:
        manifest: manifest of the training data.
        split: fraction or column that takes validation rows from the training data, or None.
        full_step: minimum number of training rows, because `drop_last` drops a step with fewer rows.
    """
    total, held_out = manifest.num_rows, manifest.num_validation or 0
    if split and not isinstance(split, str):
        held_out = len(split_validation(total, split, 0)[1])
    if isinstance(split, str) and manifest.num_validation is None:
        return  # the number of validation rows is unknown here, so the ranks check it
    if split and held_out == 0:
        raise InvalidArgumentError(
            f"validation: column {split!r} marks none of {total:,} rows. A row with true, or a number above 0, is "
            "a validation row."
        )
    if held_out == total:
        raise InvalidArgumentError(
            f"validation: column {split!r} marks all {total:,} rows, so no rows are left to train on."
        )
    if total - held_out < full_step:
        raise InvalidArgumentError(
            f"drop_last drops a step that is not full, but the {total - held_out:,} training rows are fewer than "
            f"one full step of num_proc * batch_size * accumulate = {full_step:,} rows. Lower batch_size, or set drop_last=False."
        )
