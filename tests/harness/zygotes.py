"""Modules that zygotes of this process import before they fork ranks, instead of each rank."""

from __future__ import annotations

import pytest

from sparkhvd import lazy_compiler
from sparkhvd.runner.zygote_client import of_this_process


@pytest.fixture(scope="module")
def zygote_has_torch() -> None:
    """Let ranks be forks of a process that has imported torch."""
    of_this_process._useful.update(("torch", "sparkhvd.torch"))


@pytest.fixture(scope="module")
def zygote_has_compiler(zygote_has_torch: None) -> None:
    """Let it also import torch's compiler, which DistributedDataParallel imports."""
    of_this_process._useful.add(lazy_compiler.REAL)
