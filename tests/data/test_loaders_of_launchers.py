"""Loaders in ranks of torchrun, `run_local` and plain Python: the same rows in the same order, resumed at any row."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparkhvd.data.columns.schema import DataSchema
from sparkhvd.data.dataset import load
from sparkhvd.data.manifest import Manifest
from sparkhvd.data.store.store import Store
from sparkhvd.runner import run_local
from tests.data.test_reader import DATA_DIR, ID, X, make
from tests.harness.by_value import by_value
from tests.harness.paths import ROOT
from tests.harness.soak import soak

pytestmark = pytest.mark.processes

travels_by_value = by_value(__name__)

ROWS = 2003
# Rows of a step over all ranks.
STEP = 24

# Writes the result of `read` for its rank.
SCRIPT = """
import json, os, sys
from tests.data.test_loaders_of_launchers import read

found = read(*sys.argv[1:4])
rank = os.environ.get("RANK", "0")
with open(f"{sys.argv[4]}/{rank}", "w") as file:
    json.dump(found, file)
"""


def read(folder: str, states: str, seed: str) -> dict[str, Any]:
    """Read an epoch in a rank, and the step after each of many positions."""
    dataset = load(folder, DATA_DIR)
    probe = dataset.loader()
    options = {"batch_size": STEP // probe.size, "seed": int(seed)}
    whole = [batch["id"].tolist() for batch in dataset.loader(**options)]
    behind, longest_s = [], 0.0
    for state in json.loads(Path(states).read_text()):
        with dataset.loader(**options) as loader:
            began = time.monotonic()
            loader.load_state_dict(state)
            behind.append(next(iter(loader))["id"].tolist())
            longest_s = max(longest_s, time.monotonic() - began)
    return {"whole": whole, "behind": behind, "longest_s": longest_s}


Launch = Callable[[Path, list[str], int], list[dict[str, Any]]]


def by_torchrun(folder: Path, arguments: list[str], size: int) -> list[dict[str, Any]]:
    return _by_command(
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"],
        folder,
        arguments,
        size,
    )


def by_run_local(folder: Path, arguments: list[str], size: int) -> list[dict[str, Any]]:
    del folder
    return run_local(read, arguments, num_proc=size, verbose=0)


def by_python(folder: Path, arguments: list[str], size: int) -> list[dict[str, Any]]:
    assert size == 1
    return _by_command([], folder, arguments, size)


def _by_command(
    words: list[str], folder: Path, arguments: list[str], size: int
) -> list[dict[str, Any]]:
    script, results = folder / "script.py", folder / "results"
    script.write_text(SCRIPT)
    results.mkdir()
    subprocess.run(
        [sys.executable, *words, str(script), *arguments, str(results)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=300,
        check=True,
    )
    return [json.loads((results / str(rank)).read_text()) for rank in range(size)]


@soak("data/test_loader; one process and ranks of Spark: data/test_dataset")
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("launch", "size"),
    [
        (by_python, 1),
        *((by_run_local, size) for size in (1, 2, 4, 8)),
        *((by_torchrun, size) for size in (1, 2, 4, 8)),
    ],
)
def test_every_launcher_gives_the_same_order_from_any_row(
    tmp_path: Path, launch: Launch, size: int
) -> None:
    store = Store.create(tmp_path / "store")
    made = make(store, [ROWS // 2, ROWS - ROWS // 2])
    Manifest(made.files, DataSchema((X, ID), ()), ROWS).save(store, DATA_DIR)
    dataset = load(store, DATA_DIR)
    with dataset.loader(0, 1, 1, seed=4) as loader:
        wanted = [batch["id"].item() for batch in loader]
        states = [
            {**dataset.loader(0, 1, 1, seed=4).state_dict(), "row": row}
            for row in random.Random(7).sample(range(ROWS), 100)
        ]
    (tmp_path / "states").write_text(json.dumps(states))
    found = launch(tmp_path, [str(tmp_path / "store"), str(tmp_path / "states"), "4"], size)
    assert len(found) == size
    steps = zip(*(each["whole"] for each in found), strict=True)
    assert [number for step in steps for batch in step for number in batch] == wanted
    for number, state in enumerate(states):
        step = [row for each in found for row in each["behind"][number]]
        assert step == wanted[state["row"] : state["row"] + len(step)], state
        assert len(step) >= min(STEP, ROWS - state["row"])
    assert max(each["longest_s"] for each in found) <= 1.0
