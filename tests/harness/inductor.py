"""torch.compile with as little work of the C++ compiler as there can be: what is tested is the training."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any


def lean_inductor() -> AbstractContextManager[Any]:
    """Let inductor compile on this thread without a process of its own, and without trying the CPU's vectors.

    By default it starts a process that imports torch, and compiles, loads and runs a program per instruction set.
    """
    import torch._inductor.config as config  # takes seconds

    options = {"compile_threads": 1, "cpp.vec_isa_ok": False}
    patch: AbstractContextManager[Any] = config.patch(options)
    return patch
