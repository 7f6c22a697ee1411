"""Choice of an argument of `forward` for every feature column."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from sparkhvd.data.columns.features import Argument, InputBinding, quoted
from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.data.columns.shapes import checked_shape, row_shape_of
from sparkhvd.errors import InvalidArgumentError

__all__ = ["bind_inputs", "each_column", "model_dtype"]

Shape = Sequence[int]


def model_dtype(model: nn.Module) -> str:
    """Return the name of the dtype of the model's first floating parameter, else torch's default: "float32"."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return str(parameter.dtype).removeprefix("torch.")
    return str(torch.get_default_dtype()).removeprefix("torch.")


def bind_inputs(
    model: nn.Module,
    schema: DataSchema,
    *,
    input_shapes: Sequence[Shape] | Mapping[str, Shape] | None = None,
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
    forward = _Forward.of(model)
    if inputs is not None:
        return _bind_by_name(schema, inputs, input_shapes, default, forward)
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
        _check_count(len(columns), forward, model)
        return InputBinding(
            tuple(
                replace(_single(None, c), shape=checked_shape("input_shapes", s, c))
                for c, s in zip(columns, input_shapes, strict=True)
            )
        )
    if forward.takes_one or len(columns) == 1 == forward.positional:
        return InputBinding((_joined(None, columns, default),))
    if forward.required == len(columns):
        return InputBinding(tuple(_single(None, c) for c in columns))
    raise InvalidArgumentError(
        f"{type(model).__name__}.forward takes {forward.describe()} and there are {len(columns)} feature "
        f"columns ({quoted(c.name for c in columns)}), so it is not clear which goes where. Say it with "
        f"inputs={{'<argument>': ['<column>', ...], ...}}, or with one entry per column in input_shapes."
    )


def each_column(schema: DataSchema) -> InputBinding:
    """Make an argument of each feature column, whatever the model takes."""
    return InputBinding(tuple(_single(None, c) for c in schema.features))


def _bind_by_name(
    schema: DataSchema,
    inputs: Mapping[str, str | Sequence[str]],
    shapes: Sequence[Shape] | Mapping[str, Shape] | None,
    default: str,
    forward: _Forward,
) -> InputBinding:
    if shapes is not None and not isinstance(shapes, Mapping):
        raise InvalidArgumentError(
            "inputs and a list of input_shapes are both given. With inputs=, give input_shapes as a dict by argument: "
            f"{{{next(iter(inputs), 'x')!r}: [...]}}."
        )
    by_name = {c.name: c for c in schema.features}
    unused = dict(by_name)
    arguments = []
    for name, entry in inputs.items():
        if name not in forward.names and not forward.takes_any:
            raise InvalidArgumentError(
                f"inputs names the argument {name!r}, which forward does not take. Its arguments are: {quoted(forward.names)}."
            )
        members = [entry] if isinstance(entry, str) else list(entry)
        for member in members:
            if member not in by_name:
                raise InvalidArgumentError(
                    f"inputs[{name!r}] names column {member!r}, which is not among feature_cols: {quoted(by_name)}."
                )
            unused.pop(member, None)
        if not members:
            raise InvalidArgumentError(f"inputs[{name!r}] is empty. Name at least one column.")
        chosen = [by_name[m] for m in members]
        if isinstance(entry, str):
            argument = _single(name, chosen[0])
        else:
            argument = _joined(name, chosen, default)
        shape = (shapes or {}).get(name)
        if shape is not None:
            argument = replace(argument, shape=row_shape_of("input_shapes", shape))
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
    """Bind one column as it is."""
    return Argument(name, (column.name,), column.tensor_dtype, None, False, column.is_collated)


def _joined(name: str | None, columns: Sequence[Column], default: str) -> Argument:
    """Bind columns as one tensor (B, sum of widths); `default` is the model's dtype."""
    if len(columns) == 1 and columns[0].is_collated:
        return _single(name, columns[0])
    for column in columns if len(columns) > 1 else ():
        if column.kind == "sparse" or column.is_collated:
            reason = "is sparse" if column.kind == "sparse" else "has a collate function"
            raise InvalidArgumentError(
                f"Column {column.name!r} {reason} and cannot be joined with {len(columns) - 1} other columns into one "
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


@dataclass(frozen=True)
class _Forward:
    """Arguments that `forward` takes.

    Attributes:
        positional: the most positional ones.
        required: those without a default; -1 if any number is right.
        names: that can be given as keywords.
        takes_any: keywords of any name are taken.
    """

    positional: int
    required: int
    names: tuple[str, ...]
    takes_any: bool

    @classmethod
    def of(cls, model: nn.Module) -> _Forward:
        """Read the signature of a model's `forward`."""
        # torch.compile and parallel wrappers take *args and hand them on.
        inner = model
        while isinstance(getattr(inner, "_orig_mod", None), nn.Module):
            inner = inner._orig_mod  # type: ignore[assignment]  # checked to be a Module
        if isinstance(inner, torch.jit.ScriptModule):
            method: Any = inner.forward  # compiled: it has a schema
            arguments = method.schema.arguments[1:]
            required = sum(not a.has_default_value() for a in arguments)
            return cls(len(arguments), required, tuple(a.name for a in arguments), False)
        parameters = list(inspect.signature(inner.forward).parameters.values())
        kinds = inspect.Parameter
        plain = [
            p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        ]
        required = sum(p.default is kinds.empty for p in plain)
        named = [
            p.name
            for p in parameters
            if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
        ]
        has_args = any(p.kind == kinds.VAR_POSITIONAL for p in parameters)
        takes_any = any(p.kind == kinds.VAR_KEYWORD for p in parameters)
        # *args takes any number; without a named one there is nothing that tells how many are meant.
        positional = len(plain) + (1000 if has_args else 0)
        required = required if plain or not has_args else -1
        return cls(positional, required, tuple(named), takes_any)

    @property
    def takes_one(self) -> bool:
        """True if one positional argument is enough, and more are not required."""
        return self.required == 1 or (self.required == 0 and self.positional >= 1)

    def describe(self) -> str:
        """Return the number of arguments in words."""
        if self.required < 0:
            return "any number of arguments (*args)"
        plural = "s" * (self.required != 1)
        if self.positional > self.required:
            return f"{self.required} required argument{plural} (and optional ones)"
        return f"{self.required} argument{plural}"


def _check_count(num_columns: int, forward: _Forward, model: nn.Module) -> None:
    if not max(forward.required, 0) <= num_columns <= forward.positional:
        raise InvalidArgumentError(
            f"input_shapes makes {num_columns} arguments, one per feature column, but {type(model).__name__}.forward takes "
            f"{forward.describe()}. Give as many columns as arguments, or inputs= to join columns."
        )
