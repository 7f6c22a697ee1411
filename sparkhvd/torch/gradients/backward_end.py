"""End of a backward pass, with all passes that it lies in, and whether reductions are left for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.variable import Variable

from sparkhvd import processors
from sparkhvd.engine.engine import Engine

__all__ = ["BackwardEnd", "after_backward", "in_backward", "is_worth_overlapping"]


def in_backward() -> bool:
    """Check whether this thread runs a node of a backward pass, or its hooks; not in callbacks at the end of a pass."""
    return torch._C._current_autograd_node() is not None


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


def is_worth_overlapping(engine: Engine, ranks: Sequence[int]) -> bool:
    """Return True if reducing while backward runs saves time: where ranks wait for a network, or cores are left over.

    Where the ranks of one host compute on all of its cores, the engine's threads would take these from them, in turns
    that make every rank wait for every other: a step of ResNet-50 with 2 ranks on 2 cores took 5 % longer.
    """
    topology = engine.topology
    if len({topology.hosts[rank] for rank in ranks}) > 1:
        return True
    return len(ranks) * torch.get_num_threads() < processors.allowed()
