"""Hooks and attributes that users attach to parameters and buffers, which torch leaves out of copies, pickles or both."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

__all__ = ["Hooks", "WithHooks", "add_hooks", "hooks_by_name", "hooks_of", "reduce_with_hooks"]

Hook = Callable[[Tensor], Any]


class Hooks(NamedTuple):
    """Hooks of one tensor, in their order.

    Attributes:
        backward: of `register_hook`.
        accumulated: of `register_post_accumulate_grad_hook`.
    """

    backward: tuple[Hook, ...]
    accumulated: tuple[Hook, ...]


class WithHooks(NamedTuple):
    """A pickled value, with hooks of the tensors that the pickle names instead of holding them."""

    value: Any
    hooks: Mapping[str, Hooks]


def hooks_of(tensor: Tensor) -> Hooks | None:
    """Return the hooks of a tensor; None if it has none."""
    found = (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
    if not any(found):
        return None
    backward, accumulated = (tuple((hooks or {}).values()) for hooks in found)
    return Hooks(backward, accumulated)


def hooks_by_name(module: nn.Module) -> dict[str, Hooks]:
    """Return the hooks of a module's parameters that have some."""
    found = ((name, hooks_of(p)) for name, p in module.named_parameters())
    return {name: hooks for name, hooks in found if hooks is not None}


def add_hooks(tensor: Tensor, hooks: Hooks) -> None:
    """Register hooks on a leaf, also on one that is frozen."""
    requires_grad = tensor.requires_grad
    tensor.requires_grad_(True)  # torch registers none without
    for hook in hooks.backward:
        tensor.register_hook(hook)
    for hook in hooks.accumulated:
        tensor.register_post_accumulate_grad_hook(hook)
    tensor.requires_grad_(requires_grad)


def reduce_with_hooks(tensor: Tensor, hooks: Hooks, protocol: int) -> tuple[Any, ...] | None:
    """Reduce a tensor for pickle, with its hooks as state: they may refer to it. None where its class has another state."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*backward hooks")
        function, arguments, *rest = tensor.__reduce_ex__(protocol)
    return None if any(rest) else (function, arguments, hooks, None, None, add_hooks)
