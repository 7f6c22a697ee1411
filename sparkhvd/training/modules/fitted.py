"""`TrainedState`: a trained module, its columns, and the history of its training."""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sparkhvd.data.columns.binding import InputBinding
from sparkhvd.data.columns.labels import IDENTITY, outputs_of, widths_of
from sparkhvd.data.columns.ragged import SparseRows
from sparkhvd.data.columns.schema import Column
from sparkhvd.errors import InvalidArgumentError, listed
from sparkhvd.runner.protocol import failing_path, unpicklable
from sparkhvd.training.modules.architecture import dump_shell, tensors_of
from sparkhvd.training.modules.copies import light_copy
from sparkhvd.training.modules.weights import CLOSURE_BYTES, Weights, dump
from sparkhvd.training.precision import autocast, widened
from sparkhvd.training.to_device import Mover
from sparkhvd.training.types import Columns, History


@dataclass(frozen=True, eq=False)
class TrainedState:
    """An immutable trained module with its columns, history and timings.

    A module that no fit trained has no columns; `transform` then uses the columns of its DataFrame.

    Attributes:
        module: the trained module in eval mode.
        columns: feature columns of the training data.
        labels: names of the label columns.
        inputs: binding of columns to arguments of the model.
        links: for each label the relation of outputs and probabilities; without columns one link may apply to all
            outputs.
        widths: for each label the number of output elements per row; () if unknown.
        history: one record per epoch.
        timings: seconds of the phases of the fit.
        run_id: name of the run in the store.
        loss: loss of the training with its trained parameters, or a list with one loss per label; None if unknown.
        report: document of the fit's report, see `sparkhvd.observe.report`; {} without a fit in this process.
        data: origin of the training rows, see `TorchModel.training_data`; {} if unknown.
        run_key: key of the run for `sparkhvd reproduce`, see `TorchModel.run_key`.
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
    data: Mapping[str, Any] = field(default_factory=dict, repr=False)
    run_key: str = field(default="", repr=False)

    @property
    def output_links(self) -> tuple[str, ...]:
        """The link of each output. The links are unknown if outputs and labels differ in number."""
        is_paired = len(self.links) == len(self.widths)
        return self.links if is_paired else (IDENTITY,) * len(self.widths)

    @cached_property
    def for_predict(self) -> torch.nn.Module:
        """A copy of the module with the same parameters, because `forward` may store tensors or change buffers."""
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
        """The pickled module without its weights.

        Raises:
            InvalidArgumentError: the module cannot be pickled.
        """
        try:
            return dump_shell(self.module, with_hooks=False)
        except Exception as e:
            path = failing_path(self.module, unpicklable)
            at = f" at model{path}" if path else ""
            raise InvalidArgumentError(
                f"model: {type(self.module).__name__} cannot be sent to Spark's workers: pickling failed{at}: {type(e).__name__}: {e}. Give a "
                "module of classes and functions that pickle."
            ) from e


# Name in pickles of earlier versions.
Fitted = TrainedState


# ----------------------------------------------------------------------------------------------------
# Trial of a model on two made-up rows, to find the widths of its outputs. Not every model accepts such rows (lengths of
# 0, a matrix of zeros, another number of rows). So a failed trial gives no warning, and the ranks find the widths on
# real rows.

# Torch's error of linear layers: (rows x numbers per row) and (numbers per row x outputs).
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
    names = listed(f"{n!r}: 'float32'" for a in whole for n in a.columns)
    return f". Columns of integers and booleans keep their types; if the model needs floats, give feature_dtypes={{{names}}}."


def zeros(column: Column) -> SparseRows | npt.NDArray[np.generic]:
    """Make two rows of zeros.

    With one row, an output with one entry per row would look like a single number.
    """
    if column.kind == "sparse":
        return SparseRows.empty(column.dtype, column.num_elements, num_rows=2)
    return np.zeros((2, *(column.row_shape or ())), column.row_dtype)


def _various(column: Column, num_rows: int) -> SparseRows | npt.NDArray[np.generic]:
    """Make nonzero rows: ones for integers, and floats between 0.5 and 1.5."""
    if column.kind == "sparse":
        return SparseRows.empty(column.dtype, column.num_elements, num_rows=num_rows)
    shape, dtype = (num_rows, *(column.row_shape or ())), np.dtype(column.row_dtype)
    if not np.issubdtype(dtype, np.floating):
        return np.ones(shape, dtype)
    return (0.5 + np.random.default_rng(0).random(shape)).astype(dtype)


# Messages of torch and Python about shapes, dtypes and arguments that do not fit on any machine. Other errors of
# `forward` may depend on the machine (a GPU, a file, a rank) or on the values of the rows.
_CERTAIN = re.compile(
    r"shapes cannot be multiplied|size mismatch|must match the size of tensor|must match except in dimension|is invalid for input"
    r" of size|must be equal to input_size|should contain \d+ elements|not broadcastable|[Ee]xpected .*(channels|input\[|[0-9]D |dimension|size)|to have the same dtype|must have the same"
    r" dtype|scalar type|[Dd]imension out of range|positional argument|unexpected keyword argument"
)


def failure_on_zeros(fitted: TrainedState) -> str:
    """Try a trained module on two rows of zeros, and return its error in parentheses, or "".

    The parentheses are for a message.
    """
    try:
        outputs_of(
            forward(
                light_copy(fitted.module),
                fitted.inputs,
                {c.name: zeros(c) for c in fitted.columns},
            )
        )
    except Exception as e:  # noqa: BLE001 - of the user's module
        return f" (on zeros: {type(e).__name__}: {str(e)[:500]})"
    return ""


def _is_certain(error: Exception) -> bool:
    """Check whether a `forward` that failed on the driver would certainly fail on a rank too."""
    kinds = (RuntimeError, TypeError, ValueError, IndexError)
    return type(error) in kinds and _CERTAIN.search(str(error)) is not None


def output_widths(
    model: nn.Module, inputs: InputBinding, columns: Sequence[Column], precision: str = "32"
) -> tuple[int, ...] | None:
    """Find the number of elements per row of every output.

    Arguments and errors are the same as for `trial_outputs`.
    """
    outputs = trial_outputs(model, inputs, columns, precision=precision)
    return None if outputs is None else widths_of(outputs)


def trial_outputs(
    model: nn.Module,
    inputs: InputBinding,
    columns: Sequence[Column],
    examples: Columns | None = None,
    labels: Sequence[str] = (),
    precision: str = "32",
    batch_size: int = 2,
) -> tuple[Tensor, ...] | None:
    """Run a model on made-up rows and return its outputs, or return None if it failed but may accept real rows.

    Args:
        model: in the mode of the trial.
        inputs: binding of columns to arguments of the model.
        columns: feature columns with their shapes.
        examples: collated columns, for two rows.
        labels: names of the label columns; the names of a dict of outputs may contradict them.
        precision: the Param.
        batch_size: of the training, which may be the only number of rows that the model accepts.

    Raises:
        InvalidArgumentError: shapes, dtypes or arguments cannot fit for any values, or an output does not have one
            entry per row.
    """
    collated = dict(examples or {})
    failed: list[Exception] = []
    for num_rows, make in (
        (2, zeros),
        (2, functools.partial(_various, num_rows=2)),
        (batch_size, functools.partial(_various, num_rows=batch_size)),
    ):
        if collated and num_rows != 2:
            continue
        rows = {c.name: make(c) for c in columns} | collated
        try:
            result = forward(model, inputs, rows, precision=precision)
        except Exception as e:
            if type(e) is InvalidArgumentError:
                raise
            failed.append(e)
            continue
        _check_names(result, labels)
        return _checked_outputs(result, num_rows)
    first = failed[0]
    if not all(map(_is_certain, failed)) or str(first) != str(failed[1]):
        return None
    shapes = listed(f"{c.name} {(2, *(c.row_shape or ()))}" for c in columns)
    raise InvalidArgumentError(
        f"model: forward failed on two rows of zeros ({shapes}; {inputs.describe()}): {type(first).__name__}: {first}"
        + _hint(inputs, first)
    ) from first


def forward(
    model: nn.Module,
    inputs: InputBinding,
    rows: Columns,
    move: Mover | None = None,
    precision: str = "32",
) -> Any:
    """Run a model without gradients on a batch of columns and return its result.

    Args:
        model: in the mode of the call.
        inputs: binding of columns to arguments of the model.
        rows: the columns.
        move: moves the arguments to the model's device.
        precision: the Param.
    """
    arguments, keywords = inputs.apply(rows)
    if move is not None:
        arguments, keywords = move((arguments, keywords))
    device = torch.device("cpu") if move is None else move.device
    with torch.no_grad(), autocast(precision, device):
        return model(*arguments, **keywords)


class OrderError(InvalidArgumentError):
    """Raised if the outputs have the labels' names in another order."""


def _check_names(result: object, labels: Sequence[str]) -> None:
    if isinstance(result, dict) and [*result] != [*labels] and {*result} == {*labels}:
        raise OrderError(
            f"model: forward returned the outputs {listed(map(repr, result))}, but label_cols are {listed(map(repr, labels))}. "
            "Outputs and labels are matched by their order, so give both in the same order."
        )


def _checked_outputs(result: object, num_rows: int) -> tuple[Tensor, ...]:
    outputs = widened(outputs_of(result))
    for output in outputs:
        if output.ndim == 0 or len(output) != num_rows:
            count = "two" if num_rows == 2 else num_rows
            raise InvalidArgumentError(
                f"model: forward returned shape {tuple(output.shape)} for {count} rows. An output must have one entry "
                "per row."
            )
    return outputs


def fitted_widths(widths: Sequence[int], labels: Sequence[str]) -> tuple[int, ...]:
    """Require one output per label.

    Raises:
        InvalidArgumentError: the numbers differ.
    """
    if len(widths) != len(labels):
        raise InvalidArgumentError(
            f"model: forward returned {len(widths)} outputs, but label_cols has {len(labels)} columns "
            f"({listed(map(repr, labels))}). Return one tensor per label column, in the same order."
        )
    return tuple(widths)
