"""`SparkhvdStrategy`: Lightning's strategy whose optimizers are `DistributedOptimizer`s.

Gradients are reduced by the optimizers and not by DDP: parameters that a step does not use need no option, and it costs no more than DDP with its
best options (docs/results/lightning.md). All else that Lightning asks for goes through torch.distributed's default group, over the same engine.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import sparkhvd.torch as hvd
from sparkhvd.errors import CollectiveError, InvalidArgumentError
from sparkhvd.lightning import optimizers as distributed
from sparkhvd.lightning import process_group
from sparkhvd.lightning.devices import check_size, own_device
from sparkhvd.lightning.environment import environment_of, join
from sparkhvd.lightning.layers import SynchronizedLayers
from sparkhvd.torch.context import context
from sparkhvd.training.checkpoints.frozen import agreed_frozen

__all__ = ["register"]

_NAMES = ("sparkhvd", "horovod")
_REDUCTIONS = {
    "mean": dist.ReduceOp.AVG,
    "avg": dist.ReduceOp.AVG,
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
    "product": dist.ReduceOp.PRODUCT,
}

# In place of Lightning's ParallelStrategy, of either package, which `register` puts behind this class.
_Base: Any = object


class Strategy(_Base):  # type: ignore[misc]
    """Strategy of Lightning that trains on the ranks of a job of sparkhvd: one device for each rank.

    Every rank makes its own `Trainer`, which starts no processes: `sparkhvdrun`, `sparkhvd.run`, `run_local`, torchrun, mpirun and the like
    have. A process on its own is a job of one rank.

    Args:
        lr_scaling: None: learning rates as given; "linear": multiplied by the number of ranks, as Horovod's strategy did.
        broadcast_buffers: rank 0's buffers (running statistics) go to all ranks before each validation of a fit and at its end.
        compression: of gradients; this and all others as of `DistributedOptimizer`.
        op: the reduction.
        groups: number of buckets.
        sparse_as_dense: send sparse gradients as dense ones.
        gradient_as_bucket_view: gradients live in memory that the ranks of a host share.
        sharded: every rank steps its part of the parameters and keeps optimizer state for that alone.
        **options: of Lightning's `ParallelStrategy`, as `checkpoint_io`.

    Raises:
        InvalidArgumentError: an argument is wrong; `devices` and `num_nodes` of the trainer are not those of the job.
    """

    strategy_name = "sparkhvd"
    is_distributed = True  # Lightning inserts samplers
    _package: Any
    # Lightning's.
    parallel_devices: Any
    model: Any
    _layer_sync: Any

    def __init__(
        self,
        *,
        lr_scaling: str | None = None,
        broadcast_buffers: bool = True,
        compression: Any = hvd.Compression.none,
        op: Any = hvd.Average,
        groups: int | None = None,
        sparse_as_dense: bool = False,
        gradient_as_bucket_view: bool = False,
        sharded: bool = False,
        **options: Any,
    ) -> None:
        if lr_scaling not in (None, "linear"):
            raise InvalidArgumentError(
                f"SparkhvdStrategy: lr_scaling is {lr_scaling!r}; it must be None (learning rates as given) or 'linear'."
            )
        options.setdefault("cluster_environment", environment_of(self._package)())
        super().__init__(**options)
        self.num_nodes = 1  # set by the trainer
        self._lr_scaling = lr_scaling
        self._broadcast_buffers = broadcast_buffers
        self._own_device: torch.device | None = None
        self._is_fitting = False
        # Factor of the loss of the rank's batch, where ranks have different numbers of rows.
        self.loss_weight: Callable[[], float] | None = None
        self._options = {
            "compression": compression,
            "op": op,
            "groups": groups,
            "sparse_as_dense": sparse_as_dense,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "sharded": sharded,
        }

    # --- Ranks and devices. ---

    def set_world_ranks(self) -> None:
        """Join the job, and take this rank's device; Lightning calls it for a new trainer."""
        place = join()
        if self._own_device is None:
            devices = [torch.device(each) for each in self.parallel_devices]
            check_size(len(devices), self.num_nodes, devices[0].type == "cuda", place)
            self._own_device = own_device(devices, place)
            self.parallel_devices = [self._own_device] * place.local_size
        self._package.utilities.rank_zero_only.rank = place.rank

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        assert self._own_device is not None
        return self._own_device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Rank and size for a `DistributedSampler`."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_environment(self) -> None:
        """Prepare the device and torch.distributed."""
        self.set_world_ranks()  # anew after an exception
        super().setup_environment()
        process_group.ensure()

    # --- A run. ---

    def setup(self, trainer: Any) -> None:
        """Move the module to the device, give it rank 0's values, and make the optimizers."""
        self._is_fitting = trainer.state.fn == "fit"
        if self._is_fitting and self._layer_sync is not None:
            if isinstance(self._layer_sync, self._package.plugins.TorchSyncBatchNorm):
                self._layer_sync = SynchronizedLayers()
            self.model = self._layer_sync.apply(self.model)
        super().setup(trainer)

    def model_to_device(self) -> None:
        """Move the module to this rank's device, with rank 0's parameters and buffers; frozen ones that all ranks have are not sent."""
        self.model.to(self.root_device)
        if self.world_size > 1:
            tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
            agreed, _ = agreed_frozen(self.model)
            hvd.broadcast_parameters(
                {name: each for name, each in tensors.items() if name not in agreed}, root_rank=0
            )

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the module's optimizers and schedulers, distributed."""
        super().setup_optimizers(trainer)
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        if self._lr_scaling == "linear":
            distributed.scale(self.optimizers, schedulers, self.world_size)
        self.optimizers = distributed.distribute(
            self.optimizers, schedulers, self.lightning_module, self._options
        )

    @property
    def optimizers(self) -> Any:
        """The optimizers of the run."""
        return super().optimizers

    @optimizers.setter
    def optimizers(self, optimizers: Any) -> None:
        self._package.strategies.Strategy.optimizers.fset(self, optimizers)
        distributed.forward_to(optimizers, self._lightning_optimizers)

    def backward(self, closure_loss: Tensor, *args: Any, **options: Any) -> Any:
        """Run the backward pass of a loss, weighted by the rank's share of the step's rows."""
        if self.loss_weight is not None:
            closure_loss = closure_loss * self.loss_weight()
        return super().backward(closure_loss, *args, **options)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Let backward passes inside only add to this rank's gradients."""
        with distributed.hold(self.optimizers):
            yield

    def on_validation_start(self) -> None:
        """Give all ranks rank 0's buffers: what they measure is one module."""
        super().on_validation_start()
        self._share_buffers()

    def on_train_end(self) -> None:
        """Give all ranks rank 0's buffers, which checkpoints have."""
        super().on_train_end()
        self._share_buffers()

    def _share_buffers(self) -> None:
        if self._broadcast_buffers and self._is_fitting and self.world_size > 1:
            hvd.broadcast_parameters(dict(self.lightning_module.named_buffers()), root_rank=0)

    def teardown(self) -> None:
        """End a run: the module is as before it, but for what it has learned."""
        distributed.detach(self.optimizers)
        if isinstance(self._layer_sync, SynchronizedLayers):
            self.model = self._layer_sync.revert(self.model)
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Leave the job, so that the other ranks get an error instead of waiting for this one."""
        super().on_exception(exception)
        if self.world_size > 1 and hvd.is_initialized():
            if not isinstance(exception, CollectiveError):  # else the others know
                context().engine.abort(f"{type(exception).__name__}: {exception}")
            hvd.shutdown()

    # --- Collectives. ---

    def barrier(self, *args: Any, **options: Any) -> None:
        """Wait for all ranks; not when an exception ends the run, of which the others know nothing."""
        module = self.lightning_module
        if module is None or module.trainer.state.status != "interrupted":
            hvd.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank `src`'s object on every rank."""
        return hvd.broadcast_object(obj, root_rank=src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks, or over a group of torch's, in place; return what is no tensor as it is.

        The mean of whole numbers is a new tensor of float64: Lightning divides by the mean number of rows.

        Args:
            tensor: any shape.
            group: of torch.distributed.
            reduce_op: "mean", "sum", "max", "min", "product", or one of torch's.

        Raises:
            InvalidArgumentError: `reduce_op` is none of these.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        op = _REDUCTIONS.get(reduce_op.lower()) if isinstance(reduce_op, str) else reduce_op
        if op is None:
            raise InvalidArgumentError(
                f"SparkhvdStrategy.reduce(reduce_op={reduce_op!r}): give one of {', '.join(_REDUCTIONS)}."
            )
        if op == dist.ReduceOp.AVG and not (tensor.is_floating_point() or tensor.is_complex()):
            tensor = tensor.double()
        dist.all_reduce(tensor, op, group=group)
        return tensor


@functools.cache
def register(package: Any) -> type[Any]:
    """Return the strategy's class for a package of Lightning, and register it there by its names."""
    kind = type(
        "SparkhvdStrategy",
        (Strategy, package.strategies.ParallelStrategy),
        {"__module__": "sparkhvd.lightning", "__doc__": Strategy.__doc__, "_package": package},
    )
    for name in _NAMES:
        package.strategies.StrategyRegistry.register(
            name, kind, description="One rank of sparkhvd for each device", override=True
        )
    return kind
