"""Metrics of an epoch.

Each rank adds up its rows, and the ranks combine their sums once per epoch.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, SupportsFloat, TypeAlias, TypedDict, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import sparkhvd.torch as hvd
from sparkhvd.data.columns.labels import SIGMOID, SOFTMAX, flat_rows
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.observe.report.page import OF_EPOCH

# ----------------------------------------------------------------------------------------------------
# Numbers that user code logs with `ctx.log`. Each rank adds up its numbers, and the ranks combine the sums once per
# epoch.

# Names that the loop itself writes into an epoch's record.
RESERVED = ("loss", *OF_EPOCH)


class Logs:
    """Sums of the numbers logged by user code on this rank in an epoch, weighted by rows."""

    def __init__(self) -> None:
        # By name: the sum of values times weights, and the sum of weights. A sum of tensors stays a tensor, because a
        # conversion would wait for the GPU.
        self._sums: dict[str, tuple[Tensor | float, float]] = {}

    def add(self, name: str, value: object, weight: float) -> None:
        """Add a value with a weight, in rows.

        Raises:
            InvalidArgumentError: the name is not a text or is reserved, or the value is not one number.
        """
        if not isinstance(name, str) or not name or name in RESERVED or name.startswith("val_"):
            raise InvalidArgumentError(
                f"ctx.log({name!r}, ...): the name is reserved or not a text. Give a text other than "
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
        """Restore the result of `sums`."""
        self._sums = dict(sums)

    def sums(self) -> dict[str, tuple[float, float]]:
        """Return, by name, this rank's sum of values times weights, and its sum of weights."""
        return {name: (float(total), weight) for name, (total, weight) in self._sums.items()}


def combined(by_rank: Sequence[dict[str, tuple[float, float]]], prefix: str) -> dict[str, float]:
    """Combine the ranks' (sum, weight) pairs to means by name. A name may be missing on some ranks."""
    result = {}
    for name in dict.fromkeys(name for sums in by_rank for name in sums):
        pairs = [sums[name] for sums in by_rank if name in sums]
        weight = sum(w for _, w in pairs)
        result[f"{prefix}{name}"] = sum(t for t, _ in pairs) / weight if weight else float("nan")
    return result


# ----------------------------------------------------------------------------------------------------
# Metrics of torchmetrics. Every rank updates its own states, and the ranks merge the states once per pass.
# Each state has its own reduction (sum, min, max, concatenation, or a function of the metric). Only the states of ranks
# that had rows are merged.

# Value of a torchmetrics state: a tensor, or a list with an entry per update.
_StateValue: TypeAlias = "Tensor | list[object]"


class MetricState(TypedDict):
    """States of a metric by name, and its number of updates."""

    count: int
    values: dict[str, _StateValue]


class TorchMetric(Protocol):
    """Parts of torchmetrics.Metric used by this module. torchmetrics need not be installed."""

    device: torch.device
    sync_on_compute: bool
    _reductions: Mapping[str, Callable[[_StateValue], _StateValue] | None]
    _defaults: Mapping[str, _StateValue]
    _computed: object
    _update_count: int

    def clone(self) -> TorchMetric: ...

    def to(self, device: torch.device) -> TorchMetric:
        """Move the states to a device."""

    def cpu(self) -> TorchMetric:
        """Move the states to the CPU."""

    def reset(self) -> None:
        """Empty the states."""

    def update(self, output: Tensor, label: Tensor) -> None:
        """Add a batch to the states."""

    def compute(self) -> object:
        """Compute the value from the states."""

    def modules(self) -> Iterator[nn.Module]:
        """Iterate over this metric and the metrics it wraps."""


def is_state_metric(value: object) -> TypeGuard[TorchMetric]:
    """Check for a torchmetrics.Metric, without importing torchmetrics."""
    library = sys.modules.get("torchmetrics")
    return library is not None and isinstance(value, library.Metric)


def is_metric_collection(value: object) -> TypeGuard[Mapping[str, object]]:
    """Check for a torchmetrics.MetricCollection."""
    library = sys.modules.get("torchmetrics")
    return library is not None and isinstance(value, library.MetricCollection)


@dataclass(frozen=True)
class StateMetric:
    """A torchmetrics metric of a fit. Its state accumulates over batches.

    Attributes:
        name: key of the metric in the history.
        metric: the torchmetrics object.
        label: index of the output and label that it compares.
    """

    name: str
    metric: TorchMetric
    label: int

    @property
    def kind(self) -> str:
        """Description of the metric by class, numbers and texts, the same in every process."""
        parts = []
        for part in _parts(self.metric):
            options = (
                f"{name}={value!r}"
                for name, value in sorted(vars(part).items())
                if isinstance(value, (bool, int, float, str))
                and name not in ("training", *part._defaults)
                and not name.startswith("_")
            )
            parts.append(f"{type(part).__qualname__}({', '.join(options)})")
        return " of ".join(parts)

    def fresh(self, device: torch.device | None = None) -> StateMetric:
        """Copy the metric with an empty state, on the device."""
        metric = self.metric.clone()
        if device is not None:
            metric.to(device)
        metric.reset()
        return StateMetric(self.name, metric, self.label)

    def update(self, output: Tensor, label: Tensor) -> None:
        """Add a batch to the state.

        Tensors (rows, 1) become (rows,), and classes become integers even if the loss takes floats.
        """
        output, label = column(output), column(label)
        if label.is_floating_point() and type(self.metric).__module__.startswith(
            "torchmetrics.classification"
        ):
            label = label.long()
        self.metric.update(output, label)

    def state_dict(self) -> list[MetricState]:
        return [_state(part) for part in _parts(self.metric)]

    def load_state_dict(self, state: list[MetricState]) -> None:
        """Restore the result of `state_dict`."""
        for part, saved in zip(_parts(self.metric), state, strict=True):
            part._update_count = saved["count"]
            for name, value in saved["values"].items():
                setattr(part, name, _copied(value, part.device))

    def combine(self) -> None:
        """Merge the states of all ranks, on the CPU. Every rank must call it."""
        self.metric.cpu()
        parts = _parts(self.metric)
        states_of_ranks = hvd.allgather_object(
            [_state(part) for part in parts], name=f"metric.{self.name}"
        )
        for part, states in zip(parts, zip(*states_of_ranks, strict=True), strict=True):
            _merge(part, [state for state in states if state["count"]])

    def values(self) -> dict[str, float]:
        """Compute the values by name.

        The names are `name`, or `name_0`, `name_1`, ... for several elements, or `name_<key>` for a dict. The value is
        NaN if no rank had rows.
        """
        if not any(part._update_count for part in _parts(self.metric)):
            return {self.name: float("nan")}
        return _flat(self.name, self.metric.compute())


def column(tensor: Tensor) -> Tensor:
    """Reshape (rows, 1) to (rows,), and leave other tensors unchanged."""
    return tensor[:, 0] if tensor.ndim == 2 and tensor.shape[1] == 1 else tensor


def _parts(metric: TorchMetric) -> list[TorchMetric]:
    """List the metric and its wrapped metrics, because a wrapper's state is in them."""
    return [part for part in metric.modules() if is_state_metric(part)]


def _state(metric: TorchMetric) -> MetricState:
    cpu = torch.device("cpu")
    values = {name: _copied(getattr(metric, name), cpu) for name in metric._reductions}
    return {"count": metric._update_count, "values": values}


def _copied(value: _StateValue, device: torch.device) -> _StateValue:
    """Copy a state, because later updates change tensors and lists in place."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    return [v.to(device) if isinstance(v, Tensor) else v for v in value]


def _merge(metric: TorchMetric, states: list[MetricState]) -> None:
    """Set a metric to the merged states of the ranks with rows."""
    metric._computed = None
    metric._update_count = sum(state["count"] for state in states)
    for name, reduction in metric._reductions.items():
        values = [state["values"][name] for state in states]
        if not values:
            continue  # no rank had rows, so keep the empty state
        if isinstance(values[0], list):
            merged: _StateValue = [item for value in values for item in value]
            if reduction is not None and merged:
                merged = reduction(merged)
        elif len(values) == 1:
            merged = values[0]
        else:
            merged = torch.stack([value for value in values if isinstance(value, Tensor)])
            if reduction is not None:
                merged = reduction(merged)
        setattr(metric, name, merged)


def _flat(name: str, value: object) -> dict[str, float]:
    if isinstance(value, dict):
        return {
            k: v for key, item in value.items() for k, v in _flat(f"{name}_{key}", item).items()
        }
    if isinstance(value, Tensor) and value.numel() > 1:
        return {f"{name}_{i}": v for i, v in enumerate(value.reshape(-1).tolist())}
    if isinstance(value, (Tensor, float, int)):
        return {name: float(value)}
    raise InvalidArgumentError(
        f"metric {name!r} returned {type(value).__name__}, but the history of a fit holds only numbers. Give a metric whose "
        "compute() returns a tensor or a dict of tensors."
    )


# ----------------------------------------------------------------------------------------------------
# Built-in metrics of classes: F1 and the area under the ROC curve (AUC), exact over all rows of an epoch.
# These metrics are not means over rows, so each rank keeps a state, and the ranks merge the states once per pass. F1
# keeps three counts per class. AUC keeps the score and the class of every row: 5 bytes (9 for a float64 model) on the
# rank of the row, and 17 more bytes while the ranks merge.

Array = npt.NDArray[Any]
# Scores and classes of rows.
Rows: TypeAlias = tuple[Tensor, Tensor]

# Number of batches that are joined into one tensor, because each tensor has a fixed cost.
_JOINED = 256
# Number of scores that each rank samples per class. From the samples the ranks choose the range of scores of each rank.
_SAMPLES = 256
# Number of scores looked up at once.
_BLOCK = 1 << 20
_SIDES: tuple[Literal["left", "right"], ...] = ("left", "right")


@dataclass
class F1:
    """F1 of the positive class, or the mean F1 over classes.

    For more than two classes, or several labels per row, it is the mean over the classes that occur. It is 0, with a
    warning, if no label and no prediction is positive.

    Attributes:
        name: key of the metric in the history.
        label: index of the output and label that it compares.
        link: relation of outputs and probabilities.
        counts: (3, classes) numbers of rows that are correctly predicted, predicted, labelled.
        num_batches: number of added batches.
    """

    name: str
    label: int
    link: str
    counts: Tensor | None = None
    num_batches: int = 0
    kind = "f1"

    def fresh(self, device: torch.device | None = None) -> F1:
        """Make the metric with an empty state.

        `device` is ignored, because the state follows the device of the batches.
        """
        del device
        return F1(self.name, self.label, self.link)

    def update(self, output: Tensor, label: Tensor) -> None:
        added = _counts(self.name, output, label, self.link)
        self.counts = added if self.counts is None else self.counts + added
        self.num_batches += 1

    def state_dict(self) -> list[MetricState]:
        """This rank's state, for a checkpoint."""
        values = {} if self.counts is None else {"counts": self.counts.cpu()}
        return [{"count": self.num_batches, "values": dict(values)}]

    def load_state_dict(self, state: list[MetricState]) -> None:
        """Restore the result of `state_dict`."""
        self.num_batches = state[0]["count"]
        counts = state[0]["values"].get("counts")
        self.counts = counts if isinstance(counts, Tensor) else None

    def combine(self) -> None:
        """Add up the counts of all ranks. Every rank must call this."""
        states = hvd.allgather_object(self.state_dict(), name=f"metric.{self.name}")
        counts = [s[0]["values"]["counts"] for s in states if s[0]["count"]]
        self.counts = sum(counts) if counts else None

    def values(self) -> dict[str, float]:
        """Compute the value by name, or NaN without rows."""
        if self.counts is None:
            return {self.name: math.nan}
        hits, predicted, labelled = self.counts.double()
        occurs = predicted + labelled > 0
        if not occurs.any():
            warnings.warn(
                f"metric {self.name!r} is 0, because no label and no prediction is positive.",
                stacklevel=2,
            )
            return {self.name: 0.0}
        return {self.name: float((2 * hits / (predicted + labelled))[occurs].mean())}


def classes_of(output: Tensor, label: Tensor, link: str) -> tuple[Tensor, Tensor] | None:
    """Find the predicted and labelled class of each row, or return None without class scores."""
    if output.ndim > 1 and output.shape[1] > 1 and label.ndim < output.ndim:
        return output.argmax(dim=1), label
    if link == SOFTMAX and output.ndim > 1 and output.shape == label.shape:
        # Probabilities of classes: one-hot, smoothed or from another model.
        return output.argmax(dim=1), label.argmax(dim=1)
    return None


def positives_of(output: Tensor, label: Tensor, link: str) -> tuple[Tensor, Tensor]:
    """Make masks of the predicted and the labelled positives, in the shape of the output."""
    return output > (0.0 if link == SIGMOID else 0.5), label.reshape(output.shape) > 0.5


def _counts(name: str, output: Tensor, label: Tensor, link: str) -> Tensor:
    """Count the correctly predicted, predicted and labelled rows of each class.

    Of two classes only the second is counted. Does not wait for a GPU.
    """
    classes = classes_of(output, label, link)
    if classes is None:
        _check(name, output.numel() == label.numel(), output, label)
        predicted, actual = (flat_rows(part) for part in positives_of(output, label, link))
        parts = (predicted & actual, predicted, actual)
        return torch.stack([part.sum(dim=0) for part in parts])
    predicted, actual = (part.reshape(-1).long() for part in classes)
    width = output.shape[1]
    _check(name, len(predicted) == len(actual), output, label)
    is_counted = (actual >= 0) & (actual < width)
    counts = torch.zeros(3, width, dtype=torch.int64, device=output.device)
    for count, classes_of_rows, rows in zip(
        counts,
        (predicted, predicted, actual.clamp(0, width - 1)),
        (is_counted & (predicted == actual), is_counted, is_counted),
        strict=True,
    ):
        count.index_add_(0, classes_of_rows, rows.long())
    return counts[:, 1:] if width == 2 else counts


def _check(name: str, fits: bool, output: Tensor, label: Tensor) -> None:
    if not fits:
        raise InvalidArgumentError(
            f"metric {name!r} compares an output of shape {tuple(output.shape)} with a label of shape {tuple(label.shape)}. Give one "
            "score per class, or one number per label."
        )


@dataclass
class Auc:
    """Area under the ROC curve of two classes.

    Pairs of equal scores count one half. The value is NaN if one class does not occur.

    Attributes:
        name: key of the metric in the history.
        label: index of the output and label that it compares.
        link: relation of outputs and probabilities.
        pieces: scores and classes of this rank's rows; a piece has several batches.
        batches: batches that are not in a piece yet.
        sums: after `combine` the numbers of correctly ranked pairs of rows, positive rows and negative rows of all
            ranks.
    """

    name: str
    label: int
    link: str
    pieces: list[Rows] = field(default_factory=list)
    batches: list[Rows] = field(default_factory=list)
    sums: Tensor | None = None
    kind = "auc"

    def fresh(self, device: torch.device | None = None) -> Auc:
        """Make the metric with an empty state.

        `device` is ignored, because the state follows the device of the batches.
        """
        del device
        return Auc(self.name, self.label, self.link)

    def update(self, output: Tensor, label: Tensor) -> None:
        self.batches.append(_scores(self.name, output, label, self.link))
        if len(self.batches) == _JOINED:
            self.pieces.append(_joined(self.batches))
            self.batches = []

    def state_dict(self) -> list[MetricState]:
        """This rank's state, for a checkpoint."""
        scores, classes = self._rows()
        return [{"count": len(scores), "values": {"scores": scores, "classes": classes}}]

    def load_state_dict(self, state: list[MetricState]) -> None:
        """Restore the result of `state_dict`."""
        scores, classes = (state[0]["values"][name] for name in ("scores", "classes"))
        assert isinstance(scores, Tensor)
        assert isinstance(classes, Tensor)
        self.pieces, self.batches = [(scores, classes)], []

    def combine(self) -> None:
        """Sort the rows of all ranks by score and count correctly ranked pairs. Every rank must call this.

        Each rank receives the scores of all ranks in a range. The ranges have similar numbers of rows, unless most
        scores are equal.
        """
        parts = self._by_class()
        self.pieces, self.batches = [], []
        name = f"metric.{self.name}"
        samples = [
            part[np.linspace(0, len(part) - 1, min(len(part), _SAMPLES)).astype(int)]
            for part in parts
        ]
        facts = hvd.allgather_object(samples, name=f"{name}.samples")
        known = np.sort(np.concatenate(list(itertools.chain.from_iterable(facts))))
        if not len(known) or np.isnan(known[-1]):  # a sample has the last score, and NaN comes last
            self.sums = torch.full((3,), math.nan, dtype=torch.float64)
            return
        limits = known[np.arange(1, hvd.size()) * len(known) // hvd.size()]
        mine = []
        for part, kind in zip(parts, ("positive", "negative"), strict=True):
            ends = [0, *np.searchsorted(part, limits).tolist(), len(part)]
            sent = torch.from_numpy(part.astype(known.dtype, copy=False))
            splits = [end - start for start, end in itertools.pairwise(ends)]
            received, _ = hvd.alltoall(sent, splits, name=f"{name}.{kind}")
            mine.append(np.sort(received.numpy()))
        sums = hvd.allgather(_ranked(*mine)[None], name=f"{name}.sums")
        self.sums = sums.sum(dim=0)
        # Every positive row in a rank's range is above the negative rows in the ranges of all earlier ranks.
        self.sums[0] += (sums[:, 1] * (sums[:, 2].cumsum(0) - sums[:, 2])).sum()

    def values(self) -> dict[str, float]:
        """Compute the value by name, or NaN without rows of both classes."""
        sums = _ranked(*self._by_class()) if self.sums is None else self.sums
        rightly, positive, negative = sums.tolist()
        pairs = positive * negative
        return {self.name: rightly / pairs if pairs else math.nan}

    def _by_class(self) -> tuple[Array, Array]:
        """Split this rank's scores into positive and negative rows, each in ascending order."""
        scores, classes = self._rows()
        positive, negative = (scores[classes == number].numpy() for number in (1, 0))
        positive.sort()
        negative.sort()
        return positive, negative

    def _rows(self) -> Rows:
        """Collect the scores and classes of this rank's rows on the CPU."""
        rows = [*self.pieces, *self.batches]
        if not rows:
            return torch.empty(0), torch.empty(0, dtype=torch.int8)
        scores, classes = _joined(rows)
        return scores.cpu(), classes.cpu()


def _joined(rows: list[Rows]) -> Rows:
    scores, classes = zip(*rows, strict=True)
    return torch.cat(scores), torch.cat(classes)


def _scores(name: str, output: Tensor, label: Tensor, link: str) -> Rows:
    """Compute a score and a class for each row.

    The class is 1 or 0, or negative for an ignored row.
    """
    classes = classes_of(output, label, link)
    if classes is not None and output.ndim == 2 and output.shape[1] == 2:
        actual = classes[1].reshape(-1)
        is_counted = (actual == 0) | (actual == 1)
        return output[:, 1] - output[:, 0], actual.where(is_counted, -1).to(torch.int8)
    if output.numel() != len(output) or output.numel() != label.numel():
        raise InvalidArgumentError(
            f"metric {name!r} is for two classes, but gets an output of shape {tuple(output.shape)} and a label of shape "
            f"{tuple(label.shape)}. Give one or two scores per row; for more classes use torchmetrics."
        )
    return output.reshape(-1), (label.reshape(-1) > 0.5).to(torch.int8)


def _ranked(positive: Array, negative: Array) -> Tensor:
    """Count correctly ranked pairs of a positive and a negative row, and the rows of each class.

    `positive` and `negative` are the scores, ascending.
    """
    twice = 0
    for start in range(0, len(positive), _BLOCK):
        block = positive[start : start + _BLOCK]
        # A pair of equal scores counts one half.
        twice += sum(int(np.searchsorted(negative, block, side).sum()) for side in _SIDES)
    has_nan = any(np.isnan(part[-1:]).any() for part in (positive, negative))
    rightly = math.nan if has_nan else twice / 2
    return torch.tensor([rightly, len(positive), len(negative)], dtype=torch.float64)


ClassMetric: TypeAlias = F1 | Auc
CLASS_METRICS: Mapping[str, type[ClassMetric]] = {"f1": F1, "auc": Auc}


# Begin of torch's warning about a loss of (rows, 1) and (rows,), which would only learn the mean of the labels.
_BROADCAST = "Using a target size"
_unwatched = contextlib.nullcontext()


# ----------------------------------------------------------------------------------------------------
# Metrics of a run, and their sums over a pass over the data.


@dataclass(frozen=True)
class Forward:
    """Outputs and loss of a batch on this rank.

    Attributes:
        outputs: outputs of the model, one per label.
        labels: the labels that the loss receives.
        loss: mean over the rows.
        weight: denominator of the mean: the number of rows, the sum of sample weights, or a number returned by the loss.
        is_weighted: True if other ranks cannot compute the weight beforehand.
        num_rows: number of rows on this rank.
        parts: mean and weight of each label, if the weights may differ; otherwise empty.
    """

    outputs: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    loss: Tensor
    weight: float
    is_weighted: bool
    num_rows: int
    parts: tuple[tuple[Tensor, float], ...] = ()

    @functools.cached_property
    def loss_sum(self) -> Tensor:
        """The loss times its weight, in float64 without a gradient."""
        return self.loss.detach().double() * self.weight


@dataclass(frozen=True)
class Metric:
    """Metric computed as a mean over the rows of an epoch.

    Attributes:
        name: key of the metric in the history.
        function: (output, label) -> mean over the rows of a batch, or one value per row; or a name in `BUILT_IN`.
        label: index of the output and label that it compares.
        link: relation of outputs and probabilities, for a built-in metric.
    """

    name: str
    function: Callable[..., object] | str
    label: int
    link: str

    @property
    def kind(self) -> str:
        """Name of the function, the same in every process."""
        if isinstance(self.function, str):
            return self.function
        return str(getattr(self.function, "__qualname__", type(self.function).__qualname__))

    def row_sum(self, output: Tensor, label: Tensor) -> Tensor:
        """Sum the metric over the rows of a batch, in float64."""
        if isinstance(self.function, str):
            result: object = BUILT_IN[self.function](output, label, self.link)
        else:
            result = self.function(output, label)
        value = torch.as_tensor(result).detach().double()
        num_rows = len(output)
        if value.ndim == 0:
            return value * num_rows
        if len(value) != num_rows:
            raise InvalidArgumentError(
                f"metric {self.name!r} returned the shape {tuple(value.shape)} for {num_rows} rows. Return the mean "
                "over the rows, or one value per row."
            )
        return value.sum() * num_rows / value.numel()


@contextlib.contextmanager
def no_broadcast(name: str, labels: str = "") -> Iterator[None]:
    """Turn torch's warning about a label broadcast over the output into an error.

    Args:
        name: name of the function in the block, for the message.
        labels: in words, the shape in which the function receives labels of one number per row; "" for the shape for
            losses.

    Raises:
        InvalidArgumentError: torch warned in the block.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=_BROADCAST)
        try:
            yield
        except UserWarning as e:
            if not str(e).startswith(_BROADCAST):
                raise
            labels = labels or "(rows, 1), like an output of that width"
            raise InvalidArgumentError(
                f"{name} broadcasts: {' '.join(str(e).split())} It gets labels of one number per row as {labels}. Give output and label the same shape, for example with output.reshape(label.shape)."
            ) from e


AnyMetric: TypeAlias = Metric | StateMetric | ClassMetric


def _accuracy(output: Tensor, label: Tensor, link: str) -> Tensor:
    # With several labels per row each label counts separately.
    predicted, actual = classes_of(output, label, link) or positives_of(output, label, link)
    return (predicted == actual).double()


def _mse(output: Tensor, label: Tensor, link: str) -> Tensor:
    del link
    return _difference("mse", output, label).square()


def _mae(output: Tensor, label: Tensor, link: str) -> Tensor:
    del link
    return _difference("mae", output, label).abs()


def _difference(name: str, output: Tensor, label: Tensor) -> Tensor:
    if output.numel() != label.numel():
        raise InvalidArgumentError(
            f"metric {name!r} compares an output of shape {tuple(output.shape)} with a label of shape "
            f"{tuple(label.shape)}. Give a metric that fits this label, for example 'accuracy' for classes."
        )
    return output.double() - label.double().reshape(output.shape)


# Functions that return one or several values per row, because a sum of values is exact and a mean times the rows is
# not.
BUILT_IN: Mapping[str, Callable[[Tensor, Tensor, str], Tensor]] = {
    "accuracy": _accuracy,
    "mse": _mse,
    "mae": _mae,
}


def resolve_metrics(
    metrics: object, label_cols: Sequence[str], links: Sequence[str]
) -> tuple[AnyMetric, ...]:
    """Make the metrics of a fit from names, functions, groups of them, or a dict by name.

    Torchmetrics are recognized by their class. With several labels each metric is computed for every label, and its
    name begins with the label's name. A nested list is a group as in Horovod: one function per label (None for a label
    without a metric), or one function for all labels. Equal names are numbered.

    Raises:
        InvalidArgumentError: an entry is neither a function nor a known name, a group has neither one function nor one
            per label, or a name is reserved for the history's own numbers.
    """
    result: list[AnyMetric] = []
    for name, function, index in _assigned(metrics, len(label_cols)):
        full = name if len(label_cols) == 1 else f"{label_cols[index]}_{name}"
        if full in RESERVED:
            raise InvalidArgumentError(
                f"metrics: the name {full!r} is reserved. Give a dict from other names to functions."
            )
        made = _metric(full, function, index, links[index])
        result.append(replace(made, name=_numbered(full, [m.name for m in result])))
    return tuple(result)


def _metric(name: str, function: object, label: int, link: str) -> AnyMetric:
    if isinstance(function, str) and function in CLASS_METRICS:
        return CLASS_METRICS[function](name, label, link)
    if is_state_metric(function):
        return StateMetric(name, function, label)
    if isinstance(function, str) and function not in BUILT_IN:
        raise InvalidArgumentError(
            f"metrics has the name {function!r}, which is not a built-in metric. Give one of {', '.join([*BUILT_IN, *CLASS_METRICS])}, "
            "or a function of (output, label)."
        )
    if not isinstance(function, str) and not callable(function):
        raise InvalidArgumentError(
            f"metrics holds {function!r}. Every entry must be a name or a function of (output, label)."
        )
    return Metric(name, function, label, link)


def _numbered(name: str, taken: Sequence[str]) -> str:
    """Add a number to the name if it is taken: "f1", "f1_2", "f1_3"."""
    numbers = itertools.count(2)
    free = name
    while free in taken:
        free = f"{name}_{next(numbers)}"
    return free


def _assigned(metrics: object, num_labels: int) -> Iterator[tuple[str, object, int]]:
    """Yield name, function and label of each metric."""
    for name, entry in _entries(metrics):
        if not isinstance(entry, (list, tuple)):
            yield from ((name, entry, index) for index in range(num_labels))
            continue
        group = list(entry) * (num_labels if len(entry) == 1 else 1)
        if num_labels > 1 and len(group) != num_labels:
            raise InvalidArgumentError(
                f"metrics has a group of {len(group)} functions, but there are {num_labels} labels. A list inside the list must have one "
                "function per label (None for a label without a metric), or one function for all labels."
            )
        for index, member in enumerate(group):
            members = [] if member is None else _entries(member)
            label = index if num_labels > 1 else 0
            yield from ((name or own, function, label) for own, function in members)


def _entries(metrics: object) -> list[tuple[str, object]]:
    """List functions and groups with their names. A group outside a dict has the name ""."""
    if isinstance(metrics, Mapping) or is_metric_collection(metrics):
        return [(str(name), entry) for name, entry in metrics.items()]
    entries = metrics if isinstance(metrics, (list, tuple)) else [metrics]
    return [
        pair
        for entry in entries
        for pair in (_entries(entry) if is_metric_collection(entry) else [(_name(entry), entry)])
    ]


def _name(entry: object) -> str:
    if isinstance(entry, (list, tuple)):
        return ""
    return entry if isinstance(entry, str) else getattr(entry, "__name__", type(entry).__name__)


def try_metrics(
    metrics: Sequence[AnyMetric], outputs: Sequence[Tensor], labels: Sequence[Tensor]
) -> None:
    """Try the metrics on some rows, on the driver.

    Raises:
        InvalidArgumentError: a metric does not fit the shapes.
    """
    for metric in metrics:
        output, label = outputs[metric.label], labels[metric.label]
        if isinstance(metric, Metric):
            if isinstance(metric.function, str):
                metric.row_sum(output, label)
        elif not isinstance(metric, StateMetric):
            metric.fresh().update(output, label)


class TotalsState(TypedDict):
    """State of `Totals` in a checkpoint."""

    values: Tensor
    parts: Tensor
    metrics: list[list[MetricState]]
    logs: dict[str, tuple[float, float]]


class Totals:
    """Sums of a pass over the data on this rank: loss, weight of the loss, rows and metrics."""

    def __init__(
        self,
        metrics: Sequence[AnyMetric],
        logs: Logs | None = None,
        num_parts: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """Start at zero.

        Args:
            metrics: metrics besides the loss.
            logs: numbers logged by user code in this pass, or None.
            num_parts: number of labels with separate loss weights; 0 if the labels share a weight.
            device: device of the batches, where the sums are kept to avoid waiting for it; None means the CPU.
        """
        self._logs = logs
        self._is_first = True
        self._logged: list[dict[str, tuple[float, float]]] = []
        self._means = [m for m in metrics if isinstance(m, Metric)]
        self._states = [m.fresh(device) for m in metrics if not isinstance(m, Metric)]
        self._names = [m.name for m in metrics]
        # Sums of loss * weight, weight, and rows, then of the metrics; in float64, for precise sums of millions of
        # rows.
        self.values = torch.zeros(3 + len(self._means), dtype=torch.float64, device=device)
        # Views, because `values[i] += x` takes two more operations per batch.
        self._sums = self.values.unbind()
        # Sums of loss * weight, and of weight, for each label.
        self.parts = torch.zeros(num_parts, 2, dtype=torch.float64, device=device)

    @property
    def adds_up(self) -> bool:
        """Whether the ranks' totals can be added up, because no metric has a state of its own."""
        return not self._states

    @property
    def weight(self) -> float:
        """Denominator of the mean loss: the rows, the sum of sample weights, or the sum of weights from the loss."""
        return float(self.values[1])

    @property
    def num_rows(self) -> int:
        """Rows so far."""
        return int(self.values[2])

    def state_dict(self) -> TotalsState:
        """Copy the sums of this rank so far, for a checkpoint."""
        return {
            "values": self.values.to("cpu", copy=True),
            "parts": self.parts.to("cpu", copy=True),
            "metrics": [s.state_dict() for s in self._states],
            "logs": self._logs.sums() if self._logs is not None else {},
        }

    def load_state_dict(self, state: TotalsState) -> None:
        """Restore the result of `state_dict`."""
        self.values.copy_(state["values"])
        self.parts.copy_(state["parts"])
        for metric, saved in zip(self._states, state["metrics"], strict=True):
            metric.load_state_dict(saved)
        if self._logs is not None:
            self._logs.load(state["logs"])

    def add(self, batch: Forward) -> None:
        """Add a batch to the sums."""
        if batch.weight:  # skip a mean over no rows, which may be NaN
            self._sums[0].add_(batch.loss_sum)
            self._sums[1].add_(batch.weight)
        for part, (value, weight) in zip(self.parts, batch.parts, strict=True):
            if weight:
                part += torch.stack([value.double() * weight, part.new_tensor(weight)])
        self._sums[2].add_(batch.num_rows)
        for total, metric in zip(self._sums[3:], self._means, strict=True):
            output = batch.outputs[metric.label].detach()
            with self._watched(metric.name):
                total.add_(metric.row_sum(output, batch.labels[metric.label]))
        for state in self._states:
            with self._watched(state.name, "(rows,)"):
                state.update(batch.outputs[state.label].detach(), batch.labels[state.label])
        self._is_first = False

    def _watched(self, name: str, labels: str = "") -> AbstractContextManager[None]:
        return no_broadcast(f"metric {name!r}", labels) if self._is_first else _unwatched

    def combine(self) -> None:
        """Sum the totals of all ranks, on the CPU. Every rank must call this once, after the last batch."""
        self.values, self.parts = self.values.cpu(), self.parts.cpu()
        hvd.allreduce_(self.values, name="totals", op=hvd.Sum)
        if len(self.parts):
            hvd.allreduce_(self.parts, name="totals.parts", op=hvd.Sum)
        for state in self._states:
            state.combine()
        if self._logs is not None:
            self._logged = hvd.allgather_object(self._logs.sums(), name="totals.logs")

    def means(self, prefix: str = "") -> dict[str, float]:
        """Compute the mean loss and the metrics by name, or NaN without rows."""
        means = self._own_means()
        values = {metric.name: {metric.name: means[metric.name]} for metric in self._means}
        values |= {state.name: state.values() for state in self._states}
        result = {f"{prefix}loss": means["loss"]}
        for name in self._names:
            result |= {f"{prefix}{key}": value for key, value in values[name].items()}
        return result | combined(self._logged, prefix)

    def means_so_far(self) -> dict[str, float]:
        """Compute this rank's means so far, before `combine`, or NaN without rows.

        They are the mean loss, the logged numbers and the metrics.
        """
        logged = [self._logs.sums()] if self._logs is not None else []
        return self._own_means() | combined(logged, "")

    def _own_means(self) -> dict[str, float]:
        """Compute the mean loss and the mean metrics (`Metric`) by name."""
        total, weight, num_rows, *sums = self.values.tolist()
        loss = total / weight if weight else float("nan")
        if self.parts.any():
            loss = sum(part / of for part, of in self.parts.tolist() if of)
        result = {"loss": loss}
        for metric, value in zip(self._means, sums, strict=True):
            result[metric.name] = value / num_rows if num_rows else float("nan")
        return result
