"""alltoall, reducescatter, grouped gathers, sparse tensors, join and registered memory, on tensors."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError, MismatchError
from tests.torch.on_ranks import on_ranks

pytestmark = pytest.mark.ranks

DTYPES = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
]


def rows_of(rank: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(rows * 2) + 3 * rank) % 5).view(rows, 2).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_alltoall_exchanges_tensors_of_every_dtype(dtype: torch.dtype) -> None:
    def body() -> Any:
        rank, size = hvd.rank(), hvd.size()
        x = rows_of(rank, 6, dtype)
        equal = hvd.alltoall(x)
        assert isinstance(equal, torch.Tensor)
        assert torch.equal(
            equal, torch.cat([rows_of(r, 6, dtype)[2 * rank : 2 * rank + 2] for r in range(size)])
        )
        splits = torch.tensor([rank, 0, 2], dtype=torch.int32)
        output, received = hvd.alltoall(x, splits, name="uneven")
        # Rank r sends r rows to rank 0, none to rank 1, two to rank 2.
        own = {0: lambda r: slice(0, r), 1: lambda r: slice(r, r), 2: lambda r: slice(r, r + 2)}
        parts = [rows_of(r, 6, dtype)[own[rank](r)] for r in range(size)]
        assert torch.equal(output, torch.cat(parts))
        assert received.dtype == torch.int32
        assert received.tolist() == [len(part) for part in parts]
        handle = hvd.alltoall_async(x, [2, 2, 2])
        assert hvd.synchronize(handle)[1].tolist() == [2, 2, 2]
        assert torch.equal(x, rows_of(rank, 6, dtype))

    on_ranks(3, body)


def test_alltoall_accepts_any_layout_and_empty_tensors() -> None:
    def body() -> Any:
        x = torch.arange(12.0).view(3, 4).t()  # not contiguous
        assert torch.equal(hvd.alltoall(x), torch.cat([x[2 * hvd.rank() : 2 * hvd.rank() + 2]] * 2))
        empty, received = hvd.alltoall(torch.empty(0, 3), [0, 0])
        assert empty.shape == (0, 3)
        assert received.tolist() == [0, 0]
        big, _ = hvd.alltoall(torch.full((100_000,), float(hvd.rank())), [99_999, 1])
        return big.sum().item(), len(big)

    assert on_ranks(2, body) == [(99_999.0, 199_998), (1.0, 2)]


def test_gradient_of_alltoall_returns_to_the_source_ranks() -> None:
    def body() -> Any:
        x = torch.ones(5, 2, requires_grad=True)
        output, received = hvd.alltoall(x, [1, 2])
        assert not received.requires_grad
        (output * (hvd.rank() + 1)).sum().backward()
        return x.grad[:, 0].tolist()

    assert on_ranks(2, body) == [[1.0, 2.0, 2.0, 0.0, 0.0]] * 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 2, 3, 7])
def test_reducescatter_gives_every_rank_its_rows(dtype: torch.dtype, rows: int) -> None:
    def body() -> Any:
        x = rows_of(hvd.rank(), rows, dtype)
        every = torch.stack([rows_of(r, rows, dtype) for r in range(3)])
        first = [0, (rows + 2) // 3, (rows + 2) // 3 + (rows + 1) // 3, rows]
        mine = slice(first[hvd.rank()], first[hvd.rank() + 1])
        wanted = every.any(0) if dtype == torch.bool else every.sum(0).to(dtype)
        assert torch.equal(hvd.reducescatter(x, op=hvd.Sum), wanted[mine])
        assert torch.equal(x, rows_of(hvd.rank(), rows, dtype))
        pair = hvd.grouped_reducescatter([x, x.double()], op=hvd.Sum)
        assert torch.equal(pair[0], wanted[mine])
        assert torch.equal(pair[1], every.double().sum(0)[mine])
        if dtype.is_floating_point:
            average = hvd.synchronize(hvd.reducescatter_async(x))
            assert torch.allclose(average.double(), every.double().mean(0)[mine], rtol=1e-2)

    on_ranks(3, body)


def test_reducescatter_applies_factors_and_compression() -> None:
    def body() -> Any:
        x = torch.full((2,), hvd.rank() + 1.0)
        scaled = hvd.reducescatter(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=10.0)
        halves = hvd.reducescatter(x, compression=hvd.Compression.fp16)
        return scaled.item(), halves.item(), halves.dtype

    assert on_ranks(2, body) == [(60.0, 1.5, torch.float32)] * 2


def test_gradients_of_reducescatter_equal_those_of_horovod() -> None:
    def body() -> Any:
        results = []
        for op in (hvd.Average, hvd.Sum):
            x = torch.ones(3, requires_grad=True)
            y = hvd.reducescatter(x, op=op, prescale_factor=0.5)
            (y * (hvd.rank() + 1)).sum().backward()
            results.append(x.grad.tolist())
        a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        ya, yb = hvd.grouped_reducescatter([a, b])
        (ya.sum() + 3 * yb.sum()).backward()
        x = torch.ones(2, requires_grad=True)
        with pytest.raises(InvalidArgumentError, match=r"reducescatter\(op=Max\) has no gradient"):
            hvd.reducescatter(x, op=hvd.Max).sum().backward()
        return (*results, a.grad.tolist(), b.grad.tolist())

    wanted = ([0.5, 0.5, 1.0], [1.0, 1.0, 2.0], [1.0, 1.0], [3.0, 3.0])
    assert on_ranks(2, body) == [wanted] * 2


@pytest.mark.parametrize("large", [False, True])
def test_grouped_allgather_accepts_several_dtypes(large: bool) -> None:
    scale = 5000 if large else 1

    def inputs(rank: int) -> list[torch.Tensor]:
        return [
            rows_of(rank, (rank + 1) * scale, torch.float32),
            rows_of(rank, 2 * scale, torch.int64),
            rows_of(rank, rank * scale, torch.float32),
        ]

    def body() -> Any:
        found = hvd.grouped_allgather(inputs(hvd.rank()), name="group")
        assert isinstance(found, tuple)
        for index, joined in enumerate(found):
            assert torch.equal(joined, torch.cat([inputs(r)[index] for r in range(3)]))
        found[0].add_(1)  # results are tensors of their own
        also = hvd.synchronize(hvd.grouped_allgather_async(inputs(hvd.rank())))
        assert torch.equal(also[2], found[2])
        return hvd.grouped_allgather([])

    assert on_ranks(3, body) == [()] * 3


def test_gradient_of_grouped_allgather_is_the_average_for_own_rows() -> None:
    def body() -> Any:
        a = torch.ones(hvd.rank() + 1, requires_grad=True)
        b = torch.ones(2, requires_grad=True)
        ja, jb = hvd.grouped_allgather([a, b])
        weight = torch.arange(3.0) * (hvd.rank() + 1)
        ((ja * weight).sum() + jb.sum()).backward()
        return a.grad.tolist(), b.grad.tolist()

    assert on_ranks(2, body) == [([0.0], [1.0, 1.0]), ([1.5, 3.0], [1.0, 1.0])]


def test_sparse_allreduce_adds_entries_of_all_ranks() -> None:
    def body() -> Any:
        x = torch.sparse_coo_tensor([[0, hvd.rank() + 1]], [1.0, 2.0], (4,), check_invariants=True)
        total = hvd.sparse_allreduce_async(x, name="s", op=hvd.Sum)().to_dense()
        mean = hvd.sparse_allreduce_async(x, name="m", op=hvd.Average)().to_dense()
        with pytest.raises(InvalidArgumentError, match="op=Max is not possible"):
            hvd.sparse_allreduce_async(x, "x", hvd.Max)
        return total.tolist(), mean.tolist()

    assert on_ranks(2, body) == [([2.0, 2.0, 2.0, 0.0], [1.0, 1.0, 1.0, 0.0])] * 2


# --- join ---


def test_joined_rank_contributes_zeros_and_unnamed_operations_continue() -> None:
    def body() -> Any:
        found = []
        for _ in range(hvd.rank() + 1):
            found.append(hvd.allreduce(torch.full((3,), 6.0)).tolist()[0])
        last = hvd.join()
        found.append(hvd.allreduce(torch.tensor(1.0), op=hvd.Sum).item())
        return found, last

    assert on_ranks(3, body) == [
        ([6.0, 3.0], 2),
        ([6.0, 4.0, 3.0], 2),
        ([6.0, 4.0, 2.0, 3.0], 2),
    ]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: hvd.allreduce(x, op=hvd.Max, name="x"),
        lambda x: hvd.allgather(x, name="x"),
        lambda x: hvd.broadcast(x, 0, name="x"),
        lambda x: hvd.alltoall(x, [1, 1, 0], name="x"),
        lambda x: hvd.reducescatter(x, name="x"),
        lambda x: hvd.barrier(),
        lambda x: hvd.add_process_set([0]),
        lambda x: hvd.registered_empty((4,)),
    ],
    ids=["max", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "set", "memory"],
)
def test_unsupported_operations_fail_only_while_a_rank_has_joined(call: Any) -> None:
    def body() -> Any:
        x = torch.ones(3)
        if hvd.rank() < 2:
            with pytest.raises(MismatchError, match="rank 2 has joined"):
                call(x)
            assert hvd.allreduce(x, name="y", op=hvd.Sum).tolist() == [2.0] * 3
        hvd.join()
        call(x)

    on_ranks(3, body)


def test_join_allows_training_with_uneven_batch_counts() -> None:
    batches = {0: 2, 1: 5, 2: 0}

    def body() -> Any:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        for p in model.parameters():
            nn.init.constant_(p, 0.5)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
        )
        for _ in range(batches[hvd.rank()]):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        gradients = [p.grad for p in model.parameters()]
        if hvd.rank() == 2:
            assert gradients == [None] * 4
            for p in model.parameters():
                p.grad = torch.full_like(p, float("nan"))  # no rank may read it
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        for _ in range(2):  # all ranks again, which now also agree on the order of gradients
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        return last, [p.detach().sum().item() for p in model.parameters()]

    results = on_ranks(3, body)
    assert results[0][0] in range(3)
    assert results[0] == results[1] == results[2]
    assert all(value == value for value in results[0][1])


# --- Adasum ---


def adasum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    dot, na, nb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    return a * (1 - dot / (2 * na)) + b * (1 - dot / (2 * nb))


def test_adasum_equals_its_formula_for_each_tensor() -> None:
    def vector(rank: int, seed: int) -> torch.Tensor:
        return torch.randn(50, generator=torch.Generator().manual_seed(10 * seed + rank))

    def body() -> Any:
        rank = hvd.rank()
        return hvd.grouped_allreduce([vector(rank, 0), vector(rank, 1)], op=hvd.Adasum)

    for pair in on_ranks(4, body):
        for seed, found in enumerate(pair):
            v = [vector(r, seed) for r in range(4)]
            wanted = adasum(adasum(v[0], v[1]), adasum(v[2], v[3]))
            assert torch.allclose(found, wanted, atol=1e-5)


def test_adasum_optimizer_combines_steps() -> None:
    def body() -> Any:
        p = nn.Parameter(torch.ones(3))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([p], lr=0.5, momentum=0.9), op=hvd.Adasum
        )
        assert isinstance(optimizer, torch.optim.SGD)
        with pytest.raises(InvalidArgumentError, match="is already a DistributedOptimizer"):
            hvd.DistributedOptimizer(optimizer)
        with (
            pytest.raises(InvalidArgumentError, match="not possible"),
            optimizer.skip_synchronize(),
        ):
            pass
        direction = torch.tensor([1.0, 0.0, 2.0] if hvd.rank() == 0 else [0.0, 3.0, 2.0])
        for _ in range(2):
            optimizer.zero_grad()
            (p * direction).sum().backward()
            optimizer.synchronize()
            optimizer.step()
        return p.tolist()

    first, second = on_ranks(2, body)
    assert first == second
    wanted = torch.ones(3)
    buffers = [torch.zeros(3), torch.zeros(3)]
    for _ in range(2):
        moves = []
        for r, direction in enumerate(([1.0, 0.0, 2.0], [0.0, 3.0, 2.0])):
            buffers[r] = buffers[r] * 0.9 + torch.tensor(direction)
            moves.append(-0.5 * buffers[r])
        wanted = wanted + adasum(*moves)
    assert first == pytest.approx(wanted.tolist(), abs=1e-5)


def test_adasum_needs_a_power_of_two() -> None:
    def body() -> Any:
        with pytest.raises(InvalidArgumentError, match="needs 2, 4, 8, ... ranks, not 3"):
            hvd.DistributedOptimizer(
                torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), op=hvd.Adasum
            )
        with pytest.raises(InvalidArgumentError, match="not 3"):
            hvd.allreduce(torch.ones(1), op=hvd.Adasum)

    on_ranks(3, body)


# --- Registered memory ---


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.bool], ids=str)
def test_registered_tensors_work_in_place_for_every_dtype(dtype: torch.dtype) -> None:
    def body() -> Any:
        x = hvd.registered_empty((3, 1000), dtype)
        assert x.shape == (3, 1000)
        assert x.dtype == dtype
        assert x.data_ptr() % 64 == 0
        assert not x.any()
        x.copy_(rows_of(hvd.rank(), 1500, dtype).view(3, 1000))
        wanted = sum(rows_of(r, 1500, dtype).view(3, 1000) for r in range(3))
        result = hvd.allreduce_(x, op=hvd.Sum)
        assert result is x
        assert torch.equal(x, wanted)
        hvd.allreduce_(x[1], op=hvd.Max, name="a part")
        assert torch.equal(x, wanted)
        assert hvd.registered_empty(0).shape == (0,)
        assert hvd.registered_empty(5).dtype == torch.float32

    on_ranks(3, body)


def test_registered_tensors_outlive_shutdown() -> None:
    def body() -> Any:
        x = hvd.registered_empty((1000,)).fill_(hvd.rank() + 1)
        hvd.allreduce_(x, op=hvd.Sum)
        return x.view(10, 100)[3]

    parts = on_ranks(2, body)
    gc.collect()
    for part in parts:
        part.add_(1)
        assert part.tolist() == [4.0] * 100


def test_a_parameter_and_its_gradient_may_be_registered() -> None:
    def body() -> Any:
        p = nn.Parameter(hvd.registered_empty((4,)).fill_(1.0))
        p.grad = hvd.registered_empty((4,))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))
        for _ in range(3):
            (p * hvd.rank()).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return p.tolist()

    assert on_ranks(3, body) == [[-2.0] * 4] * 3
