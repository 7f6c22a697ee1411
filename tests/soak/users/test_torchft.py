"""Unmodified torchft drives groups of the engine: its own test of native groups, and the program of the page."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.harness.page_ranks import lighthouse, run_program

if not hasattr(dist.distributed_c10d, "_reconfigure"):
    pytest.skip(
        f"torch {torch.__version__} has no reconfigure: make test-users USERS_TORCH=2.14.1",
        allow_module_level=True,
    )
pytest.importorskip("torchft", reason="runs where torchft is: make test-users USERS_TORCH=2.14.1")

pytestmark = [pytest.mark.soak, pytest.mark.timeout(400)]


def _worker(rank: int, port: int) -> None:
    from torchft import reconfigure_test

    reconfigure_test._resize_worker(rank, port, "sparkhvd")


def test_torchft_worker_resizes_and_recovers() -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    mp.spawn(_worker, args=(store.port,), nprocs=3)


def test_page_program_uses_each_row_once_after_losing_a_replica(
    tmp_path: Path,
) -> None:
    command = [shutil.which("torchft_lighthouse") or "torchft_lighthouse", "--bind", "[::]:0"]
    limits = {"min_replicas": 2, "heartbeat_timeout_ms": 1000, "join_timeout_ms": 300}
    command += [text for name, value in limits.items() for text in (f"--{name}", str(value))]
    process, address = lighthouse(tmp_path, [*command, "--quorum_tick_ms", "20"])
    try:
        printed = run_program("torchft", tmp_path, 3001, TORCHFT_LIGHTHOUSE=address)
    finally:
        process.kill()
        process.wait()
    assert sorted(line.split(":")[0] for line in printed) == ["replica 0", "replica 1"]
