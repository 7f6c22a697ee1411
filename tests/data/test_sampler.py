from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkhvd.data.reading.sampler import Stage, cuts, epoch_plan, level, split_validation
from sparkhvd.errors import InvalidArgumentError
from tests.harness.plans import batch_rows, rank_rows
from tests.harness.soak import amount

pytestmark = pytest.mark.pure


@given(
    num_rows=st.integers(0, 2000),
    size=st.integers(1, 8),
    batch_size=st.integers(1, 70),
    seed=st.integers(-5, 2**40),
    shuffle=st.booleans(),
    window_rows=st.none() | st.integers(1, 400),
    block_rows=st.none() | st.integers(1, 90),
    skipped=st.booleans(),
    start=st.integers(0, 10_000),
)
@settings(max_examples=amount(300), deadline=None)
def test_ranks_read_each_row_once_in_equal_step_counts(
    num_rows: int,
    size: int,
    batch_size: int,
    seed: int,
    shuffle: bool,
    window_rows: int | None,
    block_rows: int | None,
    skipped: bool,
    start: int,
) -> None:
    rows = np.arange(num_rows) * 3 + 7 if skipped else num_rows
    plan = epoch_plan(
        rows,
        size=size,
        batch_size=batch_size,
        seed=seed,
        epoch=1,
        shuffle=shuffle,
        window_rows=window_rows,
        block_rows=block_rows,
    )
    by_rank = [rank_rows(plan, r) for r in range(size)]
    seen = np.sort(np.concatenate(by_rank))
    np.testing.assert_array_equal(seen, rows if skipped else np.arange(num_rows))
    together = size * batch_size
    is_single = num_rows > together > 1 == num_rows % together
    assert plan.num_steps == -(-num_rows // together) - is_single
    counts = np.array([plan.rows_per_rank(s) for s in range(plan.num_steps)]).reshape(-1, size)
    np.testing.assert_array_equal(counts.sum(0), [len(r) for r in by_rank])
    assert (counts[:-1] == batch_size).all()
    limit = max(batch_size, window_rows or 0, 1) + 1
    for rank in range(size):
        if window_rows is not None:
            assert all(len(w.row_numbers()) <= limit for w in plan.windows(rank))
        start_step = start % (plan.num_steps + 1)
        left = [w.row_numbers() for w in plan.windows(rank, start_step)]
        before = int(counts[:start_step, rank].sum())
        found = np.concatenate([*left, np.empty(0, dtype=np.int64)])
        np.testing.assert_array_equal(found, by_rank[rank][before:])
        for window in plan.windows(rank, start_step):  # rows are read in the order of the files
            assert window.rows is None or (np.diff(window.rows) > 0).all()


@given(
    num_rows=st.integers(0, 600),
    size=st.integers(1, 8),
    batch_size=st.integers(1, 40),
    shuffle=st.booleans(),
)
@settings(max_examples=amount(150), deadline=None)
def test_ranks_together_form_the_global_batches_of_one_process(
    num_rows: int, size: int, batch_size: int, shuffle: bool
) -> None:
    options = {"seed": 3, "epoch": 2, "shuffle": shuffle}
    many = epoch_plan(num_rows, size=size, batch_size=batch_size, **options)
    one = epoch_plan(num_rows, size=1, batch_size=size * batch_size, **options)
    assert many.num_steps == one.num_steps
    for step in range(one.num_steps):
        together = np.concatenate([batch_rows(many, r, step) for r in range(size)])
        np.testing.assert_array_equal(together, batch_rows(one, 0, step))


def test_single_leftover_row_joins_the_last_step() -> None:
    def last(num_rows: int, **options: bool) -> tuple[int, tuple[int, ...]]:
        plan = epoch_plan(num_rows, size=2, batch_size=8, **options)
        return plan.num_steps, plan.rows_per_rank(plan.num_steps - 1)

    assert last(17) == (1, (9, 8))  # BatchNorm cannot train on one row
    assert last(33) == (2, (9, 8))
    assert last(18) == (2, (2, 0))
    assert last(17, drop_last=True) == (1, (8, 8))
    assert last(1) == (1, (1, 0))


@given(size=st.integers(1, 12), batch_size=st.integers(1, 40), data=st.data())
@settings(max_examples=amount(300), deadline=None)
def test_final_step_divides_rows_evenly_among_ranks(
    size: int, batch_size: int, data: st.DataObject
) -> None:
    num_rows = data.draw(st.integers(1, size * batch_size))
    counts = level(num_rows, size, batch_size)
    assert sum(counts) == num_rows
    assert len(counts) == size
    busy = [c for c in counts if c]
    assert max(busy) - min(busy) <= 1
    assert max(busy) <= batch_size + (batch_size == 2)
    if batch_size > 1 and num_rows > 1:
        assert min(busy) > 1


@pytest.mark.parametrize(
    ("num_rows", "size", "batch_size", "expected"),
    [
        (8, 4, 8, (2, 2, 2, 2)),
        (7, 4, 8, (3, 2, 2, 0)),
        (5, 4, 8, (3, 2, 0, 0)),
        (1, 4, 8, (1, 0, 0, 0)),
        (3, 2, 2, (3, 0)),
        (3, 4, 1, (1, 1, 1, 0)),
        (9, 4, 8, (3, 2, 2, 2)),
    ],
)
def test_final_step_rows_per_rank_match_examples(
    num_rows: int, size: int, batch_size: int, expected: tuple[int, ...]
) -> None:
    assert level(num_rows, size, batch_size) == expected


def test_drop_last_omits_an_incomplete_final_global_batch() -> None:
    plan = epoch_plan(107, size=2, batch_size=10, drop_last=True)
    assert (plan.num_steps, plan.num_rows) == (5, 100)
    assert len(np.unique(np.concatenate([rank_rows(plan, r) for r in range(2)]))) == 100
    assert epoch_plan(19, size=2, batch_size=10, drop_last=True).num_steps == 0


def test_unshuffled_global_batches_in_memory_are_sliced_among_ranks() -> None:
    plan = epoch_plan(10, size=2, batch_size=2, shuffle=False)
    assert [batch_rows(plan, r, 1).tolist() for r in range(2)] == [[4, 5], [6, 7]]
    assert [rank_rows(plan, r).tolist() for r in range(2)] == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7]]


def test_unshuffled_data_beyond_memory_give_each_rank_a_contiguous_shard() -> None:
    plan = epoch_plan(10, size=2, batch_size=2, shuffle=False, window_rows=4)
    assert [rank_rows(plan, r).tolist() for r in range(2)] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]
    assert [len(w.row_numbers()) for w in plan.windows(0)] == [4, 2]


def test_each_rank_reads_only_its_part_of_the_blocks() -> None:
    plan = epoch_plan(10_000, size=4, batch_size=10, seed=1, window_rows=500, block_rows=50)
    for rank in range(4):
        blocks = {int(b) for w in plan.windows(rank) for b in np.unique(w.row_numbers() // 50)}
        assert len(blocks) <= 200 / 4 + 1
        windows = list(plan.windows(rank))
        assert all((np.diff(w.rows) > 0).all() for w in windows if w.rows is not None)
    # Rows are mixed: a batch draws on many blocks.
    assert len(np.unique(batch_rows(plan, 0, 0) // 50)) > 3


def test_row_order_depends_only_on_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return rank_rows(epoch_plan(100, size=1, batch_size=7, seed=seed, epoch=epoch), 0).tolist()

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(s, e)) for s in (1, 2) for e in (0, 1)}) == 4
    # The same numbers on every machine and with every numpy that we support.
    assert order(0, 0)[:8] == [75, 88, 27, 62, 65, 17, 56, 96]


def test_row_permutation_is_uniform() -> None:
    first = [rank_rows(epoch_plan(10, size=1, batch_size=10, epoch=e), 0)[0] for e in range(5000)]
    counts = np.bincount(first, minlength=10)
    assert (abs(counts - 500) < 5 * np.sqrt(450)).all()


@given(num_rows=st.integers(0, 500), fraction=st.floats(0, 0.99), seed=st.integers(0, 9))
@settings(max_examples=amount(100), deadline=None)
def test_validation_split_takes_every_row_once(num_rows: int, fraction: float, seed: int) -> None:
    if num_rows == 1 and fraction > 0:
        return
    train, held_out = split_validation(num_rows, fraction, seed)
    np.testing.assert_array_equal(np.sort(np.concatenate([train, held_out])), np.arange(num_rows))
    assert (np.diff(train) > 0).all()
    assert (np.diff(held_out) > 0).all()
    if fraction > 0 and num_rows:
        assert 1 <= len(held_out) < num_rows
        assert abs(len(held_out) - fraction * num_rows) <= 1


def test_validation_split_of_one_row_raises() -> None:
    with pytest.raises(InvalidArgumentError, match="the data have 1 row, which cannot be split"):
        split_validation(1, 0.5, 0)


def test_epoch_plan_refuses_invalid_arguments() -> None:
    with pytest.raises(InvalidArgumentError, match="both must be at least 1"):
        epoch_plan(10, size=0, batch_size=1)
    with pytest.raises(InvalidArgumentError, match="Step 5 does not exist: the epoch has 5 steps"):
        epoch_plan(10, size=1, batch_size=2).rows_per_rank(5)


def test_window_cuts_do_not_divide_the_last_step() -> None:
    assert cuts(10, 4, 2) == [(0, 4), (4, 8), (8, 10)]
    assert cuts(7, 2, 3) == [(0, 2), (2, 4), (4, 7)]
    assert cuts(0, 4, 0) == []


@given(st.data())
@settings(max_examples=amount(60), deadline=None)
def test_every_row_is_read_once_although_ranks_and_batch_size_change(data: st.DataObject) -> None:
    """Ranks and batch sizes may change at any step of an epoch that exceeds the memory."""
    num_rows, window = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 80))
    options = {
        "shuffle": data.draw(st.booleans()),
        "window_rows": window,
        "block_rows": data.draw(st.integers(1, 20)),
    }
    seen: list[int] = []
    before: list[Stage] = []
    while len(seen) < num_rows:
        size, batch_size = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 12))
        plan = epoch_plan(num_rows, size=size, batch_size=batch_size, before=before, **options)
        stop = plan.num_steps
        if len(before) < 4:
            stop = data.draw(st.integers(1, plan.num_steps))
        rows = [rank_rows(plan, rank) for rank in range(size)]
        used = [list(each[: plan.rows_before(rank, stop)]) for rank, each in enumerate(rows)]
        before.append(Stage(size, batch_size, sum(map(len, used))))
        seen += [int(row) for each in used for row in each]
    assert sorted(seen) == list(range(num_rows))
