"""Trainable copies of TorchScript modules, and their pickles.

torch's own copy of a TorchScript module holds tensors that are not leaves of the autograd graph, and pickle rejects the
module.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule


def copy_parts(module: nn.Module, memo: dict[int, Any]) -> None:
    """Copy the TorchScript modules in a module.

    Args:
        module: a TorchScript module, or a module that holds TorchScript modules.
        memo: as for `copy.deepcopy`; its tensors replace the modules' tensors, and it receives the copies.
    """
    for part in _outermost(module):
        if id(part) in memo:
            continue
        # Otherwise the copy's tensors would not be leaves, and optimizers reject them.
        with torch.no_grad():
            made = copy.deepcopy(part)
        parameters = dict(part.named_parameters(remove_duplicate=False))
        for name, old in _tensors(part).items():
            new = memo.get(id(old))
            if new is None:
                new = old.detach().clone()
            if name in parameters and not isinstance(new, nn.Parameter):
                new = nn.Parameter(new, old.requires_grad)
            memo[id(old)] = new
            _put(made, name, new)
        memo[id(part)] = made


def reduce(module: ScriptModule) -> tuple[Any, ...]:
    """Reduce a TorchScript module for pickle, with its tensors as separate objects.

    Other objects may refer to the tensors.
    """
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    return _load, (buffer.getvalue(), _tensors(module))


def _load(data: bytes, tensors: Mapping[str, Tensor]) -> ScriptModule:
    module: ScriptModule = torch.jit.load(io.BytesIO(data), map_location="cpu")
    for name, tensor in tensors.items():
        _put(module, name, tensor)
    return module


def _outermost(module: nn.Module) -> Iterator[ScriptModule]:
    inner: set[int] = set()
    for part in module.modules():
        if isinstance(part, ScriptModule) and id(part) not in inner:
            inner.update(id(each) for each in part.modules())
            yield part


def _tensors(module: ScriptModule) -> dict[str, Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _put(module: Any, name: str, tensor: Tensor) -> None:
    *path, leaf = name.split(".")
    for each in path:
        module = getattr(module, each)
    module._c.setattr(leaf, tensor)
