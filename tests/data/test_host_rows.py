"""The ranks of a host read and hold rows that fit in memory once: real processes over real files."""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkhvd.data.columns.ragged import Ragged, SparseRows
from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.data.manifest import Manifest
from sparkhvd.data.packed import write_packed
from sparkhvd.data.parquet.dataset import open_dataset
from sparkhvd.data.parquet.manifest import read_manifest
from sparkhvd.data.reading.reader import Batch, Reader
from sparkhvd.data.store.store import Store
from sparkhvd.errors import RankError
from sparkhvd.runner import run_local
from sparkhvd.settings import Settings
from tests.harness.by_value import by_value

pytestmark = pytest.mark.processes

travels_by_value = by_value(__name__)

# The files that are read, and whether their rows are shared.
Key = tuple[str, bool]
DATA_DIR = "data/k/app"
ROWS = 60_000
X = Column("x", "vector", "float32", (64,), "vector", "float32")
ID = Column("id", "scalar", "int64", (), "bigint", "int64")
TOKENS = Column("tokens", "ragged", "int32", (-1,), "array<int>", "int32")
SPARSE = Column("sparse", "sparse", "float64", (900,), "vector", "float64")


def make(folder: Path) -> Manifest:
    """Write rows of every kind into four files."""
    store = Store.create(folder)
    rng = np.random.default_rng(0)
    files = []
    total = 0
    for i, part in enumerate(np.array_split(np.arange(ROWS), 4)):
        lengths = rng.integers(0, 20, len(part))
        count = int(lengths.sum())
        total += count
        tokens = Ragged.from_lengths(rng.integers(0, 1000, count).astype(np.int32), lengths)
        indices = Ragged.from_lengths(rng.integers(0, 900, count).astype(np.int32), lengths)
        values = {
            "x": rng.random((len(part), 64), dtype=np.float32),
            "id": part,
            "tokens": tokens,
            "sparse": SparseRows(indices, Ragged.from_lengths(rng.random(count), lengths), 900),
        }
        path = f"{DATA_DIR}/part-{i}.parquet"
        columns = (X, TOKENS, SPARSE, ID)
        files.append(write_packed(store, path, columns, values, row_group_bytes=4 << 20))
    schema = DataSchema((X, TOKENS, SPARSE), (ID,))
    sizes = {"tokens": total * 4, "sparse": total * 12}
    manifest = Manifest(tuple(files), schema, ROWS, variable_bytes=sizes)
    manifest.save(store, DATA_DIR)
    return manifest


def digest_of(batch: Batch) -> bytes:
    digest = hashlib.sha256()
    for name, value in sorted(batch.columns.items()):
        parts = [value] if isinstance(value, np.ndarray) else []
        for rows in [value.indices, value.values] if isinstance(value, SparseRows) else [value]:
            if isinstance(rows, Ragged):
                parts += [rows.gathered(), rows.lengths]
        digest.update(name.encode())
        for part in parts:
            digest.update(np.ascontiguousarray(part).tobytes())
    return digest.digest()


def epochs(folder: str, manifest: Manifest, is_shared: bool, **options: Any) -> dict[str, Any]:
    """Read two epochs on one rank, and return digests of the batches, bytes read and bytes of shared memory."""
    import sparkhvd.torch as hvd
    from sparkhvd.training.host_memory import HostRows

    def number(path: str, key: str) -> int:
        lines = Path(path).read_text().splitlines()
        return int(next(line for line in lines if line.startswith(key)).split()[1])

    hvd.init()
    gc.collect()  # rows of an earlier call
    label = f"rows {options.get('subset')}"
    sharing = HostRows(label) if is_shared else None
    before = number("/proc/self/io", "rchar:")
    with Reader(
        Store(folder),
        manifest,
        rank=hvd.rank(),
        size=hvd.size(),
        batch_size=1024,
        sharing=sharing,
        **options,
    ) as reader:
        batches = [digest_of(batch) for epoch in (0, 1) for batch in reader.epoch(epoch)]
        read = number("/proc/self/io", "rchar:") - before
        # No rank unmaps its memory before all have measured.
        hvd.barrier()
        shared = number("/proc/self/smaps_rollup", "Pss_Shmem:") << 10
        hvd.barrier()
    return {"batches": batches, "read": read, "shared": shared}


def in_turns(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Measure several times in the same ranks, whose start takes longer than the read."""
    return [call() for call in calls]


def by_call(calls: dict[Key, Callable[[], Any]], size: int, **options: Any) -> dict[Key, list[Any]]:
    """Make calls on ranks, and return the results of each, by rank."""
    ranks = run_local(in_turns, (list(calls.values()),), num_proc=size, **options)
    return dict(zip(calls, map(list, zip(*ranks, strict=True)), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("host-rows") / "store"
    make(folder)
    return folder


SUBSETS: dict[str, dict[str, Any]] = {
    "all": {"subset": "all", "seed": 5},
    "train": {"subset": "train", "validation": 0.2, "seed": 5},
}
MODES = (False, True)  # whether rows are shared


def subsets_of(folder: Path) -> dict[Key, Callable[[], Any]]:
    """Return calls that read the subsets, alone and together."""
    manifest = Manifest.load(Store(str(folder)), DATA_DIR)
    return {
        (subset, is_shared): partial(epochs, str(folder), manifest, is_shared, **options)
        for subset, options in SUBSETS.items()
        for is_shared in MODES
    }


@pytest.fixture(scope="module")
def of_two(folder: Path, flagged: Path, of_others: Path) -> dict[Key, list[Any]]:
    """Measurements of two ranks."""
    calls = subsets_of(folder)
    flags = Manifest.load(Store(str(flagged)), DATA_DIR)
    x = Column("x", "scalar", "float64", (), "double", "float64")
    y = Column("y", "scalar", "float64", (), "double", "float64")
    other = read_manifest(open_dataset(of_others), DataSchema((x,), (y,)))
    for is_shared in MODES:
        calls["flagged", is_shared] = partial(flagged_epochs, str(flagged), flags, is_shared)
        calls["of others", is_shared] = partial(epochs, str(of_others), other, is_shared)
    return by_call(calls, 2)


@pytest.fixture(scope="module")
def of_three(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Key, list[Any]]:
    """Measurements of three ranks."""
    store = Store.create(tmp_path_factory.mktemp("few-rows"))
    file = write_packed(store, "data/one.parquet", [ID], {"id": np.arange(2)})
    few = Manifest((file,), DataSchema((), (ID,)), 2)
    calls = subsets_of(folder)
    calls["few", True] = partial(epochs, store.local_path("") or "", few, True)
    return by_call(calls, 3)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_of_a_host_read_and_store_rows_once(
    folder: Path, size: int, of_two: dict[Key, list[Any]], of_three: dict[Key, list[Any]]
) -> None:
    results = of_two if size == 2 else of_three
    num_bytes = sum(f.stat().st_size for f in folder.glob(f"{DATA_DIR}/*.parquet"))
    for subset in SUBSETS:
        alone, together = results[subset, False], results[subset, True]
        assert [r["batches"] for r in together] == [r["batches"] for r in alone], subset
        least = (0.95 if subset == "all" else 0.75) * size * num_bytes
        assert sum(r["read"] for r in alone) > least, subset
        assert sum(r["read"] for r in together) <= 1.1 * num_bytes, subset
        held = [sum(r["shared"] for r in ranks) for ranks in (alone, together)]
        assert held[1] - held[0] <= 1.2 * num_bytes, subset


def flagged_epochs(folder: str, manifest: Manifest, is_shared: bool) -> dict[str, Any]:
    """Read the training and the validation rows that a column selects, and return them with the number of read bytes."""
    import sparkhvd.torch as hvd
    from sparkhvd.training.host_memory import HostRows, read_flags_once

    def rchar() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    hvd.init()
    before = rchar()
    options: dict[str, Any] = {"rank": hvd.rank(), "size": hvd.size(), "batch_size": 4096}
    if is_shared:
        options["flags"] = read_flags_once(Store(folder), manifest, None)
    batches = []
    for subset in ("train", "validation"):
        sharing = HostRows(subset) if is_shared else None
        with Reader(Store(folder), manifest, **options, subset=subset, sharing=sharing) as reader:
            batches += [digest_of(batch) for batch in reader.epoch(0)]
    return {"batches": batches, "read": rchar() - before}


@pytest.fixture(scope="module")
def flagged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows with a column that selects the validation rows."""
    folder = tmp_path_factory.mktemp("flagged")
    store = Store.create(folder)
    held_out = Column("held_out", "scalar", "uint8", (), "boolean", "bool")
    files = []
    for i, part in enumerate(np.array_split(np.arange(1_000_000), 2)):
        values = {"id": part, "held_out": (np.arange(len(part)) >= 400_000).astype(np.uint8)}
        path = f"{DATA_DIR}/part-{i}.parquet"
        files.append(write_packed(store, path, (ID, held_out), values))
    manifest = Manifest(tuple(files), DataSchema((), (ID,), None, held_out), 1_000_000)
    manifest.save(store, DATA_DIR)
    return folder


def test_rows_split_by_a_validation_column_are_read_once(
    of_two: dict[Key, list[Any]], flagged: Path
) -> None:
    alone, together = (of_two["flagged", is_shared] for is_shared in MODES)
    assert [r["batches"] for r in together] == [r["batches"] for r in alone]
    num_bytes = sum(f.stat().st_size for f in flagged.glob(f"{DATA_DIR}/*.parquet"))
    assert sum(r["read"] for r in alone) > 1.95 * num_bytes
    assert sum(r["read"] for r in together) <= 1.1 * num_bytes


@pytest.fixture(scope="module")
def of_others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parquet files that this package did not write."""
    folder = tmp_path_factory.mktemp("of-others")
    rng = np.random.default_rng(1)
    for i in range(3):
        table = pa.table({name: rng.random(200_000) for name in ("x", "y")})
        pq.write_table(table, folder / f"{i}.parquet", row_group_size=50_000)
    return folder


def test_ranks_divide_ordinary_parquet_at_its_row_groups(
    of_two: dict[Key, list[Any]], of_others: Path
) -> None:
    alone, together = (of_two["of others", is_shared] for is_shared in MODES)
    assert [r["batches"] for r in together] == [r["batches"] for r in alone]
    num_bytes = sum(f.stat().st_size for f in of_others.iterdir())
    assert sum(r["read"] for r in together) <= 1.1 * num_bytes


def test_host_rows_work_with_fewer_rows_than_ranks(of_three: dict[Key, list[Any]]) -> None:
    assert [len(r["batches"]) for r in of_three["few", True]] == [2, 2, 2]


def test_unreadable_file_ends_all_ranks(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    manifest = Manifest.load(Store(str(tmp_path)), DATA_DIR)
    (tmp_path / manifest.files[-1].path).unlink()
    with pytest.raises(RankError, match=r"FileNotFoundError.*part-3"):
        run_local(epochs, (str(tmp_path), manifest, True), {}, num_proc=2)


def test_each_rank_reads_all_rows_if_memory_cannot_be_shared(folder: Path) -> None:
    calls = {key: call for key, call in subsets_of(folder).items() if "all" in key}
    results = by_call(calls, 2, settings=Settings(shared_memory=False))
    alone, together = (results["all", is_shared] for is_shared in MODES)
    assert [r["batches"] for r in together] == [r["batches"] for r in alone]


def read_and_die(folder: str, manifest: Manifest) -> None:
    import sparkhvd.torch as hvd
    from sparkhvd.training.host_memory import HostRows

    hvd.init()
    with Reader(
        Store(folder), manifest, rank=hvd.rank(), size=2, batch_size=64, sharing=HostRows("rows")
    ) as reader:
        for batch in reader.epoch(0):
            if batch.step == 3 and hvd.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.barrier()


def test_a_killed_rank_leaves_no_memory_behind(folder: Path) -> None:
    manifest = Manifest.load(Store(str(folder)), DATA_DIR)
    names = set(os.listdir("/dev/shm"))
    with pytest.raises(RankError, match="SIGKILL"):
        run_local(read_and_die, (str(folder), manifest), {}, num_proc=2)
    assert set(os.listdir("/dev/shm")) <= names
    mapped = [p for p in Path("/proc").glob("[0-9]*/maps") if _maps_rows(p)]
    assert mapped == []


def _maps_rows(path: Path) -> bool:
    """Return True if a child of this process maps memory of an engine."""
    try:
        parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
        return parent == os.getpid() and "memfd:sparkhvd" in path.read_text()
    except OSError:
        return False
