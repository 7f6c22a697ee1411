"""Synchronization of ranks: seeds of an epoch, changed buffers, and errors on all ranks."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

import sparkhvd.torch as hvd
from sparkhvd.errors import CollectiveError, InvalidArgumentError


def seed_everything(seed: int, epoch: int, rank: int) -> None:
    """Seed torch, numpy and random for an epoch on a rank, so that a resumed epoch draws the same numbers."""
    state = np.random.SeedSequence([seed & (2**64 - 1), epoch, rank]).generate_state(3)
    if _may_have_devices():
        torch.manual_seed(int(state[0]))
    else:
        torch.default_generator.manual_seed(int(state[0]))
    np.random.seed(int(state[1]))
    random.seed(int(state[2]))


@functools.cache
def _may_have_devices() -> bool:
    """Check whether torch may have a device besides the CPU.

    Without other devices, seeding can avoid 0.7 ms in `manual_seed`.
    """
    accelerator = getattr(torch, "accelerator", None)  # torch 2.6
    return accelerator is None or bool(accelerator.is_available())


def raise_on_all_ranks(message: str, cause: Exception | None = None) -> NoReturn:
    """Raise InvalidArgumentError on every rank. Every rank must call it with the same message."""
    # Wait for all ranks first. If a rank exited now, a slower rank would report the loss of that rank, not this
    # message.
    with contextlib.suppress(CollectiveError):
        hvd.barrier()
    raise InvalidArgumentError(message) from cause


class BufferSync:
    """Broadcasts rank 0's buffers before each step, as DistributedDataParallel does, if training changes them.

    A codebook of moving averages, for example, must be equal on all ranks, because `forward` reads it. Running
    statistics of normalization layers are left out, because in training `forward` does not read them, and each epoch
    ends with rank 0's statistics on all ranks.

    Cost: in each step a broadcast of the changed buffers (of all buffers in the first step of an epoch); nothing for a
        model
    without buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        """Prepare for the buffers of a model."""
        self._model = model
        self._names: list[str] | None = (
            None  # names of changed buffers; None in the first step of an epoch
        )
        self._before: dict[str, tuple[int, int]] = {}

    def begin_epoch(self) -> None:
        """Prepare to search for changed buffers in the next step."""
        self._names = None

    def before_step(self) -> None:
        """Broadcast rank 0's buffers. Every rank must call it."""
        if hvd.size() == 1 or self._names == []:
            return
        buffers = self._buffers()
        if (names := self._names) is None:
            names = [name for name, _ in _common({n: _kind(b) for n, b in buffers.items()})]
        if names:
            hvd.broadcast_parameters({name: buffers[name] for name in names}, 0)
        if self._names is None:
            self._before = {name: (id(b), b._version) for name, b in buffers.items()}
            self._names = None if names else []

    def after_step(self) -> None:
        """Find the buffers changed by the first step of an epoch. Every rank must call it."""
        if hvd.size() == 1 or self._names is not None:
            return
        kinds = {}
        for name, b in self._buffers().items():
            is_changed = self._before.get(name) != (id(b), b._version)
            kinds[name] = (*_kind(b), is_changed)
        self._names = [name for name, is_changed in _common(kinds) if is_changed]

    def _buffers(self) -> dict[str, Tensor]:
        """Select the buffers possibly read by `forward` in training."""
        return {
            f"{path}.{name}".lstrip("."): buffer
            for path, module in self._model.named_modules()
            if not isinstance(module, _NormBase)
            for name, buffer in module._buffers.items()
            # Leave out unsaved buffers, because their shapes may differ between ranks.
            if buffer is not None and name not in module._non_persistent_buffers_set
        }


def _kind(buffer: Tensor) -> tuple[Any, ...]:
    return tuple(buffer.shape), str(buffer.dtype)


def _common(kinds: Mapping[str, tuple[Any, ...]]) -> list[tuple[str, bool]]:
    """Find the buffers of equal shape and dtype on all ranks, and whether a rank changed each.

    Every rank must call it, also without buffers, because `forward` may register buffers only on ranks with rows.
    """
    every: list[Mapping[str, tuple[Any, ...]]] = hvd.allgather_object(dict(kinds), name="buffers")
    return [
        (name, any(other[name][2:] == (True,) for other in every))
        for name in sorted(every[0])
        if all(name in other and other[name][:2] == every[0][name][:2] for other in every)
    ]
