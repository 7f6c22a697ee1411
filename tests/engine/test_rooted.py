"""reduce, gather and scatter, and results in the caller's memory, equal NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparkhvd.engine.calls import Reduction, TensorView
from sparkhvd.engine.engine import Engine
from sparkhvd.engine.library import Collective, DType
from sparkhvd.errors import InvalidArgumentError, MismatchError
from sparkhvd.settings import Settings
from tests.engine.arrays import REDUCTIONS, expected, random_array, view
from tests.engine.test_collectives import LAYOUTS, assert_reduced
from tests.engine.test_exchanges import output_of
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.ranks

Array = Any


@pytest.mark.parametrize(("world", "hosts", "settings"), LAYOUTS)
def test_reduce_on_the_root_equals_numpy(
    world: int, hosts: list[int] | None, settings: Settings
) -> None:
    cases = [(dtype, op, size) for dtype, op in REDUCTIONS for size in (1, 1003)]

    def input_of(dtype: DType, size: int, rank: int) -> Array:
        return random_array(dtype, (size,), seed=1000 * size + rank)

    def body(engine: Engine) -> list[Array]:
        results = []
        for number, (dtype, op, size) in enumerate(cases):
            array = input_of(dtype, size, engine.rank)
            root = number % world
            result = np.zeros_like(array)
            views = [view(array, result if engine.rank == root else None)]
            call = engine.prepare(Collective.REDUCE, views, dtype, Reduction(op), root_rank=root)
            engine.run(call, f"{number}", (array, result))
            results.append(result)
        return results

    results = run_ranks(world, body, hosts=hosts, settings=settings)
    for number, (dtype, op, size) in enumerate(cases):
        inputs = [input_of(dtype, size, rank) for rank in range(world)]
        wanted = expected(dtype, op, inputs)
        assert_reduced(results[number % world][number], wanted, dtype, exact=hosts is None)


@pytest.mark.parametrize(("world", "hosts", "settings"), LAYOUTS)
def test_scatter_inverts_gather(world: int, hosts: list[int] | None, settings: Settings) -> None:
    def input_of(dtype: DType, rank: int) -> Array:
        return random_array(dtype, ((rank * 5 + 2) % 7 * 11, 3), seed=17 * rank)

    def body(engine: Engine) -> None:
        counts = [len(input_of(DType.INT8, rank)) for rank in range(world)]
        for dtype in DType:
            root = int(dtype) % world
            whole = np.concatenate([input_of(dtype, rank) for rank in range(world)])
            own = input_of(dtype, engine.rank)
            is_root = engine.rank == root
            for brings_memory in (False, True):
                result = np.zeros_like(whole)
                target = TensorView(own.ctypes.data, result.ctypes.data, own.shape, result.nbytes)
                views = [target if brings_memory else view(own)]
                call = engine.prepare(Collective.GATHER, views, dtype, root_rank=root)
                work = engine.start(call, f"gather {dtype} {brings_memory}", (own, result))
                work.wait()
                found = result.ravel() if brings_memory else output_of(work, dtype)[0]
                size = whole.size if is_root else 0
                np.testing.assert_array_equal(found[:size], whole.ravel()[:size])
                assert brings_memory or found.size == size

                part = np.zeros_like(own)
                given = whole if is_root else whole[:0]
                target = TensorView(given.ctypes.data, part.ctypes.data, given.shape, part.nbytes)
                # Zero bytes need no memory, so the engine may also have none.
                views = [target if brings_memory and part.nbytes else view(given)]
                call = engine.prepare(
                    Collective.SCATTER,
                    views,
                    dtype,
                    root_rank=root,
                    numbers=tuple(counts) if is_root else (),
                )
                work = engine.start(call, f"scatter {dtype} {brings_memory}", (given, part))
                work.wait()
                if views[0].output:
                    np.testing.assert_array_equal(part, own)
                else:
                    found, rows = output_of(work, dtype)
                    np.testing.assert_array_equal(found, own.ravel())
                    assert rows == (len(own),)

    run_ranks(world, body, hosts=hosts, settings=settings)


def test_wrong_inputs_of_rooted_operations_raise_a_clear_error() -> None:
    def body(engine: Engine) -> None:
        array = np.ones((4, 2), np.float32)
        call = engine.prepare(Collective.SCATTER, [view(array)], DType.FLOAT32, root_rank=0)
        if engine.rank == 1:
            with pytest.raises(InvalidArgumentError, match="only the root has rows to give"):
                engine.start(call, "wrong", array)
        result = np.zeros((8, 2), np.float32)
        room = result.nbytes - (engine.rank == 1)
        views = [TensorView(array.ctypes.data, result.ctypes.data, array.shape, room)]
        call = engine.prepare(Collective.ALLGATHER, views, DType.FLOAT32)
        with pytest.raises(
            MismatchError, match=r"on rank 1 has 64 bytes \(8 rows\), but its output has 63"
        ):
            engine.run(call, "tight", (array, result))

    run_ranks(2, body)
