"""Convert label columns to tensors for the loss, to match the model's outputs."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - everyone's name

from sparkhvd.data.columns.binding import from_numpy, quoted
from sparkhvd.data.columns.schema import Column, DataSchema, checked_shape
from sparkhvd.errors import InvalidArgumentError, listed

# The user's function or module, or None if the user's `train_step` computes the loss.
Loss = Callable[..., object] | None

# Losses whose target is a class index: the label stays int64 and has no class axis.
_CLASS_INDEX_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)
_CLASS_INDEX_FUNCTIONS = ("cross_entropy", "nll_loss", "multi_margin_loss")
# Losses whose target is integer and has the shape of the output.
_INTEGER_LOSSES = (nn.MultiLabelMarginLoss,)
_INTEGERS = ("uint8", "int8", "int16", "int32", "int64", "bool")
_INTEGER_FUNCTIONS = ("multilabel_margin_loss",)
# Matches torch's errors about floats used as indices, from cross-entropy, gather, scatter, one_hot, embedding and
# `x[index]`.
_WANTS_INTEGERS = re.compile(
    r"[Ee]xpected (?:(?!but ).)*(?:\bLong\b|int64)|LongTensor|used as indices must be"
)


def _label(name: str, value: object, dtype: torch.dtype) -> Tensor:
    if isinstance(value, np.ndarray):
        return from_numpy(value, dtype)
    if not isinstance(value, Tensor):
        raise InvalidArgumentError(
            f"collate_fn[{name!r}] returned {type(value).__name__} for a label; it must return one array or tensor."
        )
    return value.to(dtype)


@dataclass(frozen=True)
class LabelBinding:
    """Picklable converter of label columns to tensors for the loss.

    Attributes:
        columns: names of the label columns. All other attributes have one entry per label column.
        dtypes: torch names of the tensors' dtypes.
        kinds: kind of the loss: "class_index", "elementwise" (any other loss of torch.nn) or "unknown".
        follows_output: whether the label is cast to the dtype of its output.
        shapes: shape of one row as the user gave it (may hold one -1); None for the column's own shape.
        extremes: smallest and largest class in the data; empty if unknown.
    """

    columns: tuple[str, ...]
    dtypes: tuple[str, ...]
    kinds: tuple[str, ...]
    follows_output: tuple[bool, ...]
    shapes: tuple[tuple[int, ...] | None, ...]
    extremes: tuple[tuple[int, ...], ...] = ()

    def apply(self, batch: Mapping[str, object]) -> tuple[Tensor, ...]:
        """Build a tensor (B, *shape) per label column.

        The default shape is (B,) for scalars, and (B, w) for arrays and vectors.
        """
        labels = [
            _label(name, batch[name], getattr(torch, dtype))
            for name, dtype in zip(self.columns, self.dtypes, strict=True)
        ]
        return tuple(
            label if shape is None else label.reshape(len(label), *shape)
            for label, shape in zip(labels, self.shapes, strict=True)
        )

    def match(self, outputs: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Convert labels to the shape and dtype required by the loss for these outputs.

        Runs at every step before the loss; it compares shapes and mostly returns a view of the label.

        Raises:
            InvalidArgumentError: outputs and labels differ in number, or a label does not match its output without
                broadcasting; both shapes are shown.
        """
        if len(outputs) != len(labels):
            raise InvalidArgumentError(
                f"The model returned {len(outputs)} output{'s' * (len(outputs) != 1)} and there are {len(labels)} label "
                f"columns ({quoted(self.columns)}). Return one tensor per label column, in the same order."
            )
        return tuple(
            self._match(i, o, t) for i, (o, t) in enumerate(zip(outputs, labels, strict=True))
        )

    def dtype_hint(self, error: Exception) -> str:
        """Suggest `label_dtypes` if a custom loss failed on its labels' dtype, or return ""."""
        own = [
            (name, dtype in _INTEGERS)
            for name, dtype, kind in zip(self.columns, self.dtypes, self.kinds, strict=True)
            if kind == "unknown"
        ]
        integers = listed(f"{name!r}: 'float32'" for name, is_integer in own if is_integer)
        floats = listed(f"{name!r}: 'int64'" for name, is_integer in own if not is_integer)
        if integers and re.search(r"dtype|scalar type|Long|Integral", str(error)):
            return f". Integer labels stay integers for your own loss; if it needs floats, give label_dtypes={{{integers}}}."
        if floats and _WANTS_INTEGERS.search(str(error)):
            return f". Floating labels stay floats for your own loss; if it needs class indices, give label_dtypes={{{floats}}}."
        return ""

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
        # A custom loss may accept outputs and labels of different shapes, as cross-entropy does.
        if self.kinds[i] == "unknown" and (
            self.shapes[i] is not None or not _broadcasts(output.shape[1:], label.shape[1:])
        ):
            return label
        raise self._mismatch(i, output.shape, label.shape)

    def _match_classes(self, i: int, output: Tensor, label: Tensor) -> Tensor:
        """Reshape class indices to the output's shape without axis 1, the class axis."""
        expected = (*output.shape[:1], *output.shape[2:])
        if output.dim() < 2 or math.prod(label.shape[1:]) != math.prod(expected[1:]):
            raise self._mismatch(i, output.shape, label.shape)
        if self.extremes:
            _check_classes(self.columns[i], self.extremes[i], output.shape[1])
        return label.reshape(expected)

    def _mismatch(
        self, i: int, output: tuple[int, ...], label: tuple[int, ...]
    ) -> InvalidArgumentError:
        expected = (
            "this loss takes scores (rows, classes, ...) and class indices (rows, ...)"
            if self.kinds[i] == "class_index"
            else "the loss would broadcast"
        )
        stated = f", or, if your loss accepts these shapes, give label_shapes={{{self.columns[i]!r}: {[*label[1:]]}}}"
        return InvalidArgumentError(
            f"Label {self.columns[i]!r} has shape {tuple(label)}, but the model's output has shape {tuple(output)}: {expected}. "
            "Change the last layer or the label so that they have the same number of elements per row"
            f"{stated if self.kinds[i] == 'unknown' else ''}."
        )


def _check_classes(name: str, extremes: tuple[int, ...], num_classes: int) -> None:
    """Raise InvalidArgumentError if a label in the data is not a class of the output."""
    if all(0 <= value < num_classes for value in extremes):
        return
    low, high = min(extremes), max(extremes)
    found = f"{low}" if low == high else f"from {low} to {high}"
    if low < 0:
        remedy = (
            "Number the classes from 0. Label rows that cross_entropy or nll_loss must ignore with its ignore_index, -100 by "
            "default."
        )
    elif low == 1 and high == num_classes:
        remedy = f'Classes are numbered from 0: df.withColumn("{name}", df["{name}"] - 1).'
    else:
        remedy = f"Give the last layer {high + 1} outputs, or number the classes from 0 without gaps, as a StringIndexer does."
    raise InvalidArgumentError(
        f"Label {name!r} is {found} in the data, and the model's output has {num_classes} "
        f"class{'es' * (num_classes != 1)} per row, so labels must be whole numbers from 0 to {num_classes - 1}. {remedy}"
    )


def _broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether two rows of these shapes (without the batch axis) would broadcast."""
    if len(a) != len(b):
        return False
    return all(x == y or 1 in (x, y) for x, y in zip(a, b, strict=True))


def bind_labels(
    schema: DataSchema,
    loss: Loss | Sequence[Loss],
    label_shapes: Sequence[Sequence[int]] | Mapping[str, Sequence[int]] | None = None,
    ranges: Mapping[str, tuple[int, int]] | None = None,
) -> LabelBinding:
    """Decide the dtype of every label from its column and its loss (one loss for all, or one per label).

    Integer labels stay int64 for losses on class indices (cross-entropy, NLL, multi-margin) and for callables outside
    torch; other losses of `torch.nn` get them in the output's dtype. `label_dtypes` (already in the schema) overrides
    this. `label_shapes` gives the shape of one row of each column, by order or by name; a leading -1 stands for the
    batch. `ranges` gives the smallest and largest integer by column: `match` raises if the output lacks such a class.

    Raises:
        InvalidArgumentError: the number of losses or shapes does not fit, a floating scalar label is used by a loss
            that needs class indices, or a shape has another number of elements than its column.
    """
    labels = schema.labels
    losses = list(loss) if isinstance(loss, Sequence) else [loss] * len(labels)
    if len(losses) != len(labels):
        raise InvalidArgumentError(
            f"There are {len(losses)} losses and {len(labels)} label columns ({quoted(c.name for c in labels)}). Give one "
            "loss for all, or one per label."
        )
    kinds = [_kind(each) for each in losses]
    dtypes, follows = [], []
    for column, kind, each in zip(labels, kinds, losses, strict=True):
        if kind == "class_index" and column.is_floating and column.kind == "scalar":
            raise InvalidArgumentError(
                f"label_cols names column {column.name!r} of type {column.source}, but {_loss_name(each)} needs class "
                f"indices. If it holds whole numbers, give label_dtypes={{{column.name!r}: 'int64'}}."
            )
        integer = kind in ("class_index", "integer")
        dtypes.append("int64" if integer and not column.is_floating else column.tensor_dtype)
        follows.append(kind == "elementwise" and not column.is_explicit)
    shown = ["elementwise" if k == "integer" else k for k in kinds]
    names = tuple(c.name for c in labels)
    shapes = _label_shapes(labels, label_shapes)
    extremes = tuple(
        _extremes(column, each, ranges or {}) if kind == "class_index" else ()
        for column, kind, each in zip(labels, kinds, losses, strict=True)
    )
    return LabelBinding(names, tuple(dtypes), tuple(shown), tuple(follows), shapes, extremes)


def _extremes(column: Column, loss: Loss, ranges: Mapping[str, tuple[int, int]]) -> tuple[int, ...]:
    """Find a label's smallest and largest class except `ignore_index`, or () if unknown."""
    # The user's subclass of a loss may number the classes in another way.
    is_torchs = not isinstance(loss, nn.Module) or type(loss).__module__.startswith("torch.nn")
    if not is_torchs or column.is_collated or column.name not in ranges:
        return ()
    default = -100 if _loss_name(loss) in ("cross_entropy", "nll_loss") else None
    ignored = getattr(loss, "ignore_index", default)
    return tuple(end for end in ranges[column.name] if end != ignored)


def _label_shapes(
    labels: Sequence[Column],
    label_shapes: Sequence[Sequence[int]] | Mapping[str, Sequence[int]] | None,
) -> tuple[tuple[int, ...] | None, ...]:
    if label_shapes is None:
        return (None,) * len(labels)
    names = [c.name for c in labels]
    if isinstance(label_shapes, Mapping):
        unknown = [name for name in label_shapes if name not in names]
        if unknown:
            raise InvalidArgumentError(
                f"label_shapes names {quoted(unknown)}, which label_cols does not. It has {quoted(names)}."
            )
        return tuple(
            checked_shape("label_shapes", label_shapes[c.name], c)
            if c.name in label_shapes
            else None
            for c in labels
        )
    if len(label_shapes) != len(labels):
        raise InvalidArgumentError(
            f"label_shapes has {len(label_shapes)} shapes and there are {len(labels)} label columns ({quoted(names)}). Give "
            "one per column, or a dict by column."
        )
    return tuple(
        checked_shape("label_shapes", shape, c)
        for shape, c in zip(label_shapes, labels, strict=True)
    )


def is_class_index(loss: object) -> bool:
    """Whether a loss takes class indices as labels, or, for cross-entropy, arrays of probabilities."""
    return _kind(loss) == "class_index"


def is_of_user(loss: object) -> bool:
    """Whether a loss is the user's own function or module. The kind of its labels is unknown."""
    return loss is not None and _kind(loss) == "unknown"


def is_of_row(column: Column) -> bool:
    """Whether a label describes the whole row, unlike class indices of parts such as pixels."""
    shape = column.row_shape
    return shape is not None and (column.is_floating or math.prod(shape) == 1)


def _kind(loss: object) -> str:
    name = getattr(loss, "__name__", "")
    module = getattr(loss, "__module__", "") or ""
    is_functional = module.startswith(("torch.nn.functional", "torch._C"))
    if isinstance(loss, _CLASS_INDEX_LOSSES) or (is_functional and name in _CLASS_INDEX_FUNCTIONS):
        return "class_index"
    if isinstance(loss, _INTEGER_LOSSES) or (is_functional and name in _INTEGER_FUNCTIONS):
        return "integer"
    is_torch_class = isinstance(loss, nn.Module) and type(loss).__module__.startswith("torch.nn")
    return "elementwise" if is_torch_class or is_functional else "unknown"


def _loss_name(loss: object) -> str:
    return str(getattr(loss, "__name__", type(loss).__name__))


# ----------------------------------------------------------------------------------------------------
# The loss decides the meaning of a model's outputs: classes, probabilities or values.

# Links: functions from outputs to probabilities. With PROBABILITY the outputs are probabilities, as in Keras models;
# with VALUE they are numbers to predict; with IDENTITY their meaning is unknown.
SOFTMAX, SIGMOID, PROBABILITY, VALUE, IDENTITY = (
    "softmax",
    "sigmoid",
    "probability",
    "value",
    "identity",
)
LINKS = (SOFTMAX, SIGMOID, PROBABILITY, VALUE, IDENTITY)
WITH_PROBABILITY = (SOFTMAX, SIGMOID, PROBABILITY)

# Links of torch's losses. NLL takes log-probabilities, and their softmax gives the probabilities.
_CLASSES = {
    SOFTMAX: (nn.CrossEntropyLoss, nn.NLLLoss),
    SIGMOID: (nn.BCEWithLogitsLoss,),
    VALUE: (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss),
}
_FUNCTIONS = {
    SOFTMAX: (F.cross_entropy, F.nll_loss),
    SIGMOID: (F.binary_cross_entropy_with_logits,),
    VALUE: (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss),
}


# Names of outputs that hold a language model's state for its next call; some have the rows in their second dimension.
# Source: `keys_to_ignore_at_inference` of Hugging Face's configurations.
_CACHES = frozenset({"past_key_values", "past_buckets_states", "mems", "cache_params"})


def outputs_of(result: object, *, skips_numbers: bool = True) -> tuple[Tensor, ...]:
    """Collect the outputs of a model in a tuple of tensors.

    Args:
        result: what `forward` returned: a tensor, or tuples, lists, dicts and dataclasses of tensors, also nested. Of
            named entries only tensors with rows are outputs; a loss or a cache is left out.
        skips_numbers: leave out single numbers in tuples, such as a second loss; otherwise they count as outputs.

    Raises:
        InvalidArgumentError: the result holds a value of another type, or no tensor.
    """
    outputs = tuple(_outputs(result, result))
    if skips_numbers and not isinstance(result, Tensor):
        outputs = tuple(output for output in outputs if output.dim())
    if not outputs:
        raise InvalidArgumentError(
            f"model.forward returned {type(result).__name__} without a tensor; it must return one tensor, or a tuple with one tensor per "
            "label column."
        )
    return outputs


def _outputs(value: object, result: object) -> Iterator[Tensor]:
    named: Iterable[object] | None = None
    if isinstance(value, Mapping):
        named = [each for name, each in value.items() if name not in _CACHES]
    elif is_dataclass(value) and not isinstance(value, type):
        named = [getattr(value, each.name) for each in fields(value) if each.name not in _CACHES]
    if isinstance(value, Tensor):
        yield value
    elif named is not None:
        for each in named:
            is_row_tensor = isinstance(each, Tensor) and each.dim() > 0
            if is_row_tensor or _is_nested(each):
                yield from _outputs(each, result)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from () if each is None else _outputs(each, result)
    else:
        raise InvalidArgumentError(
            f"model.forward returned {type(value).__name__}{'' if value is result else f' in a {type(result).__name__}'}; it must return one "
            "tensor, or a tuple with one tensor per label column."
        )


def _is_nested(value: object) -> bool:
    is_data = is_dataclass(value) and not isinstance(value, type)
    return is_data or isinstance(value, (Mapping, tuple, list))


def link_of(loss: object) -> str:
    """Find the link of a model trained with this loss. An unknown loss gives IDENTITY."""
    while isinstance(loss, functools.partial):
        loss = loss.func
    for link, classes in _CLASSES.items():
        if isinstance(loss, classes) or any(loss is each for each in _FUNCTIONS[link]):
            return link
    return IDENTITY


def known_kinds(link: str, width: int) -> tuple[str, ...]:
    """List the column kinds for a model's only output: "raw", "probability", "prediction"."""
    if (link == SOFTMAX and width > 1) or (link == SIGMOID and width == 1) or link == PROBABILITY:
        return ("raw", "probability", "prediction")
    return ("prediction",) if link == VALUE and width == 1 else ()


def num_classes(link: str, width: int) -> int:
    """Count the classes of `prediction`, or return 0 if it is a value."""
    return width if width > 1 else 2 * (link in (SIGMOID, PROBABILITY))


def flat_rows(output: Tensor) -> Tensor:
    """Reshape an output to (rows, elements)."""
    return output.reshape(output.shape[0], -1)


def widths_of(outputs: Sequence[Tensor]) -> tuple[int, ...]:
    """Elements per row of each output."""
    return tuple(flat_rows(output).shape[1] for output in outputs)


def prediction(link: str, output: Tensor) -> Tensor:
    """Predict the class of each row, or return the output itself if it is a value."""
    flat = flat_rows(output)
    if flat.shape[1] > 1:
        return flat.argmax(dim=1)
    value = flat[:, 0]
    if link == PROBABILITY:
        return value > 0.5
    return (value > 0) if link == SIGMOID else value  # sigmoid(x) > 0.5 exactly where x > 0


def probability(link: str, output: Tensor) -> Tensor | None:
    """Compute probabilities (rows, classes), of both classes for one logit, or return None if the link gives none."""
    flat = flat_rows(output)
    if link == SOFTMAX:
        return torch.softmax(flat, dim=1)
    if link == SIGMOID:
        return both_classes(torch.sigmoid(flat))
    return both_classes(flat) if link == PROBABILITY else None


def both_classes(positive: Tensor) -> Tensor:
    """Extend (rows, 1) probabilities of class 1 to both classes, and return more columns unchanged."""
    return torch.cat([1 - positive, positive], dim=1) if positive.shape[1] == 1 else positive


def most_likely(probability: Tensor, thresholds: Sequence[float]) -> Tensor:
    """Choose the class with the largest probability / threshold for each row, as in Spark ML.

    Raises:
        InvalidArgumentError: the number of thresholds differs from the number of classes.
    """
    num_classes = probability.shape[1]
    if len(thresholds) != num_classes:
        raise InvalidArgumentError(
            f"thresholds has {len(thresholds)} numbers, but the model has {num_classes} classes. Give one number per class."
        )
    ratio = probability.double() / probability.new_tensor(thresholds, dtype=torch.float64)
    # 0 / 0 is NaN: a class with probability 0 is not chosen even if its threshold is 0.
    return ratio.masked_fill(ratio.isnan(), -math.inf).argmax(dim=1)


def raw(link: str, output: Tensor) -> Tensor:
    """Reshape an output to (rows, elements), for Spark's evaluators.

    The evaluators rank rows of two classes by the second element alone. So one logit z becomes (-z, z), and two scores
    are reduced by their mean.
    """
    flat = flat_rows(output)
    if link == SIGMOID and flat.shape[1] == 1:
        return torch.cat([-flat, flat], dim=1)
    if link == PROBABILITY:
        return both_classes(flat)
    return flat - flat.mean(dim=1, keepdim=True) if link == SOFTMAX and flat.shape[1] == 2 else flat
