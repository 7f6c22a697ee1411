"""Modules from which Horovod's users import names."""

from __future__ import annotations

import importlib

import pytest

import sparkhvd.torch as hvd

pytestmark = pytest.mark.pure

NAMES = {
    "mpi_ops": ["allreduce", "allreduce_async_", "grouped_allgather", "synchronize", "poll", "join", "init", "rank", "Average", "Sum"],
    "functions": ["broadcast_parameters", "broadcast_optimizer_state", "broadcast_object", "allgather_object"],
    "compression": ["Compression"],
    "optimizer": ["DistributedOptimizer"],
    "sync_batch_norm": ["SyncBatchNorm"],
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_submodules_export_the_names_of_the_package(name: str) -> None:
    module = importlib.import_module(f"sparkhvd.torch.{name}")
    assert {n for n in NAMES[name] if getattr(module, n) is not getattr(hvd, n)} == set()
    assert [n for n in module.__all__ if not hasattr(module, n)] == []
