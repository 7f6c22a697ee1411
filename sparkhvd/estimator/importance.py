"""Permutation importance: the loss of quality when one feature is permuted among the rows."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from pyspark.ml.evaluation import Evaluator
from pyspark.ml.linalg import DenseVector, Vector
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import IntegerType, StructField, StructType

from sparkhvd.errors import InvalidArgumentError

# Column of the permuted rows: number of the permutation, 0 for the original.
_VARIANT = "__sparkhvd_variant"
# Salt of the sampling seed: a user's column `rand` with the same seed would otherwise decide which rows are sampled.
_SALT = 0x7065726D


class Importance(NamedTuple):
    """Importance of a feature.

    Attributes:
        feature: name of its column; for an element of a vector the name in Spark ML's metadata, else "column[3]".
        importance: mean by which the measure gets worse.
        std: its standard deviation over the repetitions.
    """

    feature: str
    importance: float
    std: float


class _Part(NamedTuple):
    """Feature: an element of a column, or None for the whole column."""

    name: str
    column: str
    element: int | None


def permutation_importance(
    transform: Callable[[DataFrame], DataFrame],
    columns: Sequence[str],
    df: DataFrame,
    evaluator: Evaluator,
    *,
    num_rows: int,
    repeats: int,
    seed: int,
) -> list[Importance]:
    """Compute the importance of each feature, in descending order.

    Args:
        transform: of the model.
        columns: read by the model.
        df: rows with these columns and the evaluator's.
        evaluator: of Spark ML.
        num_rows: maximum of sampled rows.
        repeats: permutations of each feature.
        seed: of sampling and permutations.

    Raises:
        InvalidArgumentError: there are fewer than two rows, or a number is too small.
    """
    if num_rows < 2 or repeats < 1:
        raise InvalidArgumentError(
            f"permutation_importance: num_rows is {num_rows} and repeats {repeats}; they must be at least 2 and 1."
        )
    rows = [
        row.asDict(recursive=False)
        for row in df.orderBy(F.rand(seed ^ _SALT)).limit(num_rows).collect()
    ]
    if len(rows) < 2:
        raise InvalidArgumentError(
            f"permutation_importance: the DataFrame has {len(rows)} rows; nothing can be permuted."
        )
    parts = [part for name in columns for part in _parts(df.schema[name], rows[0][name])]
    variants = list(_variants(rows, parts, repeats, random.Random(seed)))
    schema = StructType([*df.schema.fields, StructField(_VARIANT, IntegerType())])
    names = df.columns
    values = [
        (*(row[name] for name in names), number)
        for number, variant in enumerate(variants)
        for row in variant
    ]
    predicted = transform(df.sparkSession.createDataFrame(values, schema)).cache()
    try:
        found = [
            evaluator.evaluate(predicted.where(F.col(_VARIANT) == number))
            for number in range(len(variants))
        ]
    finally:
        predicted.unpersist()
    sign = 1.0 if evaluator.isLargerBetter() else -1.0
    importances = []
    for index, part in enumerate(parts):
        worse = [sign * (found[0] - found[1 + index * repeats + k]) for k in range(repeats)]
        importances.append(Importance(part.name, statistics.fmean(worse), statistics.pstdev(worse)))
    return sorted(importances, key=lambda each: -each.importance)


def _parts(field: StructField, value: Any) -> list[_Part]:
    """Return the features in a column, by its first value."""
    if not isinstance(value, (Vector, list)) or len(value) == 1:
        return [_Part(field.name, field.name, None)]
    names = {index: f"{field.name}[{index}]" for index in range(len(value))}
    attributes = (field.metadata or {}).get("ml_attr", {}).get("attrs", {})
    for group in attributes.values():
        names.update({a["idx"]: a["name"] for a in group if "idx" in a and "name" in a})
    return [_Part(names[index], field.name, index) for index in range(len(value))]


def _variants(
    rows: list[dict[str, Any]], parts: Sequence[_Part], repeats: int, generator: random.Random
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows, then `repeats` copies per feature with its values permuted."""
    yield rows
    for part in parts:
        for _ in range(repeats):
            others = generator.sample(rows, len(rows))
            yield [
                {**row, part.column: _replaced(row[part.column], other[part.column], part.element)}
                for row, other in zip(rows, others, strict=True)
            ]


def _replaced(value: Any, other: Any, element: int | None) -> Any:
    if element is None:
        return other
    if isinstance(value, Vector):
        numbers = value.toArray().copy()
        numbers[element] = other.toArray()[element]
        return DenseVector(numbers)
    return [*value[:element], other[element], *value[element + 1 :]]
