"""Numbers that user code reports with `ctx.log`: summed on each rank, combined over ranks once per epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsFloat

from torch import Tensor

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.observe.report.document import OF_EPOCH

__all__ = ["RESERVED", "Logs", "combined"]

# Names in an epoch's record that the loop writes.
RESERVED = ("loss", *OF_EPOCH)


class Logs:
    """Numbers that user code reports during an epoch: each rank's are summed by rows, then combined."""

    def __init__(self) -> None:
        # Sum of values times weights, and of weights. A sum of tensors stays one, so that a GPU is not waited for.
        self._sums: dict[str, tuple[Tensor | float, float]] = {}

    def add(self, name: str, value: object, weight: float) -> None:
        """Add a value with a weight, in rows.

        Raises:
            InvalidArgumentError: the name is no text or taken, or the value is not one number.
        """
        if not isinstance(name, str) or not name or name in RESERVED or name.startswith("val_"):
            raise InvalidArgumentError(
                f"ctx.log({name!r}, ...): the name is taken or no text. Give a text other than "
                f"{', '.join(RESERVED)} that does not begin with 'val_'."
            )
        number: Tensor | float
        if isinstance(value, Tensor) and value.numel() == 1:
            number = value.detach().double().reshape(())
        elif isinstance(value, SupportsFloat) and not isinstance(value, Tensor):
            number = float(value)
        else:
            raise InvalidArgumentError(
                f"ctx.log({name!r}, ...): the value is {value!r:.100}; it must be one number, or a tensor with one "
                "element."
            )
        total, weights = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (total + number * weight, weights + weight)

    def load(self, sums: dict[str, tuple[float, float]]) -> None:
        """Continue from the sums of `sums`."""
        self._sums = dict(sums)

    def sums(self) -> dict[str, tuple[float, float]]:
        """Return by name the sum of the values times their weights, and of the weights, on this rank."""
        return {name: (float(total), weight) for name, (total, weight) in self._sums.items()}


def combined(by_rank: Sequence[dict[str, tuple[float, float]]], prefix: str) -> dict[str, float]:
    """Combine each rank's (sum, weight) by name to means; a name need not be on every rank."""
    result = {}
    for name in dict.fromkeys(name for sums in by_rank for name in sums):
        pairs = [sums[name] for sums in by_rank if name in sums]
        weight = sum(w for _, w in pairs)
        result[f"{prefix}{name}"] = sum(t for t, _ in pairs) / weight if weight else float("nan")
    return result
