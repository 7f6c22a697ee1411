"""Meaning of a model's output, told by Keras' loss: what Spark ML's columns of `transform` are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparkhvd.data.columns import heads
from sparkhvd.keras.backend import keras

__all__ = ["link_of"]

# Names of Keras' functions by what their outputs are; of classes, where the loss gets logits.
_CLASSES = {
    "sparse_categorical_crossentropy": heads.SOFTMAX,
    "categorical_crossentropy": heads.SOFTMAX,
    "categorical_focal_crossentropy": heads.SOFTMAX,
    "binary_crossentropy": heads.SIGMOID,
    "binary_focal_crossentropy": heads.SIGMOID,
}
_VALUES = ("mean_squared_error", "mean_absolute_error", "huber", "log_cosh")


def link_of(loss: Any, shape: Sequence[int | None]) -> str:
    """Return the link from outputs to probabilities for a model that was trained with this loss; the identity where it tells none.

    Args:
        loss: as of `compile`: a loss, its name, or several of them.
        shape: of the model's output, with the rows. One with more axes, as of a sequence, has several classes in a row.
    """
    if isinstance(loss, (list, tuple)) and len(loss) == 1:
        return link_of(loss[0], shape)
    if loss is None or isinstance(loss, (list, tuple, Mapping)):
        return heads.IDENTITY
    if isinstance(loss, str):
        try:
            loss = keras.losses.get(loss)
        except ValueError:  # a custom object's name
            return heads.IDENTITY
    function = getattr(loss, "fn", loss)  # of a class of Keras
    name = getattr(function, "__name__", "")
    if getattr(keras.losses, name, None) is not function:
        return heads.IDENTITY
    if name in _VALUES:
        return heads.VALUE
    found = _CLASSES.get(name, heads.IDENTITY)
    is_one = found == heads.SIGMOID
    # Several binary outputs are several labels of a row.
    if len(shape) != 2 or shape[1] is None or (shape[1] == 1) != is_one:
        return heads.IDENTITY
    has_logits = bool(getattr(loss, "_fn_kwargs", {}).get("from_logits"))
    return found if found == heads.IDENTITY or has_logits else heads.PROBABILITY
