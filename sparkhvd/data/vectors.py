"""ML vectors on their way from Spark to a Python worker: four columns each, because one struct is slow.

A vector is struct<type, size, indices, values>, and a dense one has no indices, a null list. While Spark (4.1 and later)
writes an Arrow batch, it asks after every row how large the batch is, and each time walks over the nulls at a list column's
end: work that grows with the square of the rows. A million dense vectors of 32 took 12 s of the JVM's CPU to arrive; with
an empty list in place of the null, 2 s. So the parts are sent as columns of their own and joined in the worker, where that
copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

__all__ = ["join_vectors", "split_vectors", "vector_columns"]

PARTS = ("type", "size", "indices", "values")
_DENSE = 1


def vector_columns(schema: StructType) -> tuple[bool, ...]:
    """Return for each column of a Spark schema True if it has ML vectors."""
    return tuple(type(field.dataType).__name__ == "VectorUDT" for field in schema.fields)


def split_vectors(df: DataFrame, is_vector: Sequence[bool]) -> DataFrame:
    """Put four columns in place of every vector; the others stay as they are.

    Args:
        df: the DataFrame, classic or Connect; its names are plain and differ from each other.
        is_vector: `vector_columns` of its schema.
    """
    if not any(is_vector):
        return df
    from pyspark.sql import functions as F  # noqa: N812 - its usual name

    columns = []
    for name, splits in zip(df.columns, is_vector, strict=True):
        if not splits:
            columns.append(F.col(name))
            continue
        vector = F.unwrap_udt(F.col(name))
        parts = {part: vector.getField(part) for part in PARTS}
        parts["indices"] = F.coalesce(parts["indices"], F.array().cast("array<int>"))
        columns += [column.alias(f"{name}_{part}") for part, column in parts.items()]
    return df.select(*columns)


def join_vectors(batch: pa.RecordBatch, is_vector: Sequence[bool]) -> pa.RecordBatch:
    """Join the columns of `split_vectors` to Spark's structs again; columns are named c0, c1, ..."""
    if not any(is_vector):
        return batch
    arrays = iter(batch.columns)
    joined = [
        _vector(*(next(arrays) for _ in PARTS)) if splits else next(arrays) for splits in is_vector
    ]
    return pa.RecordBatch.from_arrays(joined, names=[f"c{i}" for i in range(len(joined))])


def _vector(kind: pa.Array, size: pa.Array, indices: pa.Array, values: pa.Array) -> pa.Array:
    null = kind.is_null() if kind.null_count else None  # the whole vector is null
    if size.null_count == len(size):  # all of them are dense or null
        indices = pa.nulls(len(indices), indices.type)
    elif size.null_count:
        import pyarrow.compute as pc

        indices = pc.if_else(size.is_null(), pa.scalar(None, indices.type), indices)
    return pa.StructArray.from_arrays([kind, size, indices, values], names=list(PARTS), mask=null)
