"""alltoall, reducescatter, grouped gathers, process sets, join and registered memory equal NumPy's results."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkhvd.engine.calls import Reduction, TensorView
from sparkhvd.engine.engine import Engine
from sparkhvd.engine.library import Collective, DType, ReduceOp
from sparkhvd.engine.work import Buffer, Work
from sparkhvd.errors import InvalidArgumentError, MismatchError
from sparkhvd.settings import Settings
from tests.engine.arrays import (
    NUMPY_TYPES,
    REDUCTIONS,
    allreduce,
    expected,
    random_array,
    start_allreduce,
    view,
)
from tests.engine.test_collectives import LAYOUTS, SMALL, assert_reduced
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.ranks

Array = Any


def output_of(work: Work, dtype: DType) -> tuple[Array, tuple[int, ...]]:
    """Copy the output of an operation, flat, with its rows."""
    output = work.output()
    found = np.empty(output.num_bytes // np.dtype(NUMPY_TYPES[dtype]).itemsize, NUMPY_TYPES[dtype])
    if output.num_bytes:
        ctypes.memmove(found.ctypes.data, output.address, output.num_bytes)
    return found, output.rows


def place_of(rows: int, world: int, rank: int) -> slice:
    """Return the rows that a rank gets of a reducescatter."""
    counts = [rows // world + (r < rows % world) for r in range(world)]
    return slice(sum(counts[:rank]), sum(counts[: rank + 1]))


@pytest.mark.parametrize(("world", "hosts", "settings"), LAYOUTS)
def test_alltoall_sends_rows_of_every_dtype(
    world: int, hosts: list[int] | None, settings: Settings
) -> None:
    def splits_of(rank: int, case: int) -> list[int] | None:
        if case == 0:
            return None
        return [(rank * 3 + to * 5 + case) % 4 * (100 if case == 2 else 1) for to in range(world)]

    def input_of(dtype: DType, rank: int, case: int) -> Array:
        splits = splits_of(rank, case)
        rows = 2 * world if splits is None else sum(splits) + (case == 3)  # one row too many stays
        return random_array(dtype, (rows, 3), seed=17 * rank + case)

    cases = [(dtype, case) for dtype in DType for case in range(4)]

    def body(engine: Engine) -> list[Any]:
        works = []
        for dtype, case in cases:
            array = input_of(dtype, engine.rank, case)
            splits = splits_of(engine.rank, case)
            call = engine.prepare(
                Collective.ALLTOALL, [view(array)], dtype, numbers=tuple(splits or ())
            )
            works.append((engine.start(call, f"{dtype.name} {case}", array), dtype))
        for work, _ in works:
            work.wait()
        return [output_of(work, dtype) for work, dtype in works]

    for rank, results in enumerate(run_ranks(world, body, hosts=hosts, settings=settings)):
        for (dtype, case), (found, rows) in zip(cases, results, strict=True):
            parts = []
            for sender in range(world):
                splits = splits_of(sender, case) or [2] * world
                first = sum(splits[:rank])
                parts.append(input_of(dtype, sender, case)[first : first + splits[rank]])
            assert rows == tuple(len(part) for part in parts)
            np.testing.assert_array_equal(found, np.concatenate(parts).ravel())


@pytest.mark.parametrize(("world", "hosts", "settings"), LAYOUTS)
def test_reducescatter_gives_every_rank_its_rows(
    world: int, hosts: list[int] | None, settings: Settings
) -> None:
    sizes = sorted({0, 1, world - 1, world, world + 1, 7, 1003})
    cases = REDUCTIONS

    def input_of(dtype: DType, rows: int, rank: int) -> Array:
        return random_array(dtype, (rows, 2), seed=1000 * rows + rank)

    def body(engine: Engine) -> list[list[Array]]:
        results = []
        for dtype, op in cases:  # all sizes as one group
            inputs = [input_of(dtype, rows, engine.rank) for rows in sizes]
            outputs = [
                np.empty_like(array[place_of(len(array), world, engine.rank)]) for array in inputs
            ]
            views = [view(a, o) for a, o in zip(inputs, outputs, strict=True)]
            call = engine.prepare(Collective.REDUCESCATTER, views, dtype, Reduction(op))
            engine.run(call, f"{dtype.name} {op.name}", (inputs, outputs))
            results.append(outputs)
        return results

    exact = hosts is None or len(set(hosts)) == len(hosts)
    for rank, results in enumerate(run_ranks(world, body, hosts=hosts, settings=settings)):
        for (dtype, op), outputs in zip(cases, results, strict=True):
            for rows, found in zip(sizes, outputs, strict=True):
                stacked = [input_of(dtype, rows, r) for r in range(world)]
                wanted = expected(dtype, op, stacked)[place_of(rows, world, rank)]
                assert_reduced(found, wanted, dtype, exact=exact)


@pytest.mark.parametrize(("world", "hosts", "settings"), LAYOUTS)
def test_grouped_allgather_joins_each_tensor(
    world: int, hosts: list[int] | None, settings: Settings
) -> None:
    def inputs_of(rank: int) -> list[Array]:
        shapes = [(rank, 2), (3,), (0, 4), (500 * (world - rank), 2)]
        return [random_array(DType.INT32, shape, seed=rank + 9) for shape in shapes]

    def body(engine: Engine) -> Any:
        inputs = inputs_of(engine.rank)
        call = engine.prepare(Collective.ALLGATHER, [view(array) for array in inputs], DType.INT32)
        work = engine.start(call, "all", inputs)
        work.wait()
        return output_of(work, DType.INT32)

    every = [inputs_of(rank) for rank in range(world)]
    wanted = np.concatenate([np.concatenate(parts).ravel() for parts in zip(*every, strict=True)])
    for found, rows in run_ranks(world, body, hosts=hosts, settings=settings):
        assert rows == tuple(len(inputs[index]) for index in range(4) for inputs in every)
        np.testing.assert_array_equal(found, wanted)


def test_reducescatter_applies_its_scale_factors() -> None:
    def body(engine: Engine) -> list[float]:
        array, result = np.full((4, 1), engine.rank + 1.0), np.empty((2, 1))
        call = engine.prepare(
            Collective.REDUCESCATTER,
            [view(array, result)],
            DType.FLOAT64,
            Reduction(ReduceOp.SUM, 2.0, 0.25),
        )
        engine.run(call, "x", (array, result))
        return result.ravel().tolist()

    assert run_ranks(2, body) == [[1.5, 1.5]] * 2


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (
            lambda e, x: e.prepare(Collective.ALLTOALL, [view(x)], DType.FLOAT64, numbers=(5, 5)),
            "their sum at most the first dimension, 4",
        ),
        (
            lambda e, x: e.prepare(Collective.ALLTOALL, [view(x)], DType.FLOAT64, numbers=(1,)),
            "1 splits were given for 2",
        ),
        (
            lambda e, x: e.prepare(Collective.ALLTOALL, [view(x)], DType.FLOAT64, numbers=(-1, 2)),
            "must be 0 or more",
        ),
        (
            lambda e, x: e.prepare(Collective.ALLTOALL, [view(x[:3])], DType.FLOAT64),
            "cannot be divided among 2 ranks equally",
        ),
        (
            lambda e, x: e.prepare(
                Collective.REDUCESCATTER,
                [TensorView(x.ctypes.data, 8, ())],
                DType.FLOAT64,
                Reduction(ReduceOp.SUM),
            ),
            "is a scalar",
        ),
        (
            lambda e, x: e.prepare(
                Collective.REDUCESCATTER, [view(x, x)], DType.FLOAT64, Reduction(ReduceOp.ADASUM)
            ),
            "Adasum is for allreduce only",
        ),
        (
            lambda e, x: e.prepare(
                Collective.ALLREDUCE, [view(x, x)], DType.FLOAT64, Reduction(ReduceOp.SUM), 77
            ),
            "process set 77",
        ),
    ],
    ids=lambda value: "" if callable(value) else value,
)
def test_wrong_exchange_calls_raise_immediately(prepare: Any, message: str) -> None:
    def body(engine: Engine) -> float:
        array = np.ones(4)
        with pytest.raises(InvalidArgumentError, match=message):
            engine.start(prepare(engine, array), "wrong", array)
        return float(allreduce(engine, "right", array)[0])

    assert run_ranks(2, body) == [2.0] * 2


def test_alltoall_with_mismatched_splits_fails_on_every_rank() -> None:
    def body(engine: Engine) -> float:
        array = np.ones((2, 2 + engine.rank))
        work = engine.start(
            engine.prepare(Collective.ALLTOALL, [view(array)], DType.FLOAT64), "x", array
        )
        with pytest.raises(MismatchError):
            work.wait()
        return float(allreduce(engine, "y", np.ones(1))[0])

    assert run_ranks(2, body) == [2.0] * 2


@pytest.mark.parametrize(("world", "hosts", "settings"), LAYOUTS)
def test_process_sets_work_concurrently(
    world: int, hosts: list[int] | None, settings: Settings
) -> None:
    sets = [list(range(0, world, 2)), list(range(world - 1, world)), list(range(world))]

    def body(engine: Engine) -> dict[int, Array]:
        numbers = []
        for ranks in sets:
            work = engine.add_process_set(ranks)
            work.wait()
            numbers.append(work.output().rows[0])
        started = {}
        # Each rank begins with another set; the same name in every set.
        for index in sorted(range(len(sets)), key=lambda i: (i + engine.rank) % len(sets)):
            if engine.rank in sets[index]:
                array = np.arange(5000.0) + engine.rank
                started[index] = start_allreduce(engine, "x", array, process_set=numbers[index])
        for work, _ in started.values():
            work.wait()
        for number in numbers:
            engine.remove_process_set(number).wait()
        with pytest.raises(InvalidArgumentError, match="does not exist"):
            start_allreduce(engine, "x", np.ones(1), process_set=numbers[0])
        return {index: result for index, (_, result) in started.items()}

    for rank, results in enumerate(run_ranks(world, body, hosts=hosts, settings=settings)):
        assert sorted(results) == [i for i, ranks in enumerate(sets) if rank in ranks]
        for index, found in results.items():
            ranks = sets[index]
            np.testing.assert_array_equal(found, np.arange(5000.0) * len(ranks) + sum(ranks))


def test_rank_outside_a_process_set_is_refused() -> None:
    def body(engine: Engine) -> None:
        work = engine.add_process_set([1])
        work.wait()
        number = work.output().rows[0]
        if engine.rank == 0:
            with pytest.raises(InvalidArgumentError, match="rank 0 is not in process set"):
                start_allreduce(engine, "x", np.ones(1), process_set=number)
        else:
            assert allreduce(engine, "x", np.ones(1), process_set=number) == [1.0]

    run_ranks(2, body)


@pytest.mark.parametrize("done", range(4))
@pytest.mark.parametrize("departed", range(3))
def test_a_joined_rank_contributes_zeros(departed: int, done: int) -> None:
    def body(engine: Engine) -> tuple[list[float], int]:
        mine = done if engine.rank == departed else 3
        results = [
            float(allreduce(engine, f"x {i}", np.full(2000, engine.rank + 1.0))[-1])
            for i in range(mine)
        ]
        work = engine.join()
        work.wait()
        results.append(float(allreduce(engine, "after", np.ones(1))[0]))
        return results, work.output().rows[0]

    outcomes = run_ranks(3, body)
    last = outcomes[0][1]
    assert last in range(3)
    assert done == 3 or last != departed
    for rank, (results, also_last) in enumerate(outcomes):
        assert also_last == last
        wanted = [6.0] * done + [6.0 - (departed + 1)] * (3 - done)
        assert results == [*(wanted[:done] if rank == departed else wanted), 3.0]


# --- Registered memory. ---


def array_over(buffer: Buffer, dtype: DType = DType.FLOAT32) -> Array:
    """Make an array over a whole buffer, which it keeps alive."""
    memory: Any = (ctypes.c_char * buffer.num_bytes).from_address(buffer.address)
    memory.buffer = buffer
    return np.frombuffer(memory, NUMPY_TYPES[dtype])


def mapped_segments() -> frozenset[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return frozenset(line for line in lines if "memfd" in line)


@pytest.mark.parametrize(("world", "hosts", "settings"), LAYOUTS)
def test_registered_memory_is_reduced_in_place(
    world: int, hosts: list[int] | None, settings: Settings
) -> None:
    def body(engine: Engine) -> None:
        memory = array_over(engine.allocate(40_000))
        assert not memory.any()
        for op in (ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MAX):
            for first, count in ((0, 10_000), (1, 1), (77, 5003)):
                stacked = [random_array(DType.FLOAT32, (10_000,), seed=r) for r in range(world)]
                memory[:] = stacked[engine.rank]
                part = memory[first : first + count]
                work = engine.allreduce(
                    [view(part, part)],
                    name=f"{op.name} {first}",
                    dtype=DType.FLOAT32,
                    reduction=Reduction(op),
                    keep=part,
                )
                work.wait()
                parts = [array[first : first + count] for array in stacked]
                exact = hosts is None or len(set(hosts)) == len(hosts)
                assert_reduced(part, expected(DType.FLOAT32, op, parts), DType.FLOAT32, exact=exact)
                np.testing.assert_array_equal(memory[:first], stacked[engine.rank][:first])
                rest = slice(first + count, None)
                np.testing.assert_array_equal(memory[rest], stacked[engine.rank][rest])

    run_ranks(world, body, hosts=hosts, settings=settings)


def test_registered_memory_is_freed_after_its_last_use() -> None:
    def body(engine: Engine) -> Array:
        memory = array_over(engine.allocate(4096))
        memory[:] = engine.rank
        engine.allocate(4096)  # dropped at once
        return memory

    gc.collect()
    before = mapped_segments()
    arrays = run_ranks(2, body)
    gc.collect()
    for rank, memory in enumerate(arrays):  # the engines are gone
        assert memory.tolist() == [float(rank)] * 1024
        memory += 1
    assert mapped_segments() - before
    del arrays, memory
    gc.collect()
    assert mapped_segments() <= before


def test_registered_memory_stays_until_its_operation_finishes() -> None:
    def body(engine: Engine) -> float:
        memory = array_over(engine.allocate(400_000))
        memory[:] = engine.rank + 1
        work = engine.allreduce(
            [view(memory, memory)],
            name="x",
            dtype=DType.FLOAT32,
            reduction=Reduction(ReduceOp.SUM),
            keep=memory,
        )
        del memory
        gc.collect()
        work.wait()
        return float(allreduce(engine, "y", np.ones(3))[0])

    assert run_ranks(3, body, settings=SMALL) == [3.0] * 3


def test_registering_different_sizes_raises_on_every_rank() -> None:
    def body(engine: Engine) -> None:
        with pytest.raises(MismatchError):
            engine.allocate(4096 * (1 + engine.rank))
        with pytest.raises(InvalidArgumentError, match="number of bytes from 1"):
            engine.allocate(0)
        assert engine.allocate(100).num_bytes >= 100

    run_ranks(2, body)


def test_running_engines_change_settings_on_all_ranks_together() -> None:
    def body(engine: Engine) -> list[float]:
        results = []
        for chunk_bytes in (4096, 0, 65536):
            engine.configure(chunk_bytes=chunk_bytes).wait()
            results.append(float(allreduce(engine, "x", np.ones(100_000))[-1]))
        with pytest.raises(InvalidArgumentError, match="chunk_bytes is 1; it must be from 4096"):
            engine.configure(chunk_bytes=1)
        return results

    assert run_ranks(2, body) == [[2.0] * 3] * 2
