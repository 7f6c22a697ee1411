"""State of a sharded optimizer: divides it, gathers it for `state_dict`, and merges it in elastic training."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from sparkhvd.torch.broadcast import allgather_object
from sparkhvd.torch.gradients.layout import flat
from sparkhvd.torch.optimizer.shards import Gatherer, Shard, ShardLayout

# State of an optimizer: a dict of named values for each parameter or part. A missing key gives an empty dict, as in
# torch.
State = defaultdict[Tensor, dict[str, object]]

_T = TypeVar("_T")


class _Piece(NamedTuple):
    """A value of the state, in a form to send to ranks with other GPUs.

    Attributes:
        value: the value, on the CPU.
        was_on_gpu: whether the value belongs on the GPU of its parameter.
    """

    value: object = None
    was_on_gpu: bool = False

    @classmethod
    def of(cls, value: object) -> _Piece:
        """Create a piece from any value."""
        if isinstance(value, Tensor) and not value.is_cpu:
            return cls(value.cpu(), True)
        return cls(value)

    def beside(self, param: Tensor) -> object:
        """Copy the value to the GPU of its parameter if it belongs there."""
        if not (self.was_on_gpu and isinstance(self.value, Tensor)):
            return self.value
        return param.new_empty(self.value.shape, dtype=self.value.dtype).copy_(self.value)


@dataclass(frozen=True)
class OwnState:
    """A rank's part of the state, in a form to send to other ranks.

    Attributes:
        groups: hyperparameters, as in `state_dict()`.
        parts: for each parameter number of `state_dict()` the range (first, last + 1) of the rank's elements, and the
            state by name as (whether it is element-wise, value).
    """

    groups: list[dict[str, Any]]
    parts: dict[int, tuple[int, int, dict[str, tuple[bool, _Piece]]]]


def own_state(
    state: Mapping[Tensor, dict[str, object]],
    groups: list[dict[str, Any]],
    params: Sequence[Tensor],
    shards: Mapping[Tensor, Shard],
) -> OwnState:
    """Collect this rank's part of the state. Values on the CPU are not copied.

    `params` are the parameters in the order of `state_dict()`.
    """
    parts = {}
    for number, param in enumerate(params):
        shard = shards.get(param)
        key = param if shard is None else shard.part
        if key is None or key not in state:
            continue
        is_cut = shard is not None and shard.is_cut
        first, last = (shard.first, shard.last) if shard is not None else (0, param.numel())
        pieces = {
            name: (
                is_cut and isinstance(value, Tensor) and value.shape == key.shape,
                _Piece.of(value),
            )
            for name, value in state[key].items()
        }
        parts[number] = (first, last, pieces)
    return OwnState(groups, parts)


def join_states(states: Sequence[OwnState], params: Sequence[Tensor]) -> dict[str, Any]:
    """Merge the states of all former ranks into a copy of the plain optimizer's `state_dict()`."""
    joined: dict[int, dict[str, object]] = {}
    for state in states:
        for number, (first, last, pieces) in state.parts.items():
            param, values = params[number], joined.setdefault(number, {})
            for name, (is_divided, piece) in pieces.items():
                value = piece.beside(param)
                if not is_divided:
                    # Copy the value, because the optimizer keeps the loaded object and changes it in place.
                    values.setdefault(name, copy.deepcopy(value))
                    continue
                assert isinstance(value, Tensor)
                if name not in values:
                    values[name] = torch.zeros_like(
                        param, dtype=value.dtype, device=value.device, requires_grad=False
                    )
                whole = values[name]
                assert isinstance(whole, Tensor)
                flat(whole)[first:last] = value
    return {"state": joined, "param_groups": states[0].groups}


def divide_state(
    state: Mapping[Tensor, dict[str, object]], shards: Mapping[Tensor, Shard]
) -> State:
    """Reduce the state of each parameter to this rank's part. State of other keys does not change."""
    kept: State = defaultdict(dict)
    for key, values in state.items():
        shard = shards.get(key) if isinstance(key, Tensor) else None
        if shard is None:  # the key is a part already, or is not a parameter
            kept[key] = values
        elif shard.part is not None:
            kept[shard.part] = {name: _part_of(shard, value) for name, value in values.items()}
    return kept


def gather_state(state: Mapping[Tensor, dict[str, object]], division: ShardLayout) -> State:
    """Gather all ranks' parts of the state into the plain optimizer's state. Every rank must call this."""
    gathered: State = defaultdict(dict)
    shards = list(division.shards.values())
    divided = {id(shard.part) for shard in shards if shard.part is not None}
    for key, values in state.items():
        if id(key) not in divided:
            gathered[key] = values
    _gather_whole(state, gathered, division, [shard for shard in shards if not shard.is_cut])
    _gather_cut(state, gathered, division, [shard for shard in shards if shard.is_cut])
    return gathered


def _gather_whole(
    state: Mapping[Tensor, dict[str, object]],
    gathered: State,
    division: ShardLayout,
    shards: Sequence[Shard],
) -> None:
    """Gather the state of whole parameters."""
    if not shards:
        return
    owned = {
        number: {name: _Piece.of(value) for name, value in state[shard.part].items()}
        for number, shard in enumerate(shards)
        if shard.part is not None and shard.part in state
    }
    for pieces_by_number in _exchanged(owned, division):
        for number, pieces in pieces_by_number.items():
            param = shards[number].param
            gathered[param] = {name: piece.beside(param) for name, piece in pieces.items()}


def _gather_cut(
    state: Mapping[Tensor, dict[str, object]],
    gathered: State,
    division: ShardLayout,
    shards: Sequence[Shard],
) -> None:
    """Gather the state of cut parameters.

    The rank with a parameter's first element describes its state.
    """
    first = {
        number: _describe(shard, state[shard.part])
        for number, shard in enumerate(shards)
        if shard.part is not None and shard.first == 0 and shard.part in state
    }
    described: dict[int, dict[str, tuple[torch.dtype | None, _Piece]]] = {}
    for descriptions in _exchanged(first, division):
        described.update(descriptions)
    on_cpu: list[Tensor] = []
    # Tensors on the GPU, by (name, dtype) and then by the id of their parameter.
    on_gpu: dict[tuple[str, torch.dtype], dict[int, Tensor]] = {}
    for number, entries in sorted(described.items()):
        shard, param = shards[number], shards[number].param
        for name, (dtype, piece) in entries.items():
            if dtype is None:
                gathered[param][name] = piece.beside(param)
                continue
            value = torch.empty_like(param, dtype=dtype, requires_grad=False)
            gathered[param][name] = value
            if shard.part is not None:
                own = state[shard.part][name]
                assert isinstance(own, Tensor)
                shard.of(value).copy_(own)
            if param.is_cpu:
                on_cpu.append(value)
            else:
                on_gpu.setdefault((name, dtype), {})[id(param)] = value
    if on_cpu:
        name = f"{division.label}.state"
        Gatherer(division.context, name, on_cpu, division.configuration.number).gather(on_cpu)
    for values in on_gpu.values():
        assert division.gpu is not None
        division.gpu.gather_cut(values)


def _exchanged(value: _T, division: ShardLayout) -> list[_T]:
    name = f"{division.label}.state_dict() (every rank must call it)"
    return allgather_object(value, name, process_set=division.configuration.process_set)


def _describe(
    shard: Shard, values: Mapping[str, object]
) -> dict[str, tuple[torch.dtype | None, _Piece]]:
    """Describe a parameter's state: the dtype of element-wise state, and the value of other state."""
    return {
        name: (value.dtype, _Piece())
        if isinstance(value, Tensor) and shard.is_own(value)
        else (None, _Piece.of(value))
        for name, value in values.items()
    }


def _part_of(shard: Shard, value: object) -> object:
    """Select this rank's part of a value of a parameter's state."""
    param = shard.param
    if not (shard.is_cut and isinstance(value, Tensor) and value.shape == param.shape):
        return value
    laid_out = torch.empty_like(param, dtype=value.dtype, requires_grad=False).copy_(value)
    return flat(laid_out)[shard.first : shard.last].clone()
