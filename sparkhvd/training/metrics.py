"""Metrics of an epoch: summed over rows on each rank, and over ranks once per epoch."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TypeAlias, TypedDict

import torch
from torch import Tensor

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.training.class_metrics import CLASS_METRICS, ClassMetric, classes_of, positives_of
from sparkhvd.training.metric_states import (
    MetricState,
    StateMetric,
    is_metric_collection,
    is_state_metric,
)
from sparkhvd.training.user_code.logs import RESERVED, Logs, combined

__all__ = [
    "BUILT_IN",
    "AnyMetric",
    "Forward",
    "Metric",
    "StateMetric",
    "Totals",
    "TotalsState",
    "no_broadcast",
    "resolve_metrics",
    "try_metrics",
]


# Torch only warns of (rows, 1) against (rows,), which learns the mean of the labels.
_BROADCAST = "Using a target size"
_unwatched = contextlib.nullcontext()


@dataclass(frozen=True)
class Forward:
    """Outputs and loss of a rank's rows of a step.

    Attributes:
        outputs: of the model, one per label.
        labels: as the loss gets them.
        loss: a mean over the rows.
        weight: denominator of the mean: the number of rows, the sum of sample weights, or a number that the loss gives.
        is_weighted: True if only this rank knows the weight.
        num_rows: of this rank.
        parts: each label's mean and weight, where weights may differ; else empty.
    """

    outputs: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    loss: Tensor
    weight: float
    is_weighted: bool
    num_rows: int
    parts: tuple[tuple[Tensor, float], ...] = ()


@dataclass(frozen=True)
class Metric:
    """A number per row, averaged over an epoch.

    Attributes:
        name: its key in the history.
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
        """The function's name; equal in every process."""
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
                f"metric {self.name!r} returned shape {tuple(value.shape)} for {num_rows} rows. Return the mean "
                "over the rows, or one value per row."
            )
        return value.sum() * num_rows / value.numel()


@contextlib.contextmanager
def no_broadcast(name: str, labels: str = "") -> Iterator[None]:
    """Turn torch's warning of a label that broadcasts over the output into an error; others stay warnings.

    Args:
        name: of the function, in the message.
        labels: shape in which it gets labels of one number per row, in words; "": as of losses.

    Raises:
        InvalidArgumentError: a function that is called inside, `name` in the message, has made torch warn.
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
                f"{name} broadcasts: {' '.join(str(e).split())} It gets labels of one number per row as {labels}. Give both the same shape, for example output.reshape(label.shape)."
            ) from e


AnyMetric: TypeAlias = Metric | StateMetric | ClassMetric


def _accuracy(output: Tensor, label: Tensor, link: str) -> Tensor:
    # Several labels per row count one by one.
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


# Each returns one value or several per row: sums of them stay exact, a mean times the rows would be rounded.
BUILT_IN: Mapping[str, Callable[[Tensor, Tensor, str], Tensor]] = {
    "accuracy": _accuracy,
    "mse": _mse,
    "mae": _mae,
}


def resolve_metrics(
    metrics: object, label_cols: Sequence[str], links: Sequence[str]
) -> tuple[AnyMetric, ...]:
    """Make the metrics of a fit from names, functions, groups of them, or a dict by name.

    Metrics of torchmetrics are recognized by their class. With several labels each metric is computed for every label,
    and its name begins with the label's. A list inside the list is a group as in Horovod: one function per label, None for a label without
    one, or one function for all. Equal names are numbered.

    Raises:
        InvalidArgumentError: an entry is neither a function nor a known name, a group has neither one function nor one per label, or a
            name is one of the history's own.
    """
    result: list[AnyMetric] = []
    for name, function, index in _assigned(metrics, len(label_cols)):
        full = name if len(label_cols) == 1 else f"{label_cols[index]}_{name}"
        if full in RESERVED:
            raise InvalidArgumentError(
                f"metrics: the name {full!r} is taken. Give a dict from other names to functions."
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
            f"metrics names {function!r}, which is not built in. Give one of {', '.join([*BUILT_IN, *CLASS_METRICS])}, or a "
            "function of (output, label)."
        )
    if not isinstance(function, str) and not callable(function):
        raise InvalidArgumentError(
            f"metrics holds {function!r}. Every entry must be a name or a function of (output, label)."
        )
    return Metric(name, function, label, link)


def _numbered(name: str, taken: Sequence[str]) -> str:
    """Return the name, with a number if it is taken: "f1", "f1_2", "f1_3"."""
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
                f"metrics has a group of {len(group)} functions, and there are {num_labels} labels. A list inside the list has one "
                "function per label (None for a label without one), or one function for all."
            )
        for index, member in enumerate(group):
            members = [] if member is None else _entries(member)
            label = index if num_labels > 1 else 0
            yield from ((name or own, function, label) for own, function in members)


def _entries(metrics: object) -> list[tuple[str, object]]:
    """List functions and groups with their names; "" for a group outside of a dict, whose functions have their own."""
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
    """Compute the metrics by name of some rows, on the driver.

    Raises:
        InvalidArgumentError: one does not fit the shapes.
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
    """Sums of one pass over the data on a rank: loss, its weight, rows and metrics."""

    def __init__(
        self,
        metrics: Sequence[AnyMetric],
        logs: Logs | None = None,
        num_parts: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """Start at zero.

        Args:
            metrics: measured besides the loss.
            logs: numbers that user code reports in this pass; None if it cannot.
            num_parts: labels whose losses have weights of their own; 0 if they share one.
            device: of the batches, which are added up there without waiting; None means the CPU.
        """
        self._logs = logs
        self._is_first = True
        self._logged: list[dict[str, tuple[float, float]]] = []
        self._means = [m for m in metrics if isinstance(m, Metric)]
        self._states = [m.fresh(device) for m in metrics if not isinstance(m, Metric)]
        self._names = [m.name for m in metrics]
        # loss * weight, weight, rows, then the metrics; float64 so that a million rows add up.
        self.values = torch.zeros(3 + len(self._means), dtype=torch.float64, device=device)
        # Per label loss * weight and weight.
        self.parts = torch.zeros(num_parts, 2, dtype=torch.float64, device=device)

    @property
    def adds_up(self) -> bool:
        """Whether the sums of ranks are their states added up: no metric has a state of its own."""
        return not self._states

    @property
    def weight(self) -> float:
        """The denominator of the mean loss: rows, the sum of sample weights, or of numbers that the loss gives."""
        return float(self.values[1])

    @property
    def num_rows(self) -> int:
        """Rows so far."""
        return int(self.values[2])

    def state_dict(self) -> TotalsState:
        """Return the sums of this rank so far, for a checkpoint."""
        return {
            "values": self.values.to("cpu", copy=True),
            "parts": self.parts.to("cpu", copy=True),
            "metrics": [s.state_dict() for s in self._states],
            "logs": self._logs.sums() if self._logs is not None else {},
        }

    def load_state_dict(self, state: TotalsState) -> None:
        """Continue from the sums of `state_dict`."""
        self.values.copy_(state["values"])
        self.parts.copy_(state["parts"])
        for metric, saved in zip(self._states, state["metrics"], strict=True):
            metric.load_state_dict(saved)
        if self._logs is not None:
            self._logs.load(state["logs"])

    def add(self, batch: Forward) -> None:
        """Count one batch."""
        if batch.weight:  # a mean over nothing may be NaN
            self.values[0] += batch.loss.detach().double() * batch.weight
            self.values[1] += batch.weight
        for part, (value, weight) in zip(self.parts, batch.parts, strict=True):
            if weight:
                part += torch.stack([value.double() * weight, part.new_tensor(weight)])
        self.values[2] += batch.num_rows
        for i, metric in enumerate(self._means, start=3):
            output = batch.outputs[metric.label].detach()
            with self._watched(metric.name):
                self.values[i] += metric.row_sum(output, batch.labels[metric.label])
        for state in self._states:
            with self._watched(state.name, "(rows,)"):
                state.update(batch.outputs[state.label].detach(), batch.labels[state.label])
        self._is_first = False

    def _watched(self, name: str, labels: str = "") -> AbstractContextManager[None]:
        return no_broadcast(f"metric {name!r}", labels) if self._is_first else _unwatched

    def combine(self) -> None:
        """Add up the totals of all ranks, on the CPU; every rank must call it, once, after the last batch."""
        self.values, self.parts = self.values.cpu(), self.parts.cpu()
        hvd.allreduce_(self.values, name="totals", op=hvd.Sum)
        if len(self.parts):
            hvd.allreduce_(self.parts, name="totals.parts", op=hvd.Sum)
        for state in self._states:
            state.combine()
        if self._logs is not None:
            self._logged = hvd.allgather_object(self._logs.sums(), name="totals.logs")

    def means(self, prefix: str = "") -> dict[str, float]:
        """Return mean loss and metrics by name; NaN without rows."""
        means = self._own_means()
        values = {metric.name: {metric.name: means[metric.name]} for metric in self._means}
        values |= {state.name: state.values() for state in self._states}
        result = {f"{prefix}loss": means["loss"]}
        for name in self._names:
            result |= {f"{prefix}{key}": value for key, value in values[name].items()}
        return result | combined(self._logged, prefix)

    def means_so_far(self) -> dict[str, float]:
        """Return this rank's mean loss, metrics and logged numbers before `combine`, but metrics that are no mean over rows; NaN without rows."""
        logged = [self._logs.sums()] if self._logs is not None else []
        return self._own_means() | combined(logged, "")

    def _own_means(self) -> dict[str, float]:
        """Return mean loss and means over rows by name."""
        total, weight, num_rows, *sums = self.values.tolist()
        loss = total / weight if weight else float("nan")
        if self.parts.any():
            loss = sum(part / of for part, of in self.parts.tolist() if of)
        result = {"loss": loss}
        for metric, value in zip(self._means, sums, strict=True):
            result[metric.name] = value / num_rows if num_rows else float("nan")
        return result
