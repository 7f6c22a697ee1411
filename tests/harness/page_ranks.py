"""Programs of docs/fault_tolerance.md in several processes, one of which is killed, and the rows of their steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.data.manifest import Manifest
from sparkhvd.data.packed.writer import write_packed
from sparkhvd.data.store.store import Store
from tests.harness.pages import named
from tests.harness.paths import ROOT
from tests.harness.waiting import wait_until

RANKS = 3
FOLDER = "data/k/app"
# Writes the rows of each batch before its step, and the step when the optimizer has made it.
_PRELUDE = """
import json, os, torch
from sparkhvd.data.dataset import Loader

_log, _place, _iterate, _step = open(os.environ["LOG"], "a", buffering=1), [], Loader.__iter__, torch.optim.SGD.step

def _iterate_logged(self):
    for batch in _iterate(self):
        state = self.state_dict()
        # Behind the last batch of an epoch the place is that of the next.
        _place[:] = [state["epoch"] - (not state["row"]), state["row"], self.size]
        _log.write(json.dumps(["tried", *_place, batch["y"].flatten().long().tolist()]) + "\\n")
        yield batch

def _step_logged(self, *args, **named):
    result = _step(self, *args, **named)
    _log.write(json.dumps(["done", *_place]) + "\\n")
    return result

Loader.__iter__, torch.optim.SGD.step = _iterate_logged, _step_logged
"""


def write_rows(folder: Path, rows: int) -> None:
    """Write a data set whose `y` is the number of the row."""
    columns = (
        Column("x", "vector", "float32", (2,), "vector", "float32"),
        Column("y", "vector", "float32", (1,), "vector", "float32"),
    )
    schema, store = DataSchema(columns, ()), Store.create(folder)
    numbers = np.arange(rows, dtype=np.float32)
    values = {"x": np.stack([numbers, -numbers], 1) / rows, "y": numbers[:, None]}
    path = f"{FOLDER}/part-00000-0.parquet"
    file = write_packed(store, path, schema.columns, values)
    Manifest((file,), schema, rows).save(store, FOLDER)


def run_program(name: str, folder: Path, rows: int, **variables: str) -> list[str]:
    """Run a program of the page in three processes, kill the last one during the work, and return the output of the others.

    Every row of every epoch must be in exactly one step of a process that was not killed.
    """
    write_rows(folder / "store", rows)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    program = folder / "program.py"
    program.write_text(_PRELUDE + named("docs/fault_tolerance.md", name).text)
    logs = [folder / f"log.{rank}" for rank in range(RANKS)]
    errors = [folder / f"errors.{rank}" for rank in range(RANKS)]
    common = {
        "WORLD_SIZE": str(RANKS),
        "STORE_ADDR": "127.0.0.1",
        "STORE_PORT": str(store.port),
        "DATA_STORE": str(folder / "store"),
        "DATA_PATH": FOLDER,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        **variables,
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(program)],
            env={**os.environ, **common, "RANK": str(rank), "LOG": str(logs[rank])},
            stdout=subprocess.PIPE,
            stderr=errors[rank].open("wb"),  # torchft logs more than a pipe takes
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        steps_before = rows // (RANKS * 8) // 2
        wait_until(
            lambda: _count(logs[-1], "done") > steps_before,
            "half an epoch is trained",
            within_s=120,
        )
        processes[-1].kill()
        ends = [process.communicate(timeout=120) for process in processes[:-1]]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, said in zip(processes[:-1], errors, strict=False):
        assert process.returncode == 0, said.read_text()[-3000:]
    _check_rows(logs, rows)
    return [printed for printed, _ in ends]


def _count(log: Path, kind: str) -> int:
    return log.read_text().count(f'["{kind}"') if log.exists() else 0


def _check_rows(logs: list[Path], rows: int) -> None:
    tried: dict[tuple[int, ...], dict[int, Any]] = defaultdict(dict)
    done = set()
    for rank, log in enumerate(logs):
        for line in log.read_text().splitlines():
            kind, *step = json.loads(line)
            if kind == "tried":
                tried[tuple(step[:3])][rank] = step[3]
            elif rank < RANKS - 1:
                done.add(tuple(step))
    by_epoch: dict[int, Counter[int]] = defaultdict(Counter)
    for step in done:
        assert len(tried[step]) == step[2], (step, tried[step].keys())
        by_epoch[step[0]].update(row for part in tried[step].values() for row in part)
    assert sorted(by_epoch) == [0, 1, 2]
    for counted in by_epoch.values():
        assert sorted(counted) == [*range(rows)]
        assert set(counted.values()) == {1}


def lighthouse(folder: Path, command: list[str]) -> tuple[subprocess.Popen[bytes], str]:
    """Start torchft's lighthouse and return it with its address."""
    output = folder / "lighthouse"
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 30
    while "listening on: " not in output.read_text():
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.05)
    address = output.read_text().partition("listening on: ")[2].split()[0]
    return process, f"http://127.0.0.1:{address.rpartition(':')[2]}"
