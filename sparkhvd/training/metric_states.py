"""Metrics of torchmetrics: every rank updates its own state, and the states are merged once per pass.

Each state is merged by its own reduction (sum, min, max, concatenation, or a function of the metric), over the
ranks that had rows, so that a rank without rows adds nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypedDict, TypeGuard

import torch
from torch import Tensor, nn

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError

__all__ = ["MetricState", "StateMetric", "column", "is_metric_collection", "is_state_metric"]

# A state of torchmetrics: a tensor, or a list with an entry per update.
_StateValue: TypeAlias = "Tensor | list[object]"


class MetricState(TypedDict):
    """States of one metric by name, and its number of updates."""

    count: int
    values: dict[str, _StateValue]


class TorchMetric(Protocol):
    """The part of torchmetrics.Metric that is used here; torchmetrics need not be installed."""

    device: torch.device
    sync_on_compute: bool
    _reductions: Mapping[str, Callable[[_StateValue], _StateValue] | None]
    _defaults: Mapping[str, _StateValue]
    _computed: object
    _update_count: int

    def clone(self) -> TorchMetric:
        """Copy the metric."""

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
        """Iterate over this metric and those that it wraps."""


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
    """A metric whose state adds up over batches.

    Attributes:
        name: its key in the history.
        metric: the torchmetrics object.
        label: index of the output and label that it compares.
    """

    name: str
    metric: TorchMetric
    label: int

    @property
    def kind(self) -> str:
        """Class, numbers and texts of the metric; equal in every process."""
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
        """Add a batch: (rows, 1) becomes (rows,), and classes become integers even if the loss takes floats."""
        output, label = column(output), column(label)
        if label.is_floating_point() and type(self.metric).__module__.startswith(
            "torchmetrics.classification"
        ):
            label = label.long()
        self.metric.update(output, label)

    def state_dict(self) -> list[MetricState]:
        """Return this rank's states, for a checkpoint."""
        return [_state(part) for part in _parts(self.metric)]

    def load_state_dict(self, state: list[MetricState]) -> None:
        """Continue from the states of `state_dict`."""
        for part, saved in zip(_parts(self.metric), state, strict=True):
            part._update_count = saved["count"]
            for name, value in saved["values"].items():
                setattr(part, name, _copied(value, part.device))

    def combine(self) -> None:
        """Merge the states of all ranks, on the CPU; every rank must call it."""
        self.metric.cpu()
        parts = _parts(self.metric)
        states_of_ranks = hvd.allgather_object(
            [_state(part) for part in parts], name=f"metric.{self.name}"
        )
        for part, states in zip(parts, zip(*states_of_ranks, strict=True), strict=True):
            _merge(part, [state for state in states if state["count"]])

    def values(self) -> dict[str, float]:
        """Return the metric by name: `name`, or `name_0`, `name_1`, ... of several elements, or `name_<key>` of a dict.

        NaN where no rank had rows.
        """
        if not any(part._update_count for part in _parts(self.metric)):
            return {self.name: float("nan")}
        return _flat(self.name, self.metric.compute())


def column(tensor: Tensor) -> Tensor:
    """Return (rows,) for (rows, 1), else the tensor."""
    return tensor[:, 0] if tensor.ndim == 2 and tensor.shape[1] == 1 else tensor


def _parts(metric: TorchMetric) -> list[TorchMetric]:
    """Return the metric and those that it wraps, which hold the state of a wrapper."""
    return [part for part in metric.modules() if is_state_metric(part)]


def _state(metric: TorchMetric) -> MetricState:
    cpu = torch.device("cpu")
    values = {name: _copied(getattr(metric, name), cpu) for name in metric._reductions}
    return {"count": metric._update_count, "values": values}


def _copied(value: _StateValue, device: torch.device) -> _StateValue:
    """Copy a state: later updates write into tensors and append to lists."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    return [v.to(device) if isinstance(v, Tensor) else v for v in value]


def _merge(metric: TorchMetric, states: list[MetricState]) -> None:
    """Give a metric the merged states of ranks that had rows."""
    metric._computed = None
    metric._update_count = sum(state["count"] for state in states)
    for name, reduction in metric._reductions.items():
        values = [state["values"][name] for state in states]
        if not values:
            continue  # the empty state that it has
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
        f"metric {name!r} gave {type(value).__name__}; the history of a fit holds numbers. Give a metric whose "
        "compute() returns a tensor or a dict of tensors."
    )
