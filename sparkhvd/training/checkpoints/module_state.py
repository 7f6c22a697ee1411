"""Buffers of a module, saved or not, and the extra state of modules that have one.

Training changes them on every rank. Between epochs all ranks take rank 0's; a checkpoint inside an epoch
holds each rank's own.

A buffer may change its shape while training, or exist on some ranks only: a cache that `forward` fills.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

import sparkhvd.torch as hvd
from sparkhvd.training.to_device import to_cpu
from sparkhvd.training.types import State

__all__ = [
    "broadcast_module_state",
    "extra_states",
    "load_buffers",
    "load_extra_states",
    "unsaved_buffers",
]


def unsaved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that the model's state dict leaves out (`persistent=False`), by name."""
    saved = model.state_dict()
    return {name: value for name, value in model.named_buffers() if name not in saved}


def load_buffers(model: nn.Module, values: Mapping[str, Tensor | None]) -> None:
    """Give buffers these values, whatever shape they have now; None empties one."""
    with torch.no_grad():
        for name, value in values.items():
            path, _, leaf = name.rpartition(".")
            owner = model.get_submodule(path)
            buffer = owner._buffers.get(leaf)
            if value is None or buffer is None or not _is_alike(buffer, value):
                device = _device(model) if buffer is None else buffer.device
                owner._buffers[leaf] = None if value is None else value.to(device, copy=True)
            else:
                buffer.copy_(value)


def _is_alike(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype)


def _device(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def extra_states(model: nn.Module) -> State:
    """Return the extra states of the modules that have one, by the name of the module; tensors on the CPU."""
    return {
        name: to_cpu(module.get_extra_state())
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def load_extra_states(model: nn.Module, states: Mapping[str, object]) -> None:
    """Load the states of `extra_states`."""
    for name, state in states.items():
        model.get_submodule(name).set_extra_state(state)


def broadcast_module_state(model: nn.Module) -> None:
    """Give all ranks rank 0's buffers and extra states; all ranks must call it.

    Running statistics are then of rank 0's rows, in validation and checkpoint alike.

    Cost: one broadcast of the buffers' bytes, and one of a small object where there is something that may differ
    in more than values.
    """
    if _may_differ(model):
        _make_alike(model)
    buffers = dict(model.named_buffers())
    if buffers:
        hvd.broadcast_parameters(buffers, 0)


def _may_differ(model: nn.Module) -> bool:
    """Check whether ranks may have other shapes or extra states; by the classes, so equal on all ranks."""
    return any(
        module._non_persistent_buffers_set
        or type(module).get_extra_state is not nn.Module.get_extra_state
        for module in model.modules()
    )


def _make_alike(model: nn.Module) -> None:
    """Give this rank's unsaved buffers rank 0's shapes, and its modules rank 0's extra states."""
    buffers = unsaved_buffers(model)
    shapes = {n: (v.shape, v.dtype) for n, v in buffers.items()}
    states = (shapes, extra_states(model)) if hvd.rank() == 0 else None
    wanted, extra = hvd.broadcast_object(states, 0, name="module state")
    if hvd.rank() == 0:
        return
    changed = {
        name: torch.empty(shape, dtype=dtype)
        for name, (shape, dtype) in wanted.items()
        if shapes.get(name) != (shape, dtype)
    }
    load_buffers(model, {**dict.fromkeys(shapes.keys() - wanted.keys()), **changed})
    load_extra_states(model, extra)
