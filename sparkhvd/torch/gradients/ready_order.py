"""Order in which gradients become ready, observed by the first rank and followed by all."""

from __future__ import annotations

import torch
from torch import Tensor

from sparkhvd.errors import MismatchError
from sparkhvd.torch.collectives.broadcasts import start_broadcast
from sparkhvd.torch.collectives.handles import Operation
from sparkhvd.torch.context import Context
from sparkhvd.torch.gradients.entry import ReduceOptions

__all__ = ["ReadyOrder"]


class ReadyOrder:
    """Observes the order of a cycle's gradients and gives the first rank's to every rank. Every rank makes one.

    Args:
        context: whose engine sends the order.
        label: of the reducer.
        options: of the reducer.
        count: of its parameters.

    Attributes:
        seen: numbers of the parameters whose gradients became ready in this cycle, in their order.
    """

    def __init__(self, context: Context, label: str, options: ReduceOptions, count: int) -> None:
        self._context = context
        self._label = label
        self._options = options
        self._count = count
        self.seen: list[int] = []
        self._offered: tuple[Tensor, Operation] | None = None

    def offer(self) -> None:
        """Start to send the first rank's order to every rank, once per cycle."""
        if self._offered is not None:
            return
        late = set(range(self._count)).difference(self.seen)
        numbers = [*dict.fromkeys(self.seen), *sorted(late, reverse=True)]
        order = torch.tensor(numbers, dtype=torch.int64)
        name, options = f"{self._label}.order", self._options
        work = start_broadcast(
            self._context, name, order, order, options.ranks[0], options.process_set
        )
        self._offered = (order, work)

    def agreed(self) -> list[int] | None:
        """Wait for the order that was offered and return it; None if there is none in this cycle."""
        if self._offered is None:
            return None
        order, work = self._offered
        self._offered = None
        try:
            work.wait()
        except MismatchError:
            return None  # a rank has joined and missed this cycle; all try again in the next
        return order.tolist()
