"""Metrics of an epoch: summed with their rows on each rank, combined over ranks once per epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import sparkhvd.torch as hvd
from sparkhvd.data.columns import heads
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.training.metric_states import (
    StateMetric,
    is_metric_collection,
    is_state_metric,
)
from sparkhvd.training.user_code.logs import RESERVED, Logs, combined

__all__ = ["BUILT_IN", "Forward", "Metric", "StateMetric", "Totals", "resolve_metrics"]


@dataclass(frozen=True)
class Forward:
    """What a rank computed for its rows of a step.

    Attributes:
        outputs: of the model, one per label.
        labels: as the loss saw them.
        loss: a mean over the rows.
        weight: what the mean counts: the number of rows, or what the loss or the sample weights say.
        is_weighted: whether only this rank knows the weight.
        num_rows: of this rank.
        parts: each label's mean and what it counts, where these may differ; else nothing.
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
        label: index of the output and label that it looks at.
        link: how the output is read by a built-in metric.
    """

    name: str
    function: Callable[[Tensor, Tensor], Any] | str
    label: int
    link: str

    @property
    def kind(self) -> str:
        """What it is, in a word; equal in every process."""
        if isinstance(self.function, str):
            return self.function
        return str(getattr(self.function, "__qualname__", type(self.function).__qualname__))

    def row_sum(self, output: Tensor, label: Tensor) -> Tensor:
        """The sum over the rows of a batch, in float64."""
        if isinstance(self.function, str):
            value = BUILT_IN[self.function](output, label, self.link)
        else:
            value = self.function(output, label)
        value = torch.as_tensor(value).detach().double()
        num_rows = len(output)
        if value.ndim == 0:
            return value * num_rows
        if len(value) != num_rows:
            raise InvalidArgumentError(
                f"metric {self.name!r} returned shape {tuple(value.shape)} for {num_rows} rows. Return the mean "
                "over the rows, or one value per row."
            )
        return value.sum() * num_rows / value.numel()


def _accuracy(output: Tensor, label: Tensor, link: str) -> Tensor:
    if output.ndim > 1 and output.shape[1] > 1 and label.ndim < output.ndim:
        hits = output.argmax(dim=1) == label
    elif link == heads.SOFTMAX and output.ndim > 1 and output.shape == label.shape:
        # Probabilities of classes: one-hot, smoothed or of another model.
        hits = output.argmax(dim=1) == label.argmax(dim=1)
    else:
        # Several labels per row count one by one.
        threshold = 0.0 if link == heads.SIGMOID else 0.5
        hits = (output > threshold) == (label.reshape(output.shape) > 0.5)
    return hits.double()


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


# Each gives one value or several per row: sums of them stay exact where a mean times the rows would be rounded.
BUILT_IN: Mapping[str, Callable[[Tensor, Tensor, str], Tensor]] = {
    "accuracy": _accuracy,
    "mse": _mse,
    "mae": _mae,
}


def resolve_metrics(
    metrics: Any, label_cols: Sequence[str], links: Sequence[str]
) -> tuple[Metric | StateMetric, ...]:
    """The metrics of a fit, from names, functions, lists of them, or a dict by name.

    Metrics of torchmetrics are told by their class. With several labels each metric is computed for every label,
    and its name begins with the label's.

    Raises:
        InvalidArgumentError: an entry is neither a function nor a known name, or two have one name.
    """
    named = _named(metrics)
    result: list[Metric | StateMetric] = []
    for name, function in named:
        if isinstance(function, str) and function not in BUILT_IN:
            raise InvalidArgumentError(
                f"metrics names {function!r}, which is not built in. Give one of {', '.join(BUILT_IN)}, or a "
                "function of (output, label)."
            )
        if not isinstance(function, str) and not callable(function):
            raise InvalidArgumentError(
                f"metrics holds {function!r}. Every entry must be a name or a function of (output, label)."
            )
        for index, label in enumerate(label_cols):
            full = name if len(label_cols) == 1 else f"{label}_{name}"
            if is_state_metric(function):
                result.append(StateMetric(full, function, index))
            else:
                result.append(Metric(full, function, index, links[index]))
    names = [m.name for m in result]
    for name in names:
        if names.count(name) > 1 or name in RESERVED:
            raise InvalidArgumentError(
                f"metrics: the name {name!r} is taken. Give a dict from other names to functions."
            )
    return tuple(result)


def _named(metrics: Any) -> list[tuple[str, Any]]:
    if isinstance(metrics, Mapping) or is_metric_collection(metrics):
        return [(str(name), function) for name, function in metrics.items()]
    if isinstance(metrics, str) or not isinstance(metrics, Sequence):
        metrics = [metrics]
    named: list[tuple[str, Any]] = []
    for entry in metrics:
        if isinstance(entry, (list, tuple)) or is_metric_collection(entry):  # Horovod's groups
            named += _named(entry)
        else:
            name = (
                entry
                if isinstance(entry, str)
                else getattr(entry, "__name__", type(entry).__name__)
            )
            named.append((str(name), entry))
    return named


class Totals:
    """What one pass over the data adds up to on a rank: loss, its weight, rows and metrics."""

    def __init__(
        self,
        metrics: Sequence[Metric | StateMetric],
        logs: Logs | None = None,
        num_parts: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """Nothing is counted yet.

        Args:
            metrics: what is measured besides the loss.
            logs: what user code reports in this pass; None where it cannot.
            num_parts: labels whose losses count different rows; 0 if they all count the same.
            device: where batches are computed, and added up without waiting for it; None means on the CPU.
        """
        self._logs = logs
        self._logged: list[dict[str, tuple[float, float]]] = []
        self._means = [m for m in metrics if isinstance(m, Metric)]
        self._states = [m.fresh(device) for m in metrics if isinstance(m, StateMetric)]
        # loss * weight, weight, rows, then the metrics; float64 so that a million rows add up.
        self.values = torch.zeros(3 + len(self._means), dtype=torch.float64, device=device)
        # Per label loss * weight and weight.
        self.parts = torch.zeros(num_parts, 2, dtype=torch.float64, device=device)

    @property
    def weight(self) -> float:
        """What the mean loss counts: rows, sample weights, or what the loss says."""
        return float(self.values[1])

    @property
    def num_rows(self) -> int:
        """Rows that were counted."""
        return int(self.values[2])

    def state_dict(self) -> dict[str, Any]:
        """The sums of this rank so far, for a checkpoint."""
        return {
            "values": self.values.to("cpu", copy=True),
            "parts": self.parts.to("cpu", copy=True),
            "metrics": [s.state_dict() for s in self._states],
            "logs": self._logs.sums() if self._logs is not None else {},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from sums that `state_dict` gave."""
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
            self.values[i] += metric.row_sum(output, batch.labels[metric.label])
        for state in self._states:
            state.update(batch.outputs[state.label].detach(), batch.labels[state.label])

    def combine(self) -> None:
        """Become the totals of all ranks, on the CPU; every rank must call it, once, after the last batch."""
        self.values, self.parts = self.values.cpu(), self.parts.cpu()
        hvd.allreduce_(self.values, name="totals", op=hvd.Sum)
        if len(self.parts):
            hvd.allreduce_(self.parts, name="totals.parts", op=hvd.Sum)
        for state in self._states:
            state.combine()
        if self._logs is not None:
            self._logged = hvd.allgather_object(self._logs.sums(), name="totals.logs")

    def means(self, prefix: str = "") -> dict[str, float]:
        """Mean loss and metrics by name; NaN where there was nothing."""
        total, weight, num_rows, *sums = self.values.tolist()
        loss = total / weight if weight else float("nan")
        if self.parts.any():
            loss = sum(part / of for part, of in self.parts.tolist() if of)
        result = {f"{prefix}loss": loss}
        for metric, value in zip(self._means, sums, strict=True):
            result[f"{prefix}{metric.name}"] = value / num_rows if num_rows else float("nan")
        for state in self._states:
            result |= {f"{prefix}{name}": value for name, value in state.values().items()}
        return result | combined(self._logged, prefix)
