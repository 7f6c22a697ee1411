"""Bind every feature column to an argument of `forward`."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sparkhvd.data.columns.ragged import SparseRows
from sparkhvd.data.columns.schema import FLOATS, Column, DataSchema, checked_shape, row_shape_of
from sparkhvd.data.columns.texts import Arguments
from sparkhvd.errors import InvalidArgumentError, listed

Shape = Sequence[int]


def model_dtype(model: nn.Module) -> str:
    """Dtype of the model's first floating parameter, else torch's default, as "float32"."""
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
    """Bind feature columns to the arguments of `model.forward`, also before materialization.

    - `input_shapes` is a list: each column becomes a positional argument with that shape per row. A leading -1 stands
      for the batch, as in Horovod: [-1, 1, 28, 28] and [1, 28, 28] mean the same.
    - `inputs={"x": ["a", "b"], "ids": "c"}` binds by name. A list joins its columns to (B, sum of widths); a single
      name passes the column unchanged. `input_shapes` may then be a dict by argument name.
    - Neither is given: if `forward` takes one argument, all columns are joined in the given order into
      (B, sum of widths); if it requires as many arguments as there are columns, each column becomes an argument.

    An integer column stays int64 (a boolean column bool) as its own argument, and is cast when joined with floats.

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
            f"input_shapes is a dict ({quoted(input_shapes)}), which names arguments of forward; give inputs= too, or a "
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


# Names of arguments for labels in model libraries.
_LABELS = re.compile(r"label|^targets?$|^(start|end)_positions$|^future_values$")


def label_arguments(model: nn.Module, names: Iterable[str]) -> tuple[str, ...]:
    """Select the optional label arguments of `forward`, for a loss computed by the model."""
    forward = _Forward.of(model)
    return tuple(
        n
        for n in names
        if _LABELS.search(n)
        and (n in forward.optional or (forward.takes_any and n not in forward.names))
    )


def columns_in(inputs: Mapping[str, str | Sequence[str]]) -> list[str]:
    """List the columns in the Param `inputs`, each once."""
    groups = [[v] if isinstance(v, str) else v for v in inputs.values()]
    return list(dict.fromkeys(itertools.chain.from_iterable(groups)))


def each_column(schema: DataSchema) -> InputBinding:
    """Bind each feature column to its own positional argument, for any model."""
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
    """Bind one column unchanged."""
    return Argument(name, (column.name,), column.tensor_dtype, None, False, column.is_collated)


def _joined(name: str | None, columns: Sequence[Column], default: str) -> Argument:
    """Bind columns as one tensor (B, sum of widths). `default` is the model's dtype."""
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
        # Floats take the model's dtype, unless the user chose dtypes: then the widest of them.
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
    """Arguments accepted by `forward`.

    Attributes:
        positional: maximum of positional arguments.
        required: number of arguments without a default; -1 if `forward` takes only *args.
        names: arguments that can be passed by keyword.
        optional: arguments with the default None.
        takes_any: True if `forward` accepts keywords of any name.
    """

    positional: int
    required: int
    names: tuple[str, ...]
    optional: tuple[str, ...]
    takes_any: bool

    @classmethod
    def of(cls, model: nn.Module) -> _Forward:
        """Read the signature of a model's `forward`."""
        inner = _called(model)
        if isinstance(inner, torch.jit.ScriptModule):
            method: Any = inner.forward  # a compiled method has a schema instead of a signature
            arguments = method.schema.arguments[1:]
            required = sum(not a.has_default_value() for a in arguments)
            optional = tuple(
                a.name for a in arguments if a.has_default_value() and a.default_value is None
            )
            names = tuple(a.name for a in arguments)
            return cls(len(arguments), required, names, optional, False)
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
        # *args accepts any number of arguments; 1000 stands for no limit.
        positional = len(plain) + (1000 if has_args else 0)
        required = required if plain or not has_args else -1
        optional = tuple(p.name for p in parameters if p.name in named and p.default is None)
        return cls(positional, required, tuple(named), optional, takes_any)

    @property
    def takes_one(self) -> bool:
        """True if one positional argument is enough, and no more are required."""
        return self.required == 1 or (self.required == 0 and self.positional >= 1)

    def describe(self) -> str:
        """Number of arguments in words."""
        if self.required < 0:
            return "any number of arguments (*args)"
        plural = "s" * (self.required != 1)
        if self.positional > self.required:
            return f"{self.required} required argument{plural} (and optional ones)"
        return f"{self.required} argument{plural}"


def _called(model: nn.Module) -> nn.Module:
    """Unwrap modules such as DataParallel: wrappers with one child and forward(*args, **kwargs)."""
    kinds = inspect.Parameter
    while not isinstance(model, torch.jit.ScriptModule):
        taken = {p.kind for p in inspect.signature(model.forward).parameters.values()}
        children = list(model.children())
        if len(children) != 1 or taken != {kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD}:
            break
        model = children[0]
    return model


def _check_count(num_columns: int, forward: _Forward, model: nn.Module) -> None:
    if not max(forward.required, 0) <= num_columns <= forward.positional:
        raise InvalidArgumentError(
            f"input_shapes makes {num_columns} arguments, one per feature column, but {type(model).__name__}.forward takes "
            f"{forward.describe()}. Give as many columns as arguments, or inputs= to join columns."
        )


# ----------------------------------------------------------------------------------------------------
# Batches of feature columns as the arguments of `forward`.

Array = npt.NDArray[Any]


def quoted(names: Iterable[str]) -> str:
    """Quote names, separated by commas, for messages."""
    return listed(map(repr, names))


@dataclass(frozen=True)
class Argument:
    """Tensor argument of `forward` and its columns.

    Attributes:
        name: keyword, or None for a positional argument.
        columns: names of the columns, joined in this order.
        dtype: torch name of the tensor's dtype.
        shape: shape of one row (may hold one -1); None gives (B,) for a scalar column and (B, w) for other columns.
        is_joined: True if the columns become one (B, sum of widths) tensor.
        is_whole: True if the column is passed as the collate function returned it.
    """

    name: str | None
    columns: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...] | None
    is_joined: bool
    is_whole: bool = False

    def tensor(self, batch: Mapping[str, object]) -> Any:
        """Build the argument from a batch of columns (B, *shape).

        Sparse vectors become one sparse COO tensor (B, dimensions). The result of a collate function is unchanged,
        except that arrays become tensors and floats take the argument's dtype.
        """
        first = batch[self.columns[0]]
        if self.is_whole or isinstance(first, SparseRows):
            return self._whole(first)
        # From here on, every column is an array with one shape per row.
        arrays = cast("list[Array]", [batch[name] for name in self.columns])
        rows = len(arrays[0])
        dtype = getattr(torch, self.dtype)
        if len(arrays) == 1:
            tensor = from_numpy(arrays[0], dtype)
            if self.is_joined:
                tensor = tensor.reshape(rows, math.prod(arrays[0].shape[1:]))
        else:
            parts = [a.reshape(rows, math.prod(a.shape[1:])) for a in arrays]
            # numpy converts values while it copies them, but has no bfloat16.
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
        """Resolve a -1 of `shape`, and check the shape against the tensor's elements per row."""
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
        """Describe the argument in words, such as "x = 'a' + 'b' (float32)"."""
        name = self.name if self.name is not None else "argument"
        shape = "" if self.shape is None else f", rows of shape {list(self.shape)}"
        return f"{name} = {listed(map(repr, self.columns), ' + ')} ({self.dtype}{shape})"


def _as_tensors(value: object, dtype: torch.dtype) -> object:
    """Convert a collate function's arrays to tensors, and floats to a floating `dtype`."""
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
    """Make a COO tensor (B, dimensions), marked as coalesced because the indices ascend."""
    return torch.sparse_coo_tensor(
        torch.from_numpy(rows.coordinates()),
        torch.from_numpy(rows.values.gathered().copy()),
        (len(rows), rows.width),
        is_coalesced=True,
        check_invariants=False,
    )


def from_numpy(array: Array, dtype: torch.dtype) -> Tensor:
    """Convert an array to a tensor, without a copy if it is writable and has this dtype."""
    # A tensor cannot be read-only, but Arrow's buffers are.
    return torch.from_numpy(array if array.flags.writeable else array.copy()).to(dtype)


@dataclass(frozen=True)
class InputBinding:
    """Picklable binding of columns to the model's arguments."""

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
        """Set `cast_to` of integer features joined with floats in an argument."""
        casts: dict[str, str] = {}
        for argument in self.arguments:
            if argument.is_joined and argument.dtype in FLOATS:
                for name in argument.columns:
                    # FLOATS is ordered from narrow to wide.
                    casts[name] = min(argument.dtype, casts.get(name, "float64"), key=FLOATS.index)
        return tuple(
            c if c.is_floating or c.name not in casts else replace(c, cast_to=casts[c.name])
            for c in columns
        )

    def without(self, names: Collection[str]) -> InputBinding:
        """Drop the arguments of these names."""
        return InputBinding(tuple(a for a in self.arguments if a.name not in names))

    def describe(self) -> str:
        return listed((a.describe() for a in self.arguments), "; ")
