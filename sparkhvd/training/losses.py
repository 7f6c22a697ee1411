"""Loss of a rank's rows: a mean over the rows, and the weight of this mean in the global batch.

The weight is the denominator of the mean: the number of rows, the sum of sample weights, or the number of rows that the
loss does not ignore. With one label the sum of the ranks' weights is needed only after `backward`, because one factor
corrects all gradients. With several labels whose losses may ignore different rows, no single factor is correct. Then
the ranks sum the weights of each label in the whole step while the model runs; the labels alone determine the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.collectives.tensors import Handle
from sparkhvd.training.loss_functions import ClassMean
from sparkhvd.training.metrics import Forward, Totals
from sparkhvd.training.program import Program
from sparkhvd.training.rank_sync import raise_on_all_ranks
from sparkhvd.training.spec import TrainSpec


@dataclass(frozen=True)
class Counts:
    """Weights of the labels' losses in a whole step, over all ranks and batches.

    Attributes:
        num_rows: number of rows of the step.
        sums: one weight per label; available after `wait`.
    """

    num_rows: int
    sums: Handle[Tensor]

    def shares(self, weights: Sequence[float], num_rows: int) -> list[float]:
        """Compute the factor of each label's mean over this rank's batch.

        The step multiplies the batch by its rows.
        """
        sums = self.sums.wait().tolist()
        pairs = zip(weights, sums, strict=True)
        return [w / num_rows * (self.num_rows / total) if w else 0.0 for w, total in pairs]


def counts_apart(program: Program) -> bool:
    """Check whether the labels need separate weights, because their losses may ignore different rows."""
    return len(program.losses) > 1 and any(isinstance(x, ClassMean) for x in program.losses)


def counts_of(spec: TrainSpec, program: Program, labels: Sequence[Tensor]) -> list[float]:
    """Compute the weight of each label's loss in a batch.

    It is 1.0 per row without ignored labels or class weights.
    """
    return [_count(spec, program, i, label) for i, label in enumerate(labels)]


def _count(spec: TrainSpec, program: Program, index: int, label: Tensor) -> float:
    loss, num_rows = program.losses[index], len(label)
    count = loss.count(label) if isinstance(loss, ClassMean) else None
    if count is None:
        return float(num_rows)
    # If all rows have the same number of elements, count rows: then a batch without ignored labels needs no correction.
    # If the number may differ between batches, count elements.
    name = spec.labels.columns[index]
    if spec.transformed is not None or name in program.functions.collate:
        return count
    return count * num_rows / label.numel() if label.numel() else 0.0


def mean_loss(
    spec: TrainSpec,
    program: Program,
    outputs: tuple[Tensor, ...],
    labels: tuple[Tensor, ...],
    counts: Counts | None = None,
    counted: tuple[Tensor, ...] = (),
) -> Forward:
    """Compute the user's losses: a mean over rows, or (mean, weight).

    With `counts_apart`, `counts` are the weights of the training step, and `counted` are the labels on the CPU, so that
    counting does not wait for a GPU.
    """
    counted = counted or labels
    if counts_apart(program):
        return _apart_loss(spec, program, outputs, labels, counts, counted)
    num_rows = len(outputs[0])
    total: Tensor | None = None
    weight: float | None = None
    for i, loss_fn in enumerate(program.losses):
        result = loss_fn(outputs[i], labels[i])
        if isinstance(result, tuple):
            if len(result) != 2 or len(program.losses) > 1:
                raise InvalidArgumentError(
                    f"loss returned {len(result)} values for {len(program.losses)} labels. With one label it may "
                    "return (mean, weight); otherwise it must return one number."
                )
            result, weight = result[0], float(result[1])
        elif isinstance(loss_fn, ClassMean) and not labels[i].is_floating_point():
            weight = _count(spec, program, i, counted[i])
        value = _scalar(spec, program, i, result, outputs[i], labels[i])
        total = value if total is None else total + value
    assert total is not None
    if weight is None:
        return Forward(outputs, labels, total, float(num_rows), False, num_rows)
    return Forward(outputs, labels, total, weight, True, num_rows)


def _apart_loss(
    spec: TrainSpec,
    program: Program,
    outputs: tuple[Tensor, ...],
    labels: tuple[Tensor, ...],
    counts: Counts | None,
    counted: tuple[Tensor, ...],
) -> Forward:
    """Add up the losses of several labels, each multiplied by its share of the whole step."""
    num_rows = len(outputs[0])
    weights = counts_of(spec, program, counted)
    shares = [1.0] * len(weights) if counts is None else counts.shares(weights, num_rows)
    total: Tensor | None = None
    parts: list[tuple[Tensor, float]] = []
    for i, loss_fn in enumerate(program.losses):
        result = loss_fn(outputs[i], labels[i])
        value = _scalar(spec, program, i, result, outputs[i], labels[i])
        parts.append((value.detach(), weights[i]))
        if not weights[i]:  # skip a mean over no rows, which is NaN
            continue
        value = value if shares[i] == 1.0 else value * shares[i]
        total = value if total is None else total + value
    weight = float(num_rows)
    if total is None:
        total, weight = outputs[0].sum() * 0.0, 0.0
    return Forward(outputs, labels, total, weight, False, num_rows, tuple(parts))


def _scalar(
    spec: TrainSpec, program: Program, index: int, value: object, output: Tensor, label: Tensor
) -> Tensor:
    """Check one label's loss, and return it with its factor as a term of the sum."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise InvalidArgumentError(
            f"loss returned {_shape_of(value)} for an output of shape {tuple(output.shape)} and a label of shape "
            f"{tuple(label.shape)}; it must return one number, the mean over the rows."
        )
    scalar = value.reshape(()) if value.ndim else value
    if program.is_sum[index]:
        scalar = scalar / len(output)
    factor = spec.loss_weights[index]
    return scalar if factor == 1.0 else scalar * factor


def _shape_of(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def weighted_loss(
    spec: TrainSpec,
    program: Program,
    outputs: tuple[Tensor, ...],
    labels: tuple[Tensor, ...],
    weights: Tensor,
) -> Forward:
    """Compute the mean of the rows' losses weighted by `weights` (on the CPU), and the sum of the weights."""
    sum_of_weights = float(weights.double().sum())
    weights = weights.to(outputs[0].device)
    total: Tensor | None = None
    for i, loss_fn in enumerate(program.losses):
        per_row = loss_fn(outputs[i], labels[i])
        if not isinstance(per_row, Tensor) or per_row.ndim == 0 or len(per_row) != len(weights):
            raise InvalidArgumentError(
                f"loss returned {_shape_of(per_row)} for {len(weights)} rows; with sample_weight_col it must "
                "return one value per row when called with reduction='none'."
            )
        per_row = per_row.reshape(len(weights), -1).mean(dim=1)
        value = (per_row * weights.to(per_row.dtype)).sum() * spec.loss_weights[i]
        total = value if total is None else total + value
    assert total is not None
    mean = total / sum_of_weights if sum_of_weights else total * 0.0
    return Forward(outputs, labels, mean, sum_of_weights, True, len(weights))


def check_weights(spec: TrainSpec, totals: Totals, part: str, num_steps: int | None) -> None:
    """Raise an error if all sample weights of a pass are 0, because the mean loss is undefined.

    Args:
        spec: spec of the run.
        totals: totals of all ranks, after a pass over the rows.
        part: "training" or "validation".
        num_steps: limit of steps that cut the pass, so that other passes may have weights; None for a whole pass.

    Raises:
        InvalidArgumentError: all weights are 0; raised on all ranks.
    """
    if spec.sample_weight is None or num_steps is not None or totals.weight:
        return
    raise_on_all_ranks(
        f"sample_weight_col: column {spec.sample_weight!r} is 0 in all {totals.num_rows:,} {part} rows, so there is no "
        "mean loss. Give weights above 0, or leave such rows out of the DataFrame."
    )
