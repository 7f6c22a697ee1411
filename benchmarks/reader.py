"""How fast one rank reads shuffled batches of 256 x 32 float32 (and a label), beside torch's DataLoader.

    .venv/bin/python benchmarks/reader.py [--rounds 3] [--rows 1000000] [--write]

Packed files are written first, outside the clock. All sides go by turns and hand out torch tensors. "first" is a
new reader's first epoch, with reading the files (torch's sides: from tensors in memory, so there is none);
"later" is its second. Target: >= 4 M rows/s.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from common import Table
from sparkhvd.estimator.data.manifest import Manifest
from sparkhvd.estimator.data.packed import write_packed
from sparkhvd.estimator.data.reader import Reader
from sparkhvd.estimator.data.schema import Column, DataSchema
from sparkhvd.estimator.data.store import Store

BATCH = 256
WIDTH = 32
FILES = 2
TARGET = 4.0

FEATURES = Column("features", "vector", "float32", (WIDTH,), "vector", "float32")
LABEL = Column("label", "scalar", "int64", (), "bigint", "int64")


class Rates(Table):
    """Million rows per second instead of seconds."""

    def add(self, name: str, seconds: Any) -> None:
        self.rounds.setdefault(name, []).append(seconds)
        print(
            f"{name}: " + ", ".join(f"{c} {seconds[c]:.2f} M rows/s" for c in self.columns),
            flush=True,
        )

    def markdown(self) -> str:
        return super().markdown().replace(", s |", ", M rows/s |")


def write_data(store: Store, rows: int) -> tuple[Manifest, TensorDataset]:
    rng = np.random.default_rng(0)
    features = rng.random((rows, WIDTH), dtype=np.float32)
    labels = rng.integers(0, 2, rows)
    schema = DataSchema((FEATURES,), (LABEL,))
    files = []
    for i, part in enumerate(np.array_split(np.arange(rows), FILES)):
        values = {"features": features[part], "label": labels[part]}
        files.append(
            write_packed(store, f"data/bench/app/part-{i}.parquet", schema.columns, values)
        )
    tensors = TensorDataset(torch.from_numpy(features), torch.from_numpy(labels))
    return Manifest(tuple(files), schema, rows), tensors


def timed(batches: Callable[[], Iterator[Any]], rows: int) -> float:
    """Million rows per second of one epoch."""
    began = time.perf_counter()
    seen = 0
    for features, label in batches():
        seen += len(label)
        assert features.shape[1] == WIDTH
    assert seen == rows, (seen, rows)
    return rows / (time.perf_counter() - began) / 1e6


def sparkhvd_epochs(store: Store, manifest: Manifest, shuffle_bytes: int) -> dict[str, float]:
    with Reader(
        store, manifest, rank=0, size=1, batch_size=BATCH, shuffle_bytes=shuffle_bytes
    ) as reader:

        def batches(epoch: int) -> Iterator[Any]:
            for batch in reader.epoch(epoch):
                columns = batch.columns
                yield torch.from_numpy(columns["features"]), torch.from_numpy(columns["label"])

        return {
            name: timed(lambda e=epoch: batches(e), manifest.num_rows)
            for epoch, name in enumerate(("first", "later"))
        }


def torch_epochs(loader: DataLoader[Any], rows: int) -> dict[str, float]:
    return {name: timed(lambda: iter(loader), rows) for name in ("first", "later")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--write", action="store_true", help="keep the table in docs/results/")
    options = parser.parse_args()
    table = Rates(
        f"reader: shuffled batches of {BATCH} x {WIDTH} float32, {options.rows:,} rows, one rank",
        ["first", "later"],
    )
    # As in a rank that shares its host; and more threads only hurt torch's side here, whose batches are small.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="sparkhvd-bench-") as folder:
        store = Store.create(folder)
        manifest, tensors = write_data(store, options.rows)
        sampler = BatchSampler(RandomSampler(tensors), BATCH, drop_last=False)
        whole = DataLoader(tensors, sampler=sampler, batch_size=None)
        single = DataLoader(tensors, batch_size=BATCH, shuffle=True)
        for _ in range(options.rounds):
            table.add("sparkhvd, in memory", sparkhvd_epochs(store, manifest, 1 << 30))
            table.add(
                "sparkhvd, beyond memory (windows of 16 MiB)",
                sparkhvd_epochs(store, manifest, 16 << 20),
            )
            table.add(
                "DataLoader, one index per batch (BatchSampler)", torch_epochs(whole, options.rows)
            )
            table.add(
                "DataLoader, one index per row (the usual way)", torch_epochs(single, options.rows)
            )
    table.finish("benchmarks/reader.py", write=options.write)
    median = statistics.median(r["later"] for r in table.rounds["sparkhvd, in memory"])
    print(f"{median:.1f} M rows/s, target {TARGET:.0f}: {'met' if median >= TARGET else 'MISSED'}")


if __name__ == "__main__":
    main()
