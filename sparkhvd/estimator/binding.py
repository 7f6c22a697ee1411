"""From columns to the arguments of `forward`, and from label columns to what the loss compares."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.schema import Column, DataSchema

__all__ = [
    "Argument",
    "InputBinding",
    "LabelBinding",
    "bind_inputs",
    "bind_labels",
    "check_output_shapes",
    "is_class_index",
    "model_dtype",
]

# Losses whose target is a class index: it stays int64 and has no class axis.
_CLASS_INDEX_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)
_CLASS_INDEX_FUNCTIONS = ("cross_entropy", "nll_loss", "multi_margin_loss")
# Losses whose target is integer and has the shape of the output.
_INTEGER_LOSSES = (nn.MultiLabelMarginLoss,)
_INTEGER_FUNCTIONS = ("multilabel_margin_loss",)


# -- inputs ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Argument:
    """One tensor argument of `forward`.

    Attributes:
        name: keyword, or None for a positional argument.
        columns: names of the columns, joined in this order.
        dtype: torch name of the tensor's dtype.
        shape: shape of one row (may hold one -1); None leaves (B,) for a scalar column, (B, w) for the others.
        is_joined: the columns become one (B, sum of widths) tensor.
    """

    name: str | None
    columns: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...] | None
    is_joined: bool

    def tensor(self, batch: Mapping[str, npt.NDArray[Any]]) -> Tensor:
        """The argument for a batch of columns (B, *shape)."""
        arrays = [batch[name] for name in self.columns]
        rows = len(arrays[0])
        dtype = getattr(torch, self.dtype)
        if len(arrays) == 1:
            tensor = _from_numpy(arrays[0], dtype)
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

    def _row_shape(self, tensor: Tensor) -> tuple[int, ...]:
        """The shape of a row with a -1 filled in, checked against what the columns hold."""
        assert self.shape is not None
        elements = math.prod(tensor.shape[1:])
        known = math.prod(d for d in self.shape if d != -1)
        if -1 in self.shape and known and elements % known == 0:
            return tuple(elements // known if d == -1 else d for d in self.shape)
        if known != elements or -1 in self.shape:
            raise InvalidArgumentError(
                f"input_shapes: {_quoted(self.columns)} cannot become {list(self.shape)} per row: the data have "
                f"{elements} elements per row, the shape asks for {known}. Give a shape of {elements} elements, for "
                f"example [-1, {elements}]."
            )
        return self.shape

    def describe(self) -> str:
        """In words: "x = 'a' + 'b' (float32)"."""
        name = self.name if self.name is not None else "argument"
        shape = "" if self.shape is None else f", rows of shape {list(self.shape)}"
        return f"{name} = {' + '.join(map(repr, self.columns))} ({self.dtype}{shape})"


def _from_numpy(array: npt.NDArray[Any], dtype: torch.dtype) -> Tensor:
    """A tensor of the array's values, sharing its memory where that may be written."""
    # A tensor cannot be read-only, and buffers that came from Arrow are.
    return torch.from_numpy(array if array.flags.writeable else array.copy()).to(dtype)


@dataclass(frozen=True)
class InputBinding:
    """Which columns become which argument of the model; picklable."""

    arguments: tuple[Argument, ...]

    def apply(
        self, batch: Mapping[str, npt.NDArray[Any]]
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """The positional and keyword arguments of `forward` for a batch of columns (B, *shape).

        A tensor may share memory with the batch.
        """
        args = tuple(a.tensor(batch) for a in self.arguments if a.name is None)
        kwargs = {a.name: a.tensor(batch) for a in self.arguments if a.name is not None}
        return args, kwargs

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

    Integers stay int64 (booleans bool) in an argument of their own and are cast when joined with floats.

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
                f"({_quoted(c.name for c in columns)}). Give one shape per column."
            )
        _check_count(len(columns), positional, required, model)
        return InputBinding(
            tuple(
                Argument(None, (c.name,), c.tensor_dtype, _shape(s, c), False)
                for c, s in zip(columns, input_shapes, strict=True)
            )
        )
    if required == 1 or (required == 0 and positional >= 1) or len(columns) == 1 == positional:
        return InputBinding((_joined(None, columns, default),))
    if required == len(columns):
        return InputBinding(
            tuple(Argument(None, (c.name,), c.tensor_dtype, None, False) for c in columns)
        )
    raise InvalidArgumentError(
        f"{type(model).__name__}.forward takes {_count(required, positional)} and there are {len(columns)} feature "
        f"columns ({_quoted(c.name for c in columns)}), so it is not clear which goes where. Say it with "
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
                f"inputs names the argument {name!r}, which forward does not take. Its arguments are: {_quoted(names)}."
            )
        members = [given] if isinstance(given, str) else list(given)
        for member in members:
            if member not in by_name:
                raise InvalidArgumentError(
                    f"inputs[{name!r}] names column {member!r}, which is not among feature_cols: {_quoted(by_name)}."
                )
            unused.pop(member, None)
        if not members:
            raise InvalidArgumentError(f"inputs[{name!r}] is empty. Name at least one column.")
        chosen = [by_name[m] for m in members]
        if isinstance(given, str):
            argument = Argument(name, (given,), chosen[0].tensor_dtype, None, False)
        else:
            argument = _joined(name, chosen, default)
        shape = (shapes or {}).get(name)
        if shape is not None:
            argument = Argument(
                name, argument.columns, argument.dtype, _strip_batch(shape), argument.is_joined
            )
        arguments.append(argument)
    if unused:
        raise InvalidArgumentError(
            f"feature_cols has {_quoted(unused)}, which inputs does not use. Add them to an argument, or leave them out."
        )
    unknown = set(shapes or {}) - set(inputs)
    if unknown:
        raise InvalidArgumentError(
            f"input_shapes names {_quoted(sorted(unknown))}, which inputs does not. Use the names of inputs: "
            f"{_quoted(inputs)}."
        )
    return InputBinding(tuple(arguments))


def _joined(name: str | None, columns: Sequence[Column], default: str) -> Argument:
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


def _shape(given: Sequence[int], column: Column) -> tuple[int, ...]:
    shape = _strip_batch(given)
    known = math.prod(d for d in shape if d != -1)
    if column.shape is not None:
        elements = math.prod(column.shape)
        fits = elements == known if -1 not in shape else known > 0 and elements % known == 0
        if not fits:
            raise InvalidArgumentError(
                f"input_shapes gives {list(given)} for column {column.name!r}, which has {elements} "
                f"element{'s' * (elements != 1)} per row. Give a shape of {elements} elements, for example "
                f"[-1, {elements}]."
            )
    return shape


def _strip_batch(given: Any) -> tuple[int, ...]:
    """The shape of one row: a leading -1 is the batch."""
    shape = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else None
    if shape is None or not all(isinstance(d, int) and (d == -1 or d > 0) for d in shape):
        raise InvalidArgumentError(
            f"input_shapes holds {given!r}. A shape is a list of positive numbers, with -1 for the batch: "
            "[-1, 1, 28, 28]."
        )
    shape = shape[1:] if shape and shape[0] == -1 else shape
    if shape.count(-1) > 1:
        raise InvalidArgumentError(
            f"input_shapes holds {list(given)}. After the batch, at most one -1 can be filled in."
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


def _quoted(names: Any) -> str:
    return ", ".join(repr(n) for n in names)


# -- labels ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabelBinding:
    """How label columns become tensors and meet the outputs of the model; picklable.

    Attributes:
        columns: names of the label columns.
        dtypes: torch names of the dtypes of their tensors.
        kinds: of the loss of each: "class_index", "elementwise" (any other of torch.nn) or "unknown".
        follows_output: whether the label is cast to the dtype of its output.
    """

    columns: tuple[str, ...]
    dtypes: tuple[str, ...]
    kinds: tuple[str, ...]
    follows_output: tuple[bool, ...]

    def apply(self, batch: Mapping[str, npt.NDArray[Any]]) -> tuple[Tensor, ...]:
        """One tensor per label column: (B,) for scalars, (B, w) for arrays and vectors."""
        return tuple(
            _from_numpy(batch[name], getattr(torch, dtype))
            for name, dtype in zip(self.columns, self.dtypes, strict=True)
        )

    def match(self, outputs: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The labels with the shape and dtype that the loss needs for these outputs.

        Call it at every step, before the loss: it is a check of shapes and, mostly, a view.

        Raises:
            InvalidArgumentError: outputs and labels differ in number, or a label cannot meet its output without
                broadcasting; both shapes are shown.
        """
        if len(outputs) != len(labels):
            raise InvalidArgumentError(
                f"The model returned {len(outputs)} output{'s' * (len(outputs) != 1)} and there are {len(labels)} label "
                f"columns ({_quoted(self.columns)}). Return one tensor per label column, in the same order."
            )
        return tuple(
            self._match(i, o, t) for i, (o, t) in enumerate(zip(outputs, labels, strict=True))
        )

    def _match(self, i: int, output: Tensor, label: Tensor) -> Tensor:
        if output.dim() == 0 or output.shape[0] != label.shape[0]:
            raise InvalidArgumentError(
                f"The output for label {self.columns[i]!r} has shape {tuple(output.shape)} for a batch of "
                f"{label.shape[0]} rows. forward must return one row per row of the batch."
            )
        if self.kinds[i] == "class_index" and not label.is_floating_point():
            return self._match_classes(i, output, label)
        if self.follows_output[i]:
            label = label.to(output.dtype)
        if output.shape == label.shape:
            return label
        if math.prod(output.shape[1:]) == math.prod(label.shape[1:]):
            return label.reshape(output.shape)
        if self.kinds[i] == "unknown" and not _broadcasts(output.shape[1:], label.shape[1:]):
            return (
                label  # a loss of the user's own may compare unlike shapes, as cross-entropy does
            )
        raise self._unlike(i, output.shape, label.shape)

    def _match_classes(self, i: int, output: Tensor, label: Tensor) -> Tensor:
        """A class index has the output's shape without the class axis, which is the second."""
        expected = (*output.shape[:1], *output.shape[2:])
        if output.dim() < 2 or math.prod(label.shape[1:]) != math.prod(expected[1:]):
            raise self._unlike(i, output.shape, label.shape)
        return label.reshape(expected)

    def _unlike(
        self, i: int, output: tuple[int, ...], label: tuple[int, ...]
    ) -> InvalidArgumentError:
        expected = (
            "this loss takes scores (rows, classes, ...) and class indices (rows, ...)"
            if self.kinds[i] == "class_index"
            else "the loss would broadcast one over the other"
        )
        return InvalidArgumentError(
            f"Label {self.columns[i]!r} has shape {tuple(label)} and the model's output {tuple(output)}: {expected}. "
            "Change the last layer or the label so that they have the same number of elements per row."
        )


def _broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether rows of these shapes would broadcast; the batch axis only ever meets itself."""
    if len(a) != len(b):
        return False
    return all(x == y or 1 in (x, y) for x, y in zip(a, b, strict=True))


def bind_labels(
    schema: DataSchema, loss: Callable[..., Any] | Sequence[Callable[..., Any]]
) -> LabelBinding:
    """Decide the dtype of every label from its column and its loss (one loss for all, or one per label).

    Integer labels stay int64 for losses on class indices (cross-entropy, NLL, multi-margin) and for callables that
    are not from torch; the other losses of `torch.nn` get them in the output's dtype. `label_dtypes` (already in
    the schema) overrides.

    Raises:
        InvalidArgumentError: the number of losses does not fit, or a floating scalar label goes to a loss that needs
            class indices.
    """
    labels = schema.labels
    losses = list(loss) if isinstance(loss, Sequence) else [loss] * len(labels)
    if len(losses) != len(labels):
        raise InvalidArgumentError(
            f"There are {len(losses)} losses and {len(labels)} label columns ({_quoted(c.name for c in labels)}). Give one "
            "loss for all, or one per label."
        )
    kinds = [_kind(one) for one in losses]
    dtypes, follows = [], []
    for column, kind, one in zip(labels, kinds, losses, strict=True):
        if kind == "class_index" and column.is_floating and column.kind == "scalar":
            raise InvalidArgumentError(
                f"label_cols names column {column.name!r} of type {column.source}, but {_loss_name(one)} needs class "
                f"indices. If it holds whole numbers, give label_dtypes={{{column.name!r}: 'int64'}}."
            )
        integer = kind in ("class_index", "integer")
        dtypes.append("int64" if integer and not column.is_floating else column.tensor_dtype)
        follows.append(kind == "elementwise" and not column.is_explicit)
    shown = ["elementwise" if k == "integer" else k for k in kinds]
    names = tuple(c.name for c in labels)
    return LabelBinding(names, tuple(dtypes), tuple(shown), tuple(follows))


def is_class_index(loss: Callable[..., Any]) -> bool:
    """Whether a loss takes class indices (or, for cross-entropy, arrays of probabilities) as labels."""
    return _kind(loss) == "class_index"


def _kind(loss: Callable[..., Any]) -> str:
    name = getattr(loss, "__name__", "")
    module = getattr(loss, "__module__", "") or ""
    is_functional = module.startswith(("torch.nn.functional", "torch._C"))
    if isinstance(loss, _CLASS_INDEX_LOSSES) or (is_functional and name in _CLASS_INDEX_FUNCTIONS):
        return "class_index"
    if isinstance(loss, _INTEGER_LOSSES) or (is_functional and name in _INTEGER_FUNCTIONS):
        return "integer"
    is_torch_class = isinstance(loss, nn.Module) and type(loss).__module__.startswith("torch.nn")
    return "elementwise" if is_torch_class or is_functional else "unknown"


def _loss_name(loss: Callable[..., Any]) -> str:
    return getattr(loss, "__name__", type(loss).__name__)


def check_output_shapes(
    binding: LabelBinding, outputs: Sequence[Tensor], labels: Sequence[Tensor]
) -> None:
    """Raise InvalidArgumentError if the outputs of the first batch cannot meet the labels."""
    binding.match(outputs, labels)
