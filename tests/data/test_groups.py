"""Plans of whole groups: each row once, each group on one rank, equal steps, for all group sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkhvd.data.arrow import numbered
from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.data.manifest import Manifest
from sparkhvd.data.packed import write_packed
from sparkhvd.data.reading.reader import Reader
from sparkhvd.data.reading.subset import GroupPlan, group_edges, group_plan, split_groups
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from tests.harness.plans import batch_rows

pytestmark = pytest.mark.pure

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def plan_of(lengths: Any, size: int, batch_size: int, epoch: int = 0, **given: Any) -> GroupPlan:
    edges = np.cumsum([0, *lengths])
    options: dict[str, Any] = {"shuffle": True, "window_rows": None, "block_rows": 30, **given}
    rows = options.pop("rows", int(edges[-1]))
    return group_plan(rows, edges, size=size, batch_size=batch_size, seed=5, epoch=epoch, **options)


def batches_of(plan: GroupPlan, rank: int, start_step: int = 0) -> list[list[int]]:
    windows = plan.windows(rank, start_step)
    rows = np.concatenate([[], *[window.row_numbers() for window in windows]]).astype(int)
    counts = [plan.rows_per_rank(step)[rank] for step in range(start_step, plan.num_steps)]
    return [part.tolist() for part in np.split(rows, np.cumsum(counts))[:-1]]


@given(
    lengths=LENGTHS,
    size=st.integers(1, 5),
    batch_size=st.integers(1, 50),
    shuffle=st.booleans(),
    window_rows=st.sampled_from([None, 7, 60, 500]),
    start=st.floats(0, 1),
)
@settings(max_examples=150, deadline=None)
def test_every_row_is_read_once_and_each_group_stays_on_one_rank(
    lengths: list[int],
    size: int,
    batch_size: int,
    shuffle: bool,
    window_rows: int | None,
    start: float,
) -> None:
    plan = plan_of(lengths, size, batch_size, shuffle=shuffle, window_rows=window_rows)
    of_row = np.repeat(np.arange(len(lengths)), lengths)
    by_rank = [batches_of(plan, rank) for rank in range(size)]
    assert all(len(batches) == plan.num_steps for batches in by_rank)
    orders = [[row for batch in batches for row in batch] for batches in by_rank]
    assert sorted(row for order in orders for row in order) == list(range(sum(lengths)))
    seen: list[int] = []
    for order in orders:
        groups = of_row[order]
        begins = np.flatnonzero(np.diff(groups, prepend=-1))
        seen += groups[begins].tolist()  # a group that came apart would begin twice
    assert sorted(seen) == list(range(len(lengths)))
    longest = max(lengths)
    for batches in by_rank:
        sizes = [len(batch) for batch in batches]
        assert sum(sizes) <= sum(lengths) / size + longest
        if longest <= batch_size:
            assert max(sizes) <= sum(sizes) / plan.num_steps + longest
            ends = [of_row[batch[-1]] for batch in batches if batch]
            assert ends == list(dict.fromkeys(ends))  # no batch ends inside a group
    first = int(start * plan.num_steps)
    for rank in range(size):
        assert batches_of(plan, rank, first) == by_rank[rank][first:]


@given(lengths=LENGTHS, size=st.integers(1, 4), batch_size=st.integers(1, 50))
@settings(max_examples=60, deadline=None)
def test_epochs_have_equal_step_counts_and_a_repeatable_order(
    lengths: list[int], size: int, batch_size: int
) -> None:
    plans = [plan_of(lengths, size, batch_size, epoch) for epoch in range(3)]
    assert len({plan.num_steps for plan in plans}) == 1
    again = plan_of(lengths, size, batch_size, 1)
    assert batches_of(again, 0) == batches_of(plans[1], 0)


def test_groups_are_permuted_in_each_epoch_and_not_without_shuffle() -> None:
    lengths = [3, 1, 4, 1, 5, 9, 2, 6] * 10
    first, second = (np.concatenate(batches_of(plan_of(lengths, 1, 16, e), 0)) for e in (0, 1))
    assert first.tolist() != second.tolist()
    plain = plan_of(lengths, 2, 16, shuffle=False)
    order = np.concatenate([np.concatenate(batches_of(plain, rank)) for rank in range(2)])
    assert order.tolist() == list(range(sum(lengths)))


@pytest.mark.parametrize("window_rows", [None, 1000])
def test_batches_are_nearly_full(window_rows: int | None) -> None:
    lengths = np.random.default_rng(1).integers(1, 20, 5000)
    plan = plan_of(lengths, 4, 256, window_rows=window_rows)
    counts = np.array([plan.rows_per_rank(step) for step in range(plan.num_steps)])
    assert counts.shape == (-(-lengths.sum() // (4 * 256)), 4)
    assert 235 <= counts.min() <= counts.max() <= 276


def test_group_larger_than_a_batch_is_split_into_consecutive_batches() -> None:
    plan = plan_of([3, 70, 2, 5], 2, 16)
    (rank,) = (rank for rank in range(2) if any(3 in batch for batch in batches_of(plan, rank)))
    batches = batches_of(plan, rank)
    assert [row for batch in batches for row in batch if 3 <= row < 73] == list(range(3, 73))
    assert max(len(batch) for batch in batches) <= 16 + 14


def test_windows_read_rows_in_long_consecutive_runs() -> None:
    lengths = np.full(1000, 5)
    plan = plan_of(lengths, 2, 50, window_rows=500, block_rows=100)
    windows = list(plan.windows(0))
    assert [window.num_rows <= 500 for window in windows] == [True] * len(windows)
    for window in windows:
        assert window.rows is not None
        assert (np.diff(window.rows) > 0).all()
        assert (np.diff(window.rows) > 1).sum() <= 30  # runs of about 100 rows, or parts of them
    plan = plan_of(lengths, 2, 50, rows=np.arange(5000) * 2, window_rows=500)
    assert all((window.row_numbers() % 2 == 0).all() for window in plan.windows(1))


def test_windows_are_cut_only_between_batches() -> None:
    plan = plan_of(np.random.default_rng(2).integers(1, 9, 300), 2, 20)
    sizes = [plan.rows_per_rank(step)[1] for step in range(plan.num_steps)]
    before = plan.rows_before(1, 3)
    assert before == sum(sizes[:3])
    ranges = plan.cuts(1, before, sum(sizes[3:]), 50)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == sum(sizes[3:])
    edges = {0, *np.cumsum(sizes[3:]).tolist()}
    assert all(a in edges and b in edges for a, b in ranges)
    assert all(b - a >= 50 for a, b in ranges[:-1])


def test_group_edges_of_selected_rows_follow_their_group_numbers() -> None:
    numbers = np.array([4, 4, 7, 7, 7, 9])
    assert group_edges(numbers, 6).tolist() == [0, 2, 5, 6]
    assert group_edges(numbers, np.array([1, 2, 4])).tolist() == [0, 1, 3]
    assert group_edges(numbers, np.array([], np.int64)).tolist() == [0]


def test_validation_fraction_takes_whole_groups() -> None:
    numbers = np.repeat(np.arange(50), np.random.default_rng(3).integers(1, 9, 50))
    train, held_out = split_groups(numbers, 0.3, seed=1)
    assert sorted([*train, *held_out]) == list(range(len(numbers)))
    assert not set(numbers[train]) & set(numbers[held_out])
    assert abs(len(held_out) - 0.3 * len(numbers)) <= 4
    assert split_groups(numbers, 0.3, seed=2)[1].tolist() != held_out.tolist()
    assert len(split_groups(np.array([1, 1, 2]), 0.9, seed=1)[0]) > 0
    with pytest.raises(InvalidArgumentError, match="the data have 1 group of group_col"):
        split_groups(np.array([1, 1, 1]), 0.5, seed=1)


@pytest.mark.parametrize("kind", [pa.int32(), pa.string()])
def test_consecutive_equal_values_get_one_group_number_across_batches(kind: pa.DataType) -> None:
    values = [None, None, 1, 1, 1, 2, 3, 3]
    texts = [None if v is None else str(v) for v in values]
    array = pa.array(texts if kind == pa.string() else values, kind)
    whole = pa.RecordBatch.from_arrays([pa.array(range(8)), array], names=["x", "g"])
    parts = [whole[:0], whole[:3], whole[3:4], whole[4:]]
    found = list(numbered(iter(parts), 1, 100))
    numbers = [n for batch in found for n in batch.column(1).to_pylist()]
    assert numbers == [None, None, 102, 102, 102, 103, 104, 104]
    assert [n for batch in found for n in batch.column(0).to_pylist()] == list(range(8))
    assert {batch.schema.field(1).type for batch in found} == {pa.int64()}


@pytest.mark.parametrize("shuffle_bytes", [1 << 20, 700])
@pytest.mark.parametrize("size", [2, 5])
def test_reader_returns_the_batches_of_its_plan(
    tmp_path: Path, size: int, shuffle_bytes: int
) -> None:
    lengths = [4, 30, 1, 6, 2, 9, 3]
    numbers = np.repeat(np.arange(len(lengths)), lengths)
    values = {"x": np.arange(len(numbers), dtype=np.int64), "g": numbers}
    x, g = (Column(name, "scalar", "int64", (), "bigint", "int64") for name in ("x", "g"))
    schema = DataSchema((x,), (), group=g)
    store = Store.create(tmp_path)
    files = [
        write_packed(
            store, f"d/{i}.parquet", schema.columns, {n: v[a:b] for n, v in values.items()}
        )
        for i, (a, b) in enumerate(((0, 34), (34, 55)))
    ]
    manifest = Manifest(tuple(files), schema, len(numbers))
    seen: list[int] = []
    for rank in range(size):
        with Reader(
            store, manifest, rank=rank, size=size, batch_size=8, shuffle_bytes=shuffle_bytes
        ) as reader:
            plan = reader.plan(1)
            batches = list(reader.epoch(1))
            assert [b.columns["x"].tolist() for b in batches] == [
                batch_rows(plan, rank, step).tolist() for step in range(plan.num_steps)
            ]
            for batch in batches:
                assert batch.num_rows == batch.rows_per_rank[rank] == len(batch.columns["g"])
                assert (batch.columns["g"] == numbers[batch.columns["x"]]).all()
                seen += batch.columns["x"].tolist()
            later = [b.columns["x"].tolist() for b in reader.epoch(1, start_step=2)]
            assert later == [b.columns["x"].tolist() for b in batches[2:]]
            where = "" if shuffle_bytes > 700 else ", inside windows of 43 rows"
            assert reader.description == (
                f"7 groups in random order{where}, the longest of 30 rows: cut, because batch_size is 8"
            )
    assert sorted(seen) == values["x"].tolist()
