"""Checks of the user's losses, one function per label, on the driver."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - everyone's name

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.training.types import Loss


def construct_losses(loss: object, constructors: object, model: nn.Module) -> object:
    """Make the losses with `loss_constructors`, or return the Param `loss` without constructors.

    The losses are one function, or a list with one per label. A constructor is called on the driver, with `model=` if
    it has this argument.

    Raises:
        InvalidArgumentError: both params are given, or a constructor is not a function or fails.
    """
    if constructors is None:
        return loss
    if loss is not None:
        raise InvalidArgumentError(
            "loss and loss_constructors are both given. Give only one of them."
        )
    entries = constructors if isinstance(constructors, (list, tuple)) else [constructors]
    made = [_construct(entry, model) for entry in entries]
    return made if len(made) > 1 else made[0]


def _construct(constructor: object, model: nn.Module) -> object:
    if not callable(constructor):
        raise InvalidArgumentError(
            f"loss_constructors holds {constructor!r:.200}; it must hold functions that return a loss."
        )
    try:
        return constructor(model=model) if _takes(constructor, "model") else constructor()
    except Exception as e:
        raise InvalidArgumentError(
            f"loss_constructors: calling {constructor!r:.100} failed: {type(e).__name__}: {e}. Give functions that can "
            "be called without arguments, or with model=."
        ) from e


def _takes(function: Callable[..., object], name: str) -> bool:
    """Check whether a function or a module's `forward` is known to have an argument `name`."""
    try:
        called = function.forward if isinstance(function, nn.Module) else function
        parameters = inspect.signature(called).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def resolve_losses(
    loss: object, num_labels: int, *, per_row: bool
) -> tuple[tuple[Loss, ...], tuple[bool, ...]]:
    """Resolve `loss` to one loss per label, and find out whether each loss sums over rows.

    Args:
        loss: a function or module, or a list with one per label.
        num_labels: number of label columns.
        per_row: True with sample weights, when every loss must return a value per row.

    Raises:
        InvalidArgumentError: a loss is missing, cannot be called, or cannot return a value per row; or the number of
            losses is not the number of labels.
    """
    if loss is None:
        raise InvalidArgumentError(
            "loss is required: give a function of (output, label), for example torch.nn.MSELoss()."
        )
    entries = list(loss) if isinstance(loss, (list, tuple)) else [loss] * num_labels
    if len(entries) != num_labels:
        raise InvalidArgumentError(
            f"loss has {len(entries)} entries, but label_cols has {num_labels}. Give one loss, or one loss per label."
        )
    losses = [_checked(entry, per_row=per_row) for entry in entries]
    if per_row:
        return tuple(_per_row(entry) for entry in losses), (False,) * num_labels
    is_sum = tuple(getattr(entry, "reduction", "") == "sum" for entry in losses)
    if any(is_sum) and not all(is_sum):
        raise InvalidArgumentError(
            "loss: some of the losses have reduction='sum' and some do not, so their values depend on the batch size "
            "in different ways. Give all losses the same reduction."
        )
    return tuple(ClassMean.of(entry) or entry for entry in losses), is_sum


def _checked(loss: object, *, per_row: bool) -> Loss:
    if isinstance(loss, type) or not callable(loss):
        hint = f" Give an instance: {loss.__name__}()." if isinstance(loss, type) else ""
        raise InvalidArgumentError(
            f"loss is {loss!r:.200}; it must be a function of (output, label).{hint}"
        )
    if isinstance(loss, nn.Module) and getattr(loss, "reduction", "") == "none" and not per_row:
        raise InvalidArgumentError(
            f"loss is {type(loss).__name__} with reduction='none', but a loss must return one number. Use "
            "reduction='mean'."
        )
    return loss


@dataclass(frozen=True)
class PerRow:
    """Calls a loss function with reduction="none", for one value per row."""

    function: Loss

    def __call__(self, output: Tensor, label: Tensor) -> object:
        """Compute a value per row."""
        return self.function(output, label, reduction="none")


def _per_row(loss: Loss) -> Loss:
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        changed = copy.copy(loss)
        changed.__dict__["reduction"] = "none"
        return changed
    if not _takes(loss, "reduction"):
        raise InvalidArgumentError(
            f"loss: sample_weight_col needs a loss that can return one value per row, but {loss!r:.100} has no "
            "argument 'reduction'. Give a torch.nn loss, or a function of (output, label, reduction)."
        )
    return PerRow(loss)


# ----------------------------------------------------------------------------------------------------
# Denominators of cross-entropy and NLL, which are means over the rows that are not ignored, weighted by class.

_FUNCTIONS = (F.cross_entropy, F.nll_loss)
# Torch's default of `ignore_index`: rows with this label are ignored.
_IGNORED = -100


@dataclass(frozen=True)
class ClassMean:
    """Mean loss over rows weighted by their classes, with the computation of its denominator.

    Attributes:
        loss: the user's loss.
        ignore_index: the label of ignored rows.
        weight: weight of each class, or None.
    """

    loss: Loss
    ignore_index: int
    weight: Tensor | None

    def __call__(self, output: Tensor, label: Tensor) -> object:
        """Compute the loss, and name the allowed labels if a label is invalid.

        Raises:
            InvalidArgumentError: a label is not a class of the output. (On a GPU torch ends the process instead.)
        """
        try:
            return self.loss(output, label)
        except IndexError as e:
            num_classes = output.shape[1] if output.ndim > 1 else output.shape[0]
            raise InvalidArgumentError(
                f"loss: {e} The model's output has {num_classes} classes per row, so labels must be whole numbers from 0 to "
                f"{num_classes - 1}. Give the last layer as many outputs as there are classes, or number the classes from 0."
            ) from e

    @classmethod
    def of(cls, loss: Loss) -> ClassMean | None:
        """Wrap a mean of cross-entropy or NLL, or return None for sums and other losses."""
        if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)):
            options = {n: getattr(loss, n) for n in ("reduction", "ignore_index", "weight")}
        elif any(loss is function for function in _FUNCTIONS):
            options = {}
        elif isinstance(loss, functools.partial) and loss.func in _FUNCTIONS and not loss.args:
            options = loss.keywords
        else:
            return None
        if options.get("reduction", "mean") != "mean":
            return None
        return cls(loss, options.get("ignore_index", _IGNORED), options.get("weight"))

    def count(self, label: Tensor) -> float | None:
        """Compute the denominator of the mean over labels, or return None for class probabilities.

        The mean over probabilities of classes counts all rows.
        """
        if label.is_floating_point():
            return None
        is_counted = label != self.ignore_index
        if self.weight is None:
            return float(torch.count_nonzero(is_counted))
        # Clamp labels that are not classes, because the loss itself reports them.
        classes = label[is_counted].long().clamp(0, len(self.weight) - 1)
        return float(self.weight[classes.to(self.weight.device)].sum())
