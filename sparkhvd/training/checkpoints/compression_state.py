"""What `Compression.powersgd` remembers between steps, in checkpoints.

Q and the number of steps are alike on all ranks. The errors are each rank's own, between epochs too, and as large as
the gradients: rank 0 gathers them for the file, and deals them out again where a run goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import sparkhvd.torch as hvd
from sparkhvd.torch.gradients.powersgd import PowerSGD

__all__ = ["gather_compression", "load_compression"]


def gather_compression(compression: Any) -> dict[str, Any]:
    """The state of a compression for a checkpoint; all ranks must call it.

    Returns:
        On rank 0 "alike", by parameter steps and q, and "errors", by parameter a tensor with one row per rank. On
        other ranks, and where the compression has no memory, an empty dict. The tensors are copies.

    Cost: every rank sends its errors to rank 0, one parameter after another.
    """
    if not isinstance(compression, PowerSGD):
        return {}
    states = compression.state_dict()
    alike = {
        n: {"steps": s["steps"], "q": s["q"].detach().to("cpu", copy=True)}
        for n, s in states.items()
    }
    errors = {n: _gather(n, s["error"]) for n, s in states.items() if s["error"] is not None}
    return {"alike": alike, "errors": errors} if hvd.rank() == 0 else {}


def load_compression(
    compression: Any, state: Mapping[str, Any], device: torch.device | None = None
) -> None:
    """Go on from what `gather_compression` gave rank 0, before the optimizer is built; all ranks must call it.

    Args:
        compression: of this rank.
        state: rank 0's counts; an empty one changes nothing.
        device: where the gradients are; None means on the CPU.
    """
    if not isinstance(compression, PowerSGD):
        return
    said = None
    if hvd.rank() == 0 and state:
        shapes = {n: (e.shape[1:], e.dtype) for n, e in state["errors"].items()}
        said = (state["alike"], shapes)
    said = hvd.broadcast_object(said, 0, name="compression")
    if said is None:
        return
    alike, shapes = said
    errors = {
        name: _deal(name, shape, dtype, state["errors"][name] if hvd.rank() == 0 else None)
        for name, (shape, dtype) in shapes.items()
    }
    compression.load_state_dict(
        {
            n: {
                "steps": s["steps"],
                "q": s["q"].to(device),
                "error": e if e is None else e.to(device),
            }
            for n, s in alike.items()
            for e in [errors.get(n)]
        }
    )


def _gather(name: str, mine: Tensor) -> Tensor:
    """On rank 0 (ranks, *shape), on the CPU; elsewhere without rows."""
    mine = mine.cpu()
    splits = [mine.numel(), *[0] * (hvd.size() - 1)]
    received, _ = hvd.alltoall(mine.reshape(-1), splits, name=f"compression.{name}")
    return received.reshape(-1, *mine.shape)


def _deal(name: str, shape: torch.Size, dtype: torch.dtype, rows: Tensor | None) -> Tensor:
    """This rank's row of what rank 0 has."""
    sent = torch.empty(0, dtype=dtype) if rows is None else rows.reshape(-1)
    each = 0 if rows is None else shape.numel()
    received, _ = hvd.alltoall(sent, [each] * hvd.size(), name=f"compression.{name}")
    return received.reshape(shape)
