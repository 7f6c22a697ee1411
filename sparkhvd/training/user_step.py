"""`train_step` and `validation_step`: the user's own forward and loss inside our loop.

    def train_step(model, batch, ctx):
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        ctx.log("perplexity", loss.exp())
        return loss

The function returns the mean loss over this rank's rows, or (mean, weight) if its denominator is not the rows. The loop scales it
by the rank's share of the global batch, calls `backward` and steps. A rank without rows in a step does not call the function.
"""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, SupportsFloat

import numpy as np
import torch
from torch import Tensor, nn

from sparkhvd.data.columns.binding import Argument, label_arguments
from sparkhvd.data.columns.schema import DataSchema, stored_dtype
from sparkhvd.errors import CollectiveError, InvalidArgumentError, listed
from sparkhvd.training.metrics import Forward, Logs
from sparkhvd.training.modules.lookups import is_lookup, naming_lookups
from sparkhvd.training.to_device import moved
from sparkhvd.training.types import Columns, TensorBatch
from sparkhvd.training.user_code.callbacks import Context, TrainingClock

if TYPE_CHECKING:  # an import at run time would be circular
    from sparkhvd.training.checkpoints.resume import TrainingState
    from sparkhvd.training.spec import TrainSpec


StepFunction = Callable[[nn.Module, TensorBatch, "StepContext"], object]


class StepFunctions(Protocol):
    """Attributes of `UserCode` used by this module: the user's step functions."""

    @property
    def train_step(self) -> StepFunction | None:
        """(model, batch, ctx) -> loss."""

    @property
    def validation_step(self) -> StepFunction | None:
        """(model, batch, ctx) -> loss."""


class StepContext(Context):
    """The `ctx` of `train_step` and `validation_step`: a `Context` for one batch of this rank.

    Attributes:
        num_rows: rows of the batch on this rank, at least 1.
    """

    def __init__(self, spec: TrainSpec, state: TrainingState, moment: TrainingClock) -> None:
        """Begin without rows. The loop sets the number of rows for each batch."""
        super().__init__(spec, state, moment)
        self.num_rows = 0
        self.logs = Logs()

    def log(self, name: str, value: SupportsFloat) -> None:
        """Log a mean over this rank's rows. The record of the epoch gets the mean over all rows.

        From `validation_step` the name in the record begins with `val_`.

        Raises:
            InvalidArgumentError: the name is taken, or the value is not one number.
        """
        self.logs.add(name, value, float(self.num_rows))


def model_loss(
    names: Sequence[str], model: nn.Module, batch: TensorBatch, ctx: StepContext
) -> Tensor:
    """Call a model with labels among its arguments, and return the model's own loss.

    Args:
        names: names of the arguments.
        model: the model; its `forward` returns the loss as `loss` of an object or dict, or as first or only number of a
            tuple.
        batch: batch of this rank.
        ctx: context with the number of rows.

    Raises:
        InvalidArgumentError: there is no loss.
    """
    keywords: dict[str, Any] = {}
    for name in names:
        made: Any = batch[name]
        # A column of texts may give several arguments.
        keywords.update(made if isinstance(made, Mapping) and name in made else {name: made})
    result = model(**keywords)
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if isinstance(result, tuple) and loss is None:
        loss = _loss_in(result, ctx.num_rows)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise InvalidArgumentError(
            f"loss is not given, so the model must compute it from its argument {', '.join(map(repr, label_arguments(model, names) or names))}, "
            f"but its forward returned {_kind(result)} without a loss. Give loss, or train_step."
        )
    return loss


class UserStep:
    """Calls the user's functions on the batches of this rank."""

    def __init__(
        self, spec: TrainSpec, schema: DataSchema, functions: StepFunctions, ctx: StepContext
    ) -> None:
        """Wrap the user's functions. `schema` describes the columns of the batches."""
        self.spec = spec
        self.schema = schema
        self.functions = functions
        self.ctx = ctx
        # Names of functions that were called before; the error of a function's first call describes the batch.
        self._called: set[str] = set()

    def takes(self, *, is_training: bool) -> bool:
        """Check whether the user has a function for this kind of step."""
        functions = self.functions
        return (functions.train_step if is_training else functions.validation_step) is not None

    def forward(  # noqa: D102
        self, model: nn.Module, columns: Columns, num_rows: int, *, is_training: bool
    ) -> Forward:
        """Run the user's function on at least one row.

        Raises:
            InvalidArgumentError: the function raised in its first call, or did not return a loss.
        """
        name = "train_step" if is_training else "validation_step"
        functions = self.functions
        function = functions.train_step if is_training else functions.validation_step
        assert function is not None
        if isinstance(function, functools.partial) and function.func is model_loss:
            name = "model.forward"
        batch = batch_tensors(self.spec, self.schema, columns, self.ctx.device)
        self.ctx.num_rows = num_rows
        with naming_lookups(self.ctx.model, columns):
            if name in self._called:
                return _outcome(name, function(model, batch, self.ctx), self.ctx.num_rows)
            result = _first_call(name, function, model, batch, self.ctx)
        outcome = _outcome(name, result, self.ctx.num_rows)
        if is_training:
            _check_first(model, outcome.loss)
        self._called.add(name)
        return outcome


def check_step_function(name: str, function: object) -> None:
    """Check a `train_step` or `validation_step` on the driver.

    Raises:
        InvalidArgumentError: the function cannot be called with (model, batch, ctx).
    """
    check_signature(name, function, ("model", "batch", "ctx"))


def check_signature(name: str, function: object, arguments: Sequence[str]) -> None:
    """Raise an InvalidArgumentError unless a function can be called with these positional arguments."""
    if not callable(function):
        raise InvalidArgumentError(f"{name} is {function!r:.100}; it must be a function.")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as e:
        raise InvalidArgumentError(f"{name} must take ({', '.join(arguments)}): {e}.") from e
    except ValueError:  # a C function without a signature
        return


def batch_tensors(
    spec: TrainSpec,
    schema: DataSchema,
    columns: Columns,
    device: torch.device,
    *,
    as_stored: bool = False,
) -> TensorBatch:
    """Make the batch for user code. `as_stored` leaves numbers in their stored types.

    With `inputs`, features are joined to arguments of `forward` and have the arguments' names. Otherwise they have the
    names of their columns, and the shape of `input_shapes` if given. Labels, sample weights and group numbers have the
    names of their columns: (B,) for scalar columns, (B, w) for arrays and vectors. Rows of a group have the same group
    number.
    """
    arguments, labels = _arguments(spec, schema), spec.labels
    if as_stored:
        stored = {c.name: c.dtype for c in schema.columns if not c.has_decoder}
        for name, a in arguments.items():
            if len(a.columns) == 1:
                arguments[name] = replace(a, dtype=stored.get(a.columns[0], a.dtype))
        pairs = zip(labels.columns, labels.dtypes, strict=True)
        labels = replace(labels, dtypes=tuple(stored.get(name, dtype) for name, dtype in pairs))
    batch = {name: a.tensor(columns) for name, a in arguments.items()}
    batch |= dict(zip(labels.columns, labels.apply(columns), strict=True))
    if spec.sample_weight is not None and (weights := sample_weights(spec, columns)) is not None:
        batch[spec.sample_weight] = weights
    # A transformation may have dropped the column.
    if spec.group is not None and spec.group in columns:
        batch[spec.group] = torch.from_numpy(columns[spec.group])
    # A collate function may have made a tuple or dict of a column.
    return {n: moved(v, device) for n, v in batch.items()}


def batch_dtypes(spec: TrainSpec, schema: DataSchema) -> dict[str, torch.dtype]:
    """Map the names of `batch_tensors` to their dtypes."""
    names = {name: a.dtype for name, a in _arguments(spec, schema).items()}
    names |= dict(zip(spec.labels.columns, spec.labels.dtypes, strict=True))
    if schema.sample_weight is not None:
        names[schema.sample_weight.name] = stored_dtype(schema.sample_weight.tensor_dtype)
    return {name: getattr(torch, dtype) for name, dtype in names.items()}


def _arguments(spec: TrainSpec, schema: DataSchema) -> dict[str, Argument]:
    arguments = spec.inputs.arguments
    if any(a.name is not None for a in arguments):
        return {str(a.name): a for a in arguments}
    bound = {a.columns[0]: a for a in arguments if len(a.columns) == 1}
    plain = {
        c.name: Argument(None, (c.name,), c.tensor_dtype, None, False, c.is_collated)
        for c in schema.features
    }
    return {**plain, **bound}


def sample_weights(spec: TrainSpec, columns: Columns) -> Tensor | None:
    """Select the sample weights of a batch on the CPU, or None without sample weights."""
    if spec.sample_weight is None:
        return None
    weights = columns[spec.sample_weight]
    assert isinstance(weights, np.ndarray)
    return torch.from_numpy(weights)


def _outcome(name: str, result: object, num_rows: int) -> Forward:
    """Check the result of a user's function: a loss, or (loss, weight)."""
    weight: float | None = None
    if isinstance(result, tuple) and len(result) == 2:
        weight = float(result[1])
        result = result[0]
    if not isinstance(result, Tensor) or result.numel() != 1:
        shape = f"shape {tuple(result.shape)}" if isinstance(result, Tensor) else _kind(result)
        raise InvalidArgumentError(
            f"{name} returned {shape}; it must return the loss: a tensor with one number, the mean over the rows of "
            "the batch. If the weight of the mean is not the number of rows, return the tuple (mean, weight)."
        )
    loss = result.reshape(())
    if weight is None:
        return Forward((), (), loss, float(num_rows), is_weighted=False, num_rows=num_rows)
    return Forward((), (), loss, weight, is_weighted=True, num_rows=num_rows)


def _check_first(model: nn.Module, loss: Tensor) -> None:
    if any(p.grad is not None and bool(p.grad.any()) for p in model.parameters()):
        raise InvalidArgumentError(
            "train_step called backward(). Only return the loss, because the loop calls backward() and step() for all ranks "
            "together. For a loop of your own use train_fn."
        )
    if not loss.requires_grad:
        raise InvalidArgumentError(
            "train_step returned a number that does not depend on the model's trainable parameters, so there is no "
            "gradient. Compute it without detach(), item() or torch.no_grad()."
        )


def _first_call(
    name: str, function: StepFunction, model: nn.Module, batch: TensorBatch, ctx: StepContext
) -> object:
    """Call a function for the first time, and describe the batch in errors.

    A loss that broadcasts raises an error.
    """
    try:
        with warnings.catch_warnings():
            # Torch only warns about a loss of (B, 1) and (B,), which would only learn the mean of the labels.
            warnings.filterwarnings("error", message="Using a target size")
            return function(model, batch, ctx)
    except (CollectiveError, InvalidArgumentError):
        raise
    except Exception as e:
        if isinstance(e, (IndexError, RuntimeError)) and is_lookup(e):
            raise  # `naming_lookups` gives a better message
        shapes = listed(
            f"{n} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for n, t in batch.items()
        )
        hint = ""
        if re.search(r"Long|Int|integer", str(e)) and "dtype" in str(e):
            hint = ". Whole numbers of a float column become classes by label_dtypes or feature_dtypes, {'<column>': 'int64'}"
        elif name == "model.forward" and (floats := _floating_labels(model, batch)):
            hint = f". If {floats} are classes, give feature_dtypes={{'<its column>': 'int64'}}"
        raise InvalidArgumentError(
            f"{name} raised {type(e).__name__}: {e} (batch: {shapes}){hint}"
        ) from e


def _loss_in(result: tuple[Any, ...], num_rows: int) -> object:
    """Find the loss in a tuple: the first entry if it is a number, otherwise the only number."""
    first = result[0]
    # A tensor with one element is a loss of any shape, unless it may be the output of a single row.
    if isinstance(first, Tensor) and first.numel() == 1 and (not first.dim() or num_rows > 1):
        return first
    numbers = [each for each in result if isinstance(each, Tensor) and not each.dim()]
    return numbers[0] if len(numbers) == 1 else first


def _floating_labels(model: nn.Module, batch: TensorBatch) -> str:
    names = label_arguments(model, batch)
    return ", ".join(
        repr(n) for n in names if isinstance(batch[n], Tensor) and batch[n].is_floating_point()
    )


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__
