from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from sparkhvd.data.arrow import InvalidRowCounts, column_to_numpy, problems, usable_rows
from sparkhvd.data.arrow_types import numpy_to_array, text_to_array
from sparkhvd.data.columns.ragged import Ragged
from sparkhvd.data.columns.schema import Column
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.transform.worker import feature

pytestmark = pytest.mark.pure

VECTOR = pa.struct(
    [
        ("type", pa.int8()),
        ("size", pa.int32()),
        ("indices", pa.list_(pa.int32())),
        ("values", pa.list_(pa.float64())),
    ]
)


def column(kind: str, dtype: str, tensor: str | None = None) -> Column:
    return Column("c", kind, dtype, () if kind == "scalar" else None, "source", tensor or dtype)


NAN, INF = float("nan"), float("inf")


def decimals(*values: int | None) -> pa.Array:
    """Make whole decimals with an offset into their memory."""
    return pa.array([None, 0, *values], pa.decimal128(38, 0))[2:]


def dense(*values: float) -> dict[str, Any]:
    return {"type": 1, "size": None, "indices": None, "values": list(values)}


def sparse(size: int, entries: dict[int, float]) -> dict[str, Any]:
    return {"type": 0, "size": size, "indices": list(entries), "values": list(entries.values())}


@pytest.mark.parametrize(
    ("source", "dtype"),
    [
        (pa.array([1, -2, 3], pa.int8()), "int64"),
        (pa.array([1, -2, 3], pa.int16()), "int64"),
        (pa.array([1, -2, 3], pa.int32()), "float32"),
        (pa.array([1.5, -2, 3], pa.float64()), "float32"),
        (pa.array([1.5, -2, 3], pa.float32()), "float64"),
        (pa.array([True, False, True]), "uint8"),
        (pa.array([1.0, -2.0, 3.0], pa.float64()), "int64"),
    ],
)
def test_scalars_take_the_stored_dtype(source: pa.Array, dtype: str) -> None:
    for array in (source, pa.concat_arrays([source, source])[3:]):
        values, found = column_to_numpy(array, column("scalar", dtype))
        assert found.is_clean
        assert values is not None
        assert values.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(values, np.array(source.to_pylist(), dtype))


def test_sliced_list_arrays_become_rows() -> None:
    array = pa.array([[9, 9, 9], [1, 2, 3], [4, 5, 6]], pa.list_(pa.int32()))[1:]
    values, found = column_to_numpy(array, column("array", "int64"))
    np.testing.assert_array_equal(values, [[1, 2, 3], [4, 5, 6]])
    assert dict(found.shapes) == {(3,): 2}


@pytest.mark.parametrize("start", [0, 1])
def test_mixed_dense_and_sparse_vectors_become_dense_rows(start: int) -> None:
    rows = [dense(0, 0, 1), sparse(3, {0: 5.0, 2: 7.0}), dense(1, 2, 3), sparse(3, {})]
    expected = [[0, 0, 1], [5, 0, 7], [1, 2, 3], [0, 0, 0]]
    values, found = column_to_numpy(pa.array(rows, VECTOR)[start:], column("vector", "float32"))
    assert found.is_clean
    np.testing.assert_array_equal(values, expected[start:])
    only_dense, _ = column_to_numpy(
        pa.array([rows[0], rows[2]], VECTOR), column("vector", "float32")
    )
    np.testing.assert_array_equal(only_dense, [expected[0], expected[2]])


@pytest.mark.parametrize(
    ("array", "kind", "dtype", "expected"),
    [
        (pa.array([1.0, None, 2.0, None]), "scalar", "float32", {"nulls": 2}),
        (pa.array([1.0, NAN, -INF]), "scalar", "float32", {"nans": 1, "infinities": 1}),
        (pa.array([1.0, INF], pa.float32()), "scalar", "int64", {"infinities": 1}),
        (pa.array([2**24 + 1, -(2**25)], pa.int64()), "scalar", "float32", {"inexact": 1}),
        (pa.array([2**53 + 1, -(2**63)], pa.int64()), "scalar", "float64", {"inexact": 1}),
        (pa.array([2**63 - 1, 2**24], pa.uint64()), "scalar", "float32", {"inexact": 1}),
        (pa.array([-(2**24) - 1, 7], pa.int32()), "scalar", "float32", {"inexact": 1}),
        (decimals(2**24 + 1, None), "scalar", "float32", {"inexact": 1, "nulls": 1}),
        (decimals(2**53 + 1, 10**30), "scalar", "float64", {"inexact": 2}),
        (pa.array([[1, 2**24 + 1], [2**24 + 3] * 2, [0, 0]]), "array", "float32", {"inexact": 2}),
        (pa.array([1e39, 1.0, -1e300]), "scalar", "float32", {"overflows": 2}),
        (pa.array([1e5, 1.0]), "scalar", "float16", {"overflows": 1}),
        (pa.array([1.0, 2.5, 3.0]), "scalar", "int64", {"fractions": 1}),
        (pa.array([1.0, 2.0**63, -(2.0**63)]), "scalar", "int64", {"overflows": 1}),
        (pa.array([1, 300], pa.int64()), "scalar", "uint8", {"overflows": 1}),
        (pa.array([1, -1], pa.int8()), "scalar", "uint8", {"overflows": 1}),
        (pa.array([[1.0, None], None, [1.0, 2.0]]), "array", "float32", {"nulls": 2}),
        (pa.array([[1.0, float("nan")], [1.0, 2.0]]), "array", "float32", {"nans": 1}),
    ],
)
def test_unusable_rows_are_counted(
    array: pa.Array, kind: str, dtype: str, expected: dict[str, int]
) -> None:
    values, found = column_to_numpy(array, replace(column(kind, dtype), source="decimal(38,0)"))
    assert values is None
    assert {k: v for k, v in found.counts().items() if v} == expected
    assert set(found.examples) == set(expected) - {"nulls"}


@pytest.mark.parametrize(
    ("source", "value", "dtype", "expected"),
    [
        (pa.array([1, None], pa.int8()), 200, "int64", 200),
        (pa.array([1, None], pa.int8()), 200.0, "float32", 200),
        (pa.array([1, None], pa.uint8()), -1, "int64", -1),
        (pa.array([2**53 + 1, None], pa.uint64()), -1, "int64", -1),
        (pa.array([1, None], pa.int32()), float("inf"), "float32", float("inf")),
        (pa.array([1, None], pa.int32()), 0.5, "float32", 0.5),
        (pa.array([1, None], pa.float32()), 1e300, "float64", 1e300),
        (pa.array([1, float("nan")], pa.float32()), 1e300, "float64", 1e300),
        (pa.array(np.float16([1, 2]), mask=np.array([False, True])), 1e5, "float32", 1e5),
        (pa.array([True, None]), 1, "uint8", 1),
    ],
)
def test_fill_value_may_exceed_the_source_type(
    source: pa.Array, value: float, dtype: str, expected: float
) -> None:
    first = source[0].as_py()
    for kind, array in (
        ("scalar", source),
        ("array", pa.ListArray.from_arrays(pa.array([0, 2], pa.int32()), source)),
    ):
        filled = replace(column(kind, dtype), invalid=("fill", value))
        values, found = column_to_numpy(array, filled)
        assert found.is_clean
        assert values is not None
        np.testing.assert_array_equal(np.ravel(values), np.array([first, expected], dtype))


def test_int64_overflows_are_counted_despite_a_fill_value() -> None:
    array = pa.array([2**64 - 1, None, 3], pa.uint64())
    filled = replace(column("scalar", "int64"), invalid=("fill", -1))
    assert column_to_numpy(array, filled)[1] == InvalidRowCounts(overflows=1)


def test_rows_of_nested_arrays_with_nan_are_counted_once() -> None:
    array = pa.array([[[float("nan")] * 2] * 3, [[1.0, 2.0]] * 3])
    assert column_to_numpy(array, column("array", "float32"))[1].nans == 1


def test_integers_beyond_float16_are_counted_as_overflows() -> None:
    values, found = column_to_numpy(pa.array([65535, 1], pa.uint16()), column("scalar", "float16"))
    assert values is None
    assert found == InvalidRowCounts(overflows=1)


def test_empty_rows_fit_any_entry_shape() -> None:
    kind = pa.list_(pa.list_(pa.float64()))
    nested = replace(column("ragged", "float32"), shape=(-1, 2), source="array<array<double>>")
    for rows in ([[], []], [[[1.0, 2.0]], []]):
        values, found = column_to_numpy(pa.array(rows, kind), nested)
        assert found.is_clean
        assert isinstance(values, Ragged)
        assert values.inner == (2,)
        assert feature(pa.array(rows, kind), nested, "x") is not None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("source", ["int64", "uint64"])
def test_integers_are_usable_if_torch_represents_them_exactly(dtype: str, source: str) -> None:
    powers = [2**n for n in range(64 if source == "uint64" else 63)]
    values = sorted({p + d for p in powers for d in (-1, 0, 1)} | {3 * p for p in powers[:-2]})
    stored = "float32" if dtype == "bfloat16" else dtype
    number = replace(column("scalar", stored, dtype), invalid=("skip",))
    own = np.array(values, source)
    rounded = torch.tensor([float(v) for v in values], dtype=torch.float64).to(
        getattr(torch, dtype)
    )
    exact = [float(r) == v for r, v in zip(rounded.double().tolist(), values, strict=True)]
    usable = usable_rows(pa.array(own), number)
    assert usable is not None
    assert usable.tolist() == exact


def test_decimals_within_int64_keep_their_exact_value() -> None:
    numbers = [2**53 + 1, -(2**63), 0]
    values, found = column_to_numpy(decimals(*numbers), column("scalar", "int64"))
    assert found.is_clean
    assert values is not None
    assert values.tolist() == numbers
    filled = replace(column("scalar", "int64"), invalid=("fill", -1))
    values, _ = column_to_numpy(decimals(2**53 + 1, None), filled)
    assert values is not None
    assert values.tolist() == [2**53 + 1, -1]


@pytest.mark.parametrize(("precision", "scale"), [(20, 5), (15, 3), (38, 22), (38, 37), (10, -2)])
@pytest.mark.parametrize("most", [2**30, 2**53 + 2, 2**62])
def test_decimals_become_the_nearest_doubles(precision: int, scale: int, most: int) -> None:
    draw = random.Random(f"{precision} {scale} {most}")
    most = min(most, 10**precision - 1)
    numbers = [Decimal(draw.randint(-most, most)).scaleb(-scale) for _ in range(500)]
    array = pa.array([None, *numbers], pa.decimal128(precision, scale))[1:]
    values, found = column_to_numpy(array, column("scalar", "float64"))
    assert found.is_clean
    assert values is not None
    assert values.tolist() == [float(number) for number in numbers]


def test_invalid_numbers_are_skipped_or_filled() -> None:
    floats = pa.array([1.0, INF, 1e300, NAN])
    skipping = replace(column("scalar", "float32"), invalid=("skip",))
    usable = usable_rows(floats, skipping)
    assert usable is not None
    assert usable.tolist() == [True, False, False, False]
    values, found = column_to_numpy(floats, replace(skipping, invalid=("fill", 7)))
    assert found.is_clean
    np.testing.assert_array_equal(values, [1, 7, 7, 7])
    joined = replace(column("scalar", "int64"), cast_to="float32", invalid=("fill", 0.0))
    values, found = column_to_numpy(pa.array([5, 2**24 + 1]), joined)
    assert found.is_clean
    np.testing.assert_array_equal(values, [5, 0])
    # A fraction in place of nulls converts the integers to doubles with the same values.
    half = replace(column("scalar", "float32"), source="bigint", invalid=("fill", 0.5))
    values, _ = column_to_numpy(pa.array([None, 2**24 + 1, 3]), half)
    np.testing.assert_array_equal(values, [0.5, 0.5, 3])


def test_nan_and_infinity_are_kept_bit_by_bit() -> None:
    """A NaN keeps its payload, a null becomes NaN, and a number that is too large is still an error."""
    odd = np.array([0x7FF8000000000123], np.uint64).view(np.float64)[0]
    scalars = pa.array([1.0, odd, -INF, None], pa.float64())
    lists = pa.array([[1.0, None], [odd, INF]], pa.list_(pa.float64()))
    for kind, array in (("scalar", scalars), ("array", lists), ("ragged", lists)):
        kept = replace(column(kind, "float64"), invalid=("keep",))
        values, found = column_to_numpy(array, kept)
        assert found.is_clean
        stored = values.values if isinstance(values, Ragged) else values
        assert isinstance(stored, np.ndarray)
        flat = stored.reshape(-1)
        expected = [1.0, odd, -INF, NAN] if kind == "scalar" else [1.0, NAN, odd, INF]
        np.testing.assert_array_equal(flat, expected)
        assert flat.view(np.uint64)[expected.index(odd)] == 0x7FF8000000000123
    rows = pa.array([dense(1.0, NAN), sparse(2, {1: NAN})], VECTOR)
    found_rows, _ = column_to_numpy(rows, replace(column("vector", "float32"), invalid=("keep",)))
    np.testing.assert_array_equal(found_rows, [[1, NAN], [0, NAN]])
    flags = pa.array([True, None, False])
    filled, _ = column_to_numpy(flags, replace(column("scalar", "float32"), invalid=("keep",)))
    np.testing.assert_array_equal(filled, [1, NAN, 0])
    whole, _ = column_to_numpy(
        pa.array([7, None], pa.int32()), replace(column("scalar", "float32"), invalid=("keep",))
    )
    np.testing.assert_array_equal(whole, [7, NAN])
    large = pa.array([NAN, 1e300])
    values, found = column_to_numpy(large, replace(column("scalar", "float32"), invalid=("keep",)))
    assert values is None
    assert found.counts()["overflows"] == 1
    assert found.counts()["nans"] == 0


def test_nan_error_explains_how_to_keep_nan() -> None:
    array = pa.array([NAN, 1.0])
    for dtype, says in (
        (
            "float32",
            "If NaN is meant, as for a loss that masks it, give handle_invalid={'c': 'keep'}.",
        ),
        ("int64", ""),
    ):
        of = column("scalar", dtype)
        _, found = column_to_numpy(array, of)
        (line,) = problems(of, found, 2)
        assert line.startswith(
            "column 'c' (source): 1 of 2 rows hold NaN. Every value must be a number: drop or replace them, or give "
            "handle_invalid='skip' or {column: value}."
        )
        assert line.endswith(says or "{column: value}.")
    (line,) = problems(column("scalar", "uint8", "bool"), found, 2, is_flag=True)
    assert line.endswith("Every value must be a number: drop or replace them.")


def test_error_of_inexact_integers_gives_an_example_in_fit_and_transform() -> None:
    joined = replace(column("scalar", "int64"), source="bigint", cast_to="float32")
    rows = pa.array([3, 2**24 + 1])
    found = column_to_numpy(rows, joined)[1]
    again = InvalidRowCounts.from_dict(found.to_dict())
    assert next(problems(joined, again, 2)).startswith(
        "column 'c' (bigint): 1 of 2 rows hold an integer that float32 cannot hold exactly, for example 16777217. Scale"
    )
    with pytest.raises(
        InvalidArgumentError, match="float32 cannot hold exactly, for example 16777"
    ):
        feature(rows, joined, "x")
    with pytest.raises(
        InvalidArgumentError, match="'x' is infinite in 1 rows of a batch, for exam"
    ):
        feature(pa.array([INF]), column("scalar", "float32"), "x")
    assert column_to_numpy(rows, column("scalar", "int64"))[1].is_clean


@pytest.mark.parametrize(
    "array",
    [
        pa.array([[1.0, 2.0], [1.0], [3.0, 4.0]]),
        pa.array([dense(1, 2), sparse(1, {0: 1.0}), dense(3, 4)], VECTOR),
    ],
)
def test_ragged_rows_are_counted_by_width(array: pa.Array) -> None:
    kind = "vector" if pa.types.is_struct(array.type) else "array"
    values, found = column_to_numpy(array, column(kind, "float32"))
    assert values is None
    assert dict(found.shapes) == {(2,): 2, (1,): 1}
    assert not found.is_clean


def test_rows_with_null_vectors_are_counted() -> None:
    values, found = column_to_numpy(
        pa.array([dense(1.0), None], VECTOR), column("vector", "float32")
    )
    assert values is None
    assert found.nulls == 1
    assert dict(found.shapes) == {(1,): 1}


def test_validation_values_above_zero_become_true() -> None:
    flag = column("scalar", "uint8", "bool")
    values, _ = column_to_numpy(pa.array([0.0, 2.0, -1.0]), flag, is_flag=True)
    np.testing.assert_array_equal(values, [0, 1, 0])
    values, _ = column_to_numpy(pa.array([0.0, 2.0, -1.0]), flag)
    np.testing.assert_array_equal(values, [0, 1, 1])


def test_invalid_row_counts_add_up_and_survive_json() -> None:
    _, a = column_to_numpy(pa.array([[1.0], [1.0, 2.0], None]), column("array", "float32"))
    b = InvalidRowCounts.from_dict(a.to_dict())
    b.add(a)
    assert b.nulls == 2
    assert dict(b.shapes) == {(1,): 2, (2,): 2}


def test_arrays_from_numpy_equal_arrow_arrays() -> None:
    for dtype in ("int8", "int32", "int64", "float64"):
        values = np.arange(10, dtype=dtype)
        assert numpy_to_array(values[2:]).equals(pa.array(values[2:]))
        assert numpy_to_array(values[::2]).equals(pa.array(values[::2]))
        assert numpy_to_array(values[:0]).equals(pa.array(values[:0]))
    assert text_to_array("weiß").equals(pa.array(["weiß"]))


_WORKER = """
import sys
import numpy as np, pyarrow as pa
from sparkhvd.data.arrow import column_to_numpy
from sparkhvd.data.arrow_types import numpy_to_array
from sparkhvd.data.columns.schema import Column
lists = pa.ListArray.from_arrays(numpy_to_array(np.array([0, 2, 4], np.int32)), numpy_to_array(np.ones(4)))
values, _ = column_to_numpy(lists, Column("c", "array", "float32", None, "", "float32"))
assert values.shape == (2, 2)
print([m for m in ("pandas", "pyarrow.compute", "torch", "pyspark") if m in sys.modules])
"""


def test_conversion_of_valid_data_imports_no_slow_module() -> None:
    # pandas and pyarrow.compute would cost every Python worker half a second.
    done = subprocess.run([sys.executable, "-c", _WORKER], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
