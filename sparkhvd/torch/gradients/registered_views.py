"""Gradients that live in registered memory: `DistributedOptimizer(gradient_as_bucket_view=True)`.

All gradients of a reducer lie in one flat piece of registered memory, bucket after bucket. `p.grad` is a view of
it, backward adds into it, and the ranks of a host reduce it where it lies: no copy in and none out. The price is
that gradients must be set to zero and added to instead of being taken over from backward, which costs more than
it saves when gradients are dropped after every step (measured, 64 MiB of Linear gradients, two ranks: dropped
and reduced from private memory 118 ms, views 132 ms; kept and set to zero in private memory 155 ms). So it
pays where gradients are kept anyway, and is off by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from sparkhvd.engine.engine import Buffer
from sparkhvd.torch.registered import over_buffer

__all__ = ["GradientMemory", "needed_bytes"]

# Every gradient begins on a cache line, so that vector instructions and neighbours do not get in each other's way.
_ALIGNMENT = 64


class Entry(Protocol):
    """Parameter whose gradient is a view, as far as this module needs it."""

    param: Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _num_bytes(entry: Entry) -> int:
    return _aligned(entry.param.numel() * entry.dtype.itemsize)


def needed_bytes(entries: Sequence[Entry]) -> int:
    """Return the length of memory for the gradients of these parameters, in any order."""
    return sum(_num_bytes(entry) for entry in entries)


class GradientMemory:
    """Flat memory with the gradients of parameters."""

    def __init__(self, buffer: Buffer) -> None:
        self._bytes = over_buffer(buffer, torch.uint8, buffer.num_bytes)
        # `.grad`, and the memory in which it must lie: `model.to(...)` gives the same `.grad` other memory.
        self._views: dict[int, Tensor] = {}
        self._places: dict[int, Tensor] = {}

    def lay_out(self, buckets: Sequence[Sequence[Entry]]) -> list[Tensor]:
        """Give every parameter its place, moving gradients that are there; return the flat memory of each bucket."""
        moved = {key: view.clone() for key, view in self._views.items()}
        self._bytes.zero_()
        flats: list[Tensor] = []
        first = 0
        for entries in buckets:
            size = sum(_num_bytes(entry) for entry in entries)
            dtype = entries[0].dtype
            flat = self._bytes[first : first + size].view(dtype)
            offset = 0
            for entry in entries:
                # `.data`, so that each counts its own changes.
                view = flat.as_strided(
                    entry.shape, entry.stride, flat.storage_offset() + offset // dtype.itemsize
                ).data
                self._put(entry, view, moved.get(id(entry)))
                offset += _num_bytes(entry)
            flats.append(flat)
            first += size
        return flats

    def _put(self, entry: Entry, view: Tensor, values: Tensor | None) -> None:
        old = self._views.get(id(entry))
        self._views[id(entry)] = view
        self._places[id(entry)] = view.detach()
        grad = entry.param.grad
        if values is not None:
            view.copy_(values)
        elif grad is not None and grad is not old:
            view.copy_(grad)
        entry.param.grad = view

    def take(self, entry: Entry) -> Tensor:
        """Bring the gradient of a parameter to its place, from where backward or the user has left it."""
        grad = entry.param.grad
        view = self._view(entry)
        if grad is view:
            return view
        if grad is None:
            view.zero_()
        else:
            view.copy_(grad.detach() if grad.layout is torch.strided else grad.detach().to_dense())
        entry.param.grad = view
        return view

    def zero(self, entries: Sequence[Entry]) -> None:
        """Set all gradients to zero, in their places."""
        self._bytes.zero_()
        for entry in entries:
            entry.param.grad = self._view(entry)

    def _view(self, entry: Entry) -> Tensor:
        """Return the tensor for `.grad`: the same as before, unless that was moved away from its place."""
        view, place = self._views[id(entry)], self._places[id(entry)]
        if view.data_ptr() != place.data_ptr():
            view = self._views[id(entry)] = place.data
        return view
