"""Whether a hook of autograd runs in a backward pass that another one called, as reentrant checkpoints do."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

__all__ = ["inside_nested_backward"]

# Counts the frames of `backward()` on a stack.
_BACKWARD_CODE = torch.autograd.graph._engine_run_backward.__code__
_THREAD_NAME = Path("/proc/thread-self/comm")


def inside_nested_backward(*, has_gpu: bool) -> bool:
    """Whether a hook runs in a backward pass that another one called.

    torch offers no way to ask; each `backward()` leaves one frame of a known function on the stack of its thread. A
    thread of autograd's own, on which gradients of a GPU come, has no frame of the outermost pass.

    Args:
        has_gpu: whether the hook may run on such a thread. To ask the kernel costs some microseconds per pass.
    """
    depth = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        depth += frame.f_code is _BACKWARD_CODE
        frame = frame.f_back
    return depth > 1 or (has_gpu and depth == 1 and _is_autograds_own(_THREAD_NAME.read_text()))


def _is_autograds_own(thread_name: str) -> bool:
    """Whether a thread is one of those that torch makes for devices."""
    return thread_name.startswith("pt_autograd_")
