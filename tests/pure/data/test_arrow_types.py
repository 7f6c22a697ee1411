"""ML vectors sent as their parts."""

from __future__ import annotations

import pyarrow as pa
import pytest

from sparkhvd.data.arrow_types import join_vectors

STRUCT = pa.struct(
    [
        ("type", pa.int8()),
        ("size", pa.int32()),
        ("indices", pa.list_(pa.int32())),
        ("values", pa.list_(pa.float64())),
    ]
)
DENSE = {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0]}
SPARSE = {"type": 0, "size": 9, "indices": [3, 7], "values": [4.0, 5.0]}
EMPTY = {"type": 0, "size": 9, "indices": [], "values": []}


def sent(vectors: list[dict[str, object] | None]) -> list[pa.Array]:
    """Make the four columns that Spark sends: a null vector's parts are null, but there is always a list of indices."""
    parts = [vector or dict.fromkeys(DENSE) for vector in vectors]
    types = {field.name: field.type for field in STRUCT}
    return [
        pa.array([part[n] or [] if n == "indices" else part[n] for part in parts], types[n])
        for n in types
    ]


@pytest.mark.parametrize(
    "vectors",
    [
        [DENSE, DENSE],
        [SPARSE, EMPTY],
        [DENSE, SPARSE, DENSE, EMPTY],
        [DENSE, None],
        [None, SPARSE, DENSE],
        [None],
        [],
    ],
    ids=["dense", "sparse", "both", "dense, null", "all", "null", "none"],
)
def test_vectors_survive_the_way_through_arrow(vectors: list[dict[str, object] | None]) -> None:
    other = pa.array(range(len(vectors)), pa.int64())
    columns = [other, *sent(vectors), other]
    batch = pa.RecordBatch.from_arrays(columns, names=[str(i) for i in range(len(columns))])
    joined = join_vectors(batch, (False, True, False))
    assert joined.schema.names == ["c0", "c1", "c2"]
    assert joined.column(1).type == STRUCT
    assert joined.column(1).to_pylist() == vectors
    assert joined.column(2).equals(other)


def test_a_batch_without_vectors_passes() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([1])], names=["c0"])
    assert join_vectors(batch, (False,)) is batch
