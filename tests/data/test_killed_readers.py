"""Processes that are killed while they read a data set leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparkhvd.data.columns.schema import DataSchema
from sparkhvd.data.manifest import Manifest
from sparkhvd.data.store.store import Store
from tests.data.test_reader import DATA_DIR, ID, X, make
from tests.harness.paths import ROOT
from tests.harness.soak import amount

pytestmark = pytest.mark.processes

ROWS = 2000

# Forks, because a thousand imports of torch would take an hour.
PROGRAM = """
import os, random, signal, sys, time
from sparkhvd.data import load

dataset = load(sys.argv[1], sys.argv[2])
chooser = random.Random(7)
for number in range(int(sys.argv[3])):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        limit = (1 << 30, 4096)[number % 3 == 0]  # in memory, and beyond
        for batches in [dataset.loader(number % 4, 4, 16, shuffle_bytes=limit)] * 10**6:
            for batch in batches:
                os.write(writing, b".")
    os.close(writing)
    if number % 2:
        os.read(reading, 1)  # it has a batch
    time.sleep(chooser.random() / 25)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    os.close(reading)
print(sum(int(batch["id"].sum()) for batch in dataset.loader(batch_size=64)))
"""


def test_killed_readers_leave_no_files_and_later_readers_work(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    made = make(store, [ROWS // 2, ROWS // 2])
    Manifest(made.files, DataSchema((X, ID), ()), ROWS).save(store, DATA_DIR)
    files = {path for path in tmp_path.rglob("*") if path.is_file()}
    shared = set(os.listdir("/dev/shm"))
    kills = amount(20, 1000)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "store"), DATA_DIR, str(kills)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60 + kills, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == ROWS * (ROWS - 1) // 2
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == files
    assert set(os.listdir("/dev/shm")) <= shared
