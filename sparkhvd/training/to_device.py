"""Move losses, optimizers and batches to the device of a rank, and state to the CPU."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from sparkhvd.training.references import references

_CPU = torch.device("cpu")


# A tensor, or lists, tuples and dicts of tensors and other values.
T = TypeVar("T")


def move_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Move the state of an optimizer to the devices of its parameters. Call this after the parameters have moved."""
    # Reload only if necessary: load_state_dict replaces param_groups, which a wrapping optimizer shares.
    is_moved = any(p.device != _CPU for group in optimizer.param_groups for p in group["params"])
    if optimizer.state and is_moved:
        optimizer.load_state_dict(optimizer.state_dict())


def move_losses(losses: Iterable[object], device: torch.device) -> None:
    """Move loss modules, also in `loss` and `function` attributes, to the device."""
    for loss in losses:
        for part in (loss, getattr(loss, "loss", None), getattr(loss, "function", None)):
            if isinstance(part, nn.Module):
                part.to(device)
            keywords = getattr(part, "keywords", None)  # arguments of a functools.partial
            if isinstance(keywords, dict):
                plain = {n: each for n, each in keywords.items() if not _has_parameters(each)}
                keywords.update(moved(plain, device))


def _has_parameters(value: object) -> bool:
    """Check whether a value is or has a trained tensor.

    A trained tensor must stay the same object, so `LossState` moves it.
    """
    tensors = (each for _, each, _ in references(value) if isinstance(each, Tensor))
    return any(each.requires_grad for each in tensors)


# --- batches ----------------------------------------------------------------------------------------------------


class Mover:
    """Moves batches to a device asynchronously.

    The copy reads page-locked memory after the call has returned, and the reader reuses the memory of a released batch.
    So each batch is kept until the device has copied it.
    """

    def __init__(self, device: torch.device) -> None:
        """Move batches to `device`."""
        self.device = device
        self._flying: collections.deque[tuple[torch.cuda.Event, object]] = collections.deque()

    def __call__(self, value: T) -> T:
        """Move the tensors in lists, tuples and dicts to the device. For the CPU, return the value itself."""
        if self.device.type == "cpu":
            return value
        there = moved(value, self.device, non_blocking=True)
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
            self._flying.append((event, value))
            while self._flying and self._flying[0][0].query():
                self._flying.popleft()
        return there


def _moved(value: object, device: torch.device, *, non_blocking: bool) -> object:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=non_blocking)
    if isinstance(value, PackedSequence):  # a tuple; `to` leaves its batch_sizes on the CPU
        # torch's annotations know dtypes only.
        there: PackedSequence = value.to(device, non_blocking=non_blocking)  # type: ignore[arg-type]
        return there
    if isinstance(value, Mapping):
        return {k: _moved(v, device, non_blocking=non_blocking) for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        make: Callable[..., object] = type(value)
        return make(*(_moved(v, device, non_blocking=non_blocking) for v in value))
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_moved(v, device, non_blocking=non_blocking) for v in value)
    return value


def moved(value: T, device: torch.device, *, non_blocking: bool = False) -> T:
    """Move the tensors in lists, tuples and dicts to a device."""
    return cast("T", _moved(value, device, non_blocking=non_blocking))


def to_cpu(value: T) -> T:
    """Move the tensors to the CPU, so that pickled objects can be read without a GPU."""
    return moved(value, _CPU)
