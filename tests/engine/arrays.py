"""NumPy arrays as tensors of the engine, and the reference of every reduction."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparkhvd.engine.calls import Reduction, TensorView
from sparkhvd.engine.engine import Engine
from sparkhvd.engine.library import Collective, DType, ReduceOp
from sparkhvd.engine.work import Work

Array = np.ndarray[Any, Any]

# bfloat16 has no NumPy type: its bits travel as uint16.
NUMPY_TYPES: dict[DType, Any] = {
    DType.UINT8: np.uint8,
    DType.INT8: np.int8,
    DType.UINT16: np.uint16,
    DType.INT16: np.int16,
    DType.UINT32: np.uint32,
    DType.INT32: np.int32,
    DType.UINT64: np.uint64,
    DType.INT64: np.int64,
    DType.FLOAT16: np.float16,
    DType.BFLOAT16: np.uint16,
    DType.FLOAT32: np.float32,
    DType.FLOAT64: np.float64,
    DType.BOOL: np.bool_,
}

FLOATS = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64)
BITS = {
    ReduceOp.BIT_AND: np.bitwise_and,
    ReduceOp.BIT_OR: np.bitwise_or,
    ReduceOp.BIT_XOR: np.bitwise_xor,
}
# All elementwise ones.
REDUCTIONS = [
    (dtype, op)
    for dtype in DType
    for op in ReduceOp
    if op != ReduceOp.ADASUM
    and not (dtype == DType.BOOL and op == ReduceOp.AVERAGE)
    and not (dtype in FLOATS and op in BITS)
]


def bfloat16_from(values: Array) -> Array:
    """Bits of the nearest bfloat16, ties to even."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def float32_from_bfloat16(bits: Array) -> Array:
    """Convert exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def random_array(dtype: DType, shape: tuple[int, ...], seed: int) -> Array:
    """Draw values whose sums and products stay finite."""
    rng = np.random.default_rng(seed)
    if dtype == DType.BOOL:
        return rng.integers(0, 2, shape).astype(np.bool_)
    if dtype == DType.BFLOAT16:
        return bfloat16_from(rng.standard_normal(shape).astype(np.float32))
    if dtype in (DType.FLOAT16, DType.FLOAT32, DType.FLOAT64):
        return rng.standard_normal(shape).astype(NUMPY_TYPES[dtype])
    info = np.iinfo(NUMPY_TYPES[dtype])
    return rng.integers(info.min, info.max, shape, NUMPY_TYPES[dtype], endpoint=True)


def expected(dtype: DType, op: ReduceOp, stacked: Sequence[Array]) -> Array:
    """Compute the ranks' result: added in rank order, in the accumulation type, scaled and rounded once."""
    if op in BITS:
        return BITS[op].reduce(list(stacked))  # type: ignore[no-any-return]
    if dtype == DType.BOOL:
        function = np.logical_or if op in (ReduceOp.SUM, ReduceOp.MAX) else np.logical_and
        return function.reduce(list(stacked))
    if dtype == DType.BFLOAT16:
        wide = [float32_from_bfloat16(a) for a in stacked]
        return bfloat16_from(expected(DType.FLOAT32, op, wide))
    if dtype == DType.FLOAT16:
        wide = [a.astype(np.float32) for a in stacked]
        return expected(DType.FLOAT32, op, wide).astype(np.float16)
    combine = {
        ReduceOp.SUM: np.add,
        ReduceOp.AVERAGE: np.add,
        ReduceOp.MIN: np.minimum,
        ReduceOp.MAX: np.maximum,
        ReduceOp.PRODUCT: np.multiply,
    }[op]
    result = stacked[0]
    with np.errstate(over="ignore"):
        for array in stacked[1:]:
            result = combine(result, array)
    if op == ReduceOp.AVERAGE and len(stacked) > 1:  # a divisor of 1 needs no conversion to double
        if np.issubdtype(result.dtype, np.floating):
            return result / result.dtype.type(len(stacked))
        return np.trunc(result.astype(np.float64) / len(stacked)).astype(result.dtype)
    return result


def view(source: Array, destination: Array | None = None) -> TensorView:
    """View an array as the engine's tensor."""
    assert source.flags.c_contiguous
    address = 0 if destination is None else destination.ctypes.data
    return TensorView(source.ctypes.data, address, source.shape)


def dtype_of(array: Array) -> DType:
    """Return the engine's type of an array (not for bfloat16)."""
    matches = [d for d, t in NUMPY_TYPES.items() if t == array.dtype.type and d != DType.BFLOAT16]
    return matches[0]


def start_allreduce(
    engine: Engine,
    name: str,
    array: Array,
    *,
    op: ReduceOp = ReduceOp.SUM,
    prescale: float = 1.0,
    postscale: float = 1.0,
    dtype: DType | None = None,
    **options: Any,
) -> tuple[Work, Array]:
    """Submit. The array has the result when the work is done."""
    result = np.empty_like(array)
    work = engine.allreduce(
        [view(array, result)],
        name=name,
        dtype=dtype_of(array) if dtype is None else dtype,
        reduction=Reduction(op, prescale, postscale),
        keep=(array, result),
        **options,
    )
    return work, result


def allreduce(engine: Engine, name: str, array: Array, **options: Any) -> Array:
    """Submit and wait."""
    work, result = start_allreduce(engine, name, array, **options)
    work.wait()
    return result


def start_send(engine: Engine, name: str, array: Array, to: int, tag: int = 0) -> Work:
    """Submit a message to one rank."""
    call = engine.prepare(
        Collective.SEND, [view(array)], dtype_of(array), root_rank=to, numbers=(tag,)
    )
    return engine.start(call, name, array)


def start_receive(
    engine: Engine, name: str, array: Array, source: int, tag: int = 0, *, shorter: bool = False
) -> Work:
    """Submit a receive into the array, from one rank or (-1) any."""
    numbers = (tag, 1) if shorter else (tag,)
    call = engine.prepare(
        Collective.RECEIVE,
        [view(array, array)],
        dtype_of(array),
        root_rank=source,
        numbers=numbers,
    )
    return engine.start(call, name, array)


def allgather(engine: Engine, name: str, array: Array) -> tuple[Array, tuple[int, ...]]:
    """Submit, wait and copy: the joined rows, and how many came from each rank."""
    work = engine.allgather(view(array), name=name, dtype=dtype_of(array), keep=array)
    work.wait()
    output = work.output()
    rows = sum(output.rows)
    joined = np.empty((rows, *array.shape[1:]), array.dtype)
    assert output.num_bytes == joined.nbytes
    if output.num_bytes:
        ctypes.memmove(joined.ctypes.data, output.address, output.num_bytes)
    return joined, output.rows


def start_broadcast(engine: Engine, name: str, array: Array, root_rank: int) -> tuple[Work, Array]:
    """Submit. The array has the result when the work is done."""
    result = np.empty_like(array)
    work = engine.broadcast(
        view(array, result),
        root_rank=root_rank,
        name=name,
        dtype=dtype_of(array),
        keep=(array, result),
    )
    return work, result


def broadcast(engine: Engine, name: str, array: Array, root_rank: int) -> Array:
    """Submit and wait."""
    work, result = start_broadcast(engine, name, array, root_rank)
    work.wait()
    return result
