"""`DistributedOptimizer(op=Adasum)`: ranks combine their updates of the parameters.

Adasum (arXiv:2006.02924) adds two updates if they are orthogonal and averages them if they are parallel, so
a learning rate for one rank works for many. As in Horovod it combines the *steps* of the optimizer, not
the gradients: each rank steps alone from the common parameters, and all continue from the combined step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor

from sparkhvd.engine.library import ReduceOp
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.collectives.allreduces import grouped_allreduce_
from sparkhvd.torch.compressors import Compressor
from sparkhvd.torch.context import Context
from sparkhvd.torch.optimizer.arguments import (
    check_arguments,
    group_numbers,
    parameter_names,
    placed,
)
from sparkhvd.torch.optimizer.distributed import plain_optimizer
from sparkhvd.torch.process_sets import ProcessSet


def check_size(size: int) -> None:
    """Refuse a number of ranks other than a power of two.

    Adasum combines pairs, then pairs of pairs.
    """
    if size & (size - 1):
        raise InvalidArgumentError(
            f"DistributedOptimizer: op=Adasum combines ranks in pairs and needs 2, 4, 8, ... ranks, not {size}. "
            "Use Average, or another number of ranks."
        )


class DistributedAdasum(torch.optim.Optimizer):
    """Mixin to combine the steps of all ranks by Adasum. Created by `DistributedOptimizer`."""

    def _combine(
        self,
        ctx: Context,
        compression: type[Compressor],
        process_set: ProcessSet,
        named_parameters: Iterable[tuple[str, Tensor]] | None,
        groups: int | Sequence[Sequence[Tensor]] | None,
    ) -> None:
        self._parameter_names = parameter_names(placed(self.param_groups), named_parameters)
        # Only a check: groups have no effect, because one operation combines all parameters.
        group_numbers(groups, [])
        self._context = ctx
        self._compression = compression
        self._process_set = process_set
        self._label = f"adasum.{ctx.number('adasum', process_set.process_set_id or 0)}"

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Add parameters, and combine their steps too.

        Every rank must add the same parameters.
        """
        super().add_param_group(param_group)
        added = [
            entry for entry in placed(self.param_groups) if entry[2] not in self._parameter_names
        ]
        self._parameter_names.update(parameter_names(added, None))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the norm of this rank's own gradients as `torch.nn.utils.clip_grad_norm_` and return it."""
        return torch.nn.utils.clip_grad_norm_(self._parameter_names, max_norm, norm_type)

    def step(self, closure: Callable[[], float] | None = None, **options: Any) -> Any:
        """Step with this rank's gradients, then replace the step by the combined step of all ranks."""
        parameters = [
            p
            for group in self.param_groups
            for p in group["params"]
            if p.requires_grad and p.numel()
        ]
        before = [p.detach().clone(memory_format=torch.contiguous_format) for p in parameters]
        loss = super().step(*(() if closure is None else (closure,)), **options)
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
        """Do nothing, because Adasum does not reduce gradients."""

    def skip_synchronize(self) -> NoReturn:
        """Raise an error, because `step()` itself communicates."""
        raise InvalidArgumentError(
            "DistributedOptimizer(op=Adasum): skip_synchronize() is not possible, because step() itself combines the ranks' "
            "steps. Call step() without it."
        )

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Only check the argument, because gradients add up until `step()` anyway."""
        check_arguments(ReduceOp.ADASUM, passes, 1.0)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        return plain_optimizer, (type(self).__bases__[1], self.__getstate__())
