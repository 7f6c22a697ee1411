"""Speed of one rank's reader of shuffled batches, beside torch's DataLoader and a bare read.

    .venv/bin/python benchmarks/reader.py [--rounds 3] [--rows 1000000] [--checksums] [--write] [--json PATH]

A row has 32 float32 and a label.
Files are written first, outside the clock. All sides go by turns and hand out torch tensors. "first" is a new reader's
first epoch, with reading the files; "later" is its second. Sides that read the files in every epoch have only one kind.
The bare read is pyarrow's of the very same files into Arrow, without batches and without an order. Targets: batches of
256 >= 4 M rows/s, of 1,024 >= 10 M rows/s, of 8,192 >= half of the bare read; and to verify checksums <= 5 % more CPU in
the first epoch, which alone verifies.

petastorm cannot live beside this torch and this Spark. Where its own environment exists (`make test-oldest` makes
build/oldest-env, elsewhere: --petastorm PYTHON), its BatchedDataLoader reads the same plain files by turns with the other
sides, in a process there. Else it counts with what was measured once: 0.37 M rows/s in batches of 256, on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from common import ROOT, Report, Target, spread
from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.data.manifest import Manifest
from sparkhvd.data.packed import write_packed
from sparkhvd.data.packed.file import PackedFile
from sparkhvd.data.reading.reader import Reader
from sparkhvd.data.store.store import Store

BATCHES = (256, 1024, 8192)
WIDTH = 32
FILES = 2
# Million rows per second, and of the largest batches the share of the bare read.
TARGETS = {256: 4.0, 1024: 10.0}
BARE_SHARE = 0.5
# Million rows per second in batches of 256, measured once, where there is no environment to measure it in.
PETASTORM = 0.37
PETASTORM_PYTHON = ROOT / "build" / "oldest-env" / "bin" / "python"
PETASTORM_SIDE = "petastorm's BatchedDataLoader, plain Parquet, pyarrow 14"

# Reading may take so many times the CPU for its checksums.
CHECKSUM_SHARE = 1.05
SIDES = (
    ("sparkhvd, in memory", 1 << 30),
    ("sparkhvd, beyond memory (windows of 16 MiB)", 16 << 20),
)

FEATURES = Column("features", "vector", "float32", (WIDTH,), "vector", "float32")
LABEL = Column("label", "scalar", "int64", (), "bigint", "int64")


class Files:
    """The same rows as packed files, as plain Parquet, and in memory."""

    def __init__(self, folder: str, rows: int) -> None:
        rng = np.random.default_rng(0)
        features = rng.random((rows, WIDTH), dtype=np.float32)
        labels = rng.integers(0, 2, rows)
        self.rows = rows
        self.store = Store.create(folder)
        schema = DataSchema((FEATURES,), (LABEL,))
        packed, self.plain = [], []
        for i, part in enumerate(np.array_split(np.arange(rows), FILES)):
            values = {"features": features[part], "label": labels[part]}
            path = f"data/bench/app/part-{i}.parquet"
            packed.append(write_packed(self.store, path, schema.columns, values))
            lists = pa.FixedSizeListArray.from_arrays(features[part].ravel(), WIDTH)
            table = pa.table({"features": lists, "label": labels[part]})
            self.plain.append(f"{folder}/plain-{i}.parquet")
            # Lists as every reader knows them: petastorm's takes none of a fixed size.
            pq.write_table(table, self.plain[-1], store_schema=False)
        self.manifest = Manifest(tuple(packed), schema, rows)
        self.packed = [str(Path(folder) / f.path) for f in packed]
        self.tensors = TensorDataset(torch.from_numpy(features), torch.from_numpy(labels))


class OverPyarrow(IterableDataset[Any]):
    """Usual dataset around pyarrow: batches in file order, without a shuffle."""

    def __init__(self, paths: list[str], batch: int) -> None:
        self.paths = paths
        self.batch = batch

    def __iter__(self) -> Iterator[Any]:
        """Yield the tensors of each batch."""
        for path in self.paths:
            for batch in pq.ParquetFile(path).iter_batches(self.batch):
                flat = batch.column("features").flatten().to_numpy()
                labels = batch.column("label").to_numpy()
                # Copies, because Arrow's memory is read-only.
                yield (
                    torch.from_numpy(flat.reshape(-1, WIDTH).copy()),
                    torch.from_numpy(labels.copy()),
                )


def rate(batches: Callable[[], Iterator[Any]], rows: int) -> float:
    """Measure one epoch, in million rows per second."""
    began = time.perf_counter()
    seen = 0
    for features, label in batches():
        seen += len(label)
        assert features.shape[1] == WIDTH
    assert seen == rows, (seen, rows)
    return rows / (time.perf_counter() - began) / 1e6


def ours(files: Files, batch: int, shuffle_bytes: int, epochs: int = 2) -> list[float]:
    """Measure a reader's epochs."""
    options = {"rank": 0, "size": 1, "batch_size": batch, "shuffle_bytes": shuffle_bytes}
    with Reader(files.store, files.manifest, **options) as reader:

        def batches(epoch: int) -> Iterator[Any]:
            for one in reader.epoch(epoch):
                columns = one.columns
                yield torch.from_numpy(columns["features"]), torch.from_numpy(columns["label"])

        return [rate(lambda e=epoch: batches(e), files.rows) for epoch in range(epochs)]


@contextlib.contextmanager
def unverified() -> Iterator[None]:
    """Read files inside the block as if they had no checksums."""
    read_sums = PackedFile._read_sums
    setattr(PackedFile, "_read_sums", lambda *_, **__: None)  # noqa: B010 - mypy takes no assignment to a method
    try:
        yield
    finally:
        setattr(PackedFile, "_read_sums", read_sums)  # noqa: B010


def cpu(files: Files, shuffle_bytes: int) -> float:
    """Measure the CPU seconds of a reader's first epoch, in batches of 1,024."""
    began = time.process_time()
    ours(files, 1024, shuffle_bytes, epochs=1)
    return time.process_time() - began


def measure_checksums(report: Report, files: Files, rounds: int) -> None:
    """Measure the CPU cost of checksums in the first epoch, in pairs of alternating order."""
    lines: list[list[Any]] = []
    for name, shuffle_bytes in SIDES:
        with_them, without = [], []
        for number in range(2 * rounds):
            for is_verified in (True, False) if number % 2 else (False, True):
                with contextlib.nullcontext() if is_verified else unverified():
                    (with_them if is_verified else without).append(cpu(files, shuffle_bytes))
        report.raw[f"cpu, {name}"] = {"verified": with_them, "unverified": without}
        ratios = [a / b for a, b in zip(with_them, without, strict=True)]
        ratio = statistics.median(ratios)
        target = Target("CPU", ratio, CHECKSUM_SHARE, False)
        cells = [spread(values) for values in (with_them, without, ratios)]
        lines.append([f"{name}, first epoch", *cells, [target]])
    header = ["checksums", "CPU s with", "CPU s without", "ratio of the pairs", "target"]
    report.table(header, lines)


def peers(files: Files, batch: int) -> dict[str, float]:
    """Measure the usual readers."""
    rows = files.rows
    sampler = BatchSampler(RandomSampler(files.tensors), batch, drop_last=False)
    whole = DataLoader(files.tensors, sampler=sampler, batch_size=None)
    single = DataLoader(files.tensors, batch_size=batch, shuffle=True)
    reading = DataLoader(OverPyarrow(files.plain, batch), batch_size=None)
    return {
        "DataLoader over pyarrow, plain Parquet in file order": rate(lambda: iter(reading), rows),
        "DataLoader, tensors in memory, one index per batch": rate(lambda: iter(whole), rows),
        "DataLoader, tensors in memory, one index per row": rate(lambda: iter(single), rows),
    }


def petastorm(files: Files, batch: int, python: Path) -> float:
    """Measure petastorm, in a process of its own environment."""
    program = str(Path(__file__).with_name("reader_petastorm.py"))
    command = [str(python), program, str(batch), str(files.rows), *files.plain]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.split()[-1])


def has_petastorm(python: Path) -> bool:
    """Try to import petastorm with this Python."""
    if not python.exists():
        return False
    command = [str(python), "-W", "ignore", "-c", "import petastorm"]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


def bare(files: Files) -> float:
    """Measure a bare read of the packed files."""
    began = time.perf_counter()
    rows = sum(len(pq.read_table(path)) for path in files.packed)
    return rows / (time.perf_counter() - began) / 1e6


def add_table(report: Report, rows: int) -> None:
    """Add the table: a line per side, a column per batch size."""
    found = report.raw
    bare_rate = statistics.median(found["bare"])
    peer = PETASTORM
    if PETASTORM_SIDE in found:
        peer = statistics.median(found[PETASTORM_SIDE][str(BATCHES[0])])
    lines: list[list[Any]] = []
    for name, results in found.items():
        if name == "bare":
            cells: list[str] = [spread(results)] + ["-"] * (len(BATCHES) - 1)
            lines.append(["bare pyarrow read of the packed files, no batches", *cells, "-"])
            continue
        targets = []
        for batch, least in TARGETS.items():
            if name.startswith("sparkhvd"):
                median = statistics.median(results[str(batch)])
                targets.append(Target(f"{batch:,}", median, least, True, "M rows/s"))
        if name.startswith("sparkhvd"):
            largest = BATCHES[-1]
            share = statistics.median(results[str(largest)]) / bare_rate
            targets.append(Target(f"{largest:,} / bare", share, BARE_SHARE, True))
            ratio = statistics.median(results[str(BATCHES[0])]) / peer
            targets.append(Target("256 / petastorm", ratio, 10.0, True))
        lines.append([name, *(spread(results[str(batch)]) for batch in BATCHES), targets or "-"])
    header = [f"{rows:,} rows, one rank", *(f"{b:,}, M rows/s" for b in BATCHES), "targets"]
    report.table(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--checksums", action="store_true", help="only what verifying costs")
    parser.add_argument("--write", action="store_true", help="keep the table in docs/results/")
    parser.add_argument("--json", metavar="PATH", help="write the raw numbers there")
    parser.add_argument("--petastorm", type=Path, default=PETASTORM_PYTHON, metavar="PYTHON")
    options = parser.parse_args()
    is_measured = has_petastorm(options.petastorm)
    report = Report(f"reader: shuffled batches of {WIDTH} float32 and a label, one rank")
    # As in a rank that shares its host; and more threads only hurt torch's side here, whose batches are small.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="sparkhvd-bench-") as folder:
        files = Files(folder, options.rows)
        if options.checksums:
            measure_checksums(report, files, options.rounds)
            report.finish("benchmarks/reader.py --checksums", write=False, json_path=options.json)
            return
        for number in range(options.rounds):
            found: dict[str, dict[str, float]] = {}
            for batch in BATCHES:
                for name, shuffle_bytes in SIDES:
                    first, later = ours(files, batch, shuffle_bytes)
                    found.setdefault(f"{name}, first epoch", {})[str(batch)] = first
                    found.setdefault(f"{name}, later", {})[str(batch)] = later
                for name, value in peers(files, batch).items():
                    found.setdefault(name, {})[str(batch)] = value
                if is_measured:
                    value = petastorm(files, batch, options.petastorm)
                    found.setdefault(PETASTORM_SIDE, {})[str(batch)] = value
                report.raw.setdefault("bare", []).append(bare(files))
            for name, values in found.items():
                shown = ", ".join(f"{batch}: {value:.2f}" for batch, value in values.items())
                print(f"round {number + 1}, {name}: {shown} M rows/s", flush=True)
                for batch_name, value in values.items():
                    report.raw.setdefault(name, {}).setdefault(batch_name, []).append(value)
        add_table(report, options.rows)
        measure_checksums(report, files, options.rounds)
    report.note(
        "petastorm was measured in the same rounds, in its own environment (pyarrow 14, numpy 1.26), because it cannot be imported "
        "with this pyarrow."
        if is_measured
        else f"petastorm was not measured in this run: {PETASTORM_PYTHON.relative_to(ROOT)} is missing (`make test-oldest` "
        f"creates it). Ratios use {PETASTORM} M rows/s for its BatchedDataLoader in batches of 256, from an earlier run in a "
        "separate environment (pyarrow 14, numpy 1.26) on a machine with two cores."
    )
    report.finish("benchmarks/reader.py", write=options.write, json_path=options.json)


if __name__ == "__main__":
    main()
