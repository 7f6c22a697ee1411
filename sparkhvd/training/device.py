"""Choice of a rank's device, its GPU or the CPU.

Only `choose_device` decides; all other code receives a `torch.device` and runs the same on every device.
"""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from pathlib import Path
from typing import cast

import torch
from torch import nn

import sparkhvd.torch as hvd
from sparkhvd.observe.system import Gpu
from sparkhvd.runner import RankContext
from sparkhvd.training.rank_sync import raise_on_all_ranks

_CPU = torch.device("cpu")


def choose_device(place: RankContext | None, *, looks: bool) -> tuple[torch.device, str]:
    """Choose the device of this rank.

    The result is the device, and the reason why the rank cannot use its assigned GPU, or "".

    Args:
        place: rank and local rank of this process in its job; None if no runner started it.
        looks: True if use_gpu is not given and Spark assigns no GPUs; then use a GPU if torch sees a GPU for each rank
            of this host.
    """
    index = place.gpu if place is not None else None
    is_given = index is not None
    if not is_given and not looks:
        return _CPU, ""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not is_given:
        if not count:
            return _CPU, ""
        index = place.local_rank if place is not None else 0
    assert index is not None
    if index < count:
        return torch.device("cuda", index), ""
    if not is_given:
        return _CPU, (
            f"is number {index + 1} on its host, where torch sees {count} GPU{'s' * (count != 1)}. Give num_proc={count}, "
            "or use_gpu=False to train on the CPU"
        )
    build = torch.version.cuda
    has = f"is built for CUDA {build} and sees {count}" if build else "is built without CUDA"
    return _CPU, (
        f"was given a GPU, and its torch {torch.__version__} {has}. Install torch with CUDA on the executors, or give "
        "use_gpu=False"
    )


def agree(device: torch.device, problem: str) -> None:
    """Check that all ranks compute on devices of one kind. All ranks must call it.

    Raises:
        InvalidArgumentError: the kinds differ, or a rank cannot use its GPU; raised on all ranks.
    """
    devices = hvd.allgather_object((device.type, problem), name="device")
    for rank, (_, text) in enumerate(devices):
        if text:
            raise_on_all_ranks(f"use_gpu: rank {rank} {text}.")
    for rank, (kind, _) in enumerate(devices):
        if kind != devices[0][0]:
            raise_on_all_ranks(
                f"use_gpu: rank 0 would train on {devices[0][0]} and rank {rank} on {kind}. Run on hosts that all have "
                "GPUs, or give use_gpu=False."
            )


def gpu_of(device: torch.device) -> Gpu | None:
    """Find the GPU of a device, to read its load.

    The result is None for the CPU, or if the load is unavailable.
    """
    if device.type != "cuda":
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if uuid is None else Gpu.find(f"GPU-{uuid}")


# ----------------------------------------------------------------------------------------------------
# `compile=True`: torch.compile of the model, if every rank's machine has the necessary tools.


def compile_model(model: nn.Module) -> nn.Module:
    """Compile the model by torch.compile. Every rank must call this.

    The module itself is not changed: its state dict keeps its names, and its `train()` and `eval()` apply.

    Raises:
        InvalidArgumentError: on every rank, if a rank's machine lacks a tool of the compiler.
    """
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    for rank, missing in enumerate(hvd.allgather_object(missing_tools(device), name="compile")):
        if missing:
            raise_on_all_ranks(
                f"compile=True: torch.compile needs a C++ compiler and Python's headers on every executor, and Triton for "
                f"GPUs, but on rank {rank} {missing}. Install them there, set CXX to the compiler, or set compile=False."
            )
    # `model.compile()` would silently compile nothing for classes of torch.nn, such as Sequential.
    return cast("nn.Module", torch.compile(model))


# Triton supports GPUs of this major compute capability and later (Volta, of 2017).
_LEAST_CAPABILITY = 7


def missing_tools(device: torch.device) -> str:
    """Describe the tool of torch.compile missing on this machine for this device, or return ""."""
    import torch._inductor.config  # the import takes a second and loads 800 modules

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
        return f"the GPU has the compute capability {major}.{minor}, but Triton needs {_LEAST_CAPABILITY}.0"
    return ""
