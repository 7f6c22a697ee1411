"""The device of a rank: its GPU or the CPU, decided once.

`choose_device` is the only place that decides; everything else takes a `torch.device` and runs the same on any.
"""

from __future__ import annotations

import torch

import sparkhvd.torch as hvd
from sparkhvd.observe.system import Gpu
from sparkhvd.runner import RankContext
from sparkhvd.training.together import fail_together

__all__ = ["agree", "choose_device", "gpu_of"]

_CPU = torch.device("cpu")


def choose_device(place: RankContext | None, *, looks: bool) -> tuple[torch.device, str]:
    """Return the device of this rank, and why it cannot use the GPU that it was given, or "".

    Args:
        place: of this process in its job; None if no runner started it.
        looks: use_gpu is not given, and Spark gives no GPUs: take one if torch sees one per rank of this host.
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
    """Make sure that all ranks compute on devices of one kind; all ranks must call it.

    Raises:
        InvalidArgumentError: they do not, or one cannot use its GPU; on all ranks.
    """
    devices = hvd.allgather_object((device.type, problem), name="device")
    for rank, (_, text) in enumerate(devices):
        if text:
            fail_together(f"use_gpu: rank {rank} {text}.")
    for rank, (kind, _) in enumerate(devices):
        if kind != devices[0][0]:
            fail_together(
                f"use_gpu: rank 0 would train on {devices[0][0]} and rank {rank} on {kind}. Run on hosts that all have "
                "GPUs, or give use_gpu=False."
            )


def gpu_of(device: torch.device) -> Gpu | None:
    """Return the GPU of a device, to ask how busy it is; None for the CPU, and where nobody tells."""
    if device.type != "cuda":
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if uuid is None else Gpu.find(f"GPU-{uuid}")
