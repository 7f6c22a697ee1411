"""Division of a sharded optimizer's parameters among the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.context import Context
from sparkhvd.torch.cuda import opened
from sparkhvd.torch.gradients.layout import cut_range, is_dense
from sparkhvd.torch.gradients.plan import plan_buckets
from sparkhvd.torch.optimizer.arguments import Configuration, group_numbers
from sparkhvd.torch.optimizer.cuda_shards import DeviceShards
from sparkhvd.torch.optimizer.shards import ELEMENTWISE, Shard, owners_of
from sparkhvd.torch.optimizer.shared_parameters import SharedParameters

__all__ = ["Division", "NamedGroup"]

# Named parameters, and the argument `groups` for them.
NamedGroup = tuple[list[tuple[str, Tensor]], int | Sequence[Sequence[Tensor]] | None]


class Division:
    """The parameters of a sharded optimizer, each with this rank's part.

    Args:
        context: of the ranks.
        configuration: of the optimizer.
        kind: class of the user's optimizer.

    Attributes:
        context: of the ranks.
        configuration: of the optimizer.
        label: of the optimizer, for the names of operations.
        shards: by parameter.
        gpu: the parameters on this rank's GPU; None if there are none.
        shared: memory that the ranks of this host share; None without `share_parameters`.
    """

    def __init__(
        self, context: Context, configuration: Configuration, kind: type[torch.optim.Optimizer]
    ) -> None:
        number = context.number("sharded", configuration.number)
        self.context = context
        self.configuration = configuration
        self.label = f"DistributedOptimizer.sharded.{number}"
        self.shards: dict[Tensor, Shard] = {}
        self.gpu: DeviceShards | None = None
        self.shared: SharedParameters | None = None
        self._is_elementwise = kind in ELEMENTWISE

    def add(
        self,
        named: Mapping[Tensor, str],
        groups: int | Sequence[Sequence[Tensor]] | None,
    ) -> None:
        """Divide further parameters; every rank must, the same ones in the same order."""
        parameters = [p for p in named if p.numel() > 0]
        for p in parameters:
            if not p.is_cpu:
                self._open_gpu(named[p], p)
        configuration = self.configuration
        if configuration.share_parameters and parameters:
            self.shared = SharedParameters(
                self.context,
                self.label,
                [(named[p], p) for p in parameters],
                configuration.number,
                configuration.ranks,
            )
        self._divide(named, parameters, groups)

    def reduced_apart(
        self,
        named: Sequence[tuple[str, Tensor]],
        groups: int | Sequence[Sequence[Tensor]] | None,
    ) -> Iterator[tuple[NamedGroup, bool]]:
        """Divide parameters into those of one reducer each; True where each rank gets its part of the gradients."""
        cut = [(name, p) for name, p in named if self._is_cut(p)]
        on_gpu = [(name, p) for name, p in cut if not p.is_cpu]
        if on_gpu and self.gpu is not None:
            # As they were divided, whatever the compression sends for them.
            yield (on_gpu, self.gpu.together(p for _, p in on_gpu)), True
        on_cpu = [(name, p) for name, p in cut if p.is_cpu]
        if on_cpu:
            yield (on_cpu, groups), True
        whole = [(name, p) for name, p in named if not self._is_cut(p)]
        if whole:
            yield (whole, groups), False

    def _open_gpu(self, name: str, parameter: Tensor) -> None:
        configuration = self.configuration
        if configuration.share_parameters:
            raise InvalidArgumentError(
                f"DistributedOptimizer(share_parameters=True): {name!r} is on {parameter.device}, and ranks share memory "
                "of the CPU only. Leave share_parameters out."
            )
        device = opened(self.context, f"DistributedOptimizer, {name!r}", parameter)
        if self.gpu is None:
            self.gpu = DeviceShards(
                self.context, device, self.label, configuration.number, configuration.ranks
            )

    def _is_cut(self, parameter: Tensor) -> bool:
        # State of a parameter of no dimension cannot be told from numbers such as the step.
        return self._is_elementwise and parameter.dim() > 0 and is_dense(parameter)

    def _divide(
        self,
        named: Mapping[Tensor, str],
        parameters: list[Tensor],
        groups: int | Sequence[Sequence[Tensor]] | None,
    ) -> None:
        ranks = self.configuration.ranks
        place = ranks.index(self.context.engine.topology.rank)
        whole = [p for p in parameters if not self._is_cut(p)]
        loads = [0] * len(ranks)
        for shard in self.shards.values():
            if not shard.is_cut:
                loads[shard.owner] += shard.param.numel()
        numbers = owners_of([p.numel() for p in whole], len(ranks), loads)
        owners = dict(zip(map(id, whole), numbers, strict=True))
        cut = [p for p in parameters if id(p) not in owners]
        ranges = {id(p): cut_range(p.numel(), len(ranks), place) for p in cut if p.is_cpu}
        ranges.update(self._divide_on_gpu([p for p in cut if not p.is_cpu], groups))
        for p in parameters:
            owner = owners.get(id(p), -1)
            part = ranges.get(id(p), (0, p.numel() if owner == place else 0))
            self.shards[p] = Shard(p, named[p], part, owner=owner)

    def _divide_on_gpu(
        self, parameters: list[Tensor], groups: int | Sequence[Sequence[Tensor]] | None
    ) -> dict[int, tuple[int, int]]:
        """Divide by the buckets of the gradients; frozen parameters one by one, because each may thaw alone."""
        gpu = self.gpu
        if gpu is None:
            return {}
        trained = [p for p in parameters if p.requires_grad]
        plan = plan_buckets(
            [p.nbytes for p in trained],
            [p.dtype for p in trained],
            list(reversed(range(len(trained)))),
            self.context.engine.settings.device_bucket_bytes,
            group_numbers(groups, trained),
        )
        buckets = [[trained[index] for index in indices] for indices in plan]
        buckets += [[p] for p in parameters if not p.requires_grad]
        ranges: dict[int, tuple[int, int]] = {}
        for bucket in buckets:
            ranges.update(zip(map(id, bucket), gpu.cut(bucket), strict=True))
        return ranges
