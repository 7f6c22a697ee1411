"""`KerasModel`: a trained Keras model as a Spark ML transformer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparkhvd.data.columns import labels
from sparkhvd.estimator import TorchModel
from sparkhvd.keras.backend import keras

# Models that earlier versions saved name the functions here.
from sparkhvd.keras.network import (
    Network,
    _rebuild,  # noqa: F401
    _rebuild_compiled,  # noqa: F401
)
from sparkhvd.training.modules.copies import copied


class KerasModel(TorchModel):
    """Trained Keras model. `transform` adds its outputs to a DataFrame, a column `<label>__output` for each label.

    `KerasEstimator.fit` and `load` return it; `load` reads classes and so needs `trust=True`.
    """

    def getModel(self) -> Any:  # noqa: N802 - Horovod's name
        """Return an uncompiled copy of the trained Keras model."""
        network = copied(self._require_fitted().module)
        assert isinstance(network, Network)
        return network.model

    def setModel(self, module: Any) -> Any:  # noqa: N802
        """Predict with a copy of another Keras model for the same columns.

        Returns this object.
        """
        return super().setModel(module if isinstance(module, Network) else Network(module))

    def getHistory(self) -> Any:  # noqa: N802
        """The metrics in the form of Keras' `History`: lists by name, with an element per epoch."""
        records = self._records()
        names = {name: None for record in records for name in record if name != "epoch"}
        return {name: [record[name] for record in records if name in record] for name in names}


# ----------------------------------------------------------------------------------------------------
# Meaning of a model's output, defined by Keras' loss, for Spark ML's columns of `transform`.

# Keras' loss functions by the meaning of their outputs; classes if the loss expects logits.
_CLASSES = {
    "sparse_categorical_crossentropy": labels.SOFTMAX,
    "categorical_crossentropy": labels.SOFTMAX,
    "categorical_focal_crossentropy": labels.SOFTMAX,
    "binary_crossentropy": labels.SIGMOID,
    "binary_focal_crossentropy": labels.SIGMOID,
}
_VALUES = ("mean_squared_error", "mean_absolute_error", "huber", "log_cosh")


def link_of(loss: Any, shape: Sequence[int | None]) -> str:
    """Find the link from outputs to probabilities for a model with this loss.

    It is identity if unknown.

    Args:
        loss: as of `compile`: a loss, its name, or several of them.
        shape: of the model's output, including rows. More axes, as of a sequence, mean several classes in a row.
    """
    if isinstance(loss, (list, tuple)) and len(loss) == 1:
        return link_of(loss[0], shape)
    if loss is None or isinstance(loss, (list, tuple, Mapping)):
        return labels.IDENTITY
    if isinstance(loss, str):
        try:
            loss = keras.losses.get(loss)
        except ValueError:  # a custom object's name
            return labels.IDENTITY
    function = getattr(loss, "fn", loss)  # of a class of Keras
    name = getattr(function, "__name__", "")
    if getattr(keras.losses, name, None) is not function:
        return labels.IDENTITY
    if name in _VALUES:
        return labels.VALUE
    found = _CLASSES.get(name, labels.IDENTITY)
    is_one = found == labels.SIGMOID
    # Several binary outputs are several labels of a row.
    if len(shape) != 2 or shape[1] is None or (shape[1] == 1) != is_one:
        return labels.IDENTITY
    has_logits = bool(getattr(loss, "_fn_kwargs", {}).get("from_logits"))
    return found if found == labels.IDENTITY or has_logits else labels.PROBABILITY
