"""Collectives on Keras values, and on the variables of a model."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.keras.backend import keras

# Keras' name of random number states.
SEED_NAME = "seed_generator_state"


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = hvd.Compression.none,
) -> Tensor:
    """Reduce a value over all ranks. Every rank must call it.

    Args:
        value: a number, an array, a tensor or a variable; of the same shape on every rank.
        name: by which ranks match calls.
        average: Horovod's older name of `op`.
        prescale_factor: multiplied with the value before the reduction.
        postscale_factor: multiplied with the result.
        op: Average (None), Sum, Min, Max, Product or Adasum.
        compression: on the wire.

    Raises:
        MismatchError: ranks disagree on the shape or the type.
    """
    return hvd.allreduce(
        _tensor(value),
        average=average,
        name=name,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )


def allgather(value: Any, name: str | None = None) -> Tensor:
    """Concatenate the values of all ranks along the first dimension. Every rank must call it."""
    return hvd.allgather(_tensor(value), name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Tensor:
    """Send rank `root_rank`'s value to every rank. Every rank must call it."""
    return hvd.broadcast(_tensor(value), root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: Any = hvd.Average) -> Tensor:
    """Reduce a value, and return this rank's part along the first dimension. Every rank must call it."""
    return hvd.reducescatter(_tensor(value), name=name, op=op)


def broadcast_global_variables(root_rank: int, model: Any = None) -> None:
    """Broadcast the variables of rank `root_rank`'s model in place: its weights, and its optimizer's if present.

    States of random numbers, such as those of `Dropout`, keep each rank's values.

    Args:
        root_rank: the rank with the values.
        model: a built Keras model. Keras 3 keeps no list of all variables, so it must be given.

    Raises:
        InvalidArgumentError: there is no model, or it is not built.
        MismatchError: ranks have other variables.
    """
    if not isinstance(model, keras.Model):
        raise InvalidArgumentError(
            f"broadcast_global_variables(root_rank={root_rank}, model={model!r:.100}): Keras 3 has no global variables. Give the "
            "model, or BroadcastGlobalVariablesCallback to its fit."
        )
    if not model.built:
        raise InvalidArgumentError(
            "broadcast_global_variables: the model is not built, so it has no variables yet. Call model.build(input_shape) before."
        )
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
    hvd.broadcast_parameters(
        [variable.value for variable in variables if variable.name != SEED_NAME], root_rank
    )


def _tensor(value: Any) -> Tensor:
    found: Tensor = keras.ops.convert_to_tensor(value)
    return found.detach()
