"""From columns to the arguments of `forward`, and from label columns to what the loss compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from sparkhvd.estimator.schema import DataSchema

__all__ = ["Argument", "InputBinding", "LabelBinding", "bind_inputs", "bind_labels", "model_dtype"]


@dataclass(frozen=True)
class Argument:
    """One tensor argument of `forward`.

    Attributes:
        name: keyword, or None for a positional argument.
        columns: names of the columns, joined in this order.
        dtype: torch name of the tensor's dtype.
        shape: shape of one row (may hold one -1); None means joined to one axis if `is_joined`, else the column's.
        is_joined: the columns become one (B, sum of widths) tensor.
    """

    name: str | None
    columns: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...] | None
    is_joined: bool


@dataclass(frozen=True)
class InputBinding:
    """Which columns become which argument of the model; picklable."""

    arguments: tuple[Argument, ...]

    def apply(
        self, batch: Mapping[str, npt.NDArray[Any]]
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        """The positional and keyword arguments of `forward` for a batch of columns (B, *shape)."""
        raise NotImplementedError

    def describe(self) -> str:
        """The binding in words, for error messages: "x = features (float32)"."""
        raise NotImplementedError


@dataclass(frozen=True)
class LabelBinding:
    """How label columns become tensors and meet the outputs of the model; picklable."""

    columns: tuple[str, ...]
    dtypes: tuple[str, ...]
    kinds: tuple[str, ...]

    def apply(self, batch: Mapping[str, npt.NDArray[Any]]) -> tuple[torch.Tensor, ...]:
        """One tensor per label column: (B,) for scalars, (B, w) for arrays."""
        raise NotImplementedError

    def match(
        self, outputs: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """The labels with the shape and dtype that the loss needs for these outputs.

        Call it at every step, before the loss: it is a check of shapes and, mostly, a view.

        Raises:
            InvalidArgumentError: outputs and labels differ in number, or a label cannot meet its output without
                broadcasting; both shapes are shown.
        """
        raise NotImplementedError


def model_dtype(model: torch.nn.Module) -> str:
    """Name of the dtype of the model's first floating parameter, else torch's default: "float32"."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return str(parameter.dtype).removeprefix("torch.")
    return str(torch.get_default_dtype()).removeprefix("torch.")


def bind_inputs(
    model: torch.nn.Module,
    schema: DataSchema,
    *,
    input_shapes: Sequence[Sequence[int]] | Mapping[str, Sequence[int]] | None = None,
    inputs: Mapping[str, str | Sequence[str]] | None = None,
) -> InputBinding:
    """Decide which feature columns become which argument of `model.forward`; works before materialization."""
    raise NotImplementedError


def bind_labels(
    schema: DataSchema, loss: Callable[..., Any] | Sequence[Callable[..., Any]]
) -> LabelBinding:
    """Decide the dtype of every label from its column and its loss (one loss for all, or one per label)."""
    raise NotImplementedError


def check_output_shapes(
    binding: LabelBinding, outputs: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]
) -> None:
    """Raise InvalidArgumentError if the outputs of the first batch cannot meet the labels."""
    binding.match(outputs, labels)
