"""Meaning of a model's outputs, decided by its loss: classes, probabilities or values."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - everyone's name

from sparkhvd.errors import InvalidArgumentError

__all__ = [
    "IDENTITY",
    "LINKS",
    "SIGMOID",
    "SOFTMAX",
    "link_of",
    "outputs_of",
    "prediction",
    "probability",
    "raw",
    "rows",
]

# How probabilities follow from outputs.
SOFTMAX, SIGMOID, IDENTITY = "softmax", "sigmoid", "identity"
LINKS = (SOFTMAX, SIGMOID, IDENTITY)


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
    if isinstance(loss, nn.CrossEntropyLoss) or loss is F.cross_entropy:
        return SOFTMAX
    if isinstance(loss, nn.BCEWithLogitsLoss) or loss is F.binary_cross_entropy_with_logits:
        return SIGMOID
    return IDENTITY


def rows(output: Tensor) -> Tensor:
    """Reshape an output to (rows, elements)."""
    return output.reshape(len(output), -1)


def prediction(link: str, output: Tensor) -> Tensor:
    """Return the class of each row, or the value of an output with one element per row."""
    flat = rows(output)
    if flat.shape[1] > 1:
        return flat.argmax(dim=1)
    value = flat[:, 0]
    return (value > 0) if link == SIGMOID else value  # sigmoid(x) > 0.5 exactly where x > 0


def probability(link: str, output: Tensor) -> Tensor | None:
    """Return probabilities (rows, classes), or None where the loss has none. One logit gives both classes, as Spark ML does."""
    flat = rows(output)
    if link == SOFTMAX:
        return torch.softmax(flat, dim=1)
    if link == SIGMOID:
        positive = torch.sigmoid(flat)
        return torch.cat([1 - positive, positive], dim=1) if flat.shape[1] == 1 else positive
    return None


def raw(link: str, output: Tensor) -> Tensor:
    """Return the output itself as (rows, elements). One logit z gives (-z, z), so that Spark's evaluators can rank by it."""
    flat = rows(output)
    return torch.cat([-flat, flat], dim=1) if link == SIGMOID and flat.shape[1] == 1 else flat
