"""Training programs as users write them for DDP, each written once and run by DDP, by ours, and by one process.

A program is a function of a `Way`, which wraps its model and its optimizer and gives it this rank's rows. It returns
its trained tensors (and those that it has read), which must not depend on the way. Every loss is a mean over rows, so that
the mean of the ranks' gradients is the gradient of the whole batch.

    @behaviour("views", "sharded")
    def momentum(way): ...

is run by DDP, by one process, and by ours without an option, with views and sharded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import sparkhvd.torch as hvd
from tests.harness.soak import amount

STEPS = amount(8, 20)
LATER = 5  # the step at which a program changes something
ROWS = 12

Batch = tuple[Tensor, ...]
Make = Callable[[Any], torch.optim.Optimizer]
Change = Callable[[list[nn.Parameter], torch.optim.Optimizer, int], object]
Result = nn.Module | Tensor | Sequence[Any]


class Way:
    """Way of one process that has every row. The ways of several ranks override the differences."""

    rank = 0
    size = 1
    is_sharded = False

    def __init__(self) -> None:
        self.at_start: list[Tensor] = []

    def model(self, model: nn.Module, **of_ddp: Any) -> Any:
        """Return the module to call. DDP's options affect only DDP."""
        del of_ddp
        self.at_start.append(flat(model))
        return model

    def optimizer(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, **of_ours: Any
    ) -> torch.optim.Optimizer:
        """Return the optimizer to step. Options of `DistributedOptimizer` affect only it."""
        del model, of_ours
        return optimizer

    def pair(
        self,
        model: nn.Module,
        make: Make,
        *,
        ddp: dict[str, Any] | None = None,
        ours: dict[str, Any] | None = None,
    ) -> tuple[Any, torch.optim.Optimizer]:
        """Return the module to call and the optimizer of all its parameters."""
        net = self.model(model, **(ddp or {}))
        return net, self.optimizer(make(model.parameters()), model, **(ours or {}))

    def share(self, batch: Batch) -> Batch:
        """Return this rank's rows."""
        return tuple(tensor[self.rank :: self.size] for tensor in batch)

    def backward(self, loss: Callable[[Batch], Tensor], rows: Batch) -> None:
        """Compute the gradients of these rows, in this way's number of passes."""
        loss(rows).backward()

    def no_sync(self, net: Any) -> AbstractContextManager[Any]:
        """Inside, gradients only add up."""
        del net
        return contextlib.nullcontext()

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over the ranks."""
        return value.detach()

    def reduce(self, model: nn.Module) -> None:
        """Average the gradients of a model without an optimizer."""

    def send_buffers(self, model: nn.Module) -> None:
        """Give every rank the buffers of rank 0."""

    def uneven(self, net: Any) -> AbstractContextManager[Any]:
        """Inside, ranks may have different numbers of batches."""
        del net
        return contextlib.nullcontext()

    def clip_grad_norm(
        self, optimizer: Any, parameters: Iterable[nn.Parameter], norm: float
    ) -> Tensor:
        """Clip the norm of all gradients."""
        del optimizer
        return clip_grad_norm_(parameters, norm)


class DDP(Way):
    """torch's DistributedDataParallel over gloo."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def model(self, model: nn.Module, **of_ddp: Any) -> Any:
        super().model(model)
        hook = of_ddp.pop("hook", None)
        net = DistributedDataParallel(model, **of_ddp)
        if hook is not None:
            net.register_comm_hook(None, hook)
        return net

    def no_sync(self, net: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = net.no_sync()
        return context

    def mean(self, value: Tensor) -> Tensor:
        value = value.detach().clone()
        dist.all_reduce(value)
        return value / self.size

    def uneven(self, net: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = Join([net])
        return context


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "sharded": {"sharded": True},
    "accumulated": {"backward_passes_per_step": 2},
    "halves": {"compression": hvd.Compression.fp16},
}


class Ours(Way):
    """`hvd.DistributedOptimizer` with the options of a name."""

    def __init__(self, options: str) -> None:
        super().__init__()
        self.rank, self.size = hvd.rank(), hvd.size()
        self.options = OPTIONS[options]
        self.is_sharded = "sharded" in self.options
        self.passes = self.options.get("backward_passes_per_step", 1)
        self._models: list[nn.Module] = []

    def model(self, model: nn.Module, **of_ddp: Any) -> Any:
        del of_ddp
        super().model(model)
        self._models.append(model)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        return model

    def optimizer(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, **of_ours: Any
    ) -> torch.optim.Optimizer:
        return hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), **{**self.options, **of_ours}
        )

    def backward(self, loss: Callable[[Batch], Tensor], rows: Batch) -> None:
        for number in range(self.passes):
            part = tuple(tensor[number :: self.passes] for tensor in rows)
            (loss(part) / self.passes).backward()

    def mean(self, value: Tensor) -> Tensor:
        return hvd.allreduce(value.detach(), name="mean")

    def reduce(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            assert p.grad is not None
            hvd.allreduce_(p.grad, name=name)

    def send_buffers(self, model: nn.Module) -> None:
        hvd.broadcast_parameters(model.named_buffers(), root_rank=0)

    @contextlib.contextmanager
    def uneven(self, net: Any) -> Iterator[None]:
        yield
        hvd.broadcast_parameters(net.state_dict(), root_rank=hvd.join())

    def clip_grad_norm(
        self, optimizer: Any, parameters: Iterable[nn.Parameter], norm: float
    ) -> Tensor:
        if self.is_sharded:
            clipped: Tensor = optimizer.clip_grad_norm_(norm)
            return clipped
        return super().clip_grad_norm(optimizer, parameters, norm)


# --- The table. ---


def flat(result: Any) -> Tensor:
    """Return the parameters of modules, and tensors, in one vector of float64."""
    if isinstance(result, nn.Module):
        result = list(result.parameters())
    if isinstance(result, Tensor):
        real = torch.view_as_real(result) if result.is_complex() else result
        return real.detach().double().flatten().clone()
    return torch.cat([flat(part) for part in result])


@dataclass(frozen=True)
class Behaviour:
    """A program, and how it is compared.

    Attributes:
        program: the function.
        options: names in OPTIONS with which ours is run.
        has_ddp: whether DDP can run it.
        has_one_process: whether it means the same for one process.
        bound: allowed distance of ours from DDP, relative to the largest weight.
        bound_of_one: allowed distance of ours from one process, whose sums have another order.
        refused: the error of ours if it refuses the program.
    """

    program: Callable[[Way], Result]
    options: tuple[str, ...]
    has_ddp: bool = True
    has_one_process: bool = True
    bound: float = 1e-12
    bound_of_one: float = 1e-10
    refused: str = ""


BEHAVIOURS: dict[str, Behaviour] = {}
ANYHOW = ("views", "accumulated")


def behaviour(
    *options: str, **how: Any
) -> Callable[[Callable[[Way], Result]], Callable[[Way], Result]]:
    """Add a program to the table, to be run without options and with these."""

    def enter(program: Callable[[Way], Result]) -> Callable[[Way], Result]:
        name = program.__name__
        assert name not in BEHAVIOURS
        BEHAVIOURS[name] = Behaviour(program, ("plain", *options), **how)
        return program

    return enter


# --- Models, data and the loop. ---


def numbers(step: int, *shape: int) -> Tensor:
    """Return random numbers that are the same on every rank."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def vectors(step: int) -> Batch:
    """Return the whole batch of a step."""
    x = numbers(step, ROWS, 6)
    return x, x[:, :2].sin()


def spoiled(step: int) -> Batch:
    """Return a batch in which at times a row of one rank has non-finite gradients."""
    x, y = vectors(step)
    y[step % ROWS] += torch.inf if step % 6 == 5 else 0
    return x, y


def pictures(step: int) -> Batch:
    """Return a batch of small pictures."""
    return numbers(step, ROWS, 2, 4, 4), vectors(step)[1]


def words(step: int) -> Batch:
    """Return a batch of sentences."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(15, (ROWS, 4), generator=generator), vectors(step)[1]


def mlp(seed: int = 1, width: int = 8) -> nn.Sequential:
    """Return a model with smooth activations, because rounding would choose the branch at a kink."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 2)).double()


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a model that has the same weights on every rank."""
    torch.manual_seed(1)
    return make().double()


def mean_squares(net: Any, batch: Batch) -> Tensor:
    x, y = batch
    loss: Tensor = (net(x) - y).square().mean()
    return loss


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2)


def grad(p: nn.Parameter) -> Tensor:
    assert p.grad is not None
    return p.grad


def learn(
    way: Way,
    model: nn.Module,
    make: Make = sgd,
    *,
    loss: Callable[[Any, Batch], Tensor] = mean_squares,
    data: Callable[[int], Batch] = vectors,
    change: Change | None = None,
    ddp: dict[str, Any] | None = None,
    ours: dict[str, Any] | None = None,
) -> nn.Module:
    """Train a model. `change` is called between `backward()` and `step()`."""
    net, optimizer = way.pair(model, make, ddp=ddp, ours=ours)
    parameters = list(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        way.backward(lambda rows: loss(net, rows), way.share(data(step)))
        if change is not None:
            change(parameters, optimizer, step)
        optimizer.step()
    return model


def clip(parameters: list[nn.Parameter], *_: Any) -> None:
    clip_grad_norm_(parameters, 0.3)
