"""Permutation importance: how much worse predictions get when one feature is permuted among the rows."""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from pyspark.ml.evaluation import Evaluator
from pyspark.ml.functions import array_to_vector, vector_to_array
from pyspark.ml.linalg import Vector, VectorUDT
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import ArrayType, IntegerType, StructField, StructType

from sparkhvd.data.columns.binding import quoted
from sparkhvd.data.tables import element_names
from sparkhvd.errors import InvalidArgumentError

# Column that numbers the copies of the rows; copy 0 is the original.
_VARIANT = "__sparkhvd_variant"
# Salt of the sampling seed. Without it, a user's column rand(seed) with the same seed would decide which rows are
# sampled.
_SALT = 0x7065726D
# Columns added to the sampled rows: the number of the row, and for each copy the number of the row that gives the
# value.
_NUMBERS = (StructField("row", IntegerType()), StructField("others", ArrayType(IntegerType())))
# Number of evaluations at a time.
_EVALUATIONS = 4


class Importance(NamedTuple):
    """Importance of a feature.

    Attributes:
        feature: name of the column; for an element of a vector its name in Spark ML's metadata, else "column[3]".
        importance: mean amount by which the measure gets worse.
        std: standard deviation of this amount over the repetitions.
    """

    feature: str
    importance: float
    std: float


class _Part(NamedTuple):
    """Feature: a whole column (`element` is None), or one element of it."""

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
        transform: function that adds the model's outputs.
        columns: columns that the model reads.
        df: rows with the columns of the model and the evaluator.
        evaluator: evaluator of Spark ML.
        num_rows: maximum number of sampled rows.
        repeats: number of permutations of each feature.
        seed: seed of sampling and permutations.

    Raises:
        InvalidArgumentError: there are fewer than two rows, `num_rows` or `repeats` is too small, `evaluator` has no method
            `evaluate`, or the DataFrame lacks a column of the model or the label of an evaluator of Spark ML.
    """
    if not callable(getattr(evaluator, "evaluate", None)):
        raise InvalidArgumentError(
            f"permutation_importance: evaluator is {evaluator!r:.100}; it must be an evaluator of Spark ML, such as "
            'BinaryClassificationEvaluator(labelCol="label").'
        )
    if num_rows < 2 or repeats < 1:
        raise InvalidArgumentError(
            f"permutation_importance: num_rows is {num_rows} and repeats {repeats}; they must be at least 2 and 1."
        )
    transform(df)  # reports a missing column before rows are sampled
    # Evaluators of a user's own may read other columns than their Params say.
    is_of_spark = type(evaluator).__module__ == "pyspark.ml.evaluation"
    if is_of_spark and evaluator.hasParam("labelCol"):
        label = str(evaluator.getOrDefault("labelCol"))
        if not {label, label.partition(".")[0]} & {*df.columns}:
            raise InvalidArgumentError(
                f"permutation_importance: the evaluator's labelCol is {label!r}, which the DataFrame does not have. Its columns are: "
                f"{quoted(df.columns)}."
            )
    spark = df.sparkSession
    columns = list(dict.fromkeys(columns))
    rows = df.orderBy(F.rand(seed ^ _SALT)).limit(num_rows).collect()
    if len(rows) < 2:
        raise InvalidArgumentError(
            f"permutation_importance: the DataFrame has {len(rows)} rows; nothing can be permuted."
        )
    parts = [part for name in columns for part in _parts(df, name, rows[0][name])]
    generator = random.Random(seed)
    permutations = [
        generator.sample(range(len(rows)), len(rows)) for _ in range(len(parts) * repeats)
    ]
    numbered = [
        (*row, number, list(others))
        for number, (row, others) in enumerate(
            zip(rows, zip(*permutations, strict=True), strict=True)
        )
    ]
    fields = [StructField(f"c{i}", f.dataType) for i, f in enumerate(df.schema.fields)]
    sampled = spark.createDataFrame(numbered, StructType([*fields, *_NUMBERS]))
    predicted = transform(_permuted(sampled, df.schema, parts, repeats))
    number = 1 + len(permutations)
    if is_of_spark:
        copies = _copies_of_rows(_read_columns(predicted, evaluator), number)
    else:
        copies = _collected_copies(predicted, number)

    def measure(copy: Callable[[], DataFrame]) -> float:
        return float(evaluator.evaluate(copy()))

    # Several evaluations run at once, because most of their time is planning and waiting for short tasks.
    with ThreadPoolExecutor(_EVALUATIONS if is_of_spark else 1) as pool:
        found = list(pool.map(measure, copies))
    sign = 1.0 if evaluator.isLargerBetter() else -1.0
    importances = []
    for index, part in enumerate(parts):
        worse = [sign * (found[0] - found[1 + index * repeats + k]) for k in range(repeats)]
        importances.append(Importance(part.name, statistics.fmean(worse), statistics.pstdev(worse)))
    return sorted(importances, key=lambda each: -each.importance)


def _parts(df: DataFrame, column: str, value: Any) -> list[_Part]:
    """List the features in a column: the elements of a vector or list, as in the first row, or the column itself."""
    if not isinstance(value, (Vector, list)) or len(value) == 1:
        return [_Part(column, column, None)]
    names = element_names(df, column)
    return [_Part(names.get(i, f"{column}[{i}]"), column, i) for i in range(len(value))]


def _read_columns(predicted: DataFrame, evaluator: Evaluator) -> DataFrame:
    """Select the input columns of a Spark evaluator, and the column with the copy's number."""
    params = (p for p in evaluator.params if p.name.endswith("Col") and evaluator.isDefined(p))
    values = [str(evaluator.getOrDefault(p)) for p in params]
    names = [
        name
        for name in predicted.columns
        if name == _VARIANT or any(v == name or v.startswith(f"{name}.") for v in values)
    ]
    quoted = (name.replace("`", "``") for name in names)
    return predicted.select(*(F.col(f"`{name}`") for name in quoted))


def _copies_of_rows(read: DataFrame, number: int) -> list[Callable[[], DataFrame]]:
    """Divide rows by copy number into DataFrames of one partition, without a shared query.

    A filter with another number would make Spark compile the query again for each copy.

    Args:
        read: columns that an evaluator reads, and the number of the copy.
        number: number of copies.
    """
    if not hasattr(read, "toArrow"):  # before pyspark 4
        return _collected_copies(read, number)
    vectors = {f.name for f in read.schema.fields if isinstance(f.dataType, VectorUDT)}
    fields = [(f, F.col("`{}`".format(f.name.replace("`", "``")))) for f in read.schema.fields]
    table = read.select(
        *(vector_to_array(c).alias(f.name) if f.name in vectors else c for f, c in fields)
    ).toArrow()
    columns = [
        (array_to_vector(c) if f.name in vectors else c).alias(f.name, metadata=f.metadata)
        for f, c in fields
    ]
    copy_of_row = table.column(_VARIANT).to_numpy()

    def copy(index: int) -> DataFrame:
        rows = table.filter(copy_of_row == index)
        return read.sparkSession.createDataFrame(rows).coalesce(1).select(*columns)

    return [functools.partial(copy, index) for index in range(number)]


def _collected_copies(read: DataFrame, number: int) -> list[Callable[[], DataFrame]]:
    """Divide rows of any type by the number of their copy, as `_copies_of_rows` divides rows of an evaluator of Spark."""
    copies: list[list[Any]] = [[] for _ in range(number)]
    for copy, row in read.select(_VARIANT, F.struct("*").alias("row")).collect():
        copies[copy].append(row)
    create = read.sparkSession.createDataFrame
    return [functools.partial(create, copy, read.schema) for copy in copies]


def _permuted(
    sampled: DataFrame, schema: StructType, parts: Sequence[_Part], repeats: int
) -> DataFrame:
    """Append `repeats` copies of the rows per feature, with the feature's values permuted.

    Copy 0 is the original. Spark's own expressions make the copies, so that the driver sends only the sampled rows.

    Args:
        sampled: sampled rows with columns c0, c1, ..., `row`, and `others`: for each copy the row that gives the value.
        schema: schema of the rows.
        parts: features in the order of the copies.
        repeats: number of copies per feature.
    """
    places = {field.name: i for i, field in enumerate(schema.fields)}
    read = {name: f"c{places[name]}" for name in {part.column for part in parts}}
    others = sampled.select(
        F.col("row").alias("other"), *(F.col(c).alias(f"o{c}") for c in read.values())
    )
    original = sampled.select("*", F.lit(0).alias("copy"), F.col("row").alias("other"))
    copies = sampled.select("*", F.posexplode("others").alias("copy", "other"))
    every = original.unionByName(copies.withColumn("copy", F.col("copy") + 1))
    joined = every.join(F.broadcast(others), "other")
    permuted: dict[str, Column] = {}
    for name, column in read.items():
        value, other = F.col(column), F.col(f"o{column}")
        numbers = [i for i, part in enumerate(parts) if part.column == name]
        first, last = 1 + numbers[0] * repeats, (numbers[-1] + 1) * repeats
        if parts[numbers[0]].element is not None:
            element = F.floor((F.col("copy") - first) / repeats)
            other = _replaced(value, other, element, type(schema[name].dataType) is VectorUDT)
        permuted[name] = F.when(F.col("copy").between(first, last), other).otherwise(value)
    return joined.select(
        *(
            permuted.get(f.name, F.col(f"c{i}")).alias(f.name, metadata=f.metadata)
            for i, f in enumerate(schema.fields)
        ),
        F.col("copy").alias(_VARIANT),
    )


def _replaced(value: Column, other: Column, element: Column, is_vector: bool) -> Column:
    """Replace one element of a vector or list by the element of another row."""
    if is_vector:
        value, other = vector_to_array(value), vector_to_array(other)
    mixed = F.transform(value, lambda x, i: F.when(i == element, F.get(other, i)).otherwise(x))
    return array_to_vector(mixed) if is_vector else mixed
