"""Numbers in place of the values of a column of groups."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from sparkhvd.data.arrow_memory import numbers, numpy_to_array

__all__ = ["numbered"]


def numbered(batches: Iterator[pa.RecordBatch], index: int, first: int) -> Iterator[pa.RecordBatch]:
    """Number the groups of neighbouring rows with equal values, over all batches of a partition; nulls stay.

    Args:
        batches: of the partition, sorted by the column.
        index: of the column.
        first: number of the first group.
    """
    import pyarrow.compute as pc

    number, last = first - 1, None
    for batch in batches:
        values = batch.column(index)
        if not len(values):
            continue
        begins = np.empty(len(values), np.int64)
        begins[0] = last is None or not values[0].equals(last)
        begins[1:] = numbers(pc.fill_null(pc.not_equal(values[1:], values[:-1]), True))
        of_rows = number + np.cumsum(begins)
        number, last = int(of_rows[-1]), values[-1]
        array = numpy_to_array(of_rows)
        if values.null_count:
            array = pc.if_else(pc.is_valid(values), array, pa.scalar(None, pa.int64()))
        columns = [array if i == index else batch.column(i) for i in range(batch.num_columns)]
        yield pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
