"""`ElasticSampler.processed_num` as Horovod counts it, and its state on other numbers of ranks."""

from __future__ import annotations

from typing import Any

import pytest

import sparkhvd.torch as hvd
from tests.torch.on_ranks import on_ranks

pytestmark = pytest.mark.ranks


def counted(rows: int, steps: int) -> tuple[list[int], dict[str, Any]]:
    """Record batches of two, with a commit after each second batch. Return `processed_num` after each, and the state."""
    sampler = hvd.elastic.ElasticSampler(range(rows), seed=3)
    state = hvd.elastic.TorchState(sampler=sampler)
    found = []
    for step in range(steps):
        sampler.record_batch(step, 2)
        if step % 2:
            state.commit()
        found.append(sampler.processed_num)
    return found, sampler.state_dict()


def test_recorded_batches_count_for_all_ranks_before_and_after_commit() -> None:
    for found, state in on_ranks(2, lambda: counted(20, 5)):
        assert found == [4, 8, 12, 16, 20]
        assert state["processed_num"] == 20
    # Two rows come twice, so that each of four ranks has three.
    for found, state in on_ranks(4, lambda: counted(10, 2)):
        assert found == [8, 12]
        assert sorted(state["processed_indices"]) == list(range(10))


def test_commit_adds_batches_of_ranks_that_are_ahead() -> None:
    def body() -> list[int]:
        sampler = hvd.elastic.ElasticSampler(range(9), shuffle=False, repeat=False)
        state = hvd.elastic.TorchState(sampler=sampler)
        sampler.record_batch(0, 1 + hvd.rank())
        before = sampler.processed_num
        state.commit()
        return [before, sampler.processed_num]

    assert on_ranks(2, body) == [[2, 3], [4, 3]]


def test_commit_counts_rows_recorded_in_another_order() -> None:
    def body() -> list[int]:
        sampler = hvd.elastic.ElasticSampler(range(12), shuffle=False)
        state = hvd.elastic.TorchState(sampler=sampler)
        sampler.record_indices([5, 3] if hvd.rank() else [4])
        state.commit()
        found = [sampler.processed_num]
        sampler.record_indices([7, 9] if hvd.rank() else [0, 2])
        return [*found, sampler.processed_num]

    assert on_ranks(2, body) == [[3, 7], [3, 7]]


def test_sampler_state_loads_on_another_number_of_ranks() -> None:
    saved = on_ranks(2, lambda: counted(20, 4))[0][1]
    left = set(range(20)) - set(saved["processed_indices"])
    assert len(left) == 4

    def loaded(state: dict[str, Any]) -> tuple[int, int, set[int]]:
        sampler = hvd.elastic.ElasticSampler(range(20), seed=3)
        sampler.load_state_dict(state)
        rows = set(sampler)
        sampler.record_batch(0, 1)
        return sampler.processed_num, sampler.total_size, rows

    of_horovods = {"epoch": 0, "processed_num": 16}
    for state in (saved, of_horovods):
        for size in (1, 2, 4):
            found = on_ranks(size, lambda state=state: loaded(state))
            assert [(num, total) for num, total, _ in found] == [(16 + size, 4)] * size
            assert set[int]().union(*(rows for _, _, rows in found)) == left
