"""Shapes of one row, as the Params give them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sparkhvd.data.columns.schema import Column
from sparkhvd.errors import InvalidArgumentError

__all__ = ["Shaped", "checked_shape", "row_shape_of"]


def checked_shape(param: str, given: Sequence[int], column: Column) -> tuple[int, ...]:
    """Return the shape of one row of a column, as a Param gives it, without the batch.

    Raises:
        InvalidArgumentError: it is no shape, or has another number of elements than the column.
    """
    shape = row_shape_of(param, given)
    known = math.prod(d for d in shape if d != -1)
    if column.kind == "sparse":
        raise InvalidArgumentError(
            f"{param} gives {list(given)} for column {column.name!r}, which is sparse: it goes to the model as a sparse "
            f"tensor (rows, {column.shape[0] if column.shape else 'dimensions'}). Leave {param} out and name it in inputs."
        )
    if column.row_shape is not None:
        elements = math.prod(column.row_shape)
        fits = elements == known if -1 not in shape else known > 0 and elements % known == 0
        if not fits:
            raise InvalidArgumentError(
                f"{param} gives {list(given)} for column {column.name!r}, which has {elements} "
                f"element{'s' * (elements != 1)} per row. Give a shape of {elements} elements, for example "
                f"[-1, {elements}]."
            )
    return shape


def row_shape_of(param: str, given: object) -> tuple[int, ...]:
    """Return the shape of one row, without a leading -1 for the batch.

    Raises:
        InvalidArgumentError: it is no shape.
    """
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    shape: tuple[int, ...] = tuple(given) if isinstance(given, Sequence) else ()
    if not is_list or not all(isinstance(d, int) and (d == -1 or d > 0) for d in shape):
        raise InvalidArgumentError(
            f"{param} holds {given!r}. A shape is a list of positive numbers, with -1 for the batch: "
            "[-1, 1, 28, 28]."
        )
    row = shape[1:] if shape and shape[0] == -1 else shape
    if row.count(-1) > 1:
        raise InvalidArgumentError(
            f"{param} holds {list(shape)}. After the batch, at most one -1 can be filled in."
        )
    return row


@dataclass(frozen=True)
class Shaped:
    """Decoder whose arrays get the shape that a model takes.

    Attributes:
        function: of the user.
        shape: of one row.
    """

    function: Callable[..., object]
    shape: tuple[int, ...]

    def __call__(self, value: object) -> object:
        """Call the function."""
        array = np.asarray(self.function(value))
        return array.reshape(self.shape) if array.size == math.prod(self.shape) else array
