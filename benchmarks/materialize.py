"""Speed of materialization: rows per second, time by phase, and memory.

    .venv/bin/python benchmarks/materialize.py [--rounds 3] [--cases vectors,scalars] [--scale 1.0] [--write] [--json PATH]

On `local[2]`, from Parquet that Spark wrote:

- vectors: 1,000,000 rows of an ML vector of 32 doubles and a label: >= 250,000 rows/s;
- scalars: 1,000,000 rows of 32 columns of doubles and a label: >= 400,000 rows/s;
- wide: 50,000 rows of an ML vector of 10,000 doubles, long: 20,000,000 rows of 4 columns of doubles: at least half the
  bytes/s of `vectors` and `scalars`;
- images: 20,000 PNGs of 64 x 64.

Then a reader hands out two epochs of `wide` and `long`, and an epoch of the images, decoded in its own thread and in two, in
a process of its own.

A Python worker may use at most its initial memory and a fixed amount, for any data; a reading process at most its
`shuffle_bytes`, its `prefetch_bytes` and a fixed amount.

The phases are separate jobs, each with one more step: `JVM` reads and converts rows and drops them, `Arrow hop` sends
them to Python workers, `encode` converts them to arrays and counts invalid values, `write` is all of `materialize`. The
peer is Spark's own Parquet writer on the same columns. CPU seconds are of all processes together: on a shared machine
they are more reliable than the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common import Report, Target, local_session, spread

CORES = 2
PHASES = ("JVM", "Arrow hop", "encode", "write")
# What a worker may take beyond its imports: a row group and its columns as Arrow, the batch in its forms, and what
# the allocators keep.
WORKER_BYTES = 400 << 20
# What a reader holds, as in a fit by default; the second data set is read beyond memory.
SHUFFLE_BYTES = {"wide": 1 << 30, "long": 128 << 20, "images": 1 << 30}
PREFETCH_BYTES = 16 << 20
# What a process that reads may take beyond those: the order of its rows (8 bytes for each of the 20 million of `long`, and as
# much while it is made), its batches, and what the allocators keep.
READER_BYTES = 400 << 20
SIDE = 64


@dataclass(frozen=True)
class Case:
    """Kind of data to materialize.

    Attributes:
        name: its name.
        rows: of the DataFrame.
        width: numbers per row, or 0 for images.
        is_vector: one ML vector, or as many columns.
        rate: rows per second that are promised, or None.
        base: the case of which it must reach half the bytes per second, or "".
    """

    name: str
    rows: int
    width: int
    is_vector: bool
    rate: float | None = None
    base: str = ""


# Spark's own Parquet reader holds 4,096 rows of each column: 330 MB of `wide`, several times while it grows, per task.
HEAP = "6g"
CASES = (
    Case("vectors", 1_000_000, 32, True, rate=250_000),
    Case("scalars", 1_000_000, 32, False, rate=400_000),
    Case("wide", 50_000, 10_000, True, base="vectors"),
    Case("long", 20_000_000, 4, False, base="scalars"),
    Case("images", 20_000, 0, False),
)


# -- the input ---------------------------------------------------------------------------------------


def png(number: int) -> bytes:
    """Make a grey PNG of noise."""
    rng = np.random.default_rng(number)
    pixels = rng.integers(0, 256, (SIDE, SIDE), dtype=np.uint8)

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checksum

    raw = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 0, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    return start + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")


def decode(data: bytes) -> np.ndarray:
    """Decode a PNG to (64, 64) with Pillow."""
    import io

    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(data)))


def write_input(spark: Any, folder: str, case: Case, rows: int) -> str:
    """Write the input as a user has it: Parquet files of Spark, two per core."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyspark.ml.functions import array_to_vector

    rng = np.random.default_rng(1)
    plain, path = f"{folder}/plain-{case.name}.parquet", f"{folder}/input-{case.name}"
    names = [f"c{i}" for i in range(case.width)]
    step = max(1, (64 << 20) // (8 * case.width)) if case.width else 2000
    writer: Any = None
    for start in range(0, rows, step):
        count = min(step, rows - start)
        columns: dict[str, Any] = {"label": rng.random(count)}
        if not case.width:
            columns["image"] = [png(start + i) for i in range(count)]
        else:
            # Few different numbers, so that decompressing and generating them is not what is measured.
            numbers = rng.integers(0, 1000, count * case.width).astype("f8") / 8
            if case.is_vector:
                lists = pa.FixedSizeListArray.from_arrays(numbers, case.width)
                columns["x"] = lists.cast(pa.list_(pa.float64()))
            else:
                columns |= dict(zip(names, numbers.reshape(case.width, count), strict=True))
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(plain, table.schema)
        writer.write_table(table)
    writer.close()
    df = spark.read.parquet(plain)
    if case.is_vector:
        df = df.select(array_to_vector("x").alias("x"), "label")
    df.repartition(2 * CORES).write.parquet(path)
    os.remove(plain)
    return path


def schema_of(df: Any, case: Case) -> Any:
    """Check the schema of the columns as `fit` does."""
    from sparkhvd.data.columns.check import check_schema

    decoders = ["image"] if not case.width else []
    features = [c for c in df.columns if c != "label"]
    return check_schema(df.schema, feature_cols=features, label_cols=["label"], decoders=decoders)


# -- the phases --------------------------------------------------------------------------------------


def drain(batches: Iterator[Any]) -> Iterator[Any]:
    """Take every batch and look at none."""
    import pyarrow as pa

    rows = sum(batch.num_rows for batch in batches)
    yield pa.RecordBatch.from_pydict({"rows": [rows]})


@dataclass(frozen=True)
class Encode:
    """All work of a task except writing."""

    columns: tuple[Any, ...]
    is_vector: tuple[bool, ...]

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        from sparkhvd.data.arrow import column_to_numpy
        from sparkhvd.data.arrow_types import join_vectors

        rows = 0
        for sent in batches:
            batch = join_vectors(sent, self.is_vector)
            rows += batch.num_rows
            for i, column in enumerate(self.columns):
                column_to_numpy(batch.column(i), column)
        yield pa.RecordBatch.from_pydict({"rows": [rows]})


def peak_bytes(spark: Any, *, reset: bool = False) -> int:
    """Measure the largest peak memory of the Python workers since the last reset."""

    def look(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        for _ in batches:
            pass
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        text = Path("/proc/self/status").read_text()
        kilobytes = int(text.partition("VmHWM:")[2].split()[0])
        time.sleep(0.3)  # so that every core runs one of these tasks
        yield pa.RecordBatch.from_pydict({"bytes": [kilobytes << 10]})

    found = spark.range(0, CORES, 1, CORES).mapInArrow(look, "bytes long").collect()
    return max(row.bytes for row in found)


def cpu_seconds(spark: Any) -> float:
    """Sum the CPU seconds of the JVM and its descendants."""
    root = spark.sparkContext._gateway.proc.pid
    below: dict[int, list[int]] = {}
    times: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            below.setdefault(int(fields[1]), []).append(int(entry.name))
            # Of the process itself, and of its children that have ended.
            times[int(entry.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    seconds, waiting = 0.0, [root]
    while waiting:
        pid = waiting.pop()
        seconds += times.get(pid, 0.0)
        waiting += below.get(pid, [])
    return seconds


def one_round(spark: Any, path: str, case: Case, phases: bool) -> dict[str, float]:
    """Measure clock and CPU seconds of the phases, one after the other, and the memory of the workers."""
    from sparkhvd.data.arrow_limits import bounded_batches
    from sparkhvd.data.arrow_types import split_vectors, vector_columns
    from sparkhvd.data.materialize import _select, materialize
    from sparkhvd.data.store.store import Store

    df = spark.read.parquet(path)
    schema = schema_of(df, case)
    selected = _select(df, schema, None)
    is_vector = vector_columns(selected.schema)
    sent = split_vectors(selected, is_vector)
    found: dict[str, float] = {}

    def timed(name: str, run: Callable[[], Any]) -> Any:
        cpu, began = cpu_seconds(spark), time.perf_counter()
        result = run()
        found[name] = time.perf_counter() - began
        found[f"{name}, CPU"] = cpu_seconds(spark) - cpu
        return result

    before = peak_bytes(spark, reset=True)
    with tempfile.TemporaryDirectory(prefix="sparkhvd-bench-") as folder:
        if phases:
            timed("JVM", lambda: selected.write.format("noop").mode("overwrite").save())
            with bounded_batches(selected):
                timed("Arrow hop", sent.mapInArrow(drain, "rows long").collect)
                encode = Encode(schema.columns, is_vector)
                timed("encode", sent.mapInArrow(encode, "rows long").collect)
        store = Store.create(f"{folder}/store")
        manifest = timed("write", lambda: materialize(df, schema, store, "data/k/app"))
        found["worker, MiB"] = (peak_bytes(spark) - before) / 2**20
        found["bytes"] = manifest.num_bytes
        timed("peer", lambda: selected.write.parquet(f"{folder}/spark"))
        if case.name in SHUFFLE_BYTES:
            found |= read_apart(f"{folder}/store", case)
    return found


def read_apart(url: str, case: Case) -> dict[str, float]:
    """Run `read_epochs` in a fresh process."""
    command = [sys.executable, str(Path(__file__).resolve()), "--read", url, "--cases", case.name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def high_water(*, reset: bool = False) -> int:
    """Read this process's peak memory since the last reset, in bytes."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) << 10


def read_epochs(url: str, name: str) -> dict[str, float]:
    """Measure the epochs of a reader, and its peak memory beyond the limits of its buffers."""
    from sparkhvd.data.columns.decoders import RowFunctions
    from sparkhvd.data.manifest import Manifest
    from sparkhvd.data.reading.reader import Reader
    from sparkhvd.data.store.store import Store

    store = Store(url)
    manifest = Manifest.load(store, "data/k/app")
    is_decoded = name == "images"
    if is_decoded:
        decode(png(0))  # imports what it needs
    before = high_water(reset=True)
    found: dict[str, float] = {}
    held = min(SHUFFLE_BYTES[name], manifest.num_bytes) + PREFETCH_BYTES
    for workers in (1, CORES) if is_decoded else (1,):
        functions = RowFunctions({"image": decode}, {}) if is_decoded else None
        options = {"functions": functions, "num_workers": workers}
        limits = {"shuffle_bytes": SHUFFLE_BYTES[name], "prefetch_bytes": PREFETCH_BYTES}
        with Reader(store, manifest, rank=0, size=1, batch_size=256, **options, **limits) as reader:
            for epoch in (0,) if is_decoded else (0, 1):
                what = f"decode, {workers}" if is_decoded else ("first", "later")[epoch]
                cpu, began = time.process_time(), time.perf_counter()
                rows = sum(len(batch.columns["label"]) for batch in reader.epoch(epoch))
                assert rows == manifest.num_rows
                found[f"read, {what}"] = time.perf_counter() - began
                found[f"read, {what}, CPU"] = time.process_time() - cpu
    found["reader, MiB"] = (high_water() - before) / 2**20
    found["reader held, MiB"] = held / 2**20
    return found


# -- the report --------------------------------------------------------------------------------------


def median(rounds: list[Mapping[str, float]], name: str) -> float:
    return statistics.median(one[name] for one in rounds)


def add_tables(report: Report, results: Mapping[str, Any], rows: Mapping[str, int]) -> None:
    """Add the tables: rates and memory of every case, and the time of its phases."""
    rates: list[list[Any]] = []
    phases: list[list[str]] = []
    read: list[list[Any]] = []
    bytes_per_s = {}
    for case in CASES:
        if case.name not in results:
            continue
        rounds, count = results[case.name], rows[case.name]
        seconds = median(rounds, "write")
        bytes_per_s[case.name] = median(rounds, "bytes") / seconds
        targets = []
        if case.rate is not None and count == case.rows:
            targets.append(Target("rate", count / seconds / 1e3, case.rate / 1e3, True, "k rows/s"))
        if case.base in bytes_per_s:
            share = bytes_per_s[case.name] / bytes_per_s[case.base]
            targets.append(Target(f"bytes/s against {case.base}", share, 0.5, True))
        worker = median(rounds, "worker, MiB")
        targets.append(Target("worker", worker, WORKER_BYTES / 2**20, False, "MiB"))
        what = f"{case.name}: {count:,} rows" + (f" x {case.width:,}" if case.width else "")
        cpu_rate = count / (median(rounds, "write, CPU") / CORES) / 1e3
        cells = [spread([one["write"] for one in rounds]), f"{count / seconds / 1e3:,.0f}"]
        cells += [f"{cpu_rate:,.0f}", f"{bytes_per_s[case.name] / 1e6:,.0f}", f"{worker:,.0f}"]
        rates.append([what, *cells, targets])
        if all(p in rounds[0] for p in PHASES):
            steps = [0.0, *(median(rounds, p) for p in PHASES)]
            cpu = [0.0, *(median(rounds, f"{p}, CPU") for p in PHASES)]
            shown = [
                f"{b - a:.2f} ({d - c:.2f})"
                for a, b, c, d in zip(steps, steps[1:], cpu, cpu[1:], strict=False)
            ]
            spark = f"{median(rounds, 'peer'):.2f}"
            peer = f"{spark} ({median(rounds, 'peer, CPU'):.2f})"
            phases.append([case.name, *shown, f"{steps[-1]:.2f} ({cpu[-1]:.2f})", peer])
        if "reader, MiB" in rounds[0]:
            read.append(reading_line(case, count, rounds))
    header = "data, materialize s, k rows/s, k rows/s by CPU, MB/s stored, worker MiB, targets"
    report.table(header.split(", "), rates)
    if phases:
        header = "seconds (CPU), JVM, Arrow hop, encode, write, all, Spark's own writer"
        report.table(header.split(", "), phases)
    if read:
        header = "read in a process of its own, k rows/s, peak MiB, of these may be data, targets"
        report.table(header.split(", "), read)


def reading_line(case: Case, count: int, rounds: list[Mapping[str, float]]) -> list[Any]:
    """Format rates and memory of a reader."""
    epochs = [n for n in rounds[0] if n.startswith("read, ") and not n.endswith("CPU")]
    shown = "; ".join(
        f"{n.removeprefix('read, ')}: {count / median(rounds, n) / 1e3:,.1f}" for n in epochs
    )
    peak = max(one["reader, MiB"] for one in rounds)
    held = rounds[0]["reader held, MiB"]
    target = Target("reader", peak, held + READER_BYTES / 2**20, False, "MiB")
    return [f"{case.name}: {count:,} rows", shown, f"{peak:,.0f}", f"{held:,.0f}", [target]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", default=",".join(c.name for c in CASES))
    parser.add_argument("--write", action="store_true", help="keep the tables in docs/results/")
    parser.add_argument("--json", metavar="PATH", help="write the raw numbers there")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the rows, for a trial")
    parser.add_argument("--read", metavar="STORE", help=argparse.SUPPRESS)  # for `read_apart`
    options = parser.parse_args()
    if options.read:
        print(json.dumps(read_epochs(options.read, options.cases)))
        return
    cases = [c for c in CASES if c.name in options.cases.split(",")]
    rows = {case.name: max(100, int(case.rows * options.scale)) for case in cases}
    report = Report("materialize: a DataFrame to packed Parquet on two cores")
    with (
        tempfile.TemporaryDirectory(prefix="sparkhvd-bench-") as folder,
        local_session(CORES, HEAP) as spark,
    ):
        paths = {c.name: write_input(spark, folder, c, rows[c.name]) for c in cases}
        for case in cases:  # the JVM compiles what it runs often
            one_round(spark, paths[case.name], case, True)
        for number in range(options.rounds):
            for case in cases:
                found = one_round(spark, paths[case.name], case, True)
                shown = ", ".join(f"{name} {value:,.2f}" for name, value in found.items())
                print(f"{case.name}, round {number + 1}: {shown}", flush=True)
                report.raw.setdefault(case.name, []).append(found)
    add_tables(report, report.raw, rows)
    report.note(
        "`k rows/s by CPU`: the rate of two otherwise idle cores, from the CPU time. MB/s count the stored values. Vectors and "
        "columns are doubles in Spark and float32 in the files. `worker MiB`: the largest memory of a Python worker, less its memory "
        "after the imports. `peak MiB`: the same for a process that reads. `may be data`: its shuffle_bytes or all data, and its "
        "prefetch_bytes. Images are decoded in one thread and in two. The times of phases are differences between jobs."
    )
    report.finish("benchmarks/materialize.py", write=options.write, json_path=options.json)
    missed = [t for t in report.targets if t.what in ("worker", "reader") and not t.is_met]
    assert not missed, f"a process took too much memory: {missed[0]}"


if __name__ == "__main__":
    main()
