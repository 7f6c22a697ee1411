"""Means of cross-entropy and NLL: over rows that are not ignored, by the weights of their classes."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - everyone's name

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.training.types import Loss

__all__ = ["ClassMean"]

_FUNCTIONS = (F.cross_entropy, F.nll_loss)
# The default of torch; rows with this label are ignored unless the user sets another.
_IGNORED = -100


@dataclass(frozen=True)
class ClassMean:
    """A loss that is a weighted mean over classes of rows, with its denominator.

    Attributes:
        loss: the user's.
        ignore_index: the label of rows that it leaves out.
        weight: of each class, or None.
    """

    loss: Loss
    ignore_index: int
    weight: Tensor | None

    def __call__(self, output: Tensor, label: Tensor) -> object:
        """Call the loss.

        Raises:
            InvalidArgumentError: a label is none of the output's classes; not on a GPU, where torch ends the process.
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
        """Wrap a mean of cross-entropy or NLL; None for another loss, and for sums."""
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
        """Return the denominator of the mean over these labels; None for probabilities of classes, whose mean counts rows."""
        if label.is_floating_point():
            return None
        is_counted = label != self.ignore_index
        if self.weight is None:
            return float(torch.count_nonzero(is_counted))
        # The loss itself says which class does not exist.
        classes = label[is_counted].long().clamp(0, len(self.weight) - 1)
        return float(self.weight[classes.to(self.weight.device)].sum())
