"""Seeds of an epoch, and errors that all ranks raise together."""

from __future__ import annotations

import contextlib
import random
from typing import NoReturn

import numpy as np
import torch

import sparkhvd.torch as hvd
from sparkhvd.errors import CollectiveError, InvalidArgumentError


def seed_everything(seed: int, epoch: int, rank: int) -> None:
    """Seed torch, numpy and random for an epoch on a rank, so that a resumed epoch draws the same numbers."""
    state = np.random.SeedSequence([seed & (2**64 - 1), epoch, rank]).generate_state(3)
    torch.manual_seed(int(state[0]))
    np.random.seed(int(state[1]))
    random.seed(int(state[2]))


def raise_on_all_ranks(message: str, cause: Exception | None = None) -> NoReturn:
    """Raise InvalidArgumentError on every rank; every rank must call it with the same message."""
    # A rank that exits now would hide the message from a slower rank, which would only see its loss.
    with contextlib.suppress(CollectiveError):
        hvd.barrier()
    raise InvalidArgumentError(message) from cause
