"""`SparkhvdStrategy`: a Lightning strategy with each optimizer as a `DistributedOptimizer`.

The optimizers reduce the gradients, and DDP is not used. So a step that does not use some parameters needs no option.
The cost is not higher than with DDP and its best options (docs/results/lightning.md). Everything else in Lightning uses
torch.distributed's default group, over the same engine.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import socket
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, Store, TCPStore

import sparkhvd.distributed  # noqa: F401 - registers the backend
import sparkhvd.torch as hvd
from sparkhvd import rendezvous
from sparkhvd.engine import stacks
from sparkhvd.engine.engine import Engine
from sparkhvd.errors import CollectiveError, InvalidArgumentError
from sparkhvd.interfaces import loopback, own_address
from sparkhvd.topology import Topology
from sparkhvd.topology import context as rank_context
from sparkhvd.torch import SyncBatchNorm, broadcast_object
from sparkhvd.torch.context import context
from sparkhvd.torch.optimizer.adasum import DistributedAdasum
from sparkhvd.torch.optimizer.distributed import Distributed
from sparkhvd.training.checkpoints.frozen import agreed_frozen

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

# Placeholder for Lightning's ParallelStrategy of either package, which `register` adds as the next base class.
_Base: Any = object


class Strategy(_Base):  # type: ignore[misc]
    """Strategy of Lightning on the ranks of a sparkhvd job: one device for each rank.

    Every rank makes its own `Trainer`, which starts no processes: `sparkhvdrun`, `sparkhvd.run`, `run_local`, torchrun, mpirun or
    another launcher has started them. A single process is a job of one rank.

    Args:
        lr_scaling: "linear" multiplies learning rates by the number of ranks, as Horovod's strategy does; None leaves
            them unchanged.
        broadcast_buffers: broadcast rank 0's buffers (running statistics) before each validation of a fit and at its end.
        compression: compression of gradients; this and the following arguments are those of `DistributedOptimizer`.
        op: the reduction.
        groups: number of buckets.
        sparse_as_dense: send sparse gradients as dense ones.
        gradient_as_bucket_view: gradients are in memory shared by the ranks of a host.
        sharded: every rank steps its part of the parameters and keeps only its optimizer state.
        **options: of Lightning's `ParallelStrategy`, as `checkpoint_io`.

    Raises:
        InvalidArgumentError: an argument is wrong; `devices` and `num_nodes` of the trainer are not those of the job.
    """

    strategy_name = "sparkhvd"
    is_distributed = True  # makes Lightning insert distributed samplers
    _package: Any
    # Attributes of Lightning's class.
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
        # Returns the factor for the loss of this rank's batch, if ranks have different numbers of rows.
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
        """Join the job and select this rank's device. Lightning calls this for a new trainer."""
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
        """Rank and number of ranks, as arguments of a `DistributedSampler`."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_environment(self) -> None:
        """Prepare the device and torch.distributed."""
        self.set_world_ranks()  # joins again after an exception
        super().setup_environment()
        ensure()

    # --- A run. ---

    def setup(self, trainer: Any) -> None:
        """Move the module to the device, broadcast rank 0's values, and make the optimizers."""
        self._is_fitting = trainer.state.fn == "fit"
        if self._is_fitting and self._layer_sync is not None:
            if isinstance(self._layer_sync, self._package.plugins.TorchSyncBatchNorm):
                self._layer_sync = SynchronizedLayers()
            self.model = self._layer_sync.apply(self.model)
        super().setup(trainer)

    def model_to_device(self) -> None:
        """Move the module to this rank's device, with rank 0's parameters and buffers.

        Frozen parameters equal on all ranks are not sent.
        """
        self.model.to(self.root_device)
        if self.world_size > 1:
            tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
            agreed, _ = agreed_frozen(self.model)
            hvd.broadcast_parameters(
                {name: each for name, each in tensors.items() if name not in agreed}, root_rank=0
            )

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the module's optimizers distributed, with their schedulers."""
        super().setup_optimizers(trainer)
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        if self._lr_scaling == "linear":
            scale(self.optimizers, schedulers, self.world_size)
        self.optimizers = distribute(
            self.optimizers, schedulers, self.lightning_module, self._options
        )

    @property
    def optimizers(self) -> Any:
        """The optimizers of the run."""
        return super().optimizers

    @optimizers.setter
    def optimizers(self, optimizers: Any) -> None:
        self._package.strategies.Strategy.optimizers.fset(self, optimizers)
        forward_to(optimizers, self._lightning_optimizers)

    def backward(self, closure_loss: Tensor, *args: Any, **options: Any) -> Any:
        """Run the backward pass of a loss, weighted by the rank's share of the step's rows."""
        if self.loss_weight is not None:
            closure_loss = closure_loss * self.loss_weight()
        return super().backward(closure_loss, *args, **options)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Only accumulate this rank's gradients in backward passes in the block."""
        with hold(self.optimizers):
            yield

    def on_validation_start(self) -> None:
        """Broadcast rank 0's buffers, so that all ranks validate the same module."""
        super().on_validation_start()
        self._share_buffers()

    def on_train_end(self) -> None:
        """Broadcast rank 0's buffers, because checkpoints hold rank 0's buffers."""
        super().on_train_end()
        self._share_buffers()

    def _share_buffers(self) -> None:
        if self._broadcast_buffers and self._is_fitting and self.world_size > 1:
            hvd.broadcast_parameters(dict(self.lightning_module.named_buffers()), root_rank=0)

    def teardown(self) -> None:
        """End a run, and restore the module except for its learned state."""
        detach(self.optimizers)
        if isinstance(self._layer_sync, SynchronizedLayers):
            self.model = self._layer_sync.revert(self.model)
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Leave the job, so that the other ranks get an error instead of waiting."""
        super().on_exception(exception)
        if self.world_size > 1 and hvd.is_initialized():
            # The other ranks get a CollectiveError themselves.
            if not isinstance(exception, CollectiveError):
                context().engine.abort(f"{type(exception).__name__}: {exception}")
            hvd.shutdown()

    # --- Collectives. ---

    def barrier(self, *args: Any, **options: Any) -> None:
        """Wait for all ranks, or return at once after an exception on this rank.

        After such an exception, other ranks do not call this.
        """
        module = self.lightning_module
        if module is None or module.trainer.state.status != "interrupted":
            hvd.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send rank `src`'s object to every rank."""
        return hvd.broadcast_object(obj, root_rank=src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks, or over a group of torch's, in place. Other values are returned unchanged.

        The mean of whole numbers is a new float64 tensor, because Lightning divides by the mean number of rows.

        Args:
            tensor: any shape.
            group: of torch.distributed.
            reduce_op: "mean", "sum", "max", "min", "product", or one of torch's.

        Raises:
            InvalidArgumentError: `reduce_op` is unknown.
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
    """Make the strategy's class for a package of Lightning, and register it there by its names."""
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


# ----------------------------------------------------------------------------------------------------
# This rank's device, and checks of `Trainer(devices=, num_nodes=)` against the started ranks.


def check_size(
    num_devices: int, num_hosts: int, is_gpu: bool, place: Topology, asker: str = "Trainer"
) -> None:
    """Raise an error if the numbers of devices and hosts differ from the job's.

    A strategy cannot see whether the user gave a number. Lightning replaces "auto" by one device on a CPU, and by all
    devices visible to the process on a GPU. These numbers are accepted in every job.

    Args:
        num_devices: `Trainer(devices=)`, or Lightning's choice.
        num_hosts: `Trainer(num_nodes=)`.
        is_gpu: whether the devices are GPUs.
        place: ranks and hosts of the job, and this rank.
        asker: name of Lightning's class with these arguments.

    Raises:
        InvalidArgumentError: the user requests more or fewer ranks than were started.
    """
    is_any = num_devices == 1 or (is_gpu and num_devices == torch.cuda.device_count())
    hosts = len(set(place.hosts))
    if num_devices * num_hosts == place.size or (is_any and num_hosts in (1, hosts)):
        return
    asked = f"{asker}(devices={num_devices}, num_nodes={num_hosts}, strategy='sparkhvd')"
    if place.size == 1:
        raise InvalidArgumentError(
            f"{asked}: this process is a job of one rank, and the strategy does not start processes. Start {num_devices * num_hosts} ranks: "
            f"`sparkhvdrun -np {num_devices * num_hosts} python script.py`, `sparkhvd.run_local(fn, num_proc={num_devices * num_hosts})`, "
            "or `sparkhvd.run(fn)` on Spark; or leave devices and num_nodes out."
        )
    raise InvalidArgumentError(
        f"{asked} needs {num_devices * num_hosts} ranks, but {place.size} were started, on {hosts} host(s). Leave devices and num_nodes "
        "out, or give numbers whose product is the number of ranks."
    )


def own_device(devices: Sequence[torch.device], place: Topology) -> torch.device:
    """Choose this rank's device among the trainer's devices.

    Args:
        devices: of the trainer.
        place: this rank's, in the job.

    Raises:
        InvalidArgumentError: there are GPUs, but no GPU for this rank.
    """
    if devices[0].type != "cuda":
        return devices[0]
    launched = rank_context()
    if launched is not None and launched.gpu is not None:
        return torch.device("cuda", launched.gpu)
    if len(devices) > place.local_rank:
        return devices[place.local_rank]
    # The process sees only its own GPU, or it sees all GPUs of the host.
    visible = torch.cuda.device_count()
    number = 0 if visible == 1 else place.local_rank
    if number >= visible:
        raise InvalidArgumentError(
            f"SparkhvdStrategy: rank {place.rank} has the local rank {number}, but sees only {visible} GPUs. Start as many ranks on a host "
            "as the host has GPUs."
        )
    return torch.device("cuda", number)


# ----------------------------------------------------------------------------------------------------
# Ranks and hosts of the job, for Lightning.

# Rank and hosts of this process at the last `join()`, because Lightning reads them also after the job.
_known: list[Topology] = []


def join() -> Topology:
    """Join the job, unless this process is in it, and return this rank's place."""
    hvd.init()
    engine = context().engine
    stacks.prepare(engine.settings.stack_signal)  # the end of a trainer has removed the handler
    _known[:] = [engine.topology]
    return _known[0]


def _place() -> Topology:
    return _known[0] if _known else join()


class _Environment:
    """Ranks and hosts of the job, as started by a supported launcher.

    The first access joins the job.
    """

    creates_processes_externally = True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"  # never used, because the ranks are already connected

    @property
    def main_port(self) -> int:
        return 0

    @staticmethod
    def detect() -> bool:
        return False  # Lightning must not select it, because the strategy provides it

    def world_size(self) -> int:
        return _place().size

    def set_world_size(self, size: int) -> None:
        """Do nothing, because the launcher has set the number of ranks."""

    def global_rank(self) -> int:
        return _place().rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing, because the launcher has set the rank."""

    def local_rank(self) -> int:
        return _place().local_rank

    def node_rank(self) -> int:
        place = _place()
        return place.hosts[place.rank]


@functools.cache
def environment_of(package: Any) -> type[Any]:
    base = importlib.import_module(f"{package.__name__}.plugins.environments").ClusterEnvironment
    return type("SparkhvdEnvironment", (_Environment, base), {"__module__": __name__})


# ----------------------------------------------------------------------------------------------------
# Batch normalization over all ranks during a fit: `Trainer(sync_batchnorm=True)`.


class SynchronizedLayers:
    """Replaces layers of batch normalization, and restores them.

    torch's own synchronized layer runs on GPUs only. This is `sparkhvd.torch.SyncBatchNorm`, which shares parameters, buffers and
    names with the replaced layer.
    """

    def __init__(self) -> None:
        self._replaced: dict[nn.Module, nn.Module] = {}

    def apply(self, model: nn.Module) -> nn.Module:
        """Replace every layer of batch normalization. Every rank must call it."""
        before = dict(model.named_modules(remove_duplicate=False))
        model = SyncBatchNorm.convert_sync_batchnorm(model)
        for name, layer in model.named_modules(remove_duplicate=False):
            if layer is not before[name]:
                self._replaced[layer] = before[name]
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        """Restore the layers, with the learned state of their replacements."""
        for parent in list(model.modules()):
            for name, child in parent._modules.items():
                if child in self._replaced:
                    parent._modules[name] = _with_state_of(child, self._replaced[child])
        self._replaced = {}
        return model


def _with_state_of(new: nn.Module, layer: nn.Module) -> nn.Module:
    layer._parameters.update(new._parameters)
    layer._buffers.update(new._buffers)  # a module moved to another device or type has new ones
    layer.train(new.training)
    return layer


# ----------------------------------------------------------------------------------------------------
# Optimizers and schedulers of a module: distributed, with the user's learning rates.

Optimizer = torch.optim.Optimizer

# Learning rates in a parameter group: torch's own key, and keys in which schedulers store theirs.
_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "base_lr")
# Methods defined or replaced by `DistributedOptimizer`.
_METHODS = (
    *("zero_grad", "synchronize", "skip_synchronize", "no_sync", "clip_grad_norm_"),
    *("add_param_group", "set_backward_passes_per_step", "state_dict", "load_state_dict"),
)


def distribute(
    optimizers: Iterable[Optimizer],
    schedulers: Iterable[Any],
    module: nn.Module,
    options: Mapping[str, Any],
) -> list[Optimizer]:
    """Wrap each optimizer in a `DistributedOptimizer`, and attach schedulers to it. Every rank must call it.

    Args:
        optimizers: of the module; distributed optimizers are unchanged.
        schedulers: of the optimizers.
        module: names its parameters in messages.
        options: of `DistributedOptimizer`.
    """
    made = {each: _distributed(each, module, options) for each in optimizers}
    for scheduler in _all(schedulers):
        if getattr(scheduler, "optimizer", None) in made:
            scheduler.optimizer = made[scheduler.optimizer]
    return list(made.values())


def _distributed(optimizer: Optimizer, module: nn.Module, options: Mapping[str, Any]) -> Optimizer:
    if isinstance(optimizer, (Distributed, DistributedAdasum)):
        return optimizer
    own = {p for group in optimizer.param_groups for p in group["params"]}
    named = [(name, p) for name, p in module.named_parameters() if p in own]
    # Pass names only if all parameters have names, because a loss may add parameters that the module does not list.
    names = named if len(named) == len(own) else None
    return hvd.DistributedOptimizer(optimizer, names, **options)


def scale(optimizers: Iterable[Optimizer], schedulers: Iterable[Any], factor: int) -> None:
    """Multiply the learning rates of optimizers, and the base rates of schedulers."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for key in _RATES:
                if isinstance(rate := group.get(key), Tensor):
                    rate.mul_(factor)
                elif rate is not None:
                    group[key] = rate * factor
    for scheduler in _all(schedulers):
        for name in ("base_lrs", "_last_lr"):
            if hasattr(scheduler, name):
                setattr(scheduler, name, [rate * factor for rate in getattr(scheduler, name)])


def _all(schedulers: Iterable[Any]) -> Iterator[Any]:
    """Yield schedulers with nested schedulers (`SequentialLR`, `ChainedScheduler`)."""
    for scheduler in schedulers:
        yield scheduler
        yield from _all(getattr(scheduler, "_schedulers", ()))


@contextlib.contextmanager
def hold(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Only accumulate this rank's gradients in backward passes inside."""
    with contextlib.ExitStack() as stack:
        for each in optimizers:
            if isinstance(each, Distributed):
                stack.enter_context(each.no_sync())
        yield


def detach(optimizers: Iterable[Optimizer]) -> None:
    """Stop reducing gradients, because after a fit the program may use the module alone."""
    for each in optimizers:
        if isinstance(each, Distributed):
            each.detach()


def forward_to(optimizers: Sequence[Optimizer], wrappers: Sequence[Any]) -> None:
    """Make methods of Lightning's optimizer wrappers call the wrapped optimizers.

    A wrapper has the class of its optimizer, so that `isinstance` works, but not the optimizer's attributes.
    """
    for optimizer, wrapper in zip(optimizers, wrappers, strict=True):
        if isinstance(optimizer, (Distributed, DistributedAdasum)):
            methods = {name: getattr(optimizer, name, None) for name in _METHODS}
            vars(wrapper).update({n: method for n, method in methods.items() if method is not None})


# ----------------------------------------------------------------------------------------------------
# Default group of torch.distributed over the job's engine, because Lightning and torchmetrics use torch.distributed.
# The ranks connect through a store that rank 0 serves on its own port, because not all launchers provide an address
# (`MASTER_ADDR`), and Lightning removes `WORLD_SIZE` from the environment. Ranks of one host use only loopback.
# Trust: any process that can reach the store can write to it, as with every store of torch. No key is sent through the
# store, because the engine already exists.

# Engine of the last group made by this module.
_made: list[weakref.ref[Engine]] = []


def ensure() -> None:
    """Make the default group of all ranks if missing. Every rank must call it, after `init()`.

    Raises:
        InvalidArgumentError: the program has made a default group of other ranks.
        CollectiveError: a rank is lost, or does not arrive.
    """
    engine = context().engine
    if dist.is_initialized():
        if not _made or _made[0]() is engine:
            _check_place(engine)
            return
        dist.destroy_process_group()  # the group belongs to a job that has ended
    dist.init_process_group(
        "sparkhvd", store=_store(engine), rank=engine.rank, world_size=engine.size
    )
    _made[:] = [weakref.ref(engine)]


def _check_place(engine: Engine) -> None:
    found = dist.get_rank(), dist.get_world_size()
    if found != (engine.rank, engine.size):
        raise InvalidArgumentError(
            f"SparkhvdStrategy: this process is rank {found[0]} of {found[1]} in torch.distributed's default group, but rank "
            f"{engine.rank} of {engine.size} in sparkhvd's job. Do not call init_process_group(); the strategy calls it."
        )


def _store(engine: Engine) -> Store:
    """A store of all ranks, served by rank 0."""
    if engine.size == 1:
        return HashStore()
    served = address = None
    if engine.rank == 0:
        own = _address(engine)
        family = socket.AF_INET6 if ":" in own else socket.AF_INET
        listener = socket.create_server((own, 0), family=family)
        address = listener.getsockname()[:2]
        served = TCPStore(
            address[0],
            address[1],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # the store closes it
            use_libuv=False,  # some versions of torch accept no socket with it
        )
    address = broadcast_object(address, root_rank=0, name="lightning.store")
    host, port = address
    return served or TCPStore(host, port, wait_for_workers=False, use_libuv=False)


def _address(engine: Engine) -> str:
    """Find this rank's first address reachable from other ranks."""
    if len(set(engine.topology.hosts)) == 1:
        return loopback()
    launched = rendezvous.current_rendezvous()
    if isinstance(launched, rendezvous.SocketRendezvous):
        return launched.job.endpoints[0].address
    return own_address(engine.settings.interfaces, socket.gethostname())


# ----------------------------------------------------------------------------------------------------
# Lightning's two packages, `lightning.pytorch` and `pytorch_lightning`, with separate classes, and their Fabrics.

NAMES = ("lightning.pytorch", "pytorch_lightning")
FABRICS = ("lightning.fabric", "lightning_fabric")  # each is installed with the package above it


def find(names: tuple[str, ...] = NAMES) -> list[Any]:
    """The imported packages of these names, or else the first installed one.

    Raises:
        ImportError: no package is installed.
    """
    if imported := [sys.modules[name] for name in names if name in sys.modules]:
        return imported
    for name in names:
        try:
            return [importlib.import_module(name)]
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
    raise ImportError(
        f"sparkhvd.lightning: neither of {' and '.join(names)} is installed. Run `pip install 'sparkhvd[lightning]'`.",
        name="lightning",
    )


def is_module(module: Any) -> bool:
    """Whether it is a LightningModule of either package."""
    packages = filter(None, map(sys.modules.get, NAMES))  # the module's class has imported its own
    return any(isinstance(module, package.LightningModule) for package in packages)


def package_of(module: Any) -> Any:
    """Find the package of a module's LightningModule class.

    Raises:
        InvalidArgumentError: the module is not a LightningModule.
    """
    for name in NAMES:
        package = sys.modules.get(name)  # the module's class has imported it
        if package is not None and isinstance(module, package.LightningModule):
            return package
    raise InvalidArgumentError(
        f"sparkhvd.lightning.TorchEstimator: model is a {type(module).__name__}; it must be a LightningModule of {' or '.join(NAMES)}. "
        "Use sparkhvd.TorchEstimator for other modules."
    )
