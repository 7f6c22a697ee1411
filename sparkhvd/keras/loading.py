"""Models of Keras from files, with their optimizers distributed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

import sparkhvd.torch as hvd
from sparkhvd.keras.backend import keras
from sparkhvd.keras.optimizer import DistributedOptimizer

__all__ = ["load_model"]


def load_model(
    filepath: str | PathLike[str],
    custom_optimizers: Iterable[type[Any]] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = hvd.Compression.none,
) -> Any:
    """Load a saved model; the optimizer that it was compiled with goes on, with its state, as a `DistributedOptimizer`.

    Every rank must load it, or get its variables by `BroadcastGlobalVariablesCallback`. A model that was not compiled stays so.

    Args:
        filepath: a `.keras` or `.h5` file.
        custom_optimizers: classes of the user's own optimizers.
        custom_objects: other classes and functions by name.
        compression: of gradients.
    """
    own = {kind.__name__: kind for kind in custom_optimizers or ()}
    model = keras.saving.load_model(filepath, custom_objects={**own, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model
