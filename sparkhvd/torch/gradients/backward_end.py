"""End of a backward pass, with all passes that it lies in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.variable import Variable

__all__ = ["BackwardEnd", "after_backward"]


def after_backward(callback: Callable[[], None]) -> None:
    """Call a function when the running backward pass has ended, behind those that were given before.

    It is called in the thread that ends the pass, on a GPU with the caller's streams as the current ones; its exceptions come
    out of `backward()`.
    """
    Variable._execution_engine.queue_callback(callback)


class BackwardEnd:
    """Calls a function when the outermost backward pass ends, on whose thread it is made.

    Reentrant checkpoints, and functions of the user, run a pass inside a node of another one. torch tells the end of
    the inner one; the outer one is reached through a hook of that node. Autograd alone holds this object, so it is gone
    when the pass ends in an exception.

    Args:
        callback: gets this object.
    """

    def __init__(self, callback: Callable[[BackwardEnd], None]) -> None:
        self._callback = callback
        self._handle: Any = None
        after_backward(self._leave)

    def _leave(self) -> None:
        node: Any = torch._C._current_autograd_node()  # None outside of a node
        if node is None:
            self._callback(self)
        else:
            self._handle = node.register_hook(self._enter_outer)

    def _enter_outer(self, *_: object) -> None:
        self._handle.remove()
        after_backward(self._leave)
