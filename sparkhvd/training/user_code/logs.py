"""Numbers that user code reports with `ctx.log`: summed on each rank, combined over ranks once per epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparkhvd.errors import InvalidArgumentError

__all__ = ["RESERVED", "Logs", "combined"]

# Names in an epoch's record that are the loop's own.
RESERVED = ("epoch", "loss", "seconds", "rows", "rows_per_s", "data_wait_s", "lr")


class Logs:
    """Numbers that user code reports during an epoch: each rank's are summed by rows, then combined."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Any]] = {}

    def add(self, name: str, value: Any, weight: float) -> None:
        """Count a value for `weight` rows.

        Raises:
            InvalidArgumentError: the name is no text or taken, or the value is not one number.
        """
        if not isinstance(name, str) or not name or name in RESERVED or name.startswith("val_"):
            raise InvalidArgumentError(
                f"ctx.log({name!r}, ...): the name is taken or no text. Give a text other than "
                f"{', '.join(RESERVED)} that does not begin with 'val_'."
            )
        is_tensor = isinstance(value, torch.Tensor)
        if value.numel() != 1 if is_tensor else not hasattr(value, "__float__"):
            raise InvalidArgumentError(
                f"ctx.log({name!r}, ...): the value is {value!r:.100}; it must be one number, or a tensor with one "
                "element."
            )
        # A tensor stays one, so that an accelerator is not waited for.
        value = value.detach().double().reshape(()) if is_tensor else float(value)
        entry = self._sums.setdefault(name, [0.0, 0.0])
        entry[0] = entry[0] + value * weight
        entry[1] += weight

    def load(self, sums: dict[str, tuple[float, float]]) -> None:
        """Go on from what `sums` gave."""
        self._sums = {name: list(pair) for name, pair in sums.items()}

    def sums(self) -> dict[str, tuple[float, float]]:
        """By name the sum of the values times their weights, and of the weights, on this rank."""
        return {name: (float(total), weight) for name, (total, weight) in self._sums.items()}


def combined(by_rank: Sequence[dict[str, tuple[float, float]]], prefix: str) -> dict[str, float]:
    """Means from each rank's (sum, weight) by name; a name need not be on every rank."""
    result = {}
    for name in dict.fromkeys(name for own in by_rank for name in own):
        pairs = [own[name] for own in by_rank if name in own]
        weight = sum(w for _, w in pairs)
        result[f"{prefix}{name}"] = sum(t for t, _ in pairs) / weight if weight else float("nan")
    return result
