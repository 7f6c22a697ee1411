"""Metrics of an epoch: summed with their rows on each rank, combined over ranks once per epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator import heads

__all__ = ["BUILT_IN", "Forward", "Metric", "Totals", "resolve_metrics"]


@dataclass(frozen=True)
class Forward:
    """What a rank computed for its rows of a step.

    Attributes:
        outputs: of the model, one per label.
        labels: as the loss saw them.
        loss: a mean over the rows.
        weight: what the mean counts: the number of rows, or what the loss or the sample weights say.
        is_weighted: whether only this rank knows the weight.
    """

    outputs: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    loss: Tensor
    weight: float
    is_weighted: bool


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
    else:
        # Several labels per row count one by one.
        threshold = 0.0 if link == heads.SIGMOID else 0.5
        hits = (output > threshold) == (label.reshape(output.shape) > 0.5)
    return hits.double().mean()


def _mse(output: Tensor, label: Tensor, link: str) -> Tensor:
    del link
    return _difference("mse", output, label).square().mean()


def _mae(output: Tensor, label: Tensor, link: str) -> Tensor:
    del link
    return _difference("mae", output, label).abs().mean()


def _difference(name: str, output: Tensor, label: Tensor) -> Tensor:
    if output.numel() != label.numel():
        raise InvalidArgumentError(
            f"metric {name!r} compares an output of shape {tuple(output.shape)} with a label of shape "
            f"{tuple(label.shape)}. Give a metric that fits this label, for example 'accuracy' for classes."
        )
    return output.double() - label.double().reshape(output.shape)


BUILT_IN: Mapping[str, Callable[[Tensor, Tensor, str], Tensor]] = {
    "accuracy": _accuracy,
    "mse": _mse,
    "mae": _mae,
}

_RESERVED = ("epoch", "loss", "seconds", "rows", "rows_per_s", "lr")


def resolve_metrics(
    metrics: Any, label_cols: Sequence[str], links: Sequence[str]
) -> tuple[Metric, ...]:
    """The metrics of a fit, from names, functions, lists of them, or a dict by name.

    With several labels each metric is computed for every label, and its name begins with the label's.

    Raises:
        InvalidArgumentError: an entry is neither a function nor a known name, or two have one name.
    """
    named = _named(metrics)
    result = []
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
            result.append(Metric(full, function, index, links[index]))
    names = [m.name for m in result]
    for name in names:
        if names.count(name) > 1 or name in _RESERVED:
            raise InvalidArgumentError(
                f"metrics: the name {name!r} is taken. Give a dict from other names to functions."
            )
    return tuple(result)


def _named(metrics: Any) -> list[tuple[str, Any]]:
    if isinstance(metrics, Mapping):
        return [(str(name), function) for name, function in metrics.items()]
    if isinstance(metrics, str) or not isinstance(metrics, Sequence):
        metrics = [metrics]
    named: list[tuple[str, Any]] = []
    for entry in metrics:
        if isinstance(entry, (list, tuple)):  # Horovod's groups
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
    """Sums of one pass over the data: loss, its weight, rows and metrics."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics
        # loss * weight, weight, rows, then the metrics; float64 so that a million rows add up.
        self.values = torch.zeros(3 + len(metrics), dtype=torch.float64)

    def add(self, batch: Forward) -> None:
        """Count one batch."""
        if batch.weight:  # a mean over nothing may be NaN
            self.values[0] += batch.loss.detach().double() * batch.weight
            self.values[1] += batch.weight
        self.values[2] += len(batch.outputs[0])
        for i, metric in enumerate(self._metrics, start=3):
            output = batch.outputs[metric.label].detach()
            self.values[i] += metric.row_sum(output, batch.labels[metric.label])

    def means(self, prefix: str = "") -> dict[str, float]:
        """Mean loss and metrics by name; NaN where there was nothing."""
        total, weight, num_rows, *sums = self.values.tolist()
        result = {f"{prefix}loss": total / weight if weight else float("nan")}
        for metric, value in zip(self._metrics, sums, strict=True):
            result[f"{prefix}{metric.name}"] = value / num_rows if num_rows else float("nan")
        return result
