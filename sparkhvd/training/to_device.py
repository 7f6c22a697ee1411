"""From the CPU to the device of a rank and back: what the user gave, and batches."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

__all__ = ["Mover", "move_losses", "move_optimizer", "moved", "to_cpu"]

_CPU = torch.device("cpu")


def move_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Put the state of an optimizer that has stepped before beside its parameters, after these have moved."""
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())


def move_losses(losses: Iterable[Any], device: torch.device) -> None:
    """Put the weights of losses on the device: those that are modules, or hold one as `loss` or `function`."""
    for loss in losses:
        for part in (loss, getattr(loss, "loss", None), getattr(loss, "function", None)):
            if isinstance(part, nn.Module):
                part.to(device)
            keywords = getattr(part, "keywords", None)  # of a functools.partial
            if isinstance(keywords, dict):
                keywords.update(_moved(keywords, device, non_blocking=False))


# --- batches ----------------------------------------------------------------------------------------------------


class Mover:
    """Takes batches to a device without waiting for it.

    The copy reads page-locked memory after this has returned, and the reader uses that memory again when nobody holds
    it; so what is on its way is held until the device says that it is there.
    """

    def __init__(self, device: torch.device) -> None:
        """`device` is where batches go."""
        self.device = device
        self._flying: collections.deque[tuple[Any, Any]] = collections.deque()

    def __call__(self, value: Any) -> Any:
        """The same tensors, in lists, tuples and dicts, on the device; on the CPU, the value itself."""
        if self.device.type == "cpu":
            return value
        moved = _moved(value, self.device, non_blocking=True)
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
            self._flying.append((event, value))
            while self._flying and self._flying[0][0].query():
                self._flying.popleft()
        return moved


def _moved(value: Any, device: torch.device, *, non_blocking: bool) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=non_blocking)
    if isinstance(value, PackedSequence):  # a tuple, of which one part stays on the CPU
        # torch's annotations know dtypes only.
        there: PackedSequence = value.to(device, non_blocking=non_blocking)  # type: ignore[arg-type]
        return there
    if isinstance(value, Mapping):
        return {k: _moved(v, device, non_blocking=non_blocking) for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(v, device, non_blocking=non_blocking) for v in value))
    if type(value) in (list, tuple):
        return type(value)(_moved(v, device, non_blocking=non_blocking) for v in value)
    return value


def moved(value: Any, device: torch.device) -> Any:
    """The same tensors, in lists, tuples and dicts, on a device."""
    return _moved(value, device, non_blocking=False)


def to_cpu(value: Any) -> Any:
    """The same tensors on the CPU: what is sent as an object must be readable without a GPU."""
    return _moved(value, _CPU, non_blocking=False)
