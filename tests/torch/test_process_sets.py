from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError, MismatchError
from tests.torch.on_ranks import on_ranks

pytestmark = pytest.mark.ranks


def test_every_operation_runs_within_a_process_set() -> None:
    def body() -> Any:
        odd = hvd.add_process_set([1, 3])
        if not odd.included():
            return None
        rank, x = odd.rank(), torch.full((2,), float(hvd.rank()))
        sparse = torch.sparse_coo_tensor([[rank]], [1.0], (2,), check_invariants=True)
        return {
            "allreduce": hvd.allreduce(x, process_set=odd).tolist(),
            "allreduce_": hvd.allreduce_(x.clone(), op=hvd.Sum, process_set=odd).tolist(),
            "grouped": hvd.grouped_allreduce([x, x], op=hvd.Max, process_set=odd)[1].tolist(),
            "allgather": hvd.allgather(x[:1], process_set=odd).tolist(),
            "grouped_allgather": hvd.grouped_allgather([x[:1]], process_set=odd)[0].tolist(),
            "broadcast": hvd.broadcast(x, 3, process_set=odd).tolist(),
            "broadcast_": hvd.broadcast_(x.clone(), 1, process_set=odd).tolist(),
            "alltoall": hvd.alltoall(x, process_set=odd).tolist(),
            "reducescatter": hvd.reducescatter(x, op=hvd.Sum, process_set=odd).tolist(),
            "objects": hvd.allgather_object(hvd.rank(), process_set=odd),
            "object": hvd.broadcast_object(hvd.rank(), 3, process_set=odd),
            "sparse": hvd.sparse_allreduce_async(sparse, "s", hvd.Average, odd)()
            .to_dense()
            .tolist(),
            "registered": hvd.allreduce_(
                hvd.registered_empty((2,), process_set=odd).fill_(1.0), op=hvd.Sum, process_set=odd
            ).tolist(),
            "barrier": hvd.barrier(odd),
        }

    wanted = {
        "allreduce": [2.0, 2.0],
        "allreduce_": [4.0, 4.0],
        "grouped": [3.0, 3.0],
        "allgather": [1.0, 3.0],
        "grouped_allgather": [1.0, 3.0],
        "broadcast": [3.0, 3.0],
        "broadcast_": [1.0, 1.0],
        "alltoall": [1.0, 3.0],
        "reducescatter": [4.0],
        "objects": [1, 3],
        "object": 3,
        "sparse": [0.5, 0.5],
        "registered": [2.0, 2.0],
        "barrier": None,
    }
    assert on_ranks(4, body) == [None, wanted, None, wanted]


def test_process_set_knows_its_ranks_and_the_rank_in_it() -> None:
    def body() -> Any:
        made = hvd.ProcessSet([2, 0])
        before = (made.size(), made.rank(), made.included(), made.process_set_id)
        assert before == (None, None, None, None)
        added = hvd.add_process_set(made)
        assert added is made
        number = made.process_set_id
        assert str(made) == f"ProcessSet(process_set_id={number}, ranks=[0, 2], mpi_comm=None)"
        found = (made.size(), made.included(), made.ranks)
        if hvd.rank() == 1:
            with pytest.raises(InvalidArgumentError, match="rank 1 is not in"):
                made.rank()
            return found, None
        return found, made.rank()

    results = on_ranks(3, body)
    assert results == [
        ((2, True, [0, 2]), 0),
        ((2, False, [0, 2]), None),
        ((2, True, [0, 2]), 1),
    ]


def test_removed_process_set_can_be_added_again() -> None:
    def body() -> Any:
        first = hvd.add_process_set([0, 1])
        number = first.process_set_id
        assert hvd.remove_process_set(first) is True
        assert hvd.remove_process_set(first) is False
        assert hvd.remove_process_set(hvd.global_process_set) is False
        with pytest.raises(InvalidArgumentError, match="the process set is not registered"):
            hvd.allreduce(torch.ones(1), process_set=first)
        assert hvd.add_process_set(first) is first
        assert first.process_set_id != number
        return hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=first).item()

    # A set of all ranks would be a duplicate of the global one, hence three.
    def among_three() -> Any:
        return body() if hvd.rank() < 2 else bystander()

    def bystander() -> Any:
        first = hvd.add_process_set([0, 1])
        hvd.remove_process_set(first)
        hvd.add_process_set(first)
        with pytest.raises(InvalidArgumentError, match="is not in process set"):
            hvd.allreduce(torch.ones(1), process_set=first)

    assert on_ranks(3, among_three) == [2.0, 2.0, None]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([], "at least one rank"),
        ([0, 0], "named twice"),
        ([2], "ranks must be from 0 to 1"),
        ([-1, 0], "ranks must be from 0 to 1"),
        (["a"], "ranks must be integers"),
        ([0, 1], "duplicate process set"),
        (range(2), "duplicate process set"),
    ],
    ids=str,
)
def test_invalid_process_sets_raise_immediately(ranks: Any, message: str) -> None:
    def body() -> Any:
        with pytest.raises(InvalidArgumentError, match=message):
            hvd.add_process_set(ranks)
        known = hvd.add_process_set([1])
        with pytest.raises(InvalidArgumentError, match="registered already|duplicate"):
            hvd.add_process_set(known)
        with pytest.raises(InvalidArgumentError, match="duplicate process set"):
            hvd.add_process_set([1])
        with pytest.raises(InvalidArgumentError, match="expected a ProcessSet"):
            hvd.allreduce(torch.ones(1), process_set=1)

    on_ranks(2, body)


def test_adding_different_process_sets_raises_on_every_rank() -> None:
    def body() -> Any:
        with pytest.raises(MismatchError):
            hvd.add_process_set([hvd.rank()])
        return hvd.add_process_set([1]).process_set_id

    first, second = on_ranks(2, body)
    assert first == second


def test_process_sets_count_unnamed_operations_separately() -> None:
    def body() -> Any:
        first, second = hvd.add_process_set([0, 1]), hvd.add_process_set([1, 2])
        if first.included():
            for _ in range(3):
                hvd.allreduce(torch.ones(1), process_set=first)
        if second.included():
            hvd.allreduce(torch.ones(1), process_set=second)
        return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

    assert on_ranks(3, body) == [3.0] * 3


def test_process_set_is_unregistered_when_its_engine_ends() -> None:
    def body() -> Any:
        return hvd.add_process_set([1])

    for made in on_ranks(2, body):
        assert made.process_set_id is None
        assert made.size() is None


def test_init_registers_all_process_sets_or_fails() -> None:
    with pytest.raises(InvalidArgumentError, match="ranks must be from 0 to 0"):
        hvd.init(process_sets=[[0, 1]])
    assert not hvd.is_initialized()
    with pytest.raises(InvalidArgumentError, match="'static'"):
        hvd.init(process_sets="static")
    with pytest.raises(InvalidArgumentError, match="the launcher's ranks are 0 to 0"):
        hvd.init([0, 1])
    assert not hvd.is_initialized()
    hvd.init([0], process_sets="dynamic")
    assert hvd.size() == 1
    hvd.shutdown()


def linear() -> nn.Module:
    model = nn.Linear(3, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


def test_optimizers_of_two_process_sets_reduce_within_their_sets() -> None:
    def body() -> Any:
        sets = [hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])]
        mine = sets[hvd.rank() // 2]
        model = linear()
        optimizers = [
            hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), process_set=s)
            for s in sets
        ]
        optimizer = optimizers[sets.index(mine)]
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.full((1, 3), float(hvd.rank()))).sum().backward()
            optimizer.step()
        return model.weight.detach().flatten().tolist()

    low, high = 1 - 3 * 0.5, 1 - 3 * 2.5
    assert on_ranks(4, body) == [[low] * 3, [low] * 3, [high] * 3, [high] * 3]


def test_optimizer_outside_its_process_set_works_like_the_plain_optimizer() -> None:
    def body() -> Any:
        first = hvd.add_process_set([0])
        model = linear()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), process_set=first
        )
        model(torch.full((1, 3), float(hvd.rank() + 1))).sum().backward()
        optimizer.step()
        optimizer.synchronize()
        return model.weight[0, 0].item()

    assert on_ranks(2, body) == [0.0, -1.0]


def test_joined_rank_has_joined_all_its_process_sets() -> None:
    def body() -> Any:
        both, other = hvd.add_process_set([0, 2]), hvd.add_process_set([0, 1])
        sums = []
        if hvd.rank() != 2:
            hvd.barrier(process_set=other)
            if hvd.rank() == 0:
                # Rank 2 joins, or has joined.
                for _ in range(3):
                    sums.append(hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=both).tolist())
                with pytest.raises(MismatchError, match="rank 2 has joined"):
                    hvd.broadcast(torch.ones(2), 0, process_set=both)
        last = hvd.join()
        assert last in (0, 1)
        # Names start over on each of the sets.
        for process_set in (both, other):
            if process_set.included():
                sums.append(
                    hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=process_set).item()
                )
        return sums

    ones = [[1.0, 1.0]] * 3
    assert on_ranks(3, body) == [[*ones, 2.0, 2.0], [2.0], [2.0]]
