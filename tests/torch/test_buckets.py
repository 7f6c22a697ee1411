from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkhvd.torch.gradients.plan import plan_buckets
from tests.harness.soak import amount

pytestmark = pytest.mark.ranks


def test_buckets_follow_tensor_order_and_close_when_full() -> None:
    assert plan_buckets([4, 4, 4, 4, 4], ["f"] * 5, [4, 3, 2, 1, 0], 8) == [(4, 3), (2, 1), (0,)]


def test_tensor_larger_than_a_bucket_gets_its_own_bucket() -> None:
    assert plan_buckets([4, 100, 4], ["f"] * 3, [0, 1, 2], 8) == [(0,), (1,), (2,)]


def test_tensors_of_a_bucket_have_one_dtype() -> None:
    plan = plan_buckets([4, 2, 4, 2], ["f32", "f16", "f32", "f16"], [0, 1, 2, 3], 100)
    assert plan == [(0, 2), (1, 3)]


def test_groups_of_any_size_stay_in_one_bucket() -> None:
    plan = plan_buckets([9, 9, 9, 9], ["f"] * 4, [3, 2, 1, 0], 10, groups=[[0, 2, 3]])
    assert plan == [(1,), (3, 2, 0)]


def test_empty_tensor_list_gives_no_buckets() -> None:
    assert plan_buckets([], [], [], 8) == []


@settings(max_examples=amount(200), deadline=None)
@given(st.data())
def test_every_tensor_is_in_exactly_one_bucket(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 40))
    sizes = data.draw(st.lists(st.integers(1, 50), min_size=count, max_size=count))
    kinds = data.draw(st.lists(st.sampled_from("ab"), min_size=count, max_size=count))
    order = data.draw(st.permutations(range(count)))
    limit = data.draw(st.integers(1, 80))
    free = list(range(count))
    group = data.draw(st.lists(st.sampled_from(free), unique=True)) if free else []
    plan = plan_buckets(sizes, kinds, order, limit, [group] if group else [])
    assert sorted(i for bucket in plan for i in bucket) == list(range(count))
    for bucket in plan:
        assert len({kinds[i] for i in bucket}) == 1
        positions = [order.index(i) for i in bucket]
        assert positions == sorted(positions)
        if not set(bucket) <= set(group) and len(bucket) > 1:
            assert sum(sizes[i] for i in bucket) <= limit


@pytest.mark.parametrize("limit", [1, 7, 64])
def test_equal_input_gives_an_equal_bucket_plan(limit: Any) -> None:
    arguments = ([3, 5, 8, 13], ["a", "b", "a", "b"], [2, 0, 3, 1], limit)
    assert plan_buckets(*arguments) == plan_buckets(*arguments)
