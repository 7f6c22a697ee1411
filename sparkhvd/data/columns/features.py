"""From columns to the arguments of `forward`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sparkhvd.data.columns.ragged import SparseRows
from sparkhvd.data.columns.schema import FLOATS, Column, DataSchema
from sparkhvd.errors import InvalidArgumentError

__all__ = [
    "Argument",
    "InputBinding",
    "bind_inputs",
    "checked_shape",
    "from_numpy",
    "model_dtype",
    "quoted",
]


@dataclass(frozen=True)
class Argument:
    """One tensor argument of `forward`.

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

    def tensor(self, batch: Mapping[str, Any]) -> Any:
        """The argument for a batch of columns (B, *shape).

        Sparse vectors become one sparse COO tensor (B, dimensions). What a collate function made stays as it is, with
        arrays as tensors and floats in the argument's dtype.
        """
        arrays = [batch[name] for name in self.columns]
        if self.is_whole or isinstance(arrays[0], SparseRows):
            return self._whole(arrays[0])
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

    def _whole(self, value: Any) -> Any:
        made = _as_tensors(value, getattr(torch, self.dtype))
        if self.shape is None or not isinstance(made, Tensor):
            return made
        return made.reshape(len(made), *self._row_shape(made))

    def _row_shape(self, tensor: Tensor) -> tuple[int, ...]:
        """The shape of a row with a -1 filled in, checked against what the columns hold."""
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
        """In words: "x = 'a' + 'b' (float32)"."""
        name = self.name if self.name is not None else "argument"
        shape = "" if self.shape is None else f", rows of shape {list(self.shape)}"
        return f"{name} = {' + '.join(map(repr, self.columns))} ({self.dtype}{shape})"


def _as_tensors(value: Any, dtype: torch.dtype) -> Any:
    """Arrays and tensors in what a collate function made, as tensors; floats in `dtype`, if that is floating."""
    if isinstance(value, SparseRows):
        return _sparse(value).to(dtype)
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value if value.flags.writeable else value.copy())
    if isinstance(value, Tensor):
        is_cast = value.is_floating_point() and dtype.is_floating_point
        return value.to(dtype) if is_cast else value
    if isinstance(value, Mapping):
        return {k: _as_tensors(v, dtype) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_as_tensors(v, dtype) for v in value)
    return value


def _sparse(rows: SparseRows) -> Tensor:
    """(B, dimensions) in COO layout; indices ascend, so it is coalesced."""
    return torch.sparse_coo_tensor(
        torch.from_numpy(rows.coordinates()),
        torch.from_numpy(rows.values.gathered().copy()),
        (len(rows), rows.width),
        is_coalesced=True,
        check_invariants=False,
    )


def from_numpy(array: npt.NDArray[Any], dtype: torch.dtype) -> Tensor:
    """A tensor of the array's values, sharing its memory where that may be written."""
    # A tensor cannot be read-only, and buffers that came from Arrow are.
    return torch.from_numpy(array if array.flags.writeable else array.copy()).to(dtype)


@dataclass(frozen=True)
class InputBinding:
    """Which columns become which argument of the model; picklable."""

    arguments: tuple[Argument, ...]

    def apply(self, batch: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and keyword arguments of `forward` for a batch of columns (B, *shape).

        A tensor may share memory with the batch.
        """
        args = tuple(a.tensor(batch) for a in self.arguments if a.name is None)
        kwargs = {a.name: a.tensor(batch) for a in self.arguments if a.name is not None}
        return args, kwargs

    def with_casts(self, columns: Sequence[Column]) -> tuple[Column, ...]:
        """The feature columns with `cast_to` of integers that an argument joins with floats."""
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
        """The binding in words, for error messages."""
        return "; ".join(a.describe() for a in self.arguments)


def model_dtype(model: nn.Module) -> str:
    """Name of the dtype of the model's first floating parameter, else torch's default: "float32"."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return str(parameter.dtype).removeprefix("torch.")
    return str(torch.get_default_dtype()).removeprefix("torch.")


def bind_inputs(
    model: nn.Module,
    schema: DataSchema,
    *,
    input_shapes: Sequence[Sequence[int]] | Mapping[str, Sequence[int]] | None = None,
    inputs: Mapping[str, str | Sequence[str]] | None = None,
) -> InputBinding:
    """Decide which feature columns become which argument of `model.forward`; works before materialization.

    - `input_shapes` as a list: one positional argument per column, of that shape per row. A leading -1 stands for
      the batch, as in Horovod: [-1, 1, 28, 28] and [1, 28, 28] mean the same.
    - `inputs={"x": ["a", "b"], "ids": "c"}`: by name. A list joins its columns to (B, sum of widths); a single name
      gives the column as it is. `input_shapes` may then be a dict by argument name.
    - Neither: if `forward` takes one argument, all columns are joined in the given order into (B, sum of widths);
      if it takes as many required arguments as there are columns, one each.

    Integers stay int64 (booleans bool) in an argument of their own and are cast when joined with floats, see `with_casts`.

    Raises:
        InvalidArgumentError: the counts or names do not fit; the message shows both sides.
    """
    columns = schema.features
    default = model_dtype(model)
    positional, required, names, takes_any = _signature(model)
    if inputs is not None:
        return _bind_by_name(schema, inputs, input_shapes, default, names, takes_any)
    if isinstance(input_shapes, Mapping):
        raise InvalidArgumentError(
            f"input_shapes is a dict ({list(input_shapes)}), which names arguments of forward; give inputs= too, or a "
            "list with one shape per feature column."
        )
    if input_shapes is not None:
        if len(input_shapes) != len(columns):
            raise InvalidArgumentError(
                f"input_shapes has {len(input_shapes)} shapes and feature_cols {len(columns)} columns "
                f"({quoted(c.name for c in columns)}). Give one shape per column."
            )
        _check_count(len(columns), positional, required, model)
        return InputBinding(
            tuple(
                Argument(
                    None,
                    (c.name,),
                    c.tensor_dtype,
                    checked_shape("input_shapes", s, c),
                    False,
                    c.is_collated,
                )
                for c, s in zip(columns, input_shapes, strict=True)
            )
        )
    if required == 1 or (required == 0 and positional >= 1) or len(columns) == 1 == positional:
        return InputBinding((_joined(None, columns, default),))
    if required == len(columns):
        return InputBinding(tuple(_single(None, c) for c in columns))
    raise InvalidArgumentError(
        f"{type(model).__name__}.forward takes {_count(required, positional)} and there are {len(columns)} feature "
        f"columns ({quoted(c.name for c in columns)}), so it is not clear which goes where. Say it with "
        f"inputs={{'<argument>': ['<column>', ...], ...}}, or with one entry per column in input_shapes."
    )


def _bind_by_name(
    schema: DataSchema,
    inputs: Mapping[str, str | Sequence[str]],
    shapes: Any,
    default: str,
    names: Sequence[str],
    takes_any: bool,
) -> InputBinding:
    if shapes is not None and not isinstance(shapes, Mapping):
        raise InvalidArgumentError(
            "inputs and a list of input_shapes are both given. With inputs=, give input_shapes as a dict by argument: "
            f"{{{next(iter(inputs), 'x')!r}: [...]}}."
        )
    by_name = {c.name: c for c in schema.features}
    unused = dict(by_name)
    arguments = []
    for name, given in inputs.items():
        if name not in names and not takes_any:
            raise InvalidArgumentError(
                f"inputs names the argument {name!r}, which forward does not take. Its arguments are: {quoted(names)}."
            )
        members = [given] if isinstance(given, str) else list(given)
        for member in members:
            if member not in by_name:
                raise InvalidArgumentError(
                    f"inputs[{name!r}] names column {member!r}, which is not among feature_cols: {quoted(by_name)}."
                )
            unused.pop(member, None)
        if not members:
            raise InvalidArgumentError(f"inputs[{name!r}] is empty. Name at least one column.")
        chosen = [by_name[m] for m in members]
        if isinstance(given, str):
            argument = _single(name, chosen[0])
        else:
            argument = _joined(name, chosen, default)
        shape = (shapes or {}).get(name)
        if shape is not None:
            argument = replace(argument, shape=_row_shape("input_shapes", shape))
        arguments.append(argument)
    if unused:
        raise InvalidArgumentError(
            f"feature_cols has {quoted(unused)}, which inputs does not use. Add them to an argument, or leave them out."
        )
    unknown = set(shapes or {}) - set(inputs)
    if unknown:
        raise InvalidArgumentError(
            f"input_shapes names {quoted(sorted(unknown))}, which inputs does not. Use the names of inputs: "
            f"{quoted(inputs)}."
        )
    return InputBinding(tuple(arguments))


def _single(name: str | None, column: Column) -> Argument:
    """An argument of one column, as it is."""
    return Argument(name, (column.name,), column.tensor_dtype, None, False, column.is_collated)


def _joined(name: str | None, columns: Sequence[Column], default: str) -> Argument:
    if len(columns) == 1 and columns[0].is_collated:
        return _single(name, columns[0])
    for column in columns if len(columns) > 1 else ():
        if column.kind == "sparse" or column.is_collated:
            what = "is sparse" if column.kind == "sparse" else "has a collate function"
            raise InvalidArgumentError(
                f"Column {column.name!r} {what} and cannot be joined with {len(columns) - 1} other columns into one "
                f"tensor. Give it an argument of its own: inputs={{'<argument>': {column.name!r}, ...}}."
            )
    floats = {c.tensor_dtype for c in columns if c.is_floating}
    if len(columns) == 1:
        dtype = columns[0].tensor_dtype
    elif not floats:
        dtype = columns[0].tensor_dtype if len({c.tensor_dtype for c in columns}) == 1 else "int64"
    else:
        # All floats follow the model unless the user chose: then the widest that was chosen.
        dtype = next(iter(floats)) if len(floats) == 1 else _widest(floats | {default})
    return Argument(name, tuple(c.name for c in columns), dtype, None, True)


def _widest(names: set[str]) -> str:
    widest = torch.float16 if names == {"float16"} else None
    for name in sorted(names):
        dtype = getattr(torch, name)
        widest = dtype if widest is None else torch.promote_types(widest, dtype)
    return str(widest).removeprefix("torch.")


def checked_shape(param: str, given: Sequence[int], column: Column) -> tuple[int, ...]:
    """The shape of one row of a column as a param gives it, without the batch.

    Raises:
        InvalidArgumentError: it is no shape, or has another number of elements than the column.
    """
    shape = _row_shape(param, given)
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


def _row_shape(param: str, given: Any) -> tuple[int, ...]:
    """The shape of one row: a leading -1 is the batch."""
    shape = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else None
    if shape is None or not all(isinstance(d, int) and (d == -1 or d > 0) for d in shape):
        raise InvalidArgumentError(
            f"{param} holds {given!r}. A shape is a list of positive numbers, with -1 for the batch: "
            "[-1, 1, 28, 28]."
        )
    shape = shape[1:] if shape and shape[0] == -1 else shape
    if shape.count(-1) > 1:
        raise InvalidArgumentError(
            f"{param} holds {list(given)}. After the batch, at most one -1 can be filled in."
        )
    return shape


def _signature(model: nn.Module) -> tuple[int, int, list[str], bool]:
    """(positional arguments, required ones, names, whether any name is taken) of `forward`."""
    # torch.compile and parallel wrappers take *args and hand them on.
    inner = model
    while isinstance(getattr(inner, "_orig_mod", None), nn.Module):
        inner = inner._orig_mod  # type: ignore[assignment]  # checked to be a Module
    if isinstance(inner, torch.jit.ScriptModule):
        method: Any = inner.forward
        arguments = method.schema.arguments[1:]
        required = sum(not a.has_default_value() for a in arguments)
        return len(arguments), required, [a.name for a in arguments], False
    parameters = list(inspect.signature(inner.forward).parameters.values())
    kinds = inspect.Parameter
    plain = [
        p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    required = sum(p.default is kinds.empty for p in plain)
    named = [
        p.name for p in parameters if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    ]
    has_args = any(p.kind == kinds.VAR_POSITIONAL for p in parameters)
    takes_any = any(p.kind == kinds.VAR_KEYWORD for p in parameters)
    # *args takes any number; without a named one there is nothing that tells how many are meant.
    positional = len(plain) + (1000 if has_args else 0)
    return positional, required if plain or not has_args else -1, named, takes_any


def _check_count(given: int, positional: int, required: int, model: nn.Module) -> None:
    if not max(required, 0) <= given <= positional:
        raise InvalidArgumentError(
            f"input_shapes makes {given} arguments, one per feature column, but {type(model).__name__}.forward takes "
            f"{_count(required, positional)}. Give as many columns as arguments, or inputs= to join columns."
        )


def _count(required: int, positional: int) -> str:
    if required < 0:
        return "any number of arguments (*args)"
    plural = "s" * (required != 1)
    if positional > required:
        return f"{required} required argument{plural} (and optional ones)"
    return f"{required} argument{plural}"


def quoted(names: Any) -> str:
    """The names in quotes, with commas, for messages."""
    return ", ".join(repr(n) for n in names)
