"""Metrics of torchmetrics: every rank updates its own state, and the states are merged once per pass.

Merging is done with each state's own reduction (sum, min, max, concatenation, or what the metric brings), over the
ranks that saw rows, so that a rank without rows adds nothing.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError

__all__ = ["StateMetric", "is_metric_collection", "is_state_metric"]


def is_state_metric(value: Any) -> bool:
    """Whether a value is a torchmetrics.Metric; torchmetrics is not imported for that."""
    library = sys.modules.get("torchmetrics")
    return library is not None and isinstance(value, library.Metric)


def is_metric_collection(value: Any) -> bool:
    """Whether a value is a torchmetrics.MetricCollection."""
    library = sys.modules.get("torchmetrics")
    return library is not None and isinstance(value, library.MetricCollection)


@dataclass(frozen=True)
class StateMetric:
    """A metric with a state that outlives a batch.

    Attributes:
        name: its key in the history.
        metric: the torchmetrics object.
        label: index of the output and label that it looks at.
    """

    name: str
    metric: Any
    label: int

    @property
    def kind(self) -> str:
        """What it is, with the numbers and texts it was made with; equal in every process."""
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
        """The same metric with an empty state of its own, on the device."""
        metric = self.metric.clone()
        if device is not None:
            metric.to(device)
        metric.reset()
        return StateMetric(self.name, metric, self.label)

    def update(self, output: Tensor, label: Tensor) -> None:
        """Take in a batch: (rows, 1) counts as (rows,), and classes as integers even where the loss takes floats."""
        output, label = _column(output), _column(label)
        if label.is_floating_point() and type(self.metric).__module__.startswith(
            "torchmetrics.classification"
        ):
            label = label.long()
        self.metric.update(output, label)

    def state_dict(self) -> list[dict[str, Any]]:
        """What this rank has taken in so far, as tensors and numbers."""
        return [_state(part) for part in _parts(self.metric)]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Go on from what `state_dict` gave."""
        for part, saved in zip(_parts(self.metric), state, strict=True):
            part._update_count = saved["count"]
            for name, value in saved["values"].items():
                setattr(part, name, _copied(value, part.device))

    def combine(self) -> None:
        """Take the state of all ranks together, on the CPU; every rank must call it."""
        self.metric.cpu()
        parts = _parts(self.metric)
        everyone = hvd.allgather_object(
            [_state(part) for part in parts], name=f"metric.{self.name}"
        )
        for part, states in zip(parts, zip(*everyone, strict=True), strict=True):
            _merge(part, [state for state in states if state["count"]])

    def values(self) -> dict[str, float]:
        """The metric by name: `name`, or `name_0`, `name_1`, ... of several elements, or `name_<key>` of a dict.

        NaN where no rank had rows.
        """
        if not any(part._update_count for part in _parts(self.metric)):
            return {self.name: float("nan")}
        return _flat(self.name, self.metric.compute())


def _column(tensor: Tensor) -> Tensor:
    return tensor[:, 0] if tensor.ndim == 2 and tensor.shape[1] == 1 else tensor


def _parts(metric: Any) -> list[Any]:
    """The metric and those that it is made of: a wrapper keeps its state in others."""
    return [part for part in metric.modules() if is_state_metric(part)]


def _state(metric: Any) -> dict[str, Any]:
    cpu = torch.device("cpu")
    values = {name: _copied(getattr(metric, name), cpu) for name in metric._reductions}
    return {"count": metric._update_count, "values": values}


def _copied(value: Any, device: torch.device) -> Any:
    """A state that later updates leave alone: they write into tensors and append to lists."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    return [v.to(device) if isinstance(v, Tensor) else v for v in value]


def _merge(metric: Any, states: list[dict[str, Any]]) -> None:
    """Give a metric the states of ranks that saw rows."""
    metric._computed = None
    metric._update_count = sum(state["count"] for state in states)
    for name, reduction in metric._reductions.items():
        values = [state["values"][name] for state in states]
        if not values:
            continue  # the empty state that it has
        if isinstance(values[0], list):
            merged: Any = [item for value in values for item in value]
            if reduction is not None and merged:
                merged = reduction(merged)
        elif len(values) == 1:
            merged = values[0]
        else:
            merged = torch.stack(values)
            if reduction is not None:
                merged = reduction(merged)
        setattr(metric, name, merged)


def _flat(name: str, value: Any) -> dict[str, float]:
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
