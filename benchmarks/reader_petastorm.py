"""Epoch of petastorm's BatchedDataLoader over plain Parquet files, for `reader.py`.

    build/petastorm-env/bin/python benchmarks/reader_petastorm.py BATCH ROWS FILE...

Runs in petastorm's environment. Prints million rows per second. The clock starts when the reader is made, after all imports.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path

# Rows that it mixes: about as many as the windows of 16 MiB hold on our side.
SHUFFLED_ROWS = 100_000
# On a busy machine its threads now and then take an epoch to be over before its first row.
TRIES = 5


def epoch(batch: int, files: list[str]) -> int:
    """Read every batch of an epoch, and count the rows."""
    from petastorm import make_batch_reader
    from petastorm.pytorch import BatchedDataLoader

    urls = [Path(path).as_uri() for path in files]
    options = {"num_epochs": 1, "workers_count": len(os.sched_getaffinity(0))}
    seen = 0
    with make_batch_reader(urls, **options) as reader:
        capacity = max(SHUFFLED_ROWS, 2 * batch)
        for found in BatchedDataLoader(reader, batch, shuffling_queue_capacity=capacity):
            assert found["features"].shape[1:] == (32,)
            seen += len(found["label"])
    return seen


def main() -> None:
    batch, rows, files = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    warnings.simplefilter("ignore")
    import petastorm.pytorch  # noqa: F401 - outside the clock
    import torch

    torch.set_num_threads(1)
    for _ in range(TRIES):
        began = time.perf_counter()
        seen = epoch(batch, files)
        took = time.perf_counter() - began
        if seen == rows:
            print(rows / took / 1e6)
            return
    raise SystemExit(f"petastorm gave {seen} of {rows} rows")


if __name__ == "__main__":
    main()
