"""`compile=True`: torch.compile of the model, if every rank's machine can."""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from pathlib import Path
from typing import cast

import torch
import torch._inductor.config
from torch import nn

import sparkhvd.torch as hvd
from sparkhvd.training.together import fail_together

__all__ = ["compile_model", "missing_tools"]


def compile_model(model: nn.Module) -> nn.Module:
    """Compile the model by torch.compile; every rank must call this.

    The module itself is not changed, so its state dict keeps its names, and `train()` and `eval()` of it count.

    Raises:
        InvalidArgumentError: on every rank, where the machine of one lacks what the compiler needs.
    """
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    for rank, missing in enumerate(hvd.allgather_object(missing_tools(device), name="compile")):
        if missing:
            fail_together(
                f"compile=True: torch.compile needs a C++ compiler and Python's headers on every executor, on GPUs Triton "
                f"too, and on rank {rank} {missing}. Install them there, set CXX to the compiler, or set compile=False."
            )
    # Not `model.compile()`: that silently compiles nothing where the class is of torch.nn, such as Sequential.
    return cast("nn.Module", torch.compile(model))


# Triton compiles for GPUs of this major number and later (Volta, of 2017).
_LEAST_CAPABILITY = 7


def missing_tools(device: torch.device) -> str:
    """Return the tool that torch.compile misses on this machine for this device, in words; "" if none."""
    cxx = torch._inductor.config.cpp.cxx
    names = [name for name in (cxx if isinstance(cxx, (list, tuple)) else [cxx]) if name]
    if not any(shutil.which(name) for name in names):
        return f"none of {', '.join(map(repr, names))} was found"
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        return f"{header} was not found"
    return _missing_for_gpu(device) if device.type == "cuda" else ""


def _missing_for_gpu(device: torch.device) -> str:
    if importlib.util.find_spec("triton") is None:
        return "the module triton was not found"
    major, minor = torch.cuda.get_device_capability(device)
    if major < _LEAST_CAPABILITY:
        return f"the GPU has the compute capability {major}.{minor}, and Triton needs {_LEAST_CAPABILITY}.0"
    return ""
