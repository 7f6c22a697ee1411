"""Freed memory stays with a trainer process."""

from __future__ import annotations

import platform
import resource

import pytest

from sparkhvd.runner import run_local
from sparkhvd.settings import Settings

BLOCK_BYTES = 64 << 20

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="the allocator of another C library has no mallopt"
)


def faults_of_a_second_block() -> int:
    """Page faults of writing a block of the size of one that was freed before."""
    import torch

    before = 0
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(BLOCK_BYTES // 4)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.parametrize(
    ("keep", "env", "is_kept"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"MALLOC_ARENA_MAX": "2"}, False),
        (True, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, False),
    ],
    ids=["default", "switched off", "user's variables", "user's tunables"],
)
def test_freed_memory_is_kept_unless_the_user_says_otherwise(
    keep: bool, env: dict[str, str], is_kept: bool
) -> None:
    settings = Settings(keep_freed_memory=keep)
    (faults,) = run_local(faults_of_a_second_block, num_proc=1, env=env, settings=settings)
    pages = BLOCK_BYTES // resource.getpagesize()
    # Not none and not all: the interpreter has faults of its own, and the kernel may map several pages at once.
    assert (faults < pages // 20) == is_kept
