"""Many fits in a row: the driver, Spark and the store hold no more after the last than after the second."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sparkhvd import Store
from tests.estimator.fits import estimator, mlp
from tests.harness.processes import TRAINER, children, find, wait_for_no_trainers
from tests.harness.soak import amount, soak

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# On a busy machine, a fit may take many seconds.
pytestmark = [pytest.mark.spark, pytest.mark.timeout(400)]
NUM_FITS = amount(5, 20)
# The first fits start Python workers, class loaders and pools.
NUM_WARM_UP = 2
# Memory files of other tests that run at the same time appear and vanish, and Spark ends idle workers after a minute.
SETTLE_S = 90


def holdings(store: Store) -> dict[str, int]:
    """Count all resources that a fit could leave behind."""
    gc.collect()
    processes = tree(os.getpid())
    return {
        "trainers": len(find(TRAINER)),
        "processes": len(processes),
        "threads of the driver": len(os.listdir("/proc/self/task")),
        "Python threads": threading.active_count(),
        "descriptors of the driver": len(os.listdir("/proc/self/fd")),
        "descriptors of Spark's processes": sum(descriptors(p) for p in processes),
        "shared memory": len(os.listdir("/dev/shm")),
        "temporary files": len([n for n in os.listdir(tempfile.gettempdir()) if "sparkhvd" in n]),
        "data in the store": len(store.list("data", recursive=True)),
        "files being written": sum(1 for _ in root(store).rglob(".sparkhvd-tmp-*")),
        "files at the root": len(list(root(store).iterdir())),
        "models": len(store.list("models")),
    }


def beyond(before: dict[str, int], after: dict[str, int], allowed: int) -> list[str]:
    return [name for name, count in before.items() if after[name] - count >= allowed]


def root(store: Store) -> Path:
    return Path(store.local_path("") or "")


def tree(pid: int) -> set[int]:
    below = children(pid)
    return below.union(*(tree(child) for child in below))


def descriptors(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:  # it has ended
        return 0


@soak("the leak check around every test; engine/test_leaks")
def test_repeated_fits_leak_nothing(spark: SparkSession, tmp_path: Path) -> None:
    df = spark.createDataFrame(
        [([float(i), float(i % 3)], float(i % 5)) for i in range(40)], "x array<double>, y double"
    )
    store = Store.create(tmp_path / "store")
    seen = []
    for number in range(NUM_FITS):
        model = estimator(mlp(2), store, validation=0.2, run_id=f"r{number}", data_key="d").fit(df)
        assert model.transform(df).count() == 40
        del model
        assert wait_for_no_trainers() == set()
        seen.append(holdings(store))
    # A leak per fit grows with the number of fits and stays, while caches and pools go up and down.
    allowed = max(1, (NUM_FITS - NUM_WARM_UP) // 2)
    deadline = time.monotonic() + SETTLE_S
    warm = {name: max(s[name] for s in seen[: NUM_WARM_UP + 1]) for name in seen[0]}
    while grown := beyond(warm, seen[-1], allowed):
        assert time.monotonic() < deadline, {name: [s[name] for s in seen] for name in grown}
        time.sleep(0.5)
        seen[-1] = holdings(store)
    assert seen[-1]["trainers"] == 0
    assert seen[-1]["files being written"] == 0
    # A run keeps only the files that a later fit needs.
    for number in range(NUM_FITS):
        left = {p.rpartition("/")[2] for p in store.list(f"runs/r{number}/checkpoints")}
        assert left == {"epoch-1.pt", "latest.json"}
