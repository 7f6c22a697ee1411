"""Check that losses and metrics compare each row's output with the label of that row.

`((output.squeeze() - label) ** 2).mean()` with labels (rows, 1) broadcasts to (rows, rows), so the model learns the
mean of the labels. Such a function returns the same number when the labels of a batch are permuted. A correct function
does not.

A weight or mask that broadcasts, as in `weights[label][:, None] * cross_entropy(output, label, reduction="none")`, does
not show in this test. It is found by watching torch's operations: an operation on (rows,) and (rows, 1) makes all pairs
of rows, and the result changes if both operands get the shape (rows,).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.training.loss_functions import ClassMean
from sparkhvd.training.metrics import AnyMetric, Metric, StateMetric, column, no_broadcast
from sparkhvd.training.modules.copies import copy_function, deepcopy
from sparkhvd.training.modules.lookups import is_lookup
from sparkhvd.training.references import named_globals
from sparkhvd.training.types import Loss

# Outputs with more elements are not tried.
_MOST_ELEMENTS = 1 << 23
# Numbers of rows that are unlikely as lengths of other axes (12 would be likely, as a number of quantiles).
_FEW_ROWS, _MANY_ROWS = 5, 17
_NUM_PERMUTATIONS = 3
_HALF = (torch.float16, torch.bfloat16)
# Types of globals that are not copied, because a loss cannot change them or they hold a session or data.
_UNCHANGING = (types.ModuleType, type, types.BuiltinFunctionType, np.ndarray)
_LARGE = {"pyspark", "py4j", "pandas", "pyarrow"}
# A function with less state is copied for each call, to undo changes of the state.
_SMALL_BYTES = 1 << 20

Function = Callable[[Tensor, Tensor], object]
# Function that makes outputs or labels with the shape and dtype of an example.
Draw = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class _Tried:
    """A loss or metric to try on made-up rows.

    Attributes:
        name: name for messages.
        function: the user's function.
        output: an output with the shape, dtype and device of the model's outputs.
        label: a label that the function would receive.
        is_metric: True for a metric, which may be correct although it does not pair rows.
        labels: in words, the shape in which the function receives labels of one number per row; "" for the shape for
            losses.
    """

    name: str
    function: Function
    output: Tensor
    label: Tensor
    is_metric: bool = False
    labels: str = ""


def unpaired(
    losses: Sequence[Loss],
    metrics: Sequence[AnyMetric],
    outputs: Sequence[Tensor],
    labels: Sequence[Tensor],
) -> str:
    """Try losses and metrics on made-up rows, and describe functions that do not pair rows.

    The result is "" if all functions pair rows. The functions are copied and random numbers restored, so nothing
    changes. A function that raises is skipped; the training reports its error.

    Args:
        losses: one per label.
        metrics: functions and the user's subclasses of torchmetrics are checked.
        outputs: of a few rows, one per label; only their shapes, dtypes and devices matter.
        labels: as the losses receive them.

    Raises:
        InvalidArgumentError: torch warns that a loss or metric broadcasts.
    """
    tried = [
        _Tried("loss", loss, outputs[i], labels[i])
        for i, loss in enumerate(losses)
        if not _is_torchs(loss)
    ]
    tried += (
        _of_metric(m, outputs[m.label].detach(), labels[m.label]) for m in metrics if _is_users(m)
    )
    found = [text for each in tried if (text := _problem(each))]
    if not found:
        return ""
    return (
        " ".join(found) + " If a function is meant to compare whole batches, set pairs_rows=False."
    )


def check_ends(
    losses: Sequence[Loss],
    outputs: Sequence[Tensor],
    labels: Sequence[Tensor],
    names: Sequence[str],
    ranges: Mapping[str, tuple[int, int]],
) -> None:
    """Call copies of the user's losses with the smallest and the largest label of the data.

    Args:
        losses: one per label.
        outputs: of a few rows, one per label.
        labels: as the losses receive them.
        names: of the label columns.
        ranges: smallest and largest value of columns of integers.

    Raises:
        InvalidArgumentError: a loss accepts the label 0, but raises torch's error of an index out of range for one of
            these.
    """
    for loss, output, label, name in zip(losses, outputs, labels, names, strict=True):
        if _is_torchs(loss) or name not in ranges or label.is_floating_point():
            continue
        output, label = output.detach().cpu(), label.cpu()
        with _randomness_kept(), torch.no_grad(), contextlib.suppress(_LeftAlone):
            call = _caller(loss)
            if _raised(call, output, torch.zeros_like(label)) is not None:
                continue
            for end, size in zip(ranges[name], ("smallest", "largest"), strict=True):
                error = _raised(call, output, torch.full_like(label, end))
                if error is not None and is_lookup(error):
                    raise InvalidArgumentError(
                        f"loss raised {type(error).__name__} for {name!r} = {end}, the {size} label in the data: "
                        f"{str(error).splitlines()[0].rstrip('.')}. The output has shape {tuple(output.shape[1:])} per row. Number the "
                        "classes from 0 without gaps, and give the last layer as many outputs as there are classes."
                    ) from error


def takes_only_integers(loss: Loss, num_outputs: int, dtype: torch.dtype) -> bool:
    """Check whether a loss needs class indices as labels: it raises for floats and accepts int64.

    Two rows of zeros are tried on a copy of the loss. The result is False if the loss raises for both types or cannot
    be copied.

    Args:
        loss: loss of one label.
        num_outputs: number of elements of the model's output per row.
        dtype: dtype of the output and of floating labels.
    """
    output = torch.zeros(2, num_outputs, dtype=torch.float32 if dtype in _HALF else dtype)
    # The shape that `LabelBinding.match` gives labels.
    label = output.new_zeros(2, 1) if num_outputs == 1 else output.new_zeros(2)
    with _randomness_kept(), torch.no_grad(), contextlib.suppress(_LeftAlone):
        call = _caller(loss)
        return (
            _raised(call, output, label) is not None and _raised(call, output, label.long()) is None
        )
    return False


def _raised(call: Function, output: Tensor, label: Tensor) -> Exception | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call(output.clone(), label.clone())
    except _LeftAlone:
        raise
    except Exception as error:  # noqa: BLE001 - the user's own code
        return error
    return None


def _is_users(metric: AnyMetric) -> bool:
    if isinstance(metric, StateMetric):
        return not type(metric.metric).__module__.startswith("torchmetrics.")
    return isinstance(metric, Metric) and not isinstance(metric.function, str)


def _of_metric(metric: AnyMetric, output: Tensor, label: Tensor) -> _Tried:
    name = f"metric {metric.name!r}"
    if not isinstance(metric, StateMetric):
        assert isinstance(metric, Metric)
        assert not isinstance(metric.function, str)
        return _Tried(name, metric.function, output, label, is_metric=True)

    def compute(output: Tensor, label: Tensor) -> object:
        own = metric.metric  # a copy, because this function was copied with its closure
        own.to(output.device)
        own.sync_on_compute = False
        own.reset()
        own.update(output, label)
        return own.compute()

    return _Tried(name, compute, column(output), column(label), is_metric=True, labels="(rows,)")


def _problem(tried: _Tried) -> str:
    """Describe how a function fails to pair rows, or return ""."""
    # Try on the CPU, because on a GPU a made-up label out of range would make CUDA unusable.
    tried = replace(tried, output=tried.output.cpu(), label=tried.label.cpu())
    num_rows = _num_rows(tried.output, tried.label)
    if num_rows == 0:
        return ""
    with _randomness_kept(), torch.no_grad(), contextlib.suppress(_LeftAlone):
        call = _caller(tried.function)
        if not _pairs(call, tried, num_rows):
            return _text(tried.name, tried.output, tried.label)
        if operation := _crossing(call, tried, num_rows):
            return (
                f"{tried.name} compares all pairs of rows in the operation {operation!r}: one operand has the shape (rows,) and another "
                "(rows, 1), so the result has the shape (rows, rows). Give both the same shape, for example with squeeze(1)."
            )
    return ""


def _text(name: str, output: Tensor, label: Tensor) -> str:
    shapes = [str(("rows", *t.shape[1:])).replace("'", "") for t in (output, label)]
    line = "output = output.reshape(label.shape)"
    if output.shape == label.shape and label.ndim == 2 and label.shape[1] == 1:
        line = "output, label = output.squeeze(1), label.squeeze(1)"
    return (
        f"{name} returns the same number when the labels of a batch are permuted, so it does not compare each row's output with the label "
        f"of that row. It gets the output as {shapes[0]} and the label as {shapes[1]}. If it changes the shape of only one of them, they "
        f"broadcast to all pairs of rows. Begin the function with `{line}`."
    )


def _is_torchs(loss: object) -> bool:
    """Check whether a loss is torch's own.

    torch's losses need no check, because the loop gives them matching shapes.
    """
    while isinstance(loss, (functools.partial, ClassMean)):
        loss = loss.func if isinstance(loss, functools.partial) else loss.loss
    kind = loss if isinstance(loss, types.FunctionType) else type(loss)
    return (getattr(kind, "__module__", None) or "").startswith("torch.nn.")


def _pairs(call: Function, tried: _Tried, num_rows: int) -> bool:
    """Check whether a function pairs rows.

    The result is False if the function depends on the labels, but never on their assignment to rows.
    """
    depends = False
    for made, examples, draw, generator in _made_up(tried, num_rows):
        given, other = (draw(examples, generator) for _ in range(2))
        orders = [torch.randperm(num_rows, generator=generator) for _ in range(_NUM_PERMUTATIONS)]
        value = _value(call, made, given, tried)
        if value is None:
            continue
        # Compute lazily, because a loss may be a large network and mostly the first permutation is enough.
        permuted = (_value(call, made, given[order], tried) for order in orders)
        if not all(_is_close(value, each, made.dtype) for each in permuted):
            return True
        # A mean error (output - label).mean() has the same value for all shapes, so broadcasting does not matter.
        changed = _value(call, made, _other_axes(given) if tried.is_metric else other, tried)
        # A sum of errors does not pair rows either. Broadcasting multiplies it by the number of rows.
        is_sum = tried.is_metric and _is_close(num_rows * value, changed, made.dtype)
        depends |= not (is_sum or _is_close(value, changed, made.dtype))
    return not depends


def _crossing(call: Function, tried: _Tried, num_rows: int) -> str:
    """Find an operation that makes all pairs of rows and changes the result, or return ""."""
    for made, examples, draw, generator in _made_up(tried, num_rows):
        given = draw(examples, generator)
        watched = _Watched(num_rows, made, given, mends=False)
        with watched:
            value = _value(call, made, given, tried)
        if value is None:
            continue
        if not watched.crossing:
            return ""
        with _Watched(num_rows, made, given, mends=True):
            mended = _value(call, made, given, tried)
        if not _is_close(value, mended, made.dtype):
            return watched.crossing
    return ""


class _Watched(TorchDispatchMode):
    """Watches torch's operations inside a function of outputs and labels.

    Attributes:
        crossing: the name of the first operation on rows as (rows,) and (rows, 1), or "".
    """

    def __init__(self, num_rows: int, output: Tensor, label: Tensor, *, mends: bool) -> None:
        """Start watching.

        `mends` reshapes both operands of a crossing operation to the smaller shape.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_rows = num_rows
        self._mends = mends
        # From which of output and label each tensor was computed; holds the tensors weakly.
        self._sources: Any = WeakTensorKeyDictionary()
        self._sources[output] = frozenset({"output"})
        self._sources[label] = frozenset({"label"})
        self.crossing: str = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the operation, and record its name if it is the first to cross rows."""
        given = [*_tensors_in(args), *_tensors_in((kwargs or {}).values())]
        if torch.Tag.pointwise in func.tags and self._crosses(given):
            self.crossing = self.crossing or str(func.overloadpacket.__name__)
            if self._mends:
                args = [_narrow(each, given) if isinstance(each, Tensor) else each for each in args]
        result = func(*args, **(kwargs or {}))
        sources = frozenset[str]().union(*map(self._sources_of, given))
        for each in _tensors_in([result]):
            self._sources[each] = sources | self._sources_of(each)
        return result

    def _sources_of(self, tensor: Tensor) -> frozenset[str]:
        found: frozenset[str] = self._sources.get(tensor, frozenset())
        return found

    def _crosses(self, given: Sequence[Tensor]) -> bool:
        """Whether operands with different axes make pairs of a row's output and another row's label."""
        if any(self._num_row_axes(each.shape) > 1 for each in given):
            return False
        for a, b in itertools.combinations(given, 2):
            of_a, of_b = self._sources_of(a), self._sources_of(b)
            if not (of_a and of_b) or (of_a == of_b and len(of_a) == 1) or _is_shared(a, b):
                continue
            if (
                a.ndim != b.ndim
                and self._num_row_axes(torch.broadcast_shapes(a.shape, b.shape)) > 1
            ):
                return True
        return False

    def _num_row_axes(self, shape: torch.Size) -> int:
        return shape.count(self._num_rows)


def _tensors_in(values: Iterable[object]) -> Iterator[Tensor]:
    for each in values:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _tensors_in(each)


def _is_shared(a: Tensor, b: Tensor) -> bool:
    """Check whether two tensors are views of the same tensor. Pairs of its rows are intended."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _narrow(tensor: Tensor, beside: Sequence[Tensor]) -> Tensor:
    """Remove axes of size 1 after the rows, down to the other tensors' number of axes."""
    least = min(each.ndim for each in beside if each.ndim)
    while tensor.ndim > least and tensor.shape[1] == 1:
        tensor = tensor.squeeze(1)
    return tensor


def _caller(function: Function) -> Function:
    """Copy a function. With a small state, each call of the copy starts from the initial state."""
    made, num_bytes = _copied(function)
    if num_bytes > _SMALL_BYTES:
        return made
    return lambda output, label: _copied(function)[0](output, label)


class _LeftAlone(Exception):
    """Raised if a function cannot be copied and so is not tried."""


def _copied(function: Function) -> tuple[Function, int]:
    """Copy a function with everything it refers to and could change, and return the copy and the bytes of its tensors.

    Raises:
        _LeftAlone: it cannot be copied.
    """
    memo: dict[int, Any] = {}
    try:
        if isinstance(function, types.FunctionType):
            made: Function = _copied_function(function, function.__module__, memo)
        else:
            made = deepcopy(function, memo)
            if isinstance(made, nn.Module):
                made.cpu()
    except Exception as e:
        raise _LeftAlone from e
    return made, sum(each.nbytes for each in memo.values() if isinstance(each, Tensor))


def _copied_function(
    function: types.FunctionType, home: str, memo: dict[int, Any]
) -> types.FunctionType:
    """Copy a function with its closure, named globals, and called functions of its module."""
    if id(function) in memo:
        found: types.FunctionType = memo[id(function)]
        return found
    made = copy_function(function, memo, function.__globals__)
    made.__dict__.update(deepcopy(vars(function), memo))
    for name, value in named_globals(function).items():
        if isinstance(value, types.FunctionType):
            if value.__module__ == home:
                made.__globals__[name] = _copied_function(value, home, memo)
        elif (
            not isinstance(value, _UNCHANGING)
            and type(value).__module__.partition(".")[0] not in _LARGE
        ):
            made.__globals__[name] = deepcopy(value, memo)
    return made


def _value(call: Function, output: Tensor, label: Tensor, tried: _Tried) -> float | None:
    """Call a function and return its number, or the mean of its numbers, or return None if it raises or returns no numbers.

    Raises:
        InvalidArgumentError: torch warns that it broadcasts.
    """
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with no_broadcast(tried.name, tried.labels):
                result = call(output, label)
        result = result[0] if isinstance(result, tuple) else result
        value = float(torch.as_tensor(result).detach().double().mean())
    except InvalidArgumentError as e:
        if isinstance(e.__cause__, UserWarning):
            raise
        return None
    except Exception:  # noqa: BLE001 - made-up numbers may not suit it
        return None
    return value if math.isfinite(value) else None


def _is_close(a: float, b: float | None, dtype: torch.dtype) -> bool:
    if b is None:
        return True
    return abs(a - b) <= 100 * torch.finfo(dtype).eps * max(abs(a), abs(b))


@contextlib.contextmanager
def _randomness_kept() -> Iterator[None]:
    """Restore the generators of torch, numpy and random afterwards."""
    of_numpy, of_python = np.random.get_state(), random.getstate()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        np.random.set_state(of_numpy)
        random.setstate(of_python)


# --- made-up rows -----------------------------------------------------------------------------------------------


def _num_rows(output: Tensor, label: Tensor) -> int:
    """Choose a row count different from all other axes, or return 0 if rows cannot be made up."""
    if not output.is_floating_point() or not (len(output) and len(label)):
        return 0
    elements = max(math.prod(t.shape[1:]) for t in (output, label))
    if elements > _MOST_ELEMENTS:
        return 0
    rows = _MANY_ROWS if elements * _MANY_ROWS <= 1 << 16 else _FEW_ROWS
    while rows in {*output.shape[1:], *label.shape[1:]}:
        rows += 1
    return rows


def _other_axes(label: Tensor) -> Tensor:
    return label.squeeze(1) if label.ndim == 2 and label.shape[1] == 1 else label.unsqueeze(1)


def _made_up(
    tried: _Tried, num_rows: int
) -> Iterator[tuple[Tensor, Tensor, Draw, torch.Generator]]:
    """Yield outputs, an example of labels, a way to draw labels and its generator, for each trial."""
    # Training computes losses of 16-bit outputs in float32.
    output, label = (t.float() if t.dtype in _HALF else t for t in (tried.output, tried.label))
    examples = [t.detach()[:1].expand(num_rows, *t.shape[1:]) for t in (output, label)]
    for number, (draw_output, draw_label) in enumerate(_draws(output, label)):
        generator = torch.Generator().manual_seed(number)
        yield draw_output(examples[0], generator), examples[1], draw_label, generator


def _draws(output: Tensor, label: Tensor) -> Iterator[tuple[Draw, Draw]]:
    """Yield several ways to make up rows, because functions may expect logits, probabilities or other values."""
    if label.is_floating_point():
        yield from (
            (_normal, _normal),
            (_uniform, _uniform),
            (_normal, _uniform),
            (_wide, _wide),
            (_normal, functools.partial(_whole, 2)),
            (_wide, functools.partial(_whole, 2)),
        )
        return
    # The class axis is the second, as for cross-entropy.
    is_classes = output.ndim > 1 and label.shape[1:] != output.shape[1:]
    classes = functools.partial(_whole, max(2, output.shape[1]) if is_classes else 2)
    yield from ((_normal, classes), (_uniform, classes), (_wide, classes))
    yield _wide, functools.partial(_whole, 20)


def _rows_differ(
    example: Tensor, generator: torch.Generator, draw: Callable[..., Tensor]
) -> Tensor:
    """Draw numbers with larger differences between rows than within rows."""
    per_row = (len(example), *[1] * (example.ndim - 1))
    drawn = (
        draw(per_row, generator=generator) + draw(tuple(example.shape), generator=generator)
    ) / 2
    # Round the numbers, so that their sums are exact in any order.
    return ((drawn * 64).round() / 64).to(example)


def _normal(example: Tensor, generator: torch.Generator) -> Tensor:
    return _rows_differ(example, generator, torch.randn)


def _uniform(example: Tensor, generator: torch.Generator) -> Tensor:
    return _rows_differ(example, generator, torch.rand)


def _wide(example: Tensor, generator: torch.Generator) -> Tensor:
    return 10 * _normal(example, generator)


def _whole(bound: int, example: Tensor, generator: torch.Generator) -> Tensor:
    return (
        (_uniform(example.new_empty(example.shape, dtype=torch.float64), generator) * bound)
        .floor()
        .to(example)
    )
