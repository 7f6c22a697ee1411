from __future__ import annotations

import itertools
import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.data.manifest import DAMAGED_NAME, MANIFEST_NAME, Manifest
from sparkhvd.data.packed import RowSource, write_packed
from sparkhvd.data.reading.reader import Batch, Reader
from sparkhvd.data.reading.sampler import epoch_plan
from sparkhvd.data.reading.subset import RowDivision
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError, StoreError
from tests.harness.plans import batch_rows
from tests.harness.ranks import run_threads
from tests.harness.soak import amount

pytestmark = pytest.mark.pure

X = Column("x", "vector", "float32", (3,), "vector", "float32")
ID = Column("id", "scalar", "int64", (), "bigint", "int64")
HELD_OUT = Column("held_out", "scalar", "uint8", (), "boolean", "bool")
ROW_BYTES = 3 * 4 + 8
DATA_DIR = "data/k/app"


def values_of(rows: int) -> dict[str, np.ndarray]:
    numbers = np.arange(rows)
    x = (numbers[:, None] * np.array([1, 2, 3])).astype(np.float32)
    return {"x": x, "id": numbers, "held_out": (numbers % 5 == 0).astype(np.uint8)}


def make(
    store: Store,
    rows_per_file: list[int],
    group_rows: int = 100,
    *,
    flag: bool = False,
    first: int = 0,
) -> Manifest:
    schema = DataSchema((X,), (ID,), None, HELD_OUT if flag else None)
    values = values_of(first + sum(rows_per_file))
    files, at = [], first
    for i, rows in enumerate(rows_per_file):
        part = {n: v[at : at + rows] for n, v in values.items()}
        path = f"{DATA_DIR}/part-{i:05d}-0.parquet"
        options = {"row_group_bytes": group_rows * schema.row_bytes}
        files.append(write_packed(store, path, schema.columns, part, **options))
        at += rows
    return Manifest(tuple(files), schema, at - first)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def epoch_of(reader: Reader, epoch: int = 0) -> list[Batch]:
    batches = list(reader.epoch(epoch))
    for i, batch in enumerate(batches):
        assert batch.step == i
        assert {len(v) for v in batch.columns.values()} == {batch.num_rows}
        # Columns stay together.
        expected = (batch.columns["id"][:, None] * np.array([1, 2, 3])).astype(np.float32)
        np.testing.assert_array_equal(batch.columns["x"], expected)
    return batches


def ids(batches: list[Batch]) -> list[list[int]]:
    return [b.columns["id"].tolist() for b in batches]


# -- the property ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    rows_per_file: list[int]
    group_rows: int
    size: int
    batch_size: int
    seed: int
    shuffle: bool
    shuffle_bytes: int
    prefetch_bytes: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    total = draw(st.integers(0, 5000) | st.integers(0, 40))
    inner = draw(st.lists(st.integers(0, total), max_size=5))
    edges = [0, *sorted(inner), total]
    return Case(
        rows_per_file=[b - a for a, b in itertools.pairwise(edges)],
        group_rows=draw(st.integers(1, 60) if total < 200 else st.integers(50, 6000)),
        size=draw(st.integers(1, 8)),
        batch_size=draw(
            st.integers(1, 600) | st.integers(1, 3) if total < 500 else st.integers(20, 600)
        ),
        seed=draw(st.integers(0, 2**32)),
        shuffle=draw(st.booleans()),
        # Below the size of the data, the reader streams.
        shuffle_bytes=draw(st.sampled_from([1 << 30, 40 * ROW_BYTES, 1500 * ROW_BYTES])),
        # A small bound hands out few steps at a time.
        prefetch_bytes=draw(st.sampled_from([16 << 20, 100 * ROW_BYTES])),
    )


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("sharding")
    yield Store.create(folder)
    shutil.rmtree(folder)


@given(case=cases())
@settings(
    max_examples=amount(75, 10_000), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
def test_every_row_is_read_once_for_any_files_and_ranks(shared_store: Store, case: Case) -> None:
    manifest = make(shared_store, case.rows_per_file, case.group_rows)

    def rank(number: int) -> list[Batch]:
        options = {"seed": case.seed, "shuffle": case.shuffle, "shuffle_bytes": case.shuffle_bytes}
        options |= {"prefetch_bytes": case.prefetch_bytes}
        with Reader(
            shared_store,
            manifest,
            rank=number,
            size=case.size,
            batch_size=case.batch_size,
            **options,
        ) as reader:
            batches = epoch_of(reader)
            assert len(batches) == reader.num_steps
            start = case.seed % (reader.num_steps + 1)
            rest = list(reader.epoch(0, start))
            assert ids(rest) == ids(batches[start:])
            assert [b.step for b in rest] == list(range(start, reader.num_steps))
            return batches

    by_rank: list[list[Batch]] = run_threads([lambda r=r: rank(r) for r in range(case.size)])
    for outcome in by_rank:
        if isinstance(outcome, BaseException):
            raise outcome

    assert len({len(batches) for batches in by_rank}) == 1
    seen = [i for batches in by_rank for b in batches for i in b.columns["id"].tolist()]
    assert sorted(seen) == list(range(manifest.num_rows))

    one = epoch_plan(
        manifest.num_rows,
        size=1,
        batch_size=case.size * case.batch_size,
        seed=case.seed,
        shuffle=case.shuffle,
    )
    assert len(by_rank[0]) == one.num_steps
    is_resident = manifest.num_bytes <= case.shuffle_bytes
    for step, parts in enumerate(zip(*by_rank, strict=True)):
        counts = tuple(b.num_rows for b in parts)
        assert all(b.rows_per_rank == counts for b in parts)
        together = [i for b in parts for i in b.columns["id"].tolist()]
        assert len(together) == len(batch_rows(one, 0, step))
        if is_resident:
            assert together == batch_rows(one, 0, step).tolist()


@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_before_the_first_step_are_not_read(store: Store, shuffle: bool) -> None:
    manifest = make(store, [1000] * 6)
    options: dict[str, Any] = {"rank": 1, "size": 2, "batch_size": 10, "shuffle": shuffle}
    with Reader(store, manifest, **options, shuffle_bytes=700 * ROW_BYTES) as reader:
        rows_read = 0
        read = reader._source.read

        def counted(names: list[str], rows: np.ndarray, *empty: Any) -> dict[str, np.ndarray]:
            nonlocal rows_read
            rows_read += len(rows)
            return read(names, rows, *empty)

        reader._source.read = counted  # type: ignore[assignment, method-assign]
        whole = list(reader.epoch(3))
        assert rows_read == 3000
        for start in (0, 1, 107, 280, 300):
            rows_read = 0
            assert ids(list(reader.epoch(3, start))) == ids(whole[start:])
            assert rows_read == 3000 - 10 * start
        with pytest.raises(InvalidArgumentError, match="Step 301 does not exist"):
            list(reader.epoch(3, 301))


# -- orders and subsets ------------------------------------------------------------------------------


def test_each_epoch_has_its_own_repeatable_order(store: Store) -> None:
    manifest = make(store, [300, 200])
    for shuffle_bytes in (1 << 30, 100 * ROW_BYTES):
        options = {
            "rank": 0,
            "size": 2,
            "batch_size": 16,
            "seed": 5,
            "shuffle_bytes": shuffle_bytes,
        }
        with Reader(store, manifest, **options) as one, Reader(store, manifest, **options) as other:
            assert ids(epoch_of(one, 0)) != ids(epoch_of(one, 1))
            assert ids(epoch_of(one, 1)) == ids(epoch_of(other, 1))


def test_plan_predicts_the_rows_of_batches(store: Store) -> None:
    manifest = make(store, [300, 200])
    for shuffle_bytes in (1 << 30, 100 * ROW_BYTES):
        for subset in ("all", "train"):
            with Reader(
                store,
                manifest,
                rank=1,
                size=2,
                batch_size=16,
                subset=subset,
                validation=0.2,
                shuffle_bytes=shuffle_bytes,
            ) as reader:
                plan = reader.plan(3)
                expected = [batch_rows(plan, 1, s).tolist() for s in range(plan.num_steps)]
                assert ids(epoch_of(reader, 3)) == expected


@pytest.mark.parametrize("shuffle_bytes", [1 << 30, 50 * ROW_BYTES])
def test_validation_fraction_selects_the_same_rows_in_every_reader(
    store: Store, shuffle_bytes: int
) -> None:
    manifest = make(store, [300, 200])
    seen: dict[str, list[int]] = {}
    for subset in ("train", "validation"):
        seen[subset] = []
        for rank in range(2):
            with Reader(
                store,
                manifest,
                rank=rank,
                size=2,
                batch_size=16,
                seed=3,
                subset=subset,
                validation=0.1,
                shuffle_bytes=shuffle_bytes,
            ) as reader:
                assert reader.num_rows == {"train": 450, "validation": 50}[subset]
                seen[subset] += [i for batch in ids(epoch_of(reader)) for i in batch]
    assert sorted(seen["train"] + seen["validation"]) == list(range(500))


def test_validation_column_splits_rows(store: Store) -> None:
    manifest = make(store, [300, 200], flag=True)
    for subset, expected in (
        ("train", [i for i in range(500) if i % 5]),
        ("validation", list(range(0, 500, 5))),
        ("all", list(range(500))),
    ):
        with Reader(store, manifest, rank=0, size=1, batch_size=64, subset=subset) as reader:
            batches = epoch_of(reader)
            assert sorted(i for batch in ids(batches) for i in batch) == expected
            assert set(batches[0].columns) == {"x", "id"}


def test_validation_rows_at_the_end_are_divided_evenly_among_ranks(store: Store) -> None:
    manifest, rows = make(store, [60, 40], flag=True), np.arange(80, 100)
    with RowSource(store, manifest) as source:
        division = RowDivision(source.block_edges)
    parts = [division.part(rows, number, 4) for number in range(4)]
    assert [len(np.atleast_1d(part)) for part in parts] == [5, 5, 5, 5]
    np.testing.assert_array_equal(np.concatenate(parts), rows)


def test_drop_last_omits_an_incomplete_final_step(store: Store) -> None:
    manifest = make(store, [107])
    with Reader(store, manifest, rank=1, size=2, batch_size=10, drop_last=True) as reader:
        assert [b.num_rows for b in epoch_of(reader)] == [10] * 5


def test_single_leftover_row_joins_the_last_step(store: Store) -> None:
    manifest = make(store, [103])
    for shuffle_bytes in (1 << 30, 2 * ROW_BYTES):
        with Reader(
            store,
            manifest,
            rank=0,
            size=2,
            batch_size=2,
            shuffle_bytes=shuffle_bytes,
            prefetch_bytes=1,
        ) as reader:
            assert [b.num_rows for b in epoch_of(reader)] == [2] * 25 + [3]


def test_changing_a_batch_does_not_change_later_epochs(store: Store) -> None:
    manifest = make(store, [100])
    with Reader(store, manifest, rank=0, size=1, batch_size=10, shuffle=False) as reader:
        first = list(reader.epoch(0))
        for batch in first:
            batch.columns["x"][:] = -1
        epoch_of(reader, 0)


def test_only_named_columns_are_read(store: Store) -> None:
    manifest = make(store, [100])
    with Reader(store, manifest, rank=0, size=1, batch_size=10, columns=["id"]) as reader:
        assert set(next(iter(reader.epoch(0))).columns) == {"id"}


def test_reader_description_names_the_row_order(store: Store) -> None:
    manifest = make(store, [1000])

    def described(**options: object) -> str:
        with Reader(store, manifest, rank=0, size=1, batch_size=10, **options) as reader:
            return reader.description

    assert described() == "uniform permutation in memory"
    assert described(shuffle=False) == "file order in memory"
    assert (
        described(shuffle=False, shuffle_bytes=2000) == "file order, one contiguous shard per rank"
    )
    assert described(shuffle_bytes=2000) == (
        "blocks in random order, rows permuted inside windows of 100 of 1,000 rows "
        "(raise shuffle_bytes for a uniform permutation)"
    )


# -- the thread --------------------------------------------------------------------------------------


def reader_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "sparkhvd-reader"]


def test_abandoned_epoch_ends_its_reader_thread(store: Store) -> None:
    manifest = make(store, [5000], group_rows=5000)
    with Reader(store, manifest, rank=0, size=1, batch_size=1, prefetch_bytes=1) as reader:
        epoch = reader.epoch(0)
        next(epoch)
        epoch.close()
        assert reader_threads() == []
        next(reader.epoch(1))  # dropped
        left = reader.epoch(2)
        next(left)
        assert len(epoch_of(reader, 3)) == 5000
    assert reader_threads() == []


@pytest.mark.parametrize("shuffle_bytes", [1 << 30, 100 * ROW_BYTES])
def test_epoch_prepared_ahead_has_the_same_batches(store: Store, shuffle_bytes: int) -> None:
    manifest = make(store, [300, 200])
    options: dict[str, Any] = {
        "rank": 1,
        "size": 2,
        "batch_size": 16,
        "prefetch_bytes": 40 * ROW_BYTES,
    }
    options["shuffle_bytes"] = shuffle_bytes
    with Reader(store, manifest, **options) as reader:
        plain = [ids(epoch_of(reader, e)) for e in range(4)]
    with Reader(store, manifest, **options) as reader:
        reader.prepare()
        assert len(reader_threads()) == (shuffle_bytes == 1 << 30)
        for epoch in range(2):
            batches = [ids([b])[0] for b in reader.epoch(epoch, following=epoch + 1)]
            assert batches == plain[epoch]
            assert len(reader_threads()) == 1  # the next epoch's
        # Another epoch than was prepared, a later step of it, and one that is left early.
        assert ids(list(reader.epoch(3))) == plain[3]
        assert reader_threads() == []
        list(reader.epoch(1, following=2))
        assert ids(list(reader.epoch(2, 5))) == plain[2][5:]
        left = reader.epoch(0, following=1)
        next(left)
        left.close()
        assert ids(list(reader.epoch(1))) == plain[1]
        list(reader.epoch(1, following=2))
    assert reader_threads() == []
    with Reader(store, manifest, **options) as reader:  # where a run resumes
        reader.prepare(3, 5)
        running = [t for t in threading.enumerate() if t.name == "sparkhvd-reader"]
        batches = reader.epoch(3, 5)
        first = next(batches)
        if running:
            assert reader._running is not None
            assert reader._running._thread is running[0]
        assert ids([first, *batches]) == plain[3][5:]


def test_closing_the_reader_ends_a_running_epoch(store: Store) -> None:
    manifest = make(store, [500_000], group_rows=500_000)
    reader = Reader(store, manifest, rank=0, size=1, batch_size=10, prefetch_bytes=1)
    epoch = reader.epoch(0)
    next(epoch)
    started = time.monotonic()
    reader.close()
    assert time.monotonic() - started < 1
    assert reader_threads() == []
    epoch.close()


def test_reader_thread_errors_reach_the_caller_with_rank_epoch_and_step(
    store: Store, tmp_path: Path
) -> None:
    manifest = make(store, [100, 100])
    (tmp_path / "store" / manifest.files[1].path).unlink()
    with (
        Reader(
            store, manifest, rank=1, size=2, batch_size=10, shuffle=False, shuffle_bytes=200
        ) as reader,
        pytest.raises(
            OSError, match=r"failed at rank 1, epoch 4, step 0: FileNotFoundError.*part-00001"
        ),
    ):
        epoch_of(reader, 4)
    assert reader_threads() == []


@pytest.mark.parametrize("shuffle_bytes", [1 << 30, 20 * ROW_BYTES], ids=["whole", "streamed"])
@pytest.mark.parametrize("damage", ["flip", "cut", "list"])
def test_error_names_the_damaged_file(
    store: Store, tmp_path: Path, damage: str, shuffle_bytes: int
) -> None:
    manifest = make(store, [100, 100])
    manifest.save(store, DATA_DIR)
    path = tmp_path / "store" / manifest.files[1].path
    content = path.read_bytes()
    begins = content.index(np.arange(100, 200).astype("<i8").tobytes())

    def read_all() -> None:
        listed = Manifest.load(store, DATA_DIR)
        for rank in (0, 1):  # they share the work beyond memory
            options = {"rank": rank, "size": 2, "batch_size": 10, "shuffle_bytes": shuffle_bytes}
            with Reader(store, listed, **options) as reader:
                assert sum(batch.num_rows for batch in reader.epoch(0)) == 100

    read_all()
    if damage == "cut":
        path.write_bytes(content[:300])
        expected = "part-00001.*its end is not what was written"
    elif damage == "flip":
        at = begins + 371
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        expected = r"part-00001.*column .* of row group 0 has the checksum .*fit again: the data are then mater"
    else:
        listing = tmp_path / "store" / DATA_DIR / MANIFEST_NAME
        listing.write_text(listing.read_text().replace("float32", "int32", 1))
        expected = "_manifest.json.*is damaged.*[Ff]it again"
    with pytest.raises((StoreError, InvalidArgumentError), match=expected):
        read_all()
    assert store.exists(f"{DATA_DIR}/{DAMAGED_NAME}") == (damage != "list")
    assert reader_threads() == []


def test_hanging_read_times_out(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """open() of a pipe without a writer blocks, as on a mount whose server is gone."""
    monkeypatch.setattr("sparkhvd.data.reading.reader.READ_S", 0.3)
    monkeypatch.setattr("sparkhvd.data.reading.reader.STOP_S", 0.1)
    manifest = make(store, [100])
    path = tmp_path / "store" / manifest.files[0].path
    path.unlink()
    os.mkfifo(path)
    with Reader(store, manifest, rank=0, size=1, batch_size=10) as reader:
        with pytest.raises(
            StoreError,
            match=r"rank 0, epoch 2, step 0: TimeoutError: neither the store nor a decoder gave rows",
        ):
            epoch_of(reader, 2)
        with pytest.raises(StoreError, match=r"^Rank 0: a read of .* has not returned within "):
            epoch_of(reader, 3)
    (stuck,) = [t for t in threading.enumerate() if t.name == "sparkhvd-reader"]
    os.close(os.open(path, os.O_WRONLY))
    stuck.join(20)
    assert not stuck.is_alive()


def test_an_epoch_waits_for_a_slow_read_of_another_epoch(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkhvd.data.reading.reader.STOP_S", 0.1)
    manifest = make(store, [100])
    read = RowSource.read

    def slow(self: RowSource, *arguments: Any) -> dict[str, Any]:
        time.sleep(0.6)
        return read(self, *arguments)

    monkeypatch.setattr(RowSource, "read", slow)
    with Reader(store, manifest, rank=0, size=1, batch_size=10) as reader:
        reader.prepare()
        assert len(ids(epoch_of(reader, 2))) == 10


def test_starting_a_second_epoch_makes_the_first_raise(store: Store) -> None:
    manifest = make(store, [5000], group_rows=5000)
    with Reader(store, manifest, rank=0, size=1, batch_size=1, prefetch_bytes=1) as reader:
        first, second = reader.epoch(0), reader.epoch(1)
        next(first), next(second)
        began = time.monotonic()
        with pytest.raises(InvalidArgumentError, match="Iterate over one epoch at a time"):
            list(first)
        assert time.monotonic() - began < 5
        assert len(list(second)) == 4999


def test_streaming_reader_uses_bounded_memory(store: Store) -> None:
    rows = 400_000
    manifest = make(store, [rows], group_rows=50_000)
    assert manifest.num_bytes == rows * ROW_BYTES
    with Reader(
        store,
        manifest,
        rank=0,
        size=1,
        batch_size=100,
        shuffle_bytes=1 << 20,
        prefetch_bytes=1 << 20,
    ) as reader:
        import tracemalloc

        tracemalloc.start()
        try:
            for _ in reader.epoch(0):
                pass
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 6 << 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2, "size": 2, "batch_size": 1}, "rank is 2 and size 2"),
        ({"rank": 0, "size": 1, "batch_size": 0}, "batch_size is 0"),
        ({"rank": 0, "size": 1, "batch_size": 1, "subset": "test"}, "subset is 'test'"),
        ({"rank": 0, "size": 1, "batch_size": 1, "shuffle_bytes": 0}, "shuffle_bytes is 0"),
        ({"rank": 0, "size": 1, "batch_size": 1, "subset": "validation"}, "no validation column"),
        (
            {"rank": 0, "size": 1, "batch_size": 1, "columns": ["nope"]},
            "'nope' is not part of the data",
        ),
    ],
)
def test_error_names_an_invalid_reader_argument(
    store: Store, options: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Reader(store, make(store, [10]), **options)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs CUDA")
def test_batches_are_in_page_locked_memory_on_request(store: Store) -> None:
    manifest = make(store, [300, 200])
    with Reader(store, manifest, rank=0, size=1, batch_size=16, pin_memory=True) as reader:
        for batch in epoch_of(reader):
            assert all(torch.from_numpy(v).is_pinned() for v in batch.columns.values())
