"""A rank's forked children, and the memory that the ranks of a host share."""

from __future__ import annotations

import ctypes
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkhvd.engine.engine import Engine
from tests.engine.arrays import allreduce
from tests.harness.rank_process import Talk, rank_processes

pytestmark = pytest.mark.processes


def mappings() -> list[int]:
    """Return the addresses of the memory that this process shares with other ranks."""
    maps = Path("/proc/self/maps").read_text()
    found = re.findall(r"^([0-9a-f]+)-\S+ rw-s .*memfd:sparkhvd", maps, re.MULTILINE)
    return [int(address, 16) for address in found]


def ending_of_a_child_that_writes(address: int) -> int:
    """Fork a child that fills a page there, and return the signal that ended it, or 0."""
    child = os.fork()
    if child == 0:
        ctypes.memset(address, 0x7F, 4096)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def write_from_children(engine: Engine, talk: Talk) -> Any:
    """Let children of rank 0 write to all shared memory. Return their signals, and the ranks' results."""
    work = engine.add_process_set([0, 1])
    work.wait()
    own = mappings()
    buffer = engine.allocate(4096, name="buffer")
    theirs = set(mappings()) - set(own)
    endings = {"engine": [0], "buffer": [0]}
    engine.barrier(name="made").wait()
    if engine.rank == 0:
        endings["engine"] = [ending_of_a_child_that_writes(address) for address in own]
        endings["buffer"] = [ending_of_a_child_that_writes(address) for address in theirs]
    engine.barrier(name="written").wait()
    sums = [float(allreduce(engine, "x", np.ones(size))[-1]) for size in (1, 100_000)]
    first = ctypes.string_at(buffer.address, 1)[0]
    return {**endings, "sums": sums, "first byte": first}


def test_children_cannot_write_to_the_workspaces_of_ranks() -> None:
    with rank_processes(f"{__name__}:write_from_children", 2) as ranks:
        first, second = (rank.expect() for rank in ranks)
    # The workspaces of the world and of a process set, each rank's own and the other's.
    assert first["engine"] == [signal.SIGSEGV] * 4
    assert first["sums"] == second["sums"] == [2.0, 2.0]
    # Children share a user's buffer, and so do the other ranks.
    assert first["buffer"] == [0, 0]
    assert (first["first byte"], second["first byte"]) == (0x7F, 0x7F)
