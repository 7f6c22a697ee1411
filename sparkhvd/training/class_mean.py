"""Cross-entropy and NLL: their mean counts the rows that are not ignored, by the weights of their classes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - everyone's name

__all__ = ["ClassMean"]

_FUNCTIONS = (F.cross_entropy, F.nll_loss)
# The default of torch; rows that have it are ignored although nobody asked for it.
_IGNORED = -100


@dataclass(frozen=True)
class ClassMean:
    """A loss that is a mean over classes of rows, so that it can say what it counts.

    Attributes:
        loss: as the user gave it.
        ignore_index: the label of rows that it leaves out.
        weight: of each class, or None.
    """

    loss: Any
    ignore_index: int
    weight: Tensor | None

    def __call__(self, output: Tensor, label: Tensor) -> Any:
        """What the loss gives."""
        return self.loss(output, label)

    @classmethod
    def of(cls, loss: Any) -> ClassMean | None:
        """The loss as one of this kind; None if it is another: also where it adds rows up."""
        if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)):
            given = {n: getattr(loss, n) for n in ("reduction", "ignore_index", "weight")}
        elif any(loss is function for function in _FUNCTIONS):
            given = {}
        elif isinstance(loss, functools.partial) and loss.func in _FUNCTIONS and not loss.args:
            given = loss.keywords
        else:
            return None
        if given.get("reduction", "mean") != "mean":
            return None
        return cls(loss, given.get("ignore_index", _IGNORED), given.get("weight"))

    def count(self, label: Tensor) -> float | None:
        """What the mean over these labels counts; None if rows: labels that are probabilities of classes."""
        if label.is_floating_point():
            return None
        is_counted = label != self.ignore_index
        if self.weight is None:
            return float(torch.count_nonzero(is_counted))
        # The loss itself says which class does not exist.
        classes = label[is_counted].long().clamp(0, len(self.weight) - 1)
        return float(self.weight[classes.to(self.weight.device)].sum())
