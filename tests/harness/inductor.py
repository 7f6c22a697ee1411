"""torch.compile with the least possible work of the C++ compiler, because the tests are about the training."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any


def lean_inductor() -> AbstractContextManager[Any]:
    """Let inductor compile on this thread without a separate process, and without a test of the CPU's vectors.

    By default it starts a process that imports torch, and compiles, loads and runs a program per instruction set.
    """
    import torch._inductor.config as config  # takes seconds

    options = {"compile_threads": 1, "cpp.vec_isa_ok": False}
    patch: AbstractContextManager[Any] = config.patch(options)
    return patch
