"""A trainer process keeps freed memory."""

from __future__ import annotations

import platform
import resource
from collections.abc import Callable

import pytest

from sparkhvd.runner import run_local
from sparkhvd.settings import Settings
from tests.harness.by_value import by_value
from tests.harness.soak import left_to_soak

BLOCK_BYTES = 64 << 20

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        platform.libc_ver()[0] != "glibc",
        reason="the allocator of another C library has no mallopt",
    ),
]

travels_by_value = by_value(__name__)


def write_tensor() -> None:
    import torch

    torch.ones(BLOCK_BYTES // 4)


def write_bytes() -> None:
    """Write a block without torch, because a rank imports every module that its function names."""
    b"x" * BLOCK_BYTES  # noqa: B018 - allocated, written, freed


def faults_of_later_blocks(write_block: Callable[[], None]) -> list[int]:
    """Count page faults of writes to blocks of the size of freed blocks."""
    write_block()
    faults = []
    for _ in range(8):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        write_block()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return faults[2:]  # torch's first call leaves blocks of its own behind


@pytest.mark.parametrize(
    ("keep", "env", "is_kept"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"MALLOC_ARENA_MAX": "2"}, False),
        *left_to_soak(
            "a variable of the user's, here",
            (True, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, False),
            (True, {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}, False),
        ),
    ],
    ids=["default", "switched off", "user's variables", "user's tunables", "user's own cache"],
)
def test_allocator_keeps_freed_memory_unless_the_user_configures_it(
    keep: bool, env: dict[str, str], is_kept: bool
) -> None:
    settings = Settings(keep_freed_memory=keep)
    write = write_tensor if keep and not env else write_bytes
    (faults,) = run_local(faults_of_later_blocks, (write,), num_proc=1, env=env, settings=settings)
    pages = BLOCK_BYTES // resource.getpagesize()
    # Neither none nor all: the interpreter has its own faults, and the kernel may map several pages at once.
    assert all((one < pages // 20) == is_kept for one in faults), faults


def variables_of_a_child_of_the_rank() -> str:
    import subprocess

    return subprocess.run(["env"], check=True, capture_output=True, text=True).stdout


def test_child_processes_of_a_rank_use_the_default_allocator_settings() -> None:
    env = {"GLIBC_TUNABLES": "glibc.pthread.rseq=1"}
    (variables,) = run_local(variables_of_a_child_of_the_rank, num_proc=1, env=env)
    lines = [line for line in variables.splitlines() if line.startswith("GLIBC_TUNABLES")]
    assert lines == ["GLIBC_TUNABLES=glibc.pthread.rseq=1"]
