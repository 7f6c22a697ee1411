"""`compile=True`: the model through torch.compile, if this machine can."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from torch import nn

import sparkhvd.torch as hvd
from sparkhvd.estimator.training.state import fail_together

__all__ = ["compile_model", "missing_tools"]


def compile_model(model: nn.Module) -> Callable[..., Any]:
    """The model as torch.compile runs it; every rank must call this.

    The module itself is not changed, so its state dict keeps its names, and `train()` and `eval()` of it count.

    Raises:
        InvalidArgumentError: on every rank, where the machine of one lacks what the compiler needs.
    """
    for rank, missing in enumerate(hvd.allgather_object(missing_tools(), name="compile")):
        if missing:
            fail_together(
                f"compile=True: torch.compile needs a C++ compiler and Python's headers on every executor, and on rank "
                f"{rank} {missing}. Install them there, set CXX to the compiler, or set compile=False."
            )
    # Not `model.compile()`: that silently compiles nothing where the class is of torch.nn, such as Sequential.
    compiled: Callable[..., Any] = torch.compile(model)
    return compiled


def missing_tools() -> str:
    """What torch.compile would miss on this machine, in words; "" if nothing."""
    given = torch._inductor.config.cpp.cxx
    names = [name for name in (given if isinstance(given, (list, tuple)) else [given]) if name]
    if not any(shutil.which(name) for name in names):
        return f"none of {', '.join(map(repr, names))} was found"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return "" if header.exists() else f"{header} was not found"
