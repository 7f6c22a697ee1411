"""Gradients in flat memory of a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparkhvd.torch.gradients.entry import Entry

__all__ = ["FlatGradients"]


class FlatGradients:
    """Flat memory of a bucket, with a place for the gradient of each parameter.

    Args:
        flat: the memory, of one type; is set to zero.
        entries: the parameters.
        offsets: first element of each.
        num_values: elements that gradients have; behind them may be others.

    Attributes:
        flat: the memory.
        slots: of each parameter the tensor that `.grad` is. Users see it: `model.cpu()` gives it other memory.
    """

    __slots__ = ("_addresses", "_entries", "_homes", "_values", "flat", "slots")

    def __init__(
        self, flat: Tensor, entries: Sequence[Entry], offsets: Sequence[int], num_values: int
    ) -> None:
        flat.zero_()
        first = flat.storage_offset()
        self.flat = flat
        self._entries = entries
        self._values = flat[:num_values]
        # Where the slots must lie.
        self._homes = [
            flat.as_strided(entry.shape, entry.stride, first + offset).detach()
            for entry, offset in zip(entries, offsets, strict=True)
        ]
        self._addresses = [home.data_ptr() for home in self._homes]
        self.slots = [home.data for home in self._homes]  # each counts its own changes

    def slot(self, number: int) -> Tensor:
        """Return the slot of a parameter: the same tensor as before, unless that was moved away."""
        slot = self.slots[number]
        if slot.data_ptr() != self._addresses[number]:
            slot = self.slots[number] = self._homes[number].data
        return slot

    def find_slots(self) -> list[Tensor]:
        """Return the slots of all parameters, as `slot` does."""
        for number, (slot, address) in enumerate(zip(self.slots, self._addresses, strict=True)):
            if slot.data_ptr() != address:
                self.slots[number] = self._homes[number].data
        return self.slots

    @torch.no_grad()
    def show(self) -> None:
        """Let `.grad` lie in the flat memory from now on, before any backward."""
        for entry, slot in zip(self._entries, self.slots, strict=True):
            grad = entry.param.grad
            if grad is not None:
                slot.copy_(grad if grad.layout is torch.strided else grad.to_dense())
            entry.param.grad = slot

    def zero(self) -> None:
        """Set all gradients to zero, where they lie."""
        self._values.zero_()
        for number, entry in enumerate(self._entries):
            entry.param.grad = self.slot(number)

    def scale(self, slots: list[Tensor], factor: float) -> None:
        """Multiply some slots with a factor."""
        if len(slots) == len(self.slots):
            self._values.mul_(factor)  # one launch
        elif slots:
            torch._foreach_mul_(slots, factor)
