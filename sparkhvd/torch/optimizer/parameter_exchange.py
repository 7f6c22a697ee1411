"""Exchange of the parameters that the ranks of a sharded optimizer have stepped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sparkhvd.engine.engine import Work
from sparkhvd.torch.collectives.allgathers import gathered, start_allgather
from sparkhvd.torch.collectives.tensors import written
from sparkhvd.torch.optimizer.division import Division
from sparkhvd.torch.optimizer.shards import Gatherer, Shard

__all__ = ["ParameterExchange"]


class ParameterExchange:
    """Gives every rank the parameters that the others have stepped.

    Args:
        division: of the optimizer.
    """

    def __init__(self, division: Division) -> None:
        self._division = division
        # Numbers of parameters and of frozen ones, for which the gatherer is.
        self._gathered_kind = (-1, -1)
        self._gathered: list[Tensor] = []
        self._gatherer: Gatherer | None = None

    def run(self, frozen: Iterable[Tensor]) -> None:
        """Exchange the parameters but frozen ones; every rank must."""
        ids = set(map(id, frozen))
        shards = self._division.shards
        stepped = [s for s in shards.values() if id(s.param) not in ids]
        works = self._start_gathering(stepped, len(ids))
        if self._division.gpu is not None:
            self._division.gpu.gather_parameters([s for s in stepped if not s.param.is_cpu])
        self._exchange_whole([s for s in stepped if s.param.is_cpu and not s.is_cut])
        for work in works:
            work.wait()
        written([p for p in shards if p.grad is not None])

    def _start_gathering(self, stepped: Sequence[Shard], num_frozen: int) -> list[Work]:
        """Start to gather cut parameters from the parts of all ranks."""
        division = self._division
        kind = (len(division.shards), num_frozen)
        if self._gatherer is None or kind != self._gathered_kind:
            self._gathered = [s.param for s in stepped if s.is_cut and s.param.is_cpu]
            # A new name, because the old one means other shapes to the engine.
            name = f"{division.label}.parameters.{kind[0]}.{kind[1]}"
            number = division.configuration.number
            self._gatherer = Gatherer(division.context, name, self._gathered, number)
            self._gathered_kind = kind
        return self._gatherer.start(self._gathered)

    def _exchange_whole(self, whole: Sequence[Shard]) -> None:
        """Exchange parameters that are stepped as a whole, those of each type in one operation."""
        division = self._division
        for dtype in dict.fromkeys(shard.param.dtype for shard in whole):
            # In the order in which they will come: by owner.
            ordered = sorted((s for s in whole if s.param.dtype == dtype), key=lambda s: s.owner)
            owned = [s.param.detach().reshape(-1) for s in ordered if s.part is not None]
            flat = torch.cat(owned) if owned else torch.empty(0, dtype=dtype)
            name = f"{division.label}.whole.{dtype}"
            sent = torch.view_as_real(flat) if dtype.is_complex else flat
            work = start_allgather(division.context, name, sent, division.configuration.number)
            work.wait()
            joined = gathered(work, sent.dtype, sent.shape)[0].view(dtype).view(-1)
            pieces = joined.split([s.param.numel() for s in ordered])
            for shard, piece in zip(ordered, pieces, strict=True):
                if shard.part is None:
                    shard.param.detach().copy_(piece.view(shard.param.shape))
