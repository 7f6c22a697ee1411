"""The loss of a rank's rows: a mean, and what it counts in the global batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.training.metrics import Forward, Totals
from sparkhvd.estimator.training.program import Program
from sparkhvd.estimator.training.spec import TrainSpec
from sparkhvd.estimator.training.state import fail_together

__all__ = ["check_weights", "mean_loss", "weighted_loss"]


def mean_loss(
    spec: TrainSpec, program: Program, outputs: tuple[Tensor, ...], labels: tuple[Tensor, ...]
) -> Forward:
    """The loss as the user's functions give it: a mean over rows, or (mean, weight)."""
    num_rows = len(outputs[0])
    total: Tensor | None = None
    weight: float | None = None
    for i, loss_fn in enumerate(program.losses):
        value = loss_fn(outputs[i], labels[i])
        if isinstance(value, tuple):
            if len(value) != 2 or len(program.losses) > 1:
                raise InvalidArgumentError(
                    f"loss returned {len(value)} values for {len(program.losses)} labels. With one label it may "
                    "return (mean, weight); else it must return one number."
                )
            value, weight = value[0], float(value[1])
        _check_scalar(value, outputs[i], labels[i])
        value = value.reshape(())
        if program.is_sum[i]:
            value = value / num_rows
        if spec.loss_weights[i] != 1.0:
            value = value * spec.loss_weights[i]
        total = value if total is None else total + value
    assert total is not None
    if weight is None:
        return Forward(outputs, labels, total, float(num_rows), False, num_rows)
    return Forward(outputs, labels, total, weight, True, num_rows)


def weighted_loss(
    spec: TrainSpec,
    program: Program,
    outputs: tuple[Tensor, ...],
    labels: tuple[Tensor, ...],
    weights: Tensor,
) -> Forward:
    """The mean of the rows' losses by their weights, and the sum of the weights."""
    sum_of_weights = float(weights.double().sum())
    total: Tensor | None = None
    for i, loss_fn in enumerate(program.losses):
        per_row = loss_fn(outputs[i], labels[i])
        if per_row.ndim == 0 or len(per_row) != len(weights):
            raise InvalidArgumentError(
                f"loss gave shape {tuple(per_row.shape)} for {len(weights)} rows; with sample_weight_col it must "
                "give one value per row when called with reduction='none'."
            )
        per_row = per_row.reshape(len(weights), -1).mean(dim=1)
        value = (per_row * weights.to(per_row.dtype)).sum() * spec.loss_weights[i]
        total = value if total is None else total + value
    assert total is not None
    mean = total / sum_of_weights if sum_of_weights else total * 0.0
    return Forward(outputs, labels, mean, sum_of_weights, True, len(weights))


def check_weights(spec: TrainSpec, totals: Totals, part: str, num_steps: int | None) -> None:
    """Refuse rows whose sample weights are all 0: there is no mean over them.

    Args:
        spec: of the run.
        totals: of all ranks, after a pass over the rows.
        part: "training" or "validation".
        num_steps: to which the pass was cut, or None; then other passes may have weights.

    Raises:
        InvalidArgumentError: they are; on all ranks.
    """
    if spec.sample_weight is None or num_steps is not None or totals.weight:
        return
    fail_together(
        f"sample_weight_col: column {spec.sample_weight!r} is 0 in all {totals.num_rows:,} {part} rows, so there is no "
        "mean loss. Give weights above 0, or leave such rows out of the DataFrame."
    )


def _check_scalar(value: Any, output: Tensor, label: Tensor) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InvalidArgumentError(
            f"loss returned {found} for an output of shape {tuple(output.shape)} and a label of shape "
            f"{tuple(label.shape)}; it must return one number, the mean over the rows."
        )
