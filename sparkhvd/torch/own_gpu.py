"""Selection of the GPU that the launcher gave this rank as torch's current device."""

from __future__ import annotations

import torch

from sparkhvd.rank_context import context

__all__ = ["make_current"]


def make_current() -> None:
    """Let "cuda" mean this rank's GPU in the calling thread, if the launcher gave it one.

    The process may see the GPUs of all ranks of its host, and without this all ranks' tensors would be on the first. Like
    `torch.cuda.set_device` in a script, it starts CUDA here and takes memory of that GPU, so it is left out where it
    changes nothing: for the first one. A device that the script has chosen already stays.
    """
    place = context()
    own = None if place is None else place.gpu
    if not own or not torch.cuda.is_available() or own >= torch.cuda.device_count():
        return
    if torch.cuda.is_initialized() and torch.cuda.current_device() != 0:
        return
    torch.cuda.set_device(own)
