"""Spark's types of Arrow columns, and the parts in which ML vectors are sent."""

from __future__ import annotations

import pyarrow as pa
import pytest

from sparkhvd.data.arrow_types import join_vectors, spark_type
from sparkhvd.data.columns.schema import Field, Schema

pytestmark = pytest.mark.pure

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
    """Make the four columns that Spark sends. The parts of a null vector are null, but its list of indices is not."""
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
def test_vectors_survive_conversion_to_arrow_and_back(
    vectors: list[dict[str, object] | None],
) -> None:
    other = pa.array(range(len(vectors)), pa.int64())
    columns = [other, *sent(vectors), other]
    batch = pa.RecordBatch.from_arrays(columns, names=[str(i) for i in range(len(columns))])
    joined = join_vectors(batch, (False, True, False))
    assert joined.schema.names == ["c0", "c1", "c2"]
    assert joined.column(1).type == STRUCT
    assert joined.column(1).to_pylist() == vectors
    assert joined.column(2).equals(other)


def test_batch_without_vectors_is_returned_unchanged() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([1])], names=["c0"])
    assert join_vectors(batch, (False,)) is batch


# -- types


@pytest.mark.parametrize(
    "kind",
    [
        *(pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()),
        *(pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.decimal128(9, 2)),
        *(pa.date32(), pa.timestamp("us", "UTC"), pa.null(), pa.map_(pa.string(), pa.int64())),
        *(
            pa.list_(pa.list_(pa.float32())),
            pa.struct([("a", pa.int8()), ("b", pa.list_(pa.bool_()))]),
        ),
    ],
    ids=str,
)
def test_arrow_types_equal_those_of_pyspark(kind: pa.DataType) -> None:
    from pyspark.sql.pandas.types import from_arrow_type

    mine, theirs = spark_type(kind), from_arrow_type(kind)
    assert type(mine).__name__ == type(theirs).__name__
    assert mine.simpleString() == theirs.simpleString()
    assert mine.typeName() == theirs.typeName() or kind == pa.null()
    inner = [getattr(mine, "fields", ()), getattr(theirs, "fields", ())]
    assert [f.name for f in inner[0]] == [f.name for f in inner[1]]


def test_arrow_types_unknown_to_spark_map_to_spark_types() -> None:
    tensors = (
        pa.fixed_shape_tensor(pa.float32(), (2, 3)) if hasattr(pa, "fixed_shape_tensor") else None
    )
    kinds = {
        pa.uint8(): "smallint",
        pa.uint64(): "bigint",
        pa.float16(): "float",
        pa.dictionary(pa.int8(), pa.string()): "string",
        pa.list_(pa.float64(), 3): "array<double>",
        pa.binary(4): "binary",
        STRUCT: "vector",
        **({tensors: "array<array<float>>"} if tensors else {}),
    }
    for kind, text in kinds.items():
        assert spark_type(kind).simpleString() == text
    assert type(spark_type(STRUCT)).__name__ == "VectorUDT"
    assert type(spark_type(STRUCT)) is type(spark_type(STRUCT))


def test_horovod_model_metadata_has_pyspark_type_classes() -> None:
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql.types import ArrayType, LongType

    from sparkhvd.horovod.spark.common.estimator import _metadata

    kinds = {"v": STRUCT, "a": pa.list_(pa.float32()), "k": pa.int64()}
    found = _metadata(Schema(tuple(Field(n, spark_type(kind)) for n, kind in kinds.items())))
    assert [each["spark_data_type"] for each in found.values()] == [VectorUDT, ArrayType, LongType]
