"""Find the widths of a model's outputs by running it on two rows of zeros."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sparkhvd.data.columns import heads
from sparkhvd.data.columns.features import InputBinding
from sparkhvd.data.columns.ragged import SparseRows
from sparkhvd.data.columns.schema import Column
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.training.precision import autocast, widened
from sparkhvd.training.to_device import Mover
from sparkhvd.training.types import Columns

__all__ = ["fitted_widths", "output_widths", "trial_outputs", "zeros"]


# Of torch's linear layers: rows x numbers per row, and numbers per row x outputs.
_LINEAR = re.compile(r"shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)")


def _hint(inputs: InputBinding, error: Exception) -> str:
    if sizes := _LINEAR.search(str(error)):
        return (
            f". A linear layer takes {sizes[2]} numbers per row and gets {sizes[1]}: "
            f"make it with in_features={sizes[1]}, or give other columns."
        )
    whole = [a for a in inputs.arguments if not getattr(torch, a.dtype).is_floating_point]
    if not whole:
        return ""
    names = ", ".join(f"{n!r}: 'float32'" for a in whole for n in a.columns)
    return f". Columns of integers and booleans stay so; if the model wants floats, give feature_dtypes={{{names}}}."


def zeros(column: Column) -> SparseRows | npt.NDArray[np.generic]:
    """Make two rows of zeros: two, so that an output with one entry in all is told from one entry per row."""
    if column.kind == "sparse":
        return SparseRows.empty(column.dtype, column.num_elements, num_rows=2)
    return np.zeros((2, *(column.row_shape or ())), column.row_dtype)


# Messages of torch and Python about shapes, dtypes and arguments that do not fit, on any machine. Other errors of a forward
# may come from the place where it runs: a GPU, a file, a rank.
_CERTAIN = re.compile(
    r"shapes cannot be multiplied|size mismatch|must match the size of tensor|must match except in dimension|is invalid for input"
    r" of size|must be equal to input_size|should contain \d+ elements|not broadcastable|[Ee]xpected .*(channels|input\[|[0-9]D |dimension|size)|to have the same dtype|must have the same"
    r" dtype|scalar type|[Dd]imension out of range|positional argument|unexpected keyword argument"
)


def _is_certain(error: Exception) -> bool:
    """Check whether a forward that raised this on the driver would raise it on a rank, too."""
    kinds = (RuntimeError, TypeError, ValueError, IndexError)
    return type(error) in kinds and _CERTAIN.search(str(error)) is not None


def output_widths(
    model: nn.Module,
    inputs: InputBinding,
    columns: Sequence[Column],
    examples: Columns | None = None,
    move: Mover | None = None,
    precision: str = "32",
) -> list[int] | None:
    """Find the elements per row of every output; arguments and errors as in `trial_outputs`."""
    outputs = trial_outputs(model, inputs, columns, examples, move, precision=precision)
    return None if outputs is None else [heads.rows(output).shape[1] for output in outputs]


def trial_outputs(
    model: nn.Module,
    inputs: InputBinding,
    columns: Sequence[Column],
    examples: Columns | None = None,
    move: Mover | None = None,
    labels: Sequence[str] = (),
    precision: str = "32",
) -> tuple[Tensor, ...] | None:
    """Run a model on two rows of zeros and return its outputs.

    None, with a warning, where it raises an error that need not happen elsewhere.

    Args:
        model: in the mode of the trial.
        inputs: binding of columns to arguments of the model.
        columns: feature columns with their shapes.
        examples: columns that are collated, for two rows.
        move: moves the arguments to the model's device.
        labels: names of the label columns, which the names of a dict of outputs may contradict.
        precision: the Param.

    Raises:
        InvalidArgumentError: shapes, dtypes or arguments do not fit, or an output is not one entry per row.
    """
    examples = examples or {}
    rows = {c.name: examples[c.name] if c.name in examples else zeros(c) for c in columns}
    try:
        arguments, keywords = inputs.apply(rows)
        if move is not None:
            arguments, keywords = move((arguments, keywords))
        device = torch.device("cpu") if move is None else move.device
        with torch.no_grad(), autocast(precision, device):
            result = model(*arguments, **keywords)
    except Exception as e:
        if type(e) is InvalidArgumentError:
            raise
        shapes = ", ".join(f"{c.name} {(2, *(c.row_shape or ()))}" for c in columns)
        problem = (
            f"model: forward failed on two rows of zeros ({shapes}; {inputs.describe()}): {type(e).__name__}: {e}"
            + _hint(inputs, e)
        )
        if _is_certain(e):
            raise InvalidArgumentError(problem) from e
        warnings.warn(
            f"{problem.rstrip('.')}. It may need what only ranks have, so this is no error here.",
            stacklevel=2,
        )
        return None
    outputs = widened(heads.outputs_of(result))
    if isinstance(result, dict) and [*result] != [*labels] and {*result} == {*labels}:
        raise InvalidArgumentError(
            f"model: forward returned the outputs {', '.join(map(repr, result))}, and label_cols are {', '.join(map(repr, labels))}. "
            "Outputs and labels belong together by their order: give both in the same."
        )
    for output in outputs:
        if output.ndim == 0 or len(output) != 2:
            raise InvalidArgumentError(
                f"model: forward returned shape {tuple(output.shape)} for two rows. An output must have one entry "
                "per row."
            )
    return outputs


def fitted_widths(widths: Sequence[int], labels: Sequence[str]) -> tuple[int, ...]:
    """Return the widths of a model's outputs, if there is one output per label.

    Raises:
        InvalidArgumentError: there is not.
    """
    if len(widths) != len(labels):
        raise InvalidArgumentError(
            f"model: forward returned {len(widths)} outputs and label_cols has {len(labels)} columns "
            f"({', '.join(map(repr, labels))}). Return one tensor per label column, in the same order."
        )
    return tuple(widths)
