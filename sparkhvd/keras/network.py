"""Keras model as a torch module, with its configuration and its variables in its pickle.

So any process can load the pickle. Imports no pyspark, which ranks and services need not have.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparkhvd.errors import InvalidArgumentError, listed
from sparkhvd.keras.backend import keras
from sparkhvd.wire import read_json


class Network(nn.Module):
    """Module around a built Keras model: maps a tensor for each feature column to the outputs of inference.

    Attributes:
        model: of Keras; not a submodule, whose parameters are its variables.
        variables: of the model, in Keras' order.
    """

    model: Any

    def __init__(self, model: Any, custom_objects: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        own = {
            type(each).__name__: type(each)
            for each in model._flatten_layers()
            if isinstance(each, keras.Layer) and not type(each).__module__.startswith("keras.")
        }
        vars(self).update(model=model, custom_objects={**own, **(custom_objects or {})})
        self.variables = nn.ParameterList([variable.value for variable in model.variables])

    def forward(self, *columns: Tensor) -> Any:
        """Compute the model's output, or a tuple of outputs.

        Args:
            columns: (rows, *shape) each, in the order of the model's inputs.
        """
        is_on_gpu = any(each.is_cuda for each in self.variables)
        with keras.device("gpu" if is_on_gpu else "cpu"):
            found = self.model(arranged(self.model, columns), training=False)
        if isinstance(found, Mapping):
            found = tuple(found.values())
        return tuple(found) if isinstance(found, (list, tuple)) else found

    def __reduce__(self) -> tuple[Any, ...]:
        config = keras.saving.serialize_keras_object(self.model)
        whole = json.dumps(config)
        # Custom objects registered by a script are registered only in its process.
        registered = {
            name: value
            for name, value in keras.saving.get_custom_objects().items()
            if json.dumps(name) in whole
        }
        custom_objects = {**registered, **vars(self)["custom_objects"]}
        config.pop("compile_config", None)  # a worker needs no optimizer
        return _rebuild, (json.dumps(config), custom_objects, list(self.variables))


class CompiledNetwork(Network):
    """Module with the compile configuration in its pickle too, for a saved estimator."""

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, arguments = super().__reduce__()
        compiled = self.model.get_compile_config() if self.model.compiled else None
        return _rebuild_compiled, (rebuild, arguments, compiled)


def _rebuild_compiled(
    rebuild: Callable[..., Network], arguments: tuple[Any, ...], compiled: dict[str, Any] | None
) -> Network:
    network = rebuild(*arguments)
    if compiled is not None:
        with keras.saving.custom_object_scope(vars(network)["custom_objects"]):
            network.model.compile_from_config(compiled)
    return network


def _rebuild(text: str, custom_objects: Mapping[str, Any], values: Sequence[Tensor]) -> Network:
    with keras.device("cpu"):
        model = keras.saving.deserialize_keras_object(
            read_json(text), custom_objects=dict(custom_objects), safe_mode=False
        )
    variables = model.variables
    if [tuple(v.shape) for v in variables] != [tuple(each.shape) for each in values]:
        raise InvalidArgumentError(
            f"The configuration of {type(model).__name__} gives a model with {len(variables)} variables, but the saved model has {len(values)}, or "
            "their shapes differ. Let get_config() and build() of the model make all variables."
        )
    with torch.no_grad():
        for variable, value in zip(variables, values, strict=True):
            variable.value.copy_(value)
    return Network(model, custom_objects)


def arranged(model: Any, columns: Sequence[Tensor]) -> Any:
    """Arrange feature columns as the model's inputs: one each, or all joined for a single input.

    Raises:
        InvalidArgumentError: the model has another number of inputs.
    """
    inputs = getattr(model, "inputs", None)
    if not inputs:  # a user class without declared inputs
        return columns[0] if len(columns) == 1 else list(columns)
    if len(inputs) == 1 and len(columns) > 1:
        columns = [
            torch.cat([each.flatten(1) if each.ndim > 1 else each[:, None] for each in columns], 1)
        ]
    if len(inputs) != len(columns):
        raise InvalidArgumentError(
            f"The model has {len(inputs)} inputs ({listed(each.name for each in inputs)}), but there are {len(columns)} feature columns. Give "
            "one column per input, in the same order; a model with one input gets all columns joined."
        )
    shaped = [_shaped(each, wanted.shape[1:]) for each, wanted in zip(columns, inputs, strict=True)]
    structure = getattr(model, "input", None)  # missing in a Sequential
    if isinstance(structure, Mapping):
        return dict(zip(structure, shaped, strict=True))
    return shaped if isinstance(structure, (list, tuple)) else shaped[0]


def _shaped(column: Tensor, shape: Sequence[int | None]) -> Tensor:
    """Reshape a column to an input's row shape if all its lengths are known."""
    lengths = [length for length in shape if length is not None]
    return column if len(lengths) < len(shape) else column.reshape(len(column), *lengths)
