"""Shared types of training: records of epochs, states, columns, and the user's functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

# Import only for type checks, because workers of `transform` load this module and must not load `sparkhvd.torch`.
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch import Tensor
    from torch.optim.lr_scheduler import LRScheduler

    from sparkhvd.torch.compressors import Compressor


# A JSON value.
Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"
# Number or text in the record of an epoch.
Value: TypeAlias = "float | str | None"
Record: TypeAlias = "dict[str, Value]"
History: TypeAlias = "list[Record]"

# State in a checkpoint: dicts, lists, numbers, texts and tensors, interpreted by the class that made it.
State: TypeAlias = "dict[str, object]"

# Columns of a batch by name: arrays, `Ragged`, `SparseRows`, or values of a collate function.
Columns: TypeAlias = "Mapping[str, object]"
# Features, labels and weights by name, as passed to user code.
TensorBatch: TypeAlias = "dict[str, Tensor]"

# (output, label) -> one number, (mean, weight), or one value per row; checked at the call.
Loss: TypeAlias = "Callable[..., object]"
# An optimizer, several optimizers that step together, or a function of parameters that makes an optimizer or several.
MakeOptimizer: TypeAlias = (
    "torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Callable[..., object]"
)
# (optimizer) or (optimizer, total_steps=) -> scheduler.
MakeScheduler: TypeAlias = "Callable[..., LRScheduler]"
Compression: TypeAlias = "type[Compressor] | Compressor"


class Stateful(Protocol):
    """Object with a state in checkpoints."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...
