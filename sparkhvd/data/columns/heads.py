"""Meaning of a model's outputs, decided by its loss: classes, probabilities or values."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - everyone's name

from sparkhvd.errors import InvalidArgumentError

__all__ = [
    "IDENTITY",
    "LINKS",
    "PROBABILITY",
    "SIGMOID",
    "SOFTMAX",
    "VALUE",
    "WITH_PROBABILITY",
    "both_classes",
    "known_kinds",
    "link_of",
    "most_likely",
    "num_classes",
    "outputs_of",
    "prediction",
    "probability",
    "raw",
    "rows",
]

# How probabilities follow from outputs; that the output is the probabilities, as models of Keras have it; the value itself; that nothing is known.
SOFTMAX, SIGMOID, PROBABILITY, VALUE, IDENTITY = (
    "softmax",
    "sigmoid",
    "probability",
    "value",
    "identity",
)
LINKS = (SOFTMAX, SIGMOID, PROBABILITY, VALUE, IDENTITY)
WITH_PROBABILITY = (SOFTMAX, SIGMOID, PROBABILITY)

# Losses of torch by the link that they tell. NLL takes logarithms of probabilities, whose softmax is the probabilities.
_CLASSES = {
    SOFTMAX: (nn.CrossEntropyLoss, nn.NLLLoss),
    SIGMOID: (nn.BCEWithLogitsLoss,),
    VALUE: (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss),
}
_FUNCTIONS = {
    SOFTMAX: (F.cross_entropy, F.nll_loss),
    SIGMOID: (F.binary_cross_entropy_with_logits,),
    VALUE: (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss),
}


def outputs_of(result: object) -> tuple[Tensor, ...]:
    """Return the outputs of a model as a tuple of tensors.

    Raises:
        InvalidArgumentError: they are something else.
    """
    outputs = (result,) if isinstance(result, Tensor) else result
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    if not isinstance(outputs, (tuple, list)) or not all(isinstance(o, Tensor) for o in outputs):
        raise InvalidArgumentError(
            f"model.forward returned {type(result).__name__}; it must return one tensor, or a tuple with one "
            "tensor per label column."
        )
    return tuple(outputs)


def link_of(loss: object) -> str:
    """Return the link from outputs to probabilities for a model that was trained with this loss."""
    while isinstance(loss, functools.partial):
        loss = loss.func
    for link, classes in _CLASSES.items():
        if isinstance(loss, classes) or any(loss is each for each in _FUNCTIONS[link]):
            return link
    return IDENTITY


def known_kinds(link: str, width: int) -> tuple[str, ...]:
    """List the columns that follow from the only output of a model, with `width` elements per row: "raw", "probability", "prediction"."""
    if (link == SOFTMAX and width > 1) or (link == SIGMOID and width == 1) or link == PROBABILITY:
        return ("raw", "probability", "prediction")
    return ("prediction",) if link == VALUE and width == 1 else ()


def num_classes(link: str, width: int) -> int:
    """Return the number of classes of which `prediction` is one; 0 if it is a value."""
    return width if width > 1 else 2 * (link in (SIGMOID, PROBABILITY))


def rows(output: Tensor) -> Tensor:
    """Reshape an output to (rows, elements)."""
    return output.reshape(output.shape[0], -1)


def prediction(link: str, output: Tensor) -> Tensor:
    """Return the class of each row, or the value of an output with one element per row."""
    flat = rows(output)
    if flat.shape[1] > 1:
        return flat.argmax(dim=1)
    value = flat[:, 0]
    if link == PROBABILITY:
        return value > 0.5
    return (value > 0) if link == SIGMOID else value  # sigmoid(x) > 0.5 exactly where x > 0


def probability(link: str, output: Tensor) -> Tensor | None:
    """Return probabilities (rows, classes), or None where the loss has none. One logit gives both classes, as Spark ML does."""
    flat = rows(output)
    if link == SOFTMAX:
        return torch.softmax(flat, dim=1)
    if link == SIGMOID:
        return both_classes(torch.sigmoid(flat))
    return both_classes(flat) if link == PROBABILITY else None


def both_classes(positive: Tensor) -> Tensor:
    """Complete the probability of class 1 to those of both classes; keep several."""
    return torch.cat([1 - positive, positive], dim=1) if positive.shape[1] == 1 else positive


def most_likely(probability: Tensor, thresholds: Sequence[float]) -> Tensor:
    """Return the class of each row with the largest probability / threshold, as Spark ML does.

    Raises:
        InvalidArgumentError: there is not one threshold per class.
    """
    num_classes = probability.shape[1]
    if len(thresholds) != num_classes:
        raise InvalidArgumentError(
            f"thresholds has {len(thresholds)} numbers and the model {num_classes} classes. Give one per class."
        )
    ratio = probability.double() / probability.new_tensor(thresholds, dtype=torch.float64)
    # A class without probability is not chosen, whatever its threshold: 0 / 0.
    return ratio.masked_fill(ratio.isnan(), -math.inf).argmax(dim=1)


def raw(link: str, output: Tensor) -> Tensor:
    """Return the output itself as (rows, elements).

    Spark's evaluators rank two classes by the second element alone: one logit z gives (-z, z), and two less their mean.
    """
    flat = rows(output)
    if link == SIGMOID and flat.shape[1] == 1:
        return torch.cat([-flat, flat], dim=1)
    if link == PROBABILITY:
        return both_classes(flat)
    return flat - flat.mean(dim=1, keepdim=True) if link == SOFTMAX and flat.shape[1] == 2 else flat
