"""`TrainedState`: a module with its columns, and the history of its training."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sparkhvd.data.columns.binding import InputBinding
from sparkhvd.data.columns.labels import IDENTITY, flat_rows, outputs_of
from sparkhvd.data.columns.ragged import SparseRows
from sparkhvd.data.columns.schema import Column
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.runner.protocol import failing_path, unpicklable
from sparkhvd.training.modules.architecture import dump_shell, tensors_of
from sparkhvd.training.modules.copies import light_copy
from sparkhvd.training.modules.weights import CLOSURE_BYTES, Weights, dump
from sparkhvd.training.precision import autocast, widened
from sparkhvd.training.to_device import Mover
from sparkhvd.training.types import Columns, History


@dataclass(frozen=True, eq=False)
class TrainedState:
    """Trained module with its columns, history and timings; immutable.

    Without a fit it has no columns: `transform` binds it to its DataFrame's columns.

    Attributes:
        module: the trained module in eval mode.
        columns: feature columns of the training data.
        labels: names of the label columns.
        inputs: binding of columns to arguments of the model.
        links: per label, the relation of outputs and probabilities; without columns one link may apply to all.
        widths: per label, elements of the output per row; () if unknown.
        history: one record per epoch.
        timings: seconds of the phases of the fit.
        run_id: name of the run in the store.
        loss: of its training, with trained parameters; or a list with one per label; None if unknown.
        report: document of its report, see `sparkhvd.observe.report`; {} without a fit in this process.
    """

    module: torch.nn.Module = field(repr=False)
    columns: tuple[Column, ...] = ()
    labels: tuple[str, ...] = ()
    inputs: InputBinding = InputBinding(())
    links: tuple[str, ...] = (IDENTITY,)
    widths: tuple[int, ...] = ()
    history: History = field(default_factory=list, repr=False)
    timings: Mapping[str, float] = field(default_factory=dict)
    run_id: str = ""
    loss: Any = field(default=None, repr=False)
    report: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def for_predict(self) -> torch.nn.Module:
        """Copy of the module over the same parameters, because `forward` may keep tensors or change buffers."""
        return light_copy(self.module)

    @cached_property
    def weights(self) -> Weights:
        """The weights, with their bytes if they are small."""
        tensors = tensors_of(self.module)
        if sum(t.nbytes for t in tensors.values()) > CLOSURE_BYTES:
            return Weights(dump(tensors))
        buffer = io.BytesIO()
        return Weights(dump(tensors, buffer), buffer.getvalue())

    @cached_property
    def shell(self) -> bytes:
        """Module without its weights.

        Raises:
            InvalidArgumentError: it cannot be pickled.
        """
        try:
            return dump_shell(self.module, with_hooks=False)
        except Exception as e:
            path = failing_path(self.module, unpicklable)
            at = f" at model{path}" if path else ""
            raise InvalidArgumentError(
                f"model: {type(self.module).__name__} cannot be sent to Spark's workers: pickling failed{at}: {type(e).__name__}: {e}. Give a "
                "module of classes and functions that pickle; for TorchScript the module that it was made from."
            ) from e


# Name in pickles of earlier versions.
Fitted = TrainedState


# ----------------------------------------------------------------------------------------------------
# Find the widths of a model's outputs by running it on two rows of zeros.

# Torch's error of linear layers: rows x numbers per row, and numbers per row x outputs.
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
    """Make two rows of zeros: two rows tell an output of one entry in total from one entry per row."""
    if column.kind == "sparse":
        return SparseRows.empty(column.dtype, column.num_elements, num_rows=2)
    return np.zeros((2, *(column.row_shape or ())), column.row_dtype)


# Messages of torch and Python about mismatched shapes, dtypes and arguments, independent of the machine. Other errors of a
# forward may depend on the place where it runs: a GPU, a file, a rank.
_CERTAIN = re.compile(
    r"shapes cannot be multiplied|size mismatch|must match the size of tensor|must match except in dimension|is invalid for input"
    r" of size|must be equal to input_size|should contain \d+ elements|not broadcastable|[Ee]xpected .*(channels|input\[|[0-9]D |dimension|size)|to have the same dtype|must have the same"
    r" dtype|scalar type|[Dd]imension out of range|positional argument|unexpected keyword argument"
)


def _is_certain(error: Exception) -> bool:
    """Check whether a forward that failed on the driver would fail on a rank, too."""
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
    return None if outputs is None else [flat_rows(output).shape[1] for output in outputs]


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

    Returns None, with a warning, after an error that may not occur on a rank.

    Args:
        model: in the mode of the trial.
        inputs: binding of columns to arguments of the model.
        columns: feature columns with their shapes.
        examples: collated columns, for two rows.
        move: moves the arguments to the model's device.
        labels: names of the label columns; the names of a dict of outputs may contradict them.
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
    outputs = widened(outputs_of(result))
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
    """Return the widths of a model's outputs if there is one output per label.

    Raises:
        InvalidArgumentError: the numbers differ.
    """
    if len(widths) != len(labels):
        raise InvalidArgumentError(
            f"model: forward returned {len(widths)} outputs and label_cols has {len(labels)} columns "
            f"({', '.join(map(repr, labels))}). Return one tensor per label column, in the same order."
        )
    return tuple(widths)
