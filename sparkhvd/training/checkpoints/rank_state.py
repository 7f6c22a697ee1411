"""Each rank's own state inside an epoch: random numbers, sums of the loss, running statistics.

Between epochs all ranks are alike. A checkpoint of a step holds this state for every rank, so that a run that
resumes from it draws the same numbers, reports the same means and normalizes with the same statistics.
"""

from __future__ import annotations

import hashlib
import random
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import NotRequired

import sparkhvd.torch as hvd
from sparkhvd.training.checkpoints.module_state import extra_states
from sparkhvd.training.metrics import TotalsState
from sparkhvd.training.types import State

__all__ = ["RankState", "RngState", "gather_rank_states", "load_rng"]


class RngState(TypedDict):
    """States of the generators of torch, numpy, random and the current GPU."""

    torch: Tensor
    numpy: tuple[str, Tensor, int, int, float]
    random: tuple[int, list[int], float | None]
    cuda: Tensor | None


class RankState(TypedDict):
    """A rank's own state inside an epoch."""

    rng: RngState
    totals: TotalsState | None
    seconds: float
    stop_reason: str
    extra: State
    buffers: dict[str, Tensor | None]
    others: NotRequired[State]


def gather_rank_states(
    model: nn.Module,
    totals: TotalsState | None,
    seconds: float,
    *,
    stop_reason: str = "",
    others: State | None = None,
) -> list[RankState]:
    """Gather every rank's own state, by rank; all ranks must call it.

    Args:
        model: its buffers are compared over ranks; those that differ from rank 0's are part of the result.
        totals: the rank's sums of the epoch so far: tensors and plain values; None where a `train_fn` has its own.
        seconds: that the epoch has taken so far on this rank.
        others: this rank's state of losses and metrics, as far as ranks may differ.
        stop_reason: of a callback of this rank that has asked to stop after the epoch; "" if none has.

    Cost: a digest of every buffer, one allgather of about 15 KB per rank, and one of the buffers that differ.
    """
    buffers = dict(model.named_buffers())
    state: RankState = {
        "rng": _rng(),
        "totals": totals,
        "seconds": seconds,
        "stop_reason": stop_reason,
        "extra": extra_states(model),
        "buffers": {},
        "others": others or {},
    }
    ranks: list[tuple[RankState, dict[str, bytes]]] = hvd.allgather_object(
        (state, {name: _digest(value) for name, value in buffers.items()}), name="checkpoint.ranks"
    )
    reference = ranks[0][1]
    names = {name for _, digests in ranks for name in digests}
    changed = {n for n in names if any(d.get(n) != reference.get(n) for _, d in ranks)}
    differing: list[dict[str, Tensor | None]] = [{}] * len(ranks)
    if changed:
        # One that a rank does not have is None there.
        values = {n: buffers[n].detach().cpu() if n in buffers else None for n in changed}
        sent = {} if hvd.rank() == 0 else values
        differing = hvd.allgather_object(sent, name="checkpoint.buffers")
    return [{**state, "buffers": kept} for (state, _), kept in zip(ranks, differing, strict=True)]


def load_rng(state: RngState) -> None:
    """Set the generators of torch, numpy and random to a state."""
    torch.set_rng_state(state["torch"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, words, following = state["random"]
    random.setstate((version, tuple(words), following))
    # A run on a GPU may resume on a machine without.
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _rng() -> RngState:
    state = np.random.get_state(legacy=True)
    assert isinstance(state, tuple)
    kind, keys, position, has_gauss, gauss = state
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
