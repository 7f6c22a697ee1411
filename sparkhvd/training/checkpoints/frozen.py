"""Frozen parameters of a module.

No step changes them. They are sent only to ranks that do not have them, and written once for all checkpoints of a run.
A checksum of each parameter detects changes, also writes by the user's code that autograd does not see (`.data`).

    runs/<run_id>/checkpoints/frozen-<sha256>.pt
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypedDict, cast

import torch
from torch import Tensor, nn

import sparkhvd.torch as hvd
from sparkhvd.training.host_memory import release
from sparkhvd.training.modules.weights import checksum
from sparkhvd.training.types import State

# Shape, dtype and checksum by name.
Sums: TypeAlias = "dict[str, tuple[Any, ...]]"


class Frozen(TypedDict):
    """Hash of the file of frozen parameters, and names of the parameters omitted in a checkpoint.

    A checkpoint needs the names because the user's code may have unfrozen some parameters after the file was written.
    """

    sha256: str
    names: list[str]


class FrozenParameters:
    """Rank 0's frozen parameters of a run, for the separate file."""

    def __init__(self) -> None:
        """Start without parameters. The first checkpoint adds them."""
        self._sums: Sums | None = None
        self._unwritten: dict[str, Tensor] = {}
        self._sha256 = ""

    def divide(self, model: nn.Module) -> tuple[State, list[str]]:
        """Split the state dict into the part for a checkpoint and the names of omitted parameters.

        The checkpoint omits frozen parameters that equal those in the file. The first call copies the parameters for
        the file.
        """
        state, sums = model.state_dict(), frozen_sums(model)
        if self._sums is None:
            self._sums = sums
            self._unwritten = {n: state[n].to("cpu", copy=True) for n in sums}
        names = [name for name, entry in sums.items() if self._sums.get(name) == entry]
        rest = copy.copy(state)  # `copy` keeps the attributes that modules add to a state dict
        for name in names:
            del rest[name]
        return rest, names

    def record(self, names: list[str], write: Callable[[dict[str, Tensor]], str]) -> Frozen | None:
        """Describe the omitted parameters for a checkpoint, or return None if there are none.

        Args:
            names: the names from `divide`.
            write: writes the file and returns its SHA-256; the first call with names uses it.
        """
        if not names:
            return None
        if not self._sha256:
            self._sha256 = write(self._unwritten)
            self._unwritten = {}
            release()
        return {"sha256": self._sha256, "names": names}


def broadcast_weights(model: nn.Module) -> frozenset[str]:
    """Broadcast rank 0's parameters and saved buffers. All ranks must call it.

    Cost: a broadcast of trained parameters, and of frozen parameters that differ on some rank, plus `agreed_frozen`.

    Returns:
        Names of the frozen parameters that were sent.
    """
    agreed, all_frozen = agreed_frozen(model)
    hvd.broadcast_parameters(
        {n: v for n, v in _tensors(model.state_dict()).items() if n not in agreed}, 0
    )
    return all_frozen - agreed


def agreed_frozen(model: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
    """Find the frozen parameters with equal values on all ranks. All ranks must call it.

    The result is their names, and the names of all frozen parameters of rank 0.

    Cost: one pass over frozen parameters, and an allgather of about 100 bytes for each.
    """
    by_rank: list[Sums] = hvd.allgather_object(frozen_sums(model), name="frozen")
    agreed = (n for n, entry in by_rank[0].items() if all(s.get(n) == entry for s in by_rank))
    return frozenset(agreed), frozenset(by_rank[0])


def frozen_sums(model: nn.Module) -> Sums:
    """Compute shape, dtype and checksum of each frozen parameter of the state dict."""
    return _sums(
        {
            name: value
            for name, value in model.state_dict(keep_vars=True).items()
            # Skip other classes of parameters, because a checksum may not cover their whole state.
            if type(value) is nn.Parameter and not value.requires_grad
        }
    )


def weight_sums(model: nn.Module) -> Sums:
    """Compute shape, dtype and checksum of each plain tensor of the state dict."""
    return _sums({n: t for n, t in _tensors(model.state_dict()).items() if type(t) is Tensor})


def _sums(tensors: Mapping[str, Tensor]) -> Sums:
    return {n: (tuple(t.shape), str(t.dtype), checksum(t)) for n, t in tensors.items()}


def unwritten(model: nn.Module, weights: Mapping[str, object]) -> Mapping[str, object]:
    """Make a state dict with the model's own tensors for frozen parameters of equal values.

    Loading it does not overwrite these parameters, because their memory may be shared.
    """
    own = model.state_dict(keep_vars=True)
    state = copy.copy(weights)  # `copy` keeps the attributes that modules add to a state dict
    same = {name: own[name] for name, value in weights.items() if _is_same(own.get(name), value)}
    cast("dict[str, object]", state).update(same)
    return state


def _is_same(own: object, value: object) -> bool:
    return (
        type(own) is nn.Parameter
        and not own.requires_grad
        and isinstance(value, Tensor)
        and (own.shape, own.dtype, own.device) == (value.shape, value.dtype, value.device)
        and torch.equal(own.detach(), value)
    )


def _tensors(state: Mapping[str, object]) -> dict[str, Tensor]:
    """Select the parameters and buffers of a state dict, without extra states.

    Extra states may also be tensors.
    """
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, Tensor) and name.rpartition(".")[2] != "_extra_state"
    }
