"""Random operations of an engine with NumPy's results, as functions of rank processes.

Every rank draws the same plan from the same seed, and submits and awaits it in its own order and at its own pace.
"""

from __future__ import annotations

import ctypes
import random
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkhvd.engine.calls import Reduction
from sparkhvd.engine.engine import Engine
from sparkhvd.engine.library import Collective, DType, ReduceOp
from sparkhvd.engine.work import Work
from tests.engine.arrays import (
    NUMPY_TYPES,
    REDUCTIONS,
    Array,
    expected,
    float32_from_bfloat16,
    random_array,
    start_allreduce,
    view,
)
from tests.harness.rank_process import Talk

OPERATIONS = 14
SIZES = (0, 1, 2, 3, 4, 5, 7, 63, 1000, 4097, 70_001)
LARGE = 400_003
KINDS = (
    "allreduce",
    "allreduce",
    "grouped",
    "allgather",
    "broadcast",
    "alltoall",
    "reducescatter",
    "barrier",
    "registered",
)
REGISTERED_BYTES = 1 << 20
# Several roundings of sums whose terms may cancel.
TOLERANCES = {
    DType.FLOAT16: 2e-2,
    DType.BFLOAT16: 1e-1,
    DType.FLOAT32: 1e-5,
    DType.FLOAT64: 1e-12,
}
STATIC_SETS = ((0, 1), (1, 2, 3), (0, 2), (3,), (0, 1, 2, 3))


@dataclass(frozen=True)
class Planned:
    """Planned operation, the same on every rank."""

    name: str
    kind: str
    process_set: int
    members: tuple[int, ...]
    seed: int
    dtype: DType
    op: ReduceOp
    size: int
    columns: int

    def dice(self) -> random.Random:
        return random.Random(self.seed)

    def input_of(self, rank: int, shape: tuple[int, ...], part: int = 0) -> Array:
        return random_array(self.dtype, shape, self.seed * 1000 + part * 50 + rank)


def plan_of(number: int, sets: Sequence[tuple[int, tuple[int, ...]]]) -> list[Planned]:
    """Return the operations of a round."""
    dice = random.Random(number)
    plan = []
    for index in range(OPERATIONS):
        kind = dice.choice(KINDS)
        process_set, members = (0, sets[0][1]) if kind == "registered" else dice.choice(sets)
        dtype = DType.FLOAT32 if kind == "registered" else dice.choice(list(DType))
        ops = [op for of_dtype, op in REDUCTIONS if of_dtype == dtype]
        size = LARGE if dice.random() < 0.05 else dice.choice(SIZES)
        planned = Planned(
            name=f"{number}.{index}",
            kind=kind,
            process_set=process_set,
            members=members,
            seed=number * 100 + index,
            dtype=dtype,
            op=dice.choice(ops),
            size=size,
            columns=dice.choice((1, 1, 3)),
        )
        plan.append(planned)
    # The registered memory holds one operation at a time.
    registered = [p for p in plan if p.kind == "registered"]
    return [p for p in plan if p not in registered[1:]]


@dataclass(frozen=True)
class Started:
    """A submitted operation, and how to compare its result."""

    planned: Planned
    work: Work
    check: Callable[[], None]


class Rank:
    """Rank that takes part in the stress."""

    def __init__(self, engine: Engine, *, is_exact: bool) -> None:
        self.engine = engine
        self.is_exact = is_exact
        self.buffer = engine.allocate(REGISTERED_BYTES)
        memory = (ctypes.c_float * (REGISTERED_BYTES // 4)).from_address(self.buffer.address)
        self.registered = np.frombuffer(memory, np.float32)
        self.sets: list[tuple[int, tuple[int, ...]]] = [(0, tuple(range(engine.size)))]
        for members in STATIC_SETS:
            if members[-1] < engine.size:
                self.sets.append((self.add(members), members))
        self.counts: Counter[str] = Counter()
        # Checksum of the results that every rank has, in any order: equal bits on all ranks give equal sums.
        self.checksum = 0

    def add(self, members: tuple[int, ...]) -> int:
        work = self.engine.add_process_set(members)
        work.wait()
        return int(work.output().rows[0])

    def round(self, number: int, own: random.Random) -> None:
        """Run all operations in which this rank takes part."""
        sets = list(self.sets)
        dynamic = random.Random(f"set {number}")
        if dynamic.random() < 0.3:
            size = self.engine.size
            members = tuple(sorted(dynamic.sample(range(size), dynamic.randint(1, size))))
            sets.append((self.add(members), members))
        mine = [p for p in plan_of(number, sets) if self.engine.rank in p.members]
        started = []
        for planned in own.sample(mine, len(mine)):
            started.append(getattr(self, f"start_{planned.kind}")(planned))
            self.counts[planned.kind] += 1
            if own.random() < 0.2:
                time.sleep(own.random() * 0.003)
        for one in own.sample(started, len(started)):
            while own.random() < 0.4 and not one.work.done():
                time.sleep(0)
            one.work.wait()
            one.check()
        if len(sets) > len(self.sets):
            self.engine.remove_process_set(sets[-1][0]).wait()
        if dynamic.random() < 0.2:
            self.join_round(number)

    # Each starts one kind of operation.

    def start_allreduce(self, p: Planned) -> Started:
        shape = (p.size,)
        work, result = start_allreduce(
            self.engine,
            p.name,
            p.input_of(self.engine.rank, shape),
            op=p.op,
            dtype=p.dtype,
            process_set=p.process_set,
        )
        return Started(p, work, lambda: self.same(p, result, self.reduced(p, shape)))

    def start_grouped(self, p: Planned) -> Started:
        dice = p.dice()
        shapes = [(dice.choice(SIZES), p.columns) for _ in range(dice.randint(1, 5))]
        inputs = [p.input_of(self.engine.rank, shape, i) for i, shape in enumerate(shapes)]
        results = [np.empty_like(array) for array in inputs]
        work = self.engine.allreduce(
            [view(a, b) for a, b in zip(inputs, results, strict=True)],
            name=p.name,
            dtype=p.dtype,
            reduction=Reduction(p.op),
            process_set=p.process_set,
            keep=(inputs, results),
        )

        def check() -> None:
            for i, (result, shape) in enumerate(zip(results, shapes, strict=True)):
                self.same(p, result, self.reduced(p, shape, i))

        return Started(p, work, check)

    def start_registered(self, p: Planned) -> Started:
        size = min(p.size, len(self.registered))
        place = self.registered[:size]
        place[:] = p.input_of(self.engine.rank, (size,))
        work = self.engine.allreduce(
            [view(place, place)],
            name=p.name,
            dtype=p.dtype,
            reduction=Reduction(p.op),
            keep=self.buffer,
        )
        return Started(p, work, lambda: self.same(p, place, self.reduced(p, (size,))))

    def start_allgather(self, p: Planned) -> Started:
        rows = {rank: p.dice().choice(SIZES) // (rank + 1) for rank in p.members}
        inputs = {rank: p.input_of(rank, (rows[rank], p.columns)) for rank in p.members}
        own = inputs[self.engine.rank]
        work = self.engine.allgather(
            view(own), name=p.name, dtype=p.dtype, process_set=p.process_set, keep=own
        )

        def check() -> None:
            assert work.output().rows == tuple(rows[rank] for rank in p.members), p
            every = np.concatenate([inputs[rank] for rank in p.members])
            self.same(p, self.output_of(work, every), every)

        return Started(p, work, check)

    def start_broadcast(self, p: Planned) -> Started:
        root = p.dice().choice(p.members)
        own = p.input_of(self.engine.rank, (p.size,))
        result = np.empty_like(own)
        work = self.engine.broadcast(
            view(own, result),
            root_rank=root,
            name=p.name,
            dtype=p.dtype,
            process_set=p.process_set,
            keep=(own, result),
        )
        return Started(p, work, lambda: self.same(p, result, p.input_of(root, (p.size,))))

    def start_alltoall(self, p: Planned) -> Started:
        dice = p.dice()
        most = min(p.size, 5000)
        splits = {r: [dice.randint(0, most) for _ in p.members] for r in p.members}
        inputs = {r: p.input_of(r, (sum(splits[r]), p.columns)) for r in p.members}
        me = p.members.index(self.engine.rank)
        own = inputs[self.engine.rank]
        call = self.engine.prepare(
            Collective.ALLTOALL,
            [view(own)],
            p.dtype,
            process_set=p.process_set,
            numbers=tuple(splits[self.engine.rank]),
        )
        work = self.engine.start(call, p.name, own)

        def check() -> None:
            parts = []
            for r in p.members:
                begin = sum(splits[r][:me])
                parts.append(inputs[r][begin : begin + splits[r][me]])
            self.same(p, self.output_of(work, np.concatenate(parts)), np.concatenate(parts))

        return Started(p, work, check)

    def start_reducescatter(self, p: Planned) -> Started:
        count, me = len(p.members), p.members.index(self.engine.rank)
        shape = (p.size, p.columns)
        begins = [i * (p.size // count) + min(i, p.size % count) for i in range(count + 1)]
        own = p.input_of(self.engine.rank, shape)
        result = np.empty((begins[me + 1] - begins[me], p.columns), own.dtype)
        call = self.engine.prepare(
            Collective.REDUCESCATTER,
            [view(own, result)],
            p.dtype,
            Reduction(p.op),
            p.process_set,
        )
        work = self.engine.start(call, p.name, (own, result))
        return Started(
            p,
            work,
            lambda: self.same(p, result, self.reduced(p, shape)[begins[me] : begins[me + 1]]),
        )

    def start_barrier(self, p: Planned) -> Started:
        work = self.engine.barrier(name=p.name, process_set=p.process_set)
        return Started(p, work, lambda: None)

    def join_round(self, number: int) -> None:
        """Reduce as many buckets as this rank has, and join, because ranks have unequal work."""
        dice = random.Random(f"join {number}")
        size, buckets = self.engine.size, 4
        has = [dice.randint(0, buckets) for _ in range(size)]
        lengths = [dice.choice(SIZES) for _ in range(buckets)]
        ops = [dice.choice((ReduceOp.SUM, ReduceOp.AVERAGE)) for _ in range(buckets)]
        started = []
        for i in range(has[self.engine.rank]):
            own = np.full(lengths[i], self.engine.rank + 1.0)
            started.append(
                (i, *start_allreduce(self.engine, f"bucket {number}.{i}", own, op=ops[i]))
            )
        joined = self.engine.join()
        for i, work, result in started:
            work.wait()
            total = sum(rank + 1.0 for rank in range(size) if has[rank] > i)
            if ops[i] == ReduceOp.AVERAGE:
                total *= 1 / size
            assert (result == total).all(), (number, i, has, result[:3], total)
        joined.wait()
        self.counts["join"] += 1

    # Comparing.

    def reduced(self, p: Planned, shape: tuple[int, ...], part: int = 0) -> Array:
        return expected(p.dtype, p.op, [p.input_of(rank, shape, part) for rank in p.members])

    def output_of(self, work: Work, like: Array) -> Array:
        output = work.output()
        assert output.num_bytes == like.nbytes
        copy = np.empty_like(like)
        if like.nbytes:
            ctypes.memmove(copy.ctypes.data, output.address, like.nbytes)
        return copy

    def same(self, p: Planned, found: Array, wanted: Array) -> None:
        """Compare bits. Between hosts, floating-point sums may be rounded differently."""
        wanted = wanted.astype(NUMPY_TYPES[p.dtype], copy=False)
        assert found.shape == wanted.shape, p
        if p.kind in ("allreduce", "grouped", "registered") and p.process_set == 0:
            self.checksum += zlib.crc32(p.name.encode() + found.tobytes())
        if found.tobytes() == wanted.tobytes():
            return
        if p.dtype == DType.BFLOAT16:
            found, wanted = float32_from_bfloat16(found), float32_from_bfloat16(wanted)
        wrong = found != wanted
        if not self.is_exact and p.dtype in TOLERANCES:
            allowed = TOLERANCES[p.dtype]
            wrong = ~np.isclose(found, wanted, rtol=allowed, atol=allowed, equal_nan=True)
        where = np.flatnonzero(wrong.ravel())
        assert not len(where), (
            f"{p}: {len(where)} of {found.size} elements differ, the first at {where[:3]}: "
            f"{found.ravel()[where[:3]]} instead of {wanted.ravel()[where[:3]]}"
        )


def work(engine: Engine, talk: Talk) -> Any:
    """Run rounds until the test's seconds are over, and return the number of operations of each kind."""
    first, seconds, is_exact = talk.hear()
    own = random.Random(f"{first} {engine.rank}")
    rank = Rank(engine, is_exact=is_exact)
    until = time.monotonic() + seconds
    number = first
    while True:
        rank.round(number, own)
        number += 1
        over = np.array([engine.rank == 0 and time.monotonic() > until])
        work, result = start_allreduce(engine, f"over {number}", over, op=ReduceOp.MAX)
        work.wait()
        if result[0]:
            return {"rounds": number - first, "checksum": rank.checksum, **rank.counts}
