"""Values of Params as JSON and files; `decoding` reads them.

JSON names what belongs to torch itself: modules made of `torch.nn`, functions of `torch.nn.functional`, classes of
`torch.optim` and optimizers of these classes; and what belongs to this package. Reading them runs no code of the
file. What has no name goes into a pickle, which does. That, and what decides where a fit writes, needs trust.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, nn

from sparkhvd.data.columns.decoders import pad
from sparkhvd.data.columns.images import image
from sparkhvd.data.store.moved import StoreWithRuns
from sparkhvd.data.store.store import Store
from sparkhvd.settings import Settings
from sparkhvd.torch.compression import Compression
from sparkhvd.torch.gradients.powersgd import PowerSGD
from sparkhvd.training.modules import architecture

__all__ = ["COMPRESSIONS", "Archive", "torch_name"]

# Ours, by the names that users know.
COMPRESSIONS = {
    "none": Compression.none,
    "fp16": Compression.fp16,
    "bf16": Compression.bf16,
}


class Archive:
    """Encoder of values as JSON, with the parts that JSON cannot hold: tensors by name, and values that need a pickle."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.code: dict[str, Any] = {}
        # Prefixes of the names of a module's tensors, where these are not its name.
        self.prefixes: dict[str, str] = {}
        # The estimator's module, whose tensors a pickled optimizer names.
        self.module: nn.Module | None = None

    def pickles(self) -> dict[str, bytes]:
        """Return the pickles of `code`, which name the module's tensors."""
        return {name: self.pickled(value) for name, value in self.code.items()}

    def pickled(self, value: object) -> bytes:
        """Pickle a value, with the module's tensors by name."""
        module = nn.Module() if self.module is None else self.module
        return architecture.dump_shell(module, value)

    def encode(self, name: str, value: object) -> object:
        """Encode a value as JSON-able data; what has none goes to `code` under `name`."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, Store):
            places = value.described() if isinstance(value, StoreWithRuns) else {}
            return {"store": value.url, **places}
        if isinstance(value, Settings):
            return {"settings": json.loads(value.to_json())}
        if isinstance(value, (list, tuple)):
            return [self.encode(f"{name}.{i}", v) for i, v in enumerate(value)]
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        # Other mappings, such as a defaultdict, do more than hold entries.
        if isinstance(value, dict) and type(value) in (dict, OrderedDict):
            return self._encode_dict(name, value)
        if isinstance(value, nn.Module):
            return self._encode_module(name, value)
        if isinstance(value, torch.optim.Optimizer):
            return self._encode_optimizer(name, value)
        return _encode_known(value) or self._pickled(name, value)

    def _encode_dict(self, name: str, value: Mapping[object, object]) -> object:
        if all(isinstance(k, str) for k in value):
            return {"dict": {k: self.encode(f"{name}.{k}", v) for k, v in value.items()}}
        if all(isinstance(k, (str, bytes, bool, int, float)) for k in value):
            items = value.items()
            return {
                "pairs": [[self.encode(name, k), self.encode(f"{name}.{k}", v)] for k, v in items]
            }
        return self._pickled(name, value)

    def _encode_module(self, name: str, module: nn.Module) -> object:
        if name == "model":
            self.module = module
        tensors = architecture.tensors_of(module)
        prefix = self.prefixes.get(name, f"{name}.")
        if not prefix or not self.prefixes:
            self.tensors.update({prefix + n: t for n, t in tensors.items()})
        elif tensors:  # a model's file of weights holds nothing but its weights
            return self._pickled(name, module)
        description = architecture.describe(module)
        if description is not None:
            return {"module": description}
        return self._pickled(name, module, what=architecture.foreign_class(module))

    def _encode_optimizer(self, name: str, optimizer: torch.optim.Optimizer) -> object:
        reference = torch_name(type(optimizer))
        if reference is None or self.module is None:
            return self._pickled(name, optimizer)
        index = {id(p): i for i, p in enumerate(self.module.parameters())}
        # New dicts: those of `state_dict` are the optimizer's own.
        state: dict[str, dict[str, Any]] = {}
        for number, entries in optimizer.state_dict()["state"].items():
            state[str(number)] = {}
            for key, value in entries.items():
                full = f"{name}.{number}.{key}"
                is_tensor = isinstance(value, Tensor)
                state[str(number)][key] = {"tensor": full} if is_tensor else value
                if is_tensor:
                    self.tensors[full] = value
        groups = [
            {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
        ]
        data = {
            "class": reference,
            "params": [[index.get(id(p), -1) for p in g["params"]] for g in optimizer.param_groups],
            "groups": groups,
            "state": state,
        }
        if not _is_json(data) or any(-1 in group for group in data["params"]):
            return self._pickled(name, optimizer)
        return {"optimizer": _mark_tuples(data)}

    def _pickled(self, name: str, value: object, what: str | None = None) -> dict[str, str]:
        self.code[name] = value
        kind = value if callable(value) and hasattr(value, "__qualname__") else type(value)
        return {"code": name, "what": what or f"{kind.__module__}.{kind.__qualname__}"}


def _encode_known(value: object) -> dict[str, Any] | None:
    """Encode a value of torch or of this package that has a name; None for others."""
    if (reference := torch_name(value)) is not None:
        return {"torch": reference}
    if isinstance(value, type) and value in COMPRESSIONS.values():
        return {"compression": next(n for n, kind in COMPRESSIONS.items() if kind is value)}
    if type(value) is PowerSGD:
        return {"powersgd": {"rank": value.rank, "warm_up_steps": value.warm_up_steps}}
    if isinstance(value, (pad, image)) and type(value) in (pad, image) and _is_json(asdict(value)):
        return {type(value).__name__: asdict(value)}
    if isinstance(value, PurePath):
        return {"path": str(value)}
    return None


def torch_name(value: object) -> str | None:
    """Return the name under which torch itself exports a value, for example "torch.optim.Adam"; else None."""
    name = getattr(value, "__name__", "")
    for home, module in (("torch.optim", torch.optim), ("torch.nn.functional", nn.functional)):
        if (
            name
            and not name.startswith("_")
            and getattr(module, name, None) is value
            and callable(value)
        ):
            return f"{home}.{name}"
    return None


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _mark_tuples(value: object) -> object:
    """Mark tuples (such as Adam's betas) as {"tuple": [...]}, which survives JSON."""
    if isinstance(value, tuple):
        return {"tuple": [_mark_tuples(v) for v in value]}
    if isinstance(value, list):
        return [_mark_tuples(v) for v in value]
    if isinstance(value, dict):
        return {k: _mark_tuples(v) for k, v in value.items()}
    return value
