"""What each rank has of its own inside an epoch: random numbers, sums of the loss, running statistics.

Between epochs all ranks are alike. A checkpoint of a step holds these things for every rank, so that a run that
goes on from it draws the same numbers, reports the same means and normalizes with the same statistics.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import sparkhvd.torch as hvd
from sparkhvd.training.checkpoints.module_state import extra_states

__all__ = ["gather_rank_states", "load_rng"]


def gather_rank_states(
    model: nn.Module, totals: dict[str, Any], seconds: float, *, stop_reason: str = ""
) -> list[dict[str, Any]]:
    """What every rank has of its own now, by rank; all ranks must call it.

    Args:
        model: its buffers are compared over ranks; those that differ from rank 0's are part of the result.
        totals: the rank's sums of the epoch so far: tensors and plain values.
        seconds: that the epoch has taken so far on this rank.
        stop_reason: why a callback of this rank has asked to stop after the epoch; "" if none has.

    Cost: a digest of every buffer, one allgather of about 15 KB per rank, and one of the buffers that differ.
    """
    buffers = dict(model.named_buffers())
    mine = {
        "rng": _rng(),
        "totals": totals,
        "seconds": seconds,
        "stop_reason": stop_reason,
        "extra": extra_states(model),
    }
    said = hvd.allgather_object(
        (mine, {name: _digest(value) for name, value in buffers.items()}), name="checkpoint.ranks"
    )
    reference = said[0][1]
    names = {name for _, digests in said for name in digests}
    changed = {n for n in names if any(own.get(n) != reference.get(n) for _, own in said)}
    own: list[dict[str, Tensor | None]] = [{}] * len(said)
    if changed:
        # One that a rank does not have is None there.
        values = {n: buffers[n].detach().cpu() if n in buffers else None for n in changed}
        kept = {} if hvd.rank() == 0 else values
        own = hvd.allgather_object(kept, name="checkpoint.buffers")
    return [{**state, "buffers": kept} for (state, _), kept in zip(said, own, strict=True)]


def load_rng(state: dict[str, Any]) -> None:
    """Let torch, numpy and random go on with the numbers that came next when `state` was taken."""
    torch.set_rng_state(state["torch"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, words, following = state["random"]
    random.setstate((version, tuple(words), following))
    # One that a GPU's run left says nothing on a machine without.
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _rng() -> dict[str, Any]:
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    version, words, following = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "numpy": (
            kind,
            torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            position,
            has_gauss,
            gauss,
        ),
        "random": (version, list(words), following),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def _digest(value: Tensor) -> bytes:
    flat = value.detach().cpu().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
    kind = f"{tuple(value.shape)} {value.dtype} ".encode()
    return hashlib.blake2b(kind + flat.numpy().tobytes(), digest_size=16).digest()
