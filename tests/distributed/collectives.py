"""Every collective of torch.distributed, compared with the result that one process computes from all inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "SUM": lambda rows: rows.sum(0),
    "AVG": lambda rows: rows.mean(0),
    "MIN": lambda rows: rows.amin(0),
    "MAX": lambda rows: rows.amax(0),
    "PRODUCT": lambda rows: rows.prod(0),
}
BITS = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
NUMBERS = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
]
MOVED = [*NUMBERS, torch.bool, torch.uint16, torch.complex64, torch.complex128, torch.float8_e5m2]
SIZES = (0, 1, 7, 1003)


class Ranks:
    """A group as this rank sees it, and the inputs of all ranks."""

    def __init__(self, group: Any = None) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.roots = dist.get_process_group_ranks(group or dist.group.WORLD)

    def inputs(self, dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> list[Tensor]:
        """Small whole numbers, so that every reduction is exact."""
        made = []
        for rank in range(self.size):
            generator = torch.Generator().manual_seed(100 * seed + rank)
            values = torch.randint(0, 4, (*shape, 2), generator=generator)
            if dtype.is_complex:
                made.append(torch.view_as_complex(values.to(torch.float64)).to(dtype))
            else:
                made.append(values[..., 0].to(dtype))
        return made


def same(found: Tensor, wanted: Tensor) -> bool:
    if found.dtype.itemsize == 1 and found.is_floating_point():
        found, wanted = found.view(torch.uint8), wanted.to(found.dtype).view(torch.uint8)
    return torch.equal(found, wanted.to(found.dtype).view_as(found))


def reductions(r: Ranks) -> Iterator[tuple[str, bool]]:
    for dtype in NUMBERS:
        for name, compute in OPS.items():
            if name == "AVG" and not dtype.is_floating_point:
                continue
            op = getattr(dist.ReduceOp, name)
            for size in SIZES:
                rows = torch.stack(r.inputs(dtype, (size,), size))
                wide = torch.float64 if dtype.is_floating_point else torch.int64
                # The mean is rounded once to the type, as torch rounds it here.
                wanted = compute(rows.to(wide)).to(dtype) if size else rows[0]
                tensor = rows[r.rank].clone()
                dist.all_reduce(tensor, op, group=r.group)
                yield f"all_reduce {dtype} {name} {size}", same(tensor, wanted)
            yield from rooted_reduction(r, dtype, name, compute)
            yield from scattered(r, dtype, name, compute)


def rooted_reduction(
    r: Ranks, dtype: torch.dtype, name: str, compute: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, bool]]:
    root = r.size - 1
    rows = torch.stack(r.inputs(dtype, (5, 3), 9))
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    tensor = rows[r.rank].clone()
    dist.reduce(tensor, r.roots[root], getattr(dist.ReduceOp, name), group=r.group)
    wanted = compute(rows.to(wide)).to(dtype) if r.rank == root else rows[r.rank]
    yield f"reduce {dtype} {name}", same(tensor, wanted)


def scattered(
    r: Ranks, dtype: torch.dtype, name: str, compute: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, bool]]:
    op = getattr(dist.ReduceOp, name)
    rows = torch.stack(r.inputs(dtype, (r.size, 4), 11))
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    wanted = compute(rows.to(wide)).to(dtype)[r.rank]
    output = torch.empty(4, dtype=dtype)
    dist.reduce_scatter_tensor(output, rows[r.rank].clone(), op, group=r.group)
    yield f"reduce_scatter_tensor {dtype} {name}", same(output, wanted)
    output = torch.empty(4, dtype=dtype)
    dist.reduce_scatter(output, list(rows[r.rank].clone().unbind()), op, group=r.group)
    yield f"reduce_scatter {dtype} {name}", same(output, wanted)


def unusual_reductions(r: Ranks) -> Iterator[tuple[str, bool]]:
    rows = r.inputs(torch.int32, (r.size, 6), 3)
    for name, combine in BITS.items():
        op, wanted = getattr(dist.ReduceOp, name), reduce(combine, rows)
        tensor = rows[r.rank].clone()
        dist.all_reduce(tensor, op, group=r.group)
        yield f"all_reduce {name}", same(tensor, wanted)
        tensor = rows[r.rank].clone()
        dist.reduce(tensor, r.roots[0], op, group=r.group)
        yield f"reduce {name}", same(tensor, wanted if r.rank == 0 else rows[r.rank])
        output = torch.empty(6, dtype=torch.int32)
        dist.reduce_scatter_tensor(output, rows[r.rank].clone(), op, group=r.group)
        yield f"reduce_scatter_tensor {name}", same(output, wanted[r.rank])
    yield from sums(r)
    sparse = [torch.eye(3).mul(rank + 1).to_sparse() for rank in range(r.size)]
    tensor = sparse[r.rank].clone()
    dist.all_reduce(tensor, group=r.group)
    yield "all_reduce sparse", same(tensor.to_dense(), sum(s.to_dense() for s in sparse))  # type: ignore[arg-type]
    few = [torch.eye(4)[: rank % 2].sum(0).to_sparse() for rank in range(r.size)]
    tensor = few[r.rank].clone()
    dist.all_reduce(tensor, group=r.group)
    yield (
        "all_reduce sparse, some without entries",
        same(tensor.to_dense(), sum(s.to_dense() for s in few)),
    )  # type: ignore[arg-type]


def sums(r: Ranks) -> Iterator[tuple[str, bool]]:
    inputs = r.inputs(torch.complex64, (5,))
    tensor = inputs[r.rank].clone()
    dist.all_reduce(tensor, group=r.group)
    yield "all_reduce complex", same(tensor, sum(inputs))  # type: ignore[arg-type]
    doubled = dist._make_nccl_premul_sum(2.0)
    floats = r.inputs(torch.float32, (5, 4))
    tensor = floats[r.rank].clone()
    dist.all_reduce(tensor, doubled, group=r.group)
    yield "all_reduce PREMUL_SUM", same(tensor, 2 * sum(floats))
    across = floats[r.rank].clone().t()  # not contiguous
    dist.all_reduce(across, group=r.group)
    yield "all_reduce of columns", same(across, sum(floats).t())  # type: ignore[attr-defined]
    uneven = [torch.full((place + 1,), 1.0 + r.rank) for place in range(r.size)]
    output = torch.empty(r.rank + 1)
    dist.reduce_scatter(output, uneven, group=r.group)
    total = r.size * (r.size + 1) / 2
    yield "reduce_scatter uneven", same(output, torch.full((r.rank + 1,), total))
    pair = [torch.ones(3), torch.ones(2)]
    dist.all_reduce_coalesced(pair, group=r.group)
    yield "all_reduce_coalesced", all(bool((each == r.size).all()) for each in pair)


def copies(r: Ranks) -> Iterator[tuple[str, bool]]:
    for dtype in MOVED:
        for size in (0, 5):
            inputs = r.inputs(dtype, (2, size), size + 1)
            own = inputs[r.rank]
            tensor, root = own.clone(), r.size // 2
            dist.broadcast(tensor, r.roots[root], group=r.group)
            yield f"broadcast {dtype} {size}", same(tensor, inputs[root])
            outputs = [torch.empty_like(own) for _ in inputs]
            dist.all_gather(outputs, own, group=r.group)
            yield f"all_gather {dtype} {size}", all(map(same, outputs, inputs))
            whole = own.new_empty(2 * r.size, size)
            dist.all_gather_into_tensor(whole, own, group=r.group)
            yield f"all_gather_into_tensor {dtype} {size}", same(whole, torch.cat(inputs))
            yield from rooted_copies(r, inputs, root)
        yield from exchanges(r, dtype)


def rooted_copies(r: Ranks, inputs: list[Tensor], root: int) -> Iterator[tuple[str, bool]]:
    own, is_root = inputs[r.rank], r.rank == root
    label = f"{own.dtype} {own.numel()}"
    outputs = [torch.empty_like(own) for _ in inputs] if is_root else None
    dist.gather(own, outputs, r.roots[root], group=r.group)
    yield f"gather {label}", outputs is None or all(map(same, outputs, inputs))
    output = torch.empty_like(own)
    dist.scatter(output, inputs if is_root else None, r.roots[root], group=r.group)
    yield f"scatter {label}", same(output, own)


def exchanges(r: Ranks, dtype: torch.dtype) -> Iterator[tuple[str, bool]]:
    rows = r.inputs(dtype, (r.size, 3), 5)
    output = torch.empty_like(rows[0])
    dist.all_to_all_single(output, rows[r.rank], group=r.group)
    wanted = torch.stack([each[r.rank] for each in rows])
    yield f"all_to_all_single {dtype}", same(output, wanted)


def uneven_copies(r: Ranks) -> Iterator[tuple[str, bool]]:
    """Sizes that differ from rank to rank: n for rank n, none for the first."""
    inputs = [torch.full((n, 2), float(n)) for n in range(r.size)]
    outputs = [torch.empty_like(each) for each in inputs]
    dist.all_gather(outputs, inputs[r.rank], group=r.group)
    yield "all_gather uneven", all(map(same, outputs, inputs))
    found = [torch.empty_like(each) for each in inputs] if r.rank == 0 else None
    dist.gather(inputs[r.rank], found, r.roots[0], group=r.group)
    yield "gather uneven", found is None or all(map(same, found, inputs))
    output = torch.empty_like(inputs[r.rank])
    dist.scatter(output, inputs if r.rank == 0 else None, r.roots[0], group=r.group)
    yield "scatter uneven", same(output, inputs[r.rank])
    sent = [torch.full((r.rank + to,), float(r.rank)) for to in range(r.size)]
    got = [torch.empty(r.rank + source) for source in range(r.size)]
    dist.all_to_all(got, sent, group=r.group)
    wanted = [torch.full((r.rank + source,), float(source)) for source in range(r.size)]
    yield "all_to_all uneven", all(map(same, got, wanted))
    splits = [r.rank + to for to in range(r.size)]
    whole = torch.empty(sum(splits))
    dist.all_to_all_single(whole, torch.cat(sent), splits, splits, group=r.group)
    yield "all_to_all_single uneven", same(whole, torch.cat(wanted))


def objects(r: Ranks) -> Iterator[tuple[str, bool]]:
    gathered: list[Any] = [None] * r.size
    dist.all_gather_object(gathered, {"rank": r.rank}, group=r.group)
    yield "all_gather_object", gathered == [{"rank": rank} for rank in range(r.size)]
    sent: list[Any] = [r.rank, "x" * r.rank]
    dist.broadcast_object_list(sent, r.roots[-1], group=r.group)
    yield "broadcast_object_list", sent == [r.size - 1, "x" * (r.size - 1)]
    mine: list[Any] = [None]
    every = list(range(10, 10 + r.size)) if r.rank == 0 else None
    dist.scatter_object_list(mine, every, r.roots[0], group=r.group)
    yield "scatter_object_list", mine == [10 + r.rank]
    found: list[Any] | None = [None] * r.size if r.rank == 0 else None
    dist.gather_object(r.rank, found, r.roots[0], group=r.group)
    yield "gather_object", found is None or found == list(range(r.size))


def asynchronous(r: Ranks) -> Iterator[tuple[str, bool]]:
    """Works: awaited in another order than launched, by future, by polling, coalesced."""
    tensors = [torch.full((3,), float(n)) for n in range(4)]
    works = [dist.all_reduce(each, group=r.group, async_op=True) for each in tensors]
    for work in reversed(works):
        work.wait()
    yield "waits in any order", all(bool((t == n * r.size).all()) for n, t in enumerate(tensors))
    yield "is_completed", all(work.is_completed() and work.is_success() for work in works)
    whole = torch.empty(r.size)
    own = torch.full((1,), float(r.rank))
    future = dist.all_gather_into_tensor(whole, own, group=r.group, async_op=True).get_future()
    after = future.then(lambda done: done.value()[0].sum().item())
    yield "future", after.wait() == sum(range(r.size))
    work = dist.barrier(group=r.group, async_op=True)
    torch.futures.collect_all([work.get_future()]).wait()
    yield "collect_all", work.exception() is None
    pair = [torch.ones(2), torch.ones(3)]
    with dist._coalescing_manager(r.group, async_ops=True) as manager:
        for each in pair:
            dist.all_reduce(each, group=r.group)
    manager.wait()
    with dist._coalescing_manager(r.group, torch.device("cpu"), async_ops=True) as manager:
        dist.all_reduce(pair[0], group=r.group)
    manager.wait()
    pair[0] /= r.size
    yield "coalescing manager", all(bool((each == r.size).all()) for each in pair)


def messages(r: Ranks) -> Iterator[tuple[str, bool]]:
    """Around a ring, tags out of order, from any rank, large both ways, into columns."""
    after, before = r.roots[(r.rank + 1) % r.size], r.roots[(r.rank - 1) % r.size]
    for dtype in (torch.bool, torch.float8_e5m2, torch.complex64):
        inputs = r.inputs(dtype, (3, 2), 8)
        got = torch.empty_like(inputs[0])
        ops = [
            dist.P2POp(dist.isend, inputs[r.rank], after, r.group),
            dist.P2POp(dist.irecv, got, before, r.group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        yield f"batch_isend_irecv {dtype}", same(got, inputs[r.rank - 1])
    whole = [torch.full((300_000,), float(rank)) for rank in range(r.size)]
    large, small = torch.empty(2, 150_000).t(), torch.empty(1)
    works = [
        dist.irecv(small, before, r.group, tag=2),
        dist.irecv(large, before, r.group, tag=1),
        dist.isend(whole[r.rank], after, r.group, tag=1),
        dist.isend(torch.ones(1), after, r.group, tag=2),
    ]
    for work in works:
        work.wait()
    yield "tags", small.item() == 1 and same(large.contiguous(), whole[r.rank - 1])
    if r.size > 1 and r.rank != 0:
        dist.send(torch.full((2,), float(r.rank)), r.roots[0], r.group)
    if r.size > 1 and r.rank == 0:
        found = torch.empty(2)
        senders = [(dist.recv(found, group=r.group), int(found[0])) for _ in range(r.size - 1)]
        yield "recv of any", sorted(senders) == [(r.roots[n], n) for n in range(1, r.size)]


CHECKS = (messages, reductions, unusual_reductions, copies, uneven_copies, objects, asynchronous)


def wrong(group: Any = None) -> list[str]:
    """Return the checks that failed on this rank."""
    ranks = Ranks(group)
    return [name for check in CHECKS for name, ok in check(ranks) if not ok]
