"""Memory of a reader in its own process: it can be limited below the size of the data, and does not grow."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from sparkhvd.data.columns.ragged import Ragged
from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.data.manifest import Manifest
from sparkhvd.data.packed import write_packed
from sparkhvd.data.store.store import Store
from tests.harness.paths import ROOT
from tests.harness.soak import amount

pytestmark = pytest.mark.processes

X = Column("x", "vector", "float32", (64,), "vector", "float32")
TOKENS = Column("tokens", "ragged", "int32", (-1,), "array<int>", "int32")
MEBIBYTE = 1 << 20

PROGRAM = """
import ctypes, gc, resource, sys
import pyarrow
from pathlib import Path
from sparkhvd.errors import SparkhvdError
from sparkhvd.data.manifest import Manifest
from sparkhvd.data.reading.reader import Reader
from sparkhvd.data.store.store import Store

store = Store(FOLDER)
manifest = Manifest.load(store, "data")

def status(name):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(name))
    return int(line.split()[1]) << 10

def rows_of(reader, epoch):
    return sum(batch.num_rows for batch in reader.epoch(epoch))
"""


def make(folder: Path, rows: int, columns: tuple[Column, ...]) -> Manifest:
    store = Store.create(folder)
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 60, rows)
    values = {
        "x": np.zeros((rows, 64), np.float32),
        "tokens": Ragged.from_lengths(np.zeros(int(lengths.sum()), np.int32), lengths),
    }
    given = {c.name: values[c.name] for c in columns}
    options = {"row_group_bytes": 16 * MEBIBYTE}
    file = write_packed(store, "data/part-0.parquet", columns, given, **options)
    sizes = {"tokens": int(lengths.sum()) * 4} if TOKENS in columns else {}
    manifest = Manifest((file,), DataSchema(columns, ()), rows, variable_bytes=sizes)
    manifest.save(store, "data")
    return manifest


def run(folder: Path, body: str) -> str:
    program = f"FOLDER = {str(folder)!r}\n{PROGRAM}{textwrap.dedent(body)}"
    # One arena, because otherwise each thread keeps some memory.
    command = [sys.executable, "-c", program]
    environ = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_reader_reads_data_larger_than_memory(tmp_path: Path) -> None:
    manifest = make(tmp_path, 800_000, (X,))
    assert manifest.num_bytes > 190 * MEBIBYTE
    # 64 MiB more than the interpreter has: less than a third of the data, and no copy of them fits.
    body = """
    limit = status("VmSize") + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    options = {"rank": 0, "size": 1, "batch_size": 1000}
    with Reader(store, manifest, **options, shuffle_bytes=16 << 20) as reader:
        assert rows_of(reader, 0) == manifest.num_rows
    print("streamed")
    try:
        with Reader(store, manifest, **options, shuffle_bytes=1 << 30) as reader:
            rows_of(reader, 0)
        print("the limit does not bite")
    except (MemoryError, SparkhvdError):
        print("in memory they do not fit")
    """
    assert run(tmp_path, body).split("\n")[:2] == ["streamed", "in memory they do not fit"]


@pytest.mark.parametrize("shuffle_bytes", [4 * MEBIBYTE, 1 << 30], ids=["streamed", "in memory"])
@pytest.mark.parametrize("columns", [(X,), (X, TOKENS)], ids=["fixed", "variable"])
def test_reader_memory_does_not_grow_over_20_epochs(
    tmp_path: Path, columns: tuple[Column, ...], shuffle_bytes: int
) -> None:
    manifest = make(tmp_path, 100_000, columns)
    body = f"""
    options = {{"rank": 0, "size": 2, "batch_size": 100, "shuffle_bytes": {shuffle_bytes}}}
    before, seen = status("VmRSS"), []
    with Reader(store, manifest, **options, prefetch_bytes=4 << 20) as reader:
        for epoch in range(20):
            assert rows_of(reader, epoch) == manifest.num_rows // 2
            gc.collect()
            # What is free goes back to the system: how much allocators keep depends on how threads happened to meet.
            pyarrow.default_memory_pool().release_unused()
            ctypes.CDLL(None).malloc_trim(0)
            seen.append(status("VmRSS") - before)
    print(*seen, status("VmHWM") - before)
    """
    *seen, peak = map(int, run(tmp_path, body).split())
    # Windows, the next window's rows, prefetched batches, and memory that the allocator keeps, or all of the data and this memory.
    data = manifest.num_bytes
    assert peak < (data if shuffle_bytes > data else 3 * shuffle_bytes) + 24 * MEBIBYTE
    # An allocator's memory goes up and down, but leaked memory stays.
    assert median(seen[15:]) - median(seen[2:7]) < 3 * MEBIBYTE, seen


def test_shuffle_windows_stay_within_their_memory_limit(tmp_path: Path) -> None:
    """The process keeps freed blocks, so its peak is compared with that of a reader with small windows."""
    make(tmp_path, amount(400_000, 600_000), (X, TOKENS))

    def peak(window_bytes: int) -> int:
        body = f"""
        from sparkhvd.runner import allocator
        del os.environ["MALLOC_ARENA_MAX"]
        assert allocator.keep_freed_memory()
        options = {{"rank": 0, "size": 1, "batch_size": 250, "shuffle_bytes": {window_bytes}}}
        with Reader(store, manifest, **options) as reader:
            for epoch in range({amount(2, 3)}):
                assert rows_of(reader, epoch) == manifest.num_rows
        print(status("VmHWM"))
        """
        return int(run(tmp_path, "import os\n" + textwrap.dedent(body)))

    window = 48 * MEBIBYTE
    assert peak(window) - peak(MEBIBYTE) < 1.3 * window
