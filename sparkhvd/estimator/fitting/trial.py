"""Trial of a model on two rows of zeros, before any rank starts: its outputs, and whether the loss can compare them with the labels."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sparkhvd.data.columns import heads
from sparkhvd.data.columns.features import InputBinding
from sparkhvd.data.columns.labels import LabelBinding
from sparkhvd.data.columns.schema import DataSchema
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.training.metrics import AnyMetric, try_metrics
from sparkhvd.training.modules.copies import light_copy
from sparkhvd.training.modules.modes import in_mode
from sparkhvd.training.modules.output_widths import fitted_widths, trial_outputs, zeros
from sparkhvd.training.row_pairs import unpaired
from sparkhvd.training.types import Loss

__all__ = ["Pairs", "try_model"]

Compare: TypeAlias = "Callable[[Sequence[Tensor], Sequence[Tensor]], None]"


class Pairs:
    """Check of a fit that loss and metrics pair rows: once, as soon as the shapes of outputs and labels are known."""

    def __init__(
        self, losses: Sequence[Loss], metrics: Sequence[AnyMetric], *, is_asked: bool
    ) -> None:
        self._losses, self._metrics = losses, metrics
        # The ranks do it where nobody did before.
        self.is_left = is_asked and bool(losses)

    def __call__(self, outputs: Sequence[Tensor], labels: Sequence[Tensor]) -> None:
        """Warn of functions that do not."""
        if self.is_left:
            self.is_left = False
            if text := unpaired(self._losses, self._metrics, outputs, labels):
                warnings.warn(text, stacklevel=2)


def try_model(
    model: torch.nn.Module,
    inputs: InputBinding,
    schema: DataSchema,
    labels: LabelBinding | None,
    examples: Mapping[str, Any] | None = None,
    metrics: Sequence[AnyMetric] = (),
    precision: str = "32",
    compare: Compare | None = None,
) -> tuple[int, ...] | None:
    """Run the model on zeros and return the elements per row of its outputs, one per label; the model is not changed.

    None where only ranks can tell, see `trial_outputs`.

    Args:
        model: of the user.
        inputs: binding of columns to its arguments.
        schema: columns whose shapes are known.
        labels: binding of the labels that the loss compares with the outputs; None where the user's code computes the loss.
        examples: columns that are collated, for two rows.
        metrics: of the fit.
        precision: the Param.
        compare: called with outputs and labels that fit each other.

    Raises:
        InvalidArgumentError: it does not fit the columns, or has another number of outputs, or a label or a metric cannot meet its
            output.
    """
    trial = in_mode(light_copy(model), is_training=False)
    names = [c.name for c in schema.labels]
    run = functools.partial(
        trial_outputs,
        inputs=inputs,
        columns=schema.features,
        examples=examples,
        precision=precision,
    )
    outputs = run(trial, labels=names)
    if outputs is None:
        return None
    widths = [heads.rows(output).shape[1] for output in outputs]
    fitted = fitted_widths(widths, names)
    rows = None if labels is None else _zero_labels(schema, labels)
    if labels is None or rows is None:
        return fitted
    if (problem := _mismatch(labels, outputs, rows, metrics, compare)) is None:
        return fitted
    # Some models return something else in training.
    with torch.random.fork_rng(devices=[]):
        trained = run(in_mode(trial, is_training=True))
    if trained is None or _mismatch(labels, trained, rows, metrics, compare) is None:
        return fitted
    raise InvalidArgumentError(f"model, tried on two rows of zeros: {problem}")


def _zero_labels(schema: DataSchema, labels: LabelBinding) -> tuple[Tensor, ...] | None:
    """Make two rows of the labels; None if the shape of one is not known."""
    if any(c.row_shape is None or -1 in c.row_shape for c in schema.labels):
        return None
    return labels.apply({c.name: zeros(c) for c in schema.labels})


def _mismatch(
    labels: LabelBinding,
    outputs: tuple[Tensor, ...],
    rows: tuple[Tensor, ...],
    metrics: Sequence[AnyMetric],
    compare: Compare | None,
) -> InvalidArgumentError | None:
    try:
        matched = labels.match(outputs, rows)
        try_metrics(metrics, outputs, matched)
    except InvalidArgumentError as e:
        return e
    if compare is not None:
        compare(outputs, matched)
    return None
