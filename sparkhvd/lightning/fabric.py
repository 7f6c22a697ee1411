"""`FabricStrategy`: Fabric's DDP strategy on the ranks of a job.

A Fabric program may call `backward` and `step` in any order, so DDP reduces the gradients, over the job's engine. With
a `Trainer` the order is known, so `SparkhvdStrategy` lets the optimizers reduce the gradients.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from sparkhvd.distributed import ddp_hook
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.lightning import strategy
from sparkhvd.lightning.strategy import check_size, environment_of, join, own_device

# Arguments of Fabric's strategy decided by the job.
_DECIDED = ("process_group_backend", "start_method", "timeout")

# Placeholder for Fabric's DDPStrategy of either package, which `register` adds as the next base class.
_Base: Any = object


class Strategy(_Base):  # type: ignore[misc]
    """Strategy of Lightning Fabric on the ranks of a sparkhvd job: one device for each rank.

    Every rank makes its own `Fabric`, which starts no processes: `sparkhvdrun`, `sparkhvd.run`, `run_local`, torchrun, mpirun or
    another launcher has started them. A single process is a job of one rank.

    Args:
        gradient_as_bucket_view: gradients are in memory shared by the ranks of a host; `ddp_hook` reduces them there.
        **options: of Fabric's `DDPStrategy`, as `checkpoint_io`, and of `DistributedDataParallel`, as `find_unused_parameters`.

    Raises:
        InvalidArgumentError: an option is the job's; `devices` and `num_nodes` of the `Fabric` are not those of the job.
    """

    _package: Any
    # Attribute of Lightning's class.
    parallel_devices: Any

    def __init__(self, *, gradient_as_bucket_view: bool = False, **options: Any) -> None:
        if decided := [name for name in _DECIDED if name in options]:
            raise InvalidArgumentError(
                f"FabricStrategy({decided[0]}=...): the job already determines processes, backend and timeouts. Leave {decided[0]} out, "
                "or use DDPStrategy(process_group_backend='sparkhvd', ...)."
            )
        options.setdefault("cluster_environment", environment_of(self._package)())
        super().__init__(gradient_as_bucket_view=gradient_as_bucket_view, **options)
        self._has_views = gradient_as_bucket_view
        self._own_device: torch.device | None = None

    def _set_world_ranks(self) -> None:
        """Join the job and select this rank's device. Fabric's constructor calls this."""
        place = join()
        if self._own_device is None:
            devices = [torch.device(each) for each in self.parallel_devices]
            is_gpu = devices[0].type == "cuda"
            check_size(len(devices), self.num_nodes, is_gpu, place, "Fabric")
            self._own_device = own_device(devices, place)
            self.parallel_devices = [self._own_device] * place.local_size
        super()._set_world_ranks()  # sets the rank of rank_zero_only

    def _configure_launcher(self) -> None:
        """Do nothing, because another launcher has started the processes."""

    def _setup_distributed(self) -> None:
        self._set_world_ranks()  # joins again after an exception
        strategy.ensure()

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        assert self._own_device is not None
        return self._own_device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Rank and number of ranks, as arguments of a `DistributedSampler`."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_module(self, module: nn.Module) -> Any:
        """Wrap a module in DDP."""
        wrapped = super().setup_module(module)
        if self._has_views:
            wrapped.register_comm_hook(None, ddp_hook)
        return wrapped

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the strategy by its name."""
        strategy_registry.register(
            "sparkhvd", cls, description="One rank of sparkhvd for each device", override=True
        )


@functools.cache
def register(package: Any) -> type[Any]:
    """Make the strategy's class for a package of Fabric, and register it there by its name."""
    strategies = package.strategies
    kind: Any = type(
        "FabricStrategy",
        (Strategy, strategies.DDPStrategy),
        {"__module__": "sparkhvd.lightning", "__doc__": Strategy.__doc__, "_package": package},
    )
    kind.register_strategies(strategies.STRATEGY_REGISTRY)
    return kind  # type: ignore[no-any-return]
