"""Every collective gives NumPy's result on the stacked inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparkhvd.engine.calls import Reduction
from sparkhvd.engine.engine import Engine, isa_available
from sparkhvd.engine.library import DType, ReduceOp
from sparkhvd.settings import Settings
from tests.engine.arrays import (
    NUMPY_TYPES,
    REDUCTIONS,
    allgather,
    allreduce,
    broadcast,
    expected,
    random_array,
    start_allreduce,
    view,
)
from tests.harness.ranks import run_ranks
from tests.harness.soak import SOAK

pytestmark = pytest.mark.ranks

# Small slots: a few thousand elements already need several segments.
SMALL = Settings(slot_bytes=4096, slots=2)
SOCKETS = Settings(slot_bytes=4096, slots=2, shared_memory=False)

LAYOUTS = [
    pytest.param(1, None, SMALL, id="1"),
    pytest.param(2, None, SMALL, id="2-shared"),
    pytest.param(2, [0, 1], SMALL, id="2-hosts"),
    pytest.param(3, None, SOCKETS, id="3-sockets"),
    pytest.param(4, [0, 0, 1, 1], SMALL, id="2x2"),
    pytest.param(5, [0, 1, 0, 2, 0], SMALL, id="3+1+1"),
    pytest.param(5, None, SMALL, id="5-shared"),
]


def sizes(world: int) -> list[int]:
    every = sorted({0, 1, max(world - 1, 0), world, world + 1, 127, 1024, 5003})
    # More ranks than cores take long, so outside of `make soak` they run every third size, the largest first.
    return every if SOAK or world < 5 else every[::-3]


def assert_reduced(found: Any, wanted: Any, dtype: DType, *, exact: bool) -> None:
    """Compare bits inside a host. Between hosts, partial sums are added, so floats may be rounded differently."""
    if exact or dtype not in (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64):
        np.testing.assert_array_equal(found, wanted)
    elif dtype == DType.BFLOAT16:
        assert np.all(np.abs(found.astype(np.int64) - wanted.astype(np.int64)) <= 1)
    else:
        epsilon = np.finfo(NUMPY_TYPES[dtype]).eps
        np.testing.assert_allclose(found, wanted, rtol=8 * epsilon, atol=8 * epsilon)


@pytest.mark.parametrize(
    ("world", "hosts", "settings"),
    [
        *LAYOUTS,
        pytest.param(6, list(range(6)), SMALL, id="6-hosts"),
        pytest.param(7, None, SMALL, id="7-shared"),
    ],
)
def test_allreduce_matches_numpy(world: int, hosts: list[int] | None, settings: Settings) -> None:
    cases = [(dtype, op, size) for dtype, op in REDUCTIONS for size in sizes(world)]

    def body(engine: Engine) -> list[Any]:
        results = []
        for dtype, op, size in cases:
            array = random_array(dtype, (size,), seed=1000 * size + engine.rank)
            name = f"{dtype.name} {op.name} {size}"
            results.append(allreduce(engine, name, array, dtype=dtype, op=op))
        return results

    by_rank = run_ranks(world, body, hosts=hosts, settings=settings)
    # Rank order is kept by direct addition on one host; several hosts add per host first.
    exact = hosts is None or len(set(hosts)) == len(hosts)
    for index, (dtype, op, size) in enumerate(cases):
        stacked = [random_array(dtype, (size,), seed=1000 * size + r) for r in range(world)]
        wanted = expected(dtype, op, stacked)
        for rank in range(world):
            # Every rank has the same bits.
            np.testing.assert_array_equal(by_rank[rank][index], by_rank[0][index])
        assert_reduced(by_rank[0][index], wanted, dtype, exact=exact)


@pytest.mark.parametrize(("world", "hosts", "settings"), LAYOUTS)
def test_allgather_joins_unequal_first_dimensions(
    world: int, hosts: list[int] | None, settings: Settings
) -> None:
    def rows_of(rank: int, case: int) -> Any:
        rows = [(rank * 7 + case) % 5, 0, 1, 600 * rank, 3][case]
        return random_array(DType.FLOAT32, (rows, 2, 3), seed=rank)

    def body(engine: Engine) -> list[Any]:
        return [allgather(engine, f"gather {c}", rows_of(engine.rank, c)) for c in range(5)]

    for results in run_ranks(world, body, hosts=hosts, settings=settings):
        for case, (joined, rows) in enumerate(results):
            parts = [rows_of(r, case) for r in range(world)]
            assert rows == tuple(len(p) for p in parts)
            np.testing.assert_array_equal(joined, np.concatenate(parts))


@pytest.mark.parametrize(("world", "hosts", "settings"), LAYOUTS)
def test_broadcast_copies_the_tensor_of_the_root(
    world: int, hosts: list[int] | None, settings: Settings
) -> None:
    def body(engine: Engine) -> list[Any]:
        return [
            broadcast(
                engine,
                f"{root} {size}",
                random_array(DType.INT64, (size,), seed=engine.rank),
                root,
            )
            for root in range(world)
            for size in (0, 1, 3000)
        ]

    for results in run_ranks(world, body, hosts=hosts, settings=settings):
        wanted = [
            random_array(DType.INT64, (size,), seed=root)
            for root in range(world)
            for size in (0, 1, 3000)
        ]
        for found, array in zip(results, wanted, strict=True):
            np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize(("world", "hosts", "settings"), LAYOUTS)
def test_barrier_blocks_every_rank_until_the_last_arrives(
    world: int, hosts: list[int] | None, settings: Settings
) -> None:
    arrived: list[int] = []

    def body(engine: Engine) -> int:
        arrived.append(engine.rank)
        engine.barrier().wait()
        seen = len(arrived)
        engine.barrier().wait()
        return seen

    assert run_ranks(world, body, hosts=hosts, settings=settings) == [world] * world


@pytest.mark.parametrize("hosts", [None, [0, 1, 1]])
def test_operations_match_by_name_in_any_order(hosts: list[int] | None) -> None:
    names = [f"tensor {i}" for i in range(40)]

    def body(engine: Engine) -> dict[str, float]:
        order = np.random.default_rng(engine.rank).permutation(len(names))
        started = {}
        for i in order:
            # Also sizes around a slot, so that operations overlap in several segments.
            array = np.full(1 + 311 * int(i), engine.rank + i, np.float32)
            started[names[i]] = start_allreduce(engine, names[i], array)
        results = {}
        for i in reversed(order):
            work, result = started[names[i]]
            work.wait()
            assert np.all(result == result[0])
            results[names[i]] = float(result[0])
        return results

    for results in run_ranks(3, body, hosts=hosts, settings=SMALL):
        assert results == {name: 3 + 3 * i for i, name in enumerate(names)}


@pytest.mark.parametrize("hosts", [None, [0, 0, 1]])
def test_several_tensors_are_reduced_in_one_operation(hosts: list[int] | None) -> None:
    shapes = [(3, 4), (0,), (5000,), (1,), (), (7, 11, 13)]

    def body(engine: Engine) -> list[Any]:
        arrays = [np.full(s, engine.rank + i, np.float32) for i, s in enumerate(shapes)]
        results = [np.empty_like(a) for a in arrays]
        views = [view(a, r) for a, r in zip(arrays, results, strict=True)]
        engine.allreduce(
            views,
            name="bucket",
            dtype=DType.FLOAT32,
            reduction=Reduction(ReduceOp.AVERAGE),
            keep=(arrays, results),
        ).wait()
        return results

    for results in run_ranks(3, body, hosts=hosts, settings=SMALL):
        for i, (shape, result) in enumerate(zip(shapes, results, strict=True)):
            np.testing.assert_array_equal(result, np.full(shape, 1 + i, np.float32))


def test_allreduce_result_may_overwrite_the_input() -> None:
    def body(engine: Engine) -> Any:
        array = np.arange(10_000, dtype=np.float64) + engine.rank
        engine.allreduce(
            [view(array, array)],
            name="x",
            dtype=DType.FLOAT64,
            reduction=Reduction(ReduceOp.SUM),
            keep=array,
        ).wait()
        return array

    for result in run_ranks(3, body, settings=SMALL):
        np.testing.assert_array_equal(result, 3 * np.arange(10_000) + 3.0)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.INT32, DType.FLOAT16])
def test_scale_factors_apply_once_to_inputs_and_result(dtype: DType) -> None:
    def body(engine: Engine) -> Any:
        array = np.array([10, 7, 3], NUMPY_TYPES[dtype]) * (engine.rank + 1)
        return allreduce(engine, "x", array, op=ReduceOp.SUM, prescale=0.5, postscale=3.0)

    for found in run_ranks(2, body):
        inputs = [np.array([10, 7, 3]) * r * 0.5 for r in (1, 2)]
        if dtype == DType.INT32:
            inputs = [np.trunc(i) for i in inputs]
        np.testing.assert_array_equal(found, (inputs[0] + inputs[1]) * 3)


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512", "neon"])
@pytest.mark.parametrize("hosts", [None, [0, 0, 1]])
def test_all_instruction_sets_give_the_same_bits(isa: str, hosts: list[int] | None) -> None:
    if not isa_available(isa):
        pytest.skip(f"this CPU has no {isa}")

    def bits(isa: str) -> list[bytes]:
        def body(engine: Engine) -> list[bytes]:
            return [
                allreduce(
                    engine,
                    f"{dtype.name} {op.name}",
                    random_array(dtype, (3001,), seed=engine.rank),
                    dtype=dtype,
                    op=op,
                ).tobytes()
                for dtype, op in REDUCTIONS
            ]

        settings = Settings(isa=isa, slot_bytes=4096)
        return [b"".join(parts) for parts in run_ranks(3, body, hosts=hosts, settings=settings)]

    assert bits(isa) == bits("auto")


def test_small_tensors_of_a_step_are_reduced_through_mailboxes() -> None:
    """A rank may submit all of them before it has to wait for another rank."""

    def body(engine: Engine) -> int:
        started = [
            start_allreduce(engine, f"{number}", np.full(size, engine.rank + 1.0, np.float32))
            for number, size in enumerate([1] * 50 + [8000] * 14)
        ]
        for work, result in started:
            work.wait()
            assert (result == 6).all()
        found = engine.counters()["collectives"]
        return sum(e["operations"] for e in found if e["algorithm"] == "mailbox_allreduce")

    assert run_ranks(3, body) == [64] * 3
