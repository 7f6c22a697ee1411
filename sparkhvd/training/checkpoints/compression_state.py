"""State of `Compression.powersgd` in checkpoints.

Q and the number of steps are alike on all ranks. The errors are each rank's own, between epochs too, and as large as
the gradients: rank 0 gathers them for the file, and scatters them when a run resumes.
"""

from __future__ import annotations

from typing import TypedDict, cast

import torch
from torch import Tensor

import sparkhvd.torch as hvd
from sparkhvd.torch.gradients.powersgd import PowerSGD
from sparkhvd.training.types import Compression, State

__all__ = ["gather_compression", "load_compression"]


class _Alike(TypedDict):
    """State of a parameter that all ranks share."""

    steps: int
    q: Tensor


class _Gathered(TypedDict):
    """State of all ranks by parameter; an error has one row per rank."""

    alike: dict[str, _Alike]
    errors: dict[str, Tensor]


def gather_compression(compression: Compression | None) -> State:
    """Gather the state of a compression for a checkpoint; all ranks must call it.

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
    compression: Compression, state: State, device: torch.device | None = None
) -> None:
    """Continue from rank 0's result of `gather_compression`, before the optimizer is built; all ranks must call it.

    Args:
        compression: of this rank.
        state: rank 0's counts; an empty one changes nothing.
        device: of the gradients; None means the CPU.
    """
    if not isinstance(compression, PowerSGD):
        return
    gathered = cast("_Gathered", state) if hvd.rank() == 0 and state else None
    header = None
    if gathered is not None:
        shapes = {n: (e.shape[1:], e.dtype) for n, e in gathered["errors"].items()}
        header = (gathered["alike"], shapes)
    header = hvd.broadcast_object(header, 0, name="compression")
    if header is None:
        return
    alike, shapes = header
    errors = {
        name: _scatter(name, shape, dtype, None if gathered is None else gathered["errors"][name])
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


def _gather(name: str, error: Tensor) -> Tensor:
    """Gather (ranks, *shape) on rank 0, on the CPU; elsewhere without rows."""
    error = error.cpu()
    splits = [error.numel(), *[0] * (hvd.size() - 1)]
    received, _ = hvd.alltoall(error.reshape(-1), splits, name=f"compression.{name}")
    return received.reshape(-1, *error.shape)


def _scatter(name: str, shape: torch.Size, dtype: torch.dtype, rows: Tensor | None) -> Tensor:
    """Receive this rank's row of rank 0's tensor."""
    sent = torch.empty(0, dtype=dtype) if rows is None else rows.reshape(-1)
    each = 0 if rows is None else shape.numel()
    received, _ = hvd.alltoall(sent, [each] * hvd.size(), name=f"compression.{name}")
    return received.reshape(shape)
