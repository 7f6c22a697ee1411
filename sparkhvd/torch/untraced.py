"""Functions and classes that TorchDynamo leaves alone.

torch's C++ calls them while Dynamo compiles what calls the C++: in the forward pass of a compiled DDP model, or in `backward()` of a compiled
training step.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["leave_untraced"]


def leave_untraced(*parts: Any) -> None:
    """Have Dynamo run functions, or the methods of classes, and what these call, as they are; without importing Dynamo, which takes seconds."""
    frames: Any = torch._C._dynamo.eval_frame
    functions = [each for part in parts for each in _functions(part)]
    for each in functions:
        each._torchdynamo_disable = True  # what Dynamo would trace into
    if not hasattr(frames, "set_code_exec_strategy"):  # torch before 2.7
        return
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for each in functions:
        for code in _codes(each.__code__):
            frames.set_code_exec_strategy(code, skip)


def _functions(part: Any) -> list[Any]:
    if isinstance(part, types.FunctionType):
        return [part]
    return [each for each in vars(part).values() if isinstance(each, types.FunctionType)]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Return the code of a function, and of those that it defines."""
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _codes(each)
