"""The user's model, or the model from the user's function: the same on all ranks, and checked on the driver."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import torch
from torch import nn

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.training.modules.attributes import views
from sparkhvd.training.modules.modes import check_modes

# Guards torch's generator, because a process has only one and fits may run in several threads.
_generator_lock = threading.Lock()


def build_model(model: object, seed: int = 0) -> object:
    """Make the module if `model` is a function, or return another value unchanged.

    The function draws from generators of torch, numpy and random seeded with `seed`; the caller's random numbers are unaffected.

    Raises:
        InvalidArgumentError: the function failed, or returned no module.
    """
    if isinstance(model, nn.Module) or not callable(model):
        return model
    with _generator_lock, torch.random.fork_rng(devices=[]):
        others = random.getstate(), np.random.get_state()
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            made = model()
        except Exception as e:
            raise InvalidArgumentError(
                f"model: calling the function failed: {type(e).__name__}: {e}. Give a torch.nn.Module, or a function "
                "without arguments that returns a torch.nn.Module."
            ) from e
        finally:
            random.setstate(others[0])
            np.random.set_state(others[1])
    if not isinstance(made, nn.Module):
        raise InvalidArgumentError(
            f"model: the function returned {made!r:.200}; it must return a torch.nn.Module."
        )
    return made


def uncompiled(model: object) -> Any:
    """Unwrap a module from torch.compile, or return another value unchanged."""
    while type(model).__name__ == "OptimizedModule":
        model = model._orig_mod  # type: ignore[attr-defined]
    return model


def is_compiled(model: object) -> bool:
    """Check whether torch.compile wraps a module, or `module.compile()` was called."""
    return uncompiled(model) is not model or getattr(model, "_compiled_call_impl", None) is not None


def is_lazy(model: nn.Module) -> bool:
    """Check whether a parameter or buffer gets its shape from the first batch."""
    return any(map(nn.parameter.is_lazy, (*model.parameters(), *model.buffers())))


def check_model(model: object) -> nn.Module:
    """Check on the driver that a model can be trained, and return it.

    Raises:
        InvalidArgumentError: the model is missing, is not a module, has nothing to train, or its `train` or `eval` does
            not set the mode.
    """
    if model is None:
        raise InvalidArgumentError("model is required: give the torch.nn.Module to train.")
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(f"model is {model!r:.200}; it must be a torch.nn.Module.")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type == "meta":
            raise InvalidArgumentError(
                f"model: {name!r} is on the meta device and has no values. Give a function that makes the module and initializes it, for "
                "example with module.to_empty(device='cpu') and reset_parameters() of its layers."
            )
        if tensor.device.type != "cpu":
            raise InvalidArgumentError(
                f"model: {name!r} is on {tensor.device}. Give model.cpu(), because every rank moves its own copy of the model to "
                "its GPU."
            )
        if tensor.layout != torch.strided:
            raise InvalidArgumentError(
                f"model: {name!r} has the layout {tensor.layout}, but ranks can share only dense parameters and buffers. "
                "Register its indices and values, or the tensor as .to_dense(). A tensor that never changes may be a plain "
                "attribute instead of a buffer."
            )
    if not any(p.requires_grad for p in model.parameters()):
        raise InvalidArgumentError(
            "model has no parameter that requires a gradient, so there is nothing to train."
        )
    check_modes(model, "model")
    for attribute, shared in views(dict(model.named_modules())):
        raise InvalidArgumentError(
            f"model: the attribute {attribute!r} shares its memory with {shared!r}. Ranks train copies of the model, in which the attribute "
            f"would not follow changes of {shared!r}. Compute it in forward or in a property, or give a .clone() of it."
        )
    return model
