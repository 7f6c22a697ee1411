"""Batches of feature columns as the arguments of `forward`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparkhvd.data.columns.ragged import SparseRows
from sparkhvd.data.columns.schema import FLOATS, Column
from sparkhvd.data.columns.texts import Arguments
from sparkhvd.errors import InvalidArgumentError

__all__ = ["Argument", "InputBinding", "from_numpy", "quoted"]

Array = npt.NDArray[Any]


def quoted(names: Iterable[str]) -> str:
    """Put names in quotes, with commas between, for messages."""
    return ", ".join(repr(n) for n in names)


@dataclass(frozen=True)
class Argument:
    """Tensor argument of `forward` and the columns that it is made of.

    Attributes:
        name: keyword, or None for a positional argument.
        columns: names of the columns, joined in this order.
        dtype: torch name of the tensor's dtype.
        shape: shape of one row (may hold one -1); None leaves (B,) for a scalar column, (B, w) for the others.
        is_joined: the columns become one (B, sum of widths) tensor.
        is_whole: the one column is handed on as the collate function made it.
    """

    name: str | None
    columns: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...] | None
    is_joined: bool
    is_whole: bool = False

    def tensor(self, batch: Mapping[str, object]) -> Any:
        """Build the argument from a batch of columns (B, *shape).

        Sparse vectors become one sparse COO tensor (B, dimensions). The result of a collate function stays as it is, with
        arrays as tensors and floats in the argument's dtype.
        """
        first = batch[self.columns[0]]
        if self.is_whole or isinstance(first, SparseRows):
            return self._whole(first)
        # Columns of one shape per row.
        arrays = cast("list[Array]", [batch[name] for name in self.columns])
        rows = len(arrays[0])
        dtype = getattr(torch, self.dtype)
        if len(arrays) == 1:
            tensor = from_numpy(arrays[0], dtype)
            if self.is_joined:
                tensor = tensor.reshape(rows, math.prod(arrays[0].shape[1:]))
        else:
            parts = [a.reshape(rows, math.prod(a.shape[1:])) for a in arrays]
            # numpy converts while it fills; it has no bfloat16.
            filled = torch.float32 if dtype == torch.bfloat16 else dtype
            tensor = torch.empty((rows, sum(p.shape[1] for p in parts)), dtype=filled)
            np.concatenate(parts, axis=1, out=tensor.numpy(), casting="unsafe")
            tensor = tensor.to(dtype)
        if self.shape is not None:
            tensor = tensor.reshape(rows, *self._row_shape(tensor))
        return tensor

    def _whole(self, value: object) -> object:
        made = _as_tensors(value, getattr(torch, self.dtype))
        if self.shape is None or not isinstance(made, Tensor):
            return made
        return made.reshape(len(made), *self._row_shape(made))

    def _row_shape(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the shape of a row with a -1 filled in, checked against the tensor's elements."""
        assert self.shape is not None
        elements = math.prod(tensor.shape[1:])
        known = math.prod(d for d in self.shape if d != -1)
        if -1 in self.shape and known and elements % known == 0:
            return tuple(elements // known if d == -1 else d for d in self.shape)
        if known != elements or -1 in self.shape:
            raise InvalidArgumentError(
                f"input_shapes: {quoted(self.columns)} cannot become {list(self.shape)} per row: the data have "
                f"{elements} elements per row, the shape asks for {known}. Give a shape of {elements} elements, for "
                f"example [-1, {elements}]."
            )
        return self.shape

    def describe(self) -> str:
        """Return the argument in words: "x = 'a' + 'b' (float32)"."""
        name = self.name if self.name is not None else "argument"
        shape = "" if self.shape is None else f", rows of shape {list(self.shape)}"
        return f"{name} = {' + '.join(map(repr, self.columns))} ({self.dtype}{shape})"


def _as_tensors(value: object, dtype: torch.dtype) -> object:
    """Convert arrays in the result of a collate function to tensors; floats become `dtype`, if that is floating."""
    if isinstance(value, SparseRows):
        return _sparse(value).to(dtype)
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value if value.flags.writeable else value.copy())
    if isinstance(value, Tensor):
        is_cast = value.is_floating_point() and dtype.is_floating_point
        return value.to(dtype) if is_cast else value
    if isinstance(value, Mapping):
        kind = Arguments if isinstance(value, Arguments) else dict
        return kind({k: _as_tensors(v, dtype) for k, v in value.items()})
    if type(value) is list:
        return [_as_tensors(v, dtype) for v in value]
    if type(value) is tuple:
        return tuple(_as_tensors(v, dtype) for v in value)
    return value


def _sparse(rows: SparseRows) -> Tensor:
    """Return a tensor (B, dimensions) in COO layout; indices ascend, so it is coalesced."""
    return torch.sparse_coo_tensor(
        torch.from_numpy(rows.coordinates()),
        torch.from_numpy(rows.values.gathered().copy()),
        (len(rows), rows.width),
        is_coalesced=True,
        check_invariants=False,
    )


def from_numpy(array: Array, dtype: torch.dtype) -> Tensor:
    """Return a tensor of the array's values, sharing its memory where that may be written."""
    # A tensor cannot be read-only, and buffers that came from Arrow are.
    return torch.from_numpy(array if array.flags.writeable else array.copy()).to(dtype)


@dataclass(frozen=True)
class InputBinding:
    """Arguments of the model and their columns; picklable."""

    arguments: tuple[Argument, ...]

    def apply(self, batch: Mapping[str, object]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Build the positional and keyword arguments of `forward` from a batch of columns (B, *shape).

        A tensor may share memory with the batch.
        """
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for argument in self.arguments:
            made, name = argument.tensor(batch), argument.name
            if isinstance(made, Arguments) and (name is None or name in made):
                kwargs.update(made)
            elif name is None:
                args.append(made)
            else:
                kwargs[name] = made
        return tuple(args), kwargs

    def with_casts(self, columns: Sequence[Column]) -> tuple[Column, ...]:
        """Return the feature columns with `cast_to` set for integers that an argument joins with floats."""
        casts: dict[str, str] = {}
        for argument in self.arguments:
            if argument.is_joined and argument.dtype in FLOATS:
                for name in argument.columns:
                    # FLOATS go from narrow to wide.
                    casts[name] = min(argument.dtype, casts.get(name, "float64"), key=FLOATS.index)
        return tuple(
            c if c.is_floating or c.name not in casts else replace(c, cast_to=casts[c.name])
            for c in columns
        )

    def describe(self) -> str:
        """Return the binding in words, for error messages."""
        return "; ".join(a.describe() for a in self.arguments)
