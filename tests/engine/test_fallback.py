"""Ranks that cannot share memory: one warning with the reason, and right results over sockets."""

from __future__ import annotations

import importlib.util

import pytest

from sparkhvd.runner import run_local
from sparkhvd.settings import Settings

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="its ranks use torch"),
]


def results(limit: str) -> list[float]:
    """Limit rank 1, then use every collective with tensors."""
    import resource
    from pathlib import Path

    import torch

    import sparkhvd.torch as hvd
    from sparkhvd.runner import context

    if context().rank == 1:
        if limit == "file size":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        else:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            room = used + (96 << 20)
            resource.setrlimit(resource.RLIMIT_AS, (room, room))
    hvd.init()
    rank = hvd.rank()
    return [
        float(hvd.allreduce(torch.full((300_001,), rank + 1.0), op=hvd.Sum).sum()),
        float(hvd.allgather(torch.full((rank + 1, 7), rank + 1.0)).sum()),
        float(hvd.broadcast(torch.full((100_000,), rank + 1.0), 2).sum()),
    ]


@pytest.mark.parametrize(
    ("limit", "why"),
    [
        ("file size", "fallocate of "),
        ("address space", "the limit of address space (RLIMIT_AS) is"),
    ],
)
def test_host_uses_sockets_if_one_rank_cannot_share_memory(
    limit: str, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(slot_bytes=8 << 20)
    expected = [6.0 * 300_001, 7.0 * (1 + 4 + 9), 300_000.0]
    assert run_local(results, (limit,), num_proc=3, settings=settings) == [expected] * 3
    lines = [line for line in capfd.readouterr().err.splitlines() if "no shared memory" in line]
    assert len(lines) == 1, lines
    assert f"rank 1: no shared memory with the ranks of this host, because {why}" in lines[0]
    assert lines[0].endswith("Their tensors go through sockets, which is slower.")
