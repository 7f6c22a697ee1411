"""Classes whose methods TorchDynamo leaves alone.

torch's C++ calls them while Dynamo compiles what calls the C++, such as the forward pass of a compiled DDP model.
"""

from __future__ import annotations

import types
from typing import Any

import torch

__all__ = ["leave_untraced"]


def leave_untraced(*kinds: type) -> None:
    """Have Dynamo run the methods of classes, and what these call, as they are; without importing Dynamo, which takes seconds."""
    frames: Any = torch._C._dynamo.eval_frame
    if not hasattr(frames, "set_code_exec_strategy"):  # torch before 2.7
        return
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for kind in kinds:
        for method in vars(kind).values():
            if isinstance(method, types.FunctionType):
                frames.set_code_exec_strategy(method.__code__, skip)
