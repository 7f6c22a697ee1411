"""`DistributedOptimizer(op=Adasum)`: what ranks combine is how far each of them moved the parameters.

Adasum (arXiv:2006.02924) adds two updates where they are orthogonal and averages them where they are parallel, so
a learning rate that suits one rank suits many. As in Horovod it combines the *steps* of the optimizer, not
the gradients: each rank steps alone from the common parameters, and all go on from the combined step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from sparkhvd.engine import ReduceOp
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch._context import Context
from sparkhvd.torch.collectives.allreduces import grouped_allreduce_
from sparkhvd.torch.compression import Compressor
from sparkhvd.torch.process_sets import ProcessSet

__all__ = ["DistributedAdasum", "check_size"]


def check_size(size: int) -> None:
    """Adasum combines pairs, then pairs of pairs."""
    if size & (size - 1):
        raise InvalidArgumentError(
            f"DistributedOptimizer: op=Adasum combines ranks in pairs and needs 2, 4, 8, ... ranks, not {size}. "
            "Use Average, or another number of ranks."
        )


class DistributedAdasum(torch.optim.Optimizer):
    """What an optimizer does around its own step. Made by `DistributedOptimizer`."""

    def _combine(
        self, ctx: Context, compression: type[Compressor], process_set: ProcessSet
    ) -> None:
        self._context = ctx
        self._compression = compression
        self._process_set = process_set
        self._label = f"adasum.{ctx.number('adasum', process_set.process_set_id or 0)}"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step alone from the common parameters, then go on from the combined step of all ranks."""
        parameters = [
            p
            for group in self.param_groups
            for p in group["params"]
            if p.requires_grad and p.numel()
        ]
        before = [p.detach().clone(memory_format=torch.contiguous_format) for p in parameters]
        loss = super().step() if closure is None else super().step(closure)
        moved = [
            p.detach().to(memory_format=torch.contiguous_format) - start
            for p, start in zip(parameters, before, strict=True)
        ]
        for p, start, move in zip(parameters, before, self._combined(moved), strict=True):
            p.detach().copy_(start.add_(move))
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # the class below runs the step hooks

    def _combined(self, moved: list[Tensor]) -> list[Tensor]:
        compressed = [self._compression.compress(move) for move in moved]
        wires = [wire.contiguous() for wire, _ in compressed]
        grouped_allreduce_(
            wires, name=self._label, op=ReduceOp.ADASUM, process_set=self._process_set
        )
        return [
            self._compression.decompress(wire, ctx)
            for wire, (_, ctx) in zip(wires, compressed, strict=True)
        ]

    def synchronize(self) -> None:
        """Nothing to wait for: gradients stay this rank's own."""

    def skip_synchronize(self) -> NoReturn:
        """Not possible: the step itself is what ranks combine."""
        raise InvalidArgumentError(
            "DistributedOptimizer(op=Adasum): skip_synchronize() is not possible, because step() combines. Call "
            "step() alone."
        )

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Has no effect: gradients add up until `step()` is called."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain, (type(self).__mro__[2], self.__getstate__())


def _plain(kind: type[torch.optim.Optimizer], state: dict[str, Any]) -> Any:
    made = kind.__new__(kind)
    made.__setstate__(state)
    return made
