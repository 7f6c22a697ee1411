"""Training programs as people write them for DDP, each written once and run three ways: DDP, ours, one process.

A program is a function of a `Way`, which wraps its model and its optimizer and gives it this rank's rows. It returns
what it has trained (and what it has read), which must not depend on the way. Every loss is a mean over rows, so that
the mean of the ranks' gradients is the gradient of the whole batch.

    @behaviour("views", "sharded")
    def momentum(way): ...

is run by DDP, by one process, and by ours without an option, with views and sharded.
"""

from __future__ import annotations

import contextlib
import copy
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.join import Join
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parametrizations
from torch.optim import lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint

import sparkhvd.torch as hvd

STEPS = 20
ROWS = 12
TIMEOUT_S = 30

Batch = tuple[Tensor, ...]
Make = Callable[[Any], torch.optim.Optimizer]
Change = Callable[[list[nn.Parameter], torch.optim.Optimizer, int], object]
Result = nn.Module | Tensor | Sequence[Any]


class Way:
    """One process that sees every row; the ways of several ranks say where they differ."""

    rank = 0
    size = 1
    is_sharded = False

    def __init__(self) -> None:
        self.at_start: list[Tensor] = []

    def model(self, model: nn.Module, **of_ddp: Any) -> Any:
        """Return the module to call; DDP's options mean something to DDP alone."""
        del of_ddp
        self.at_start.append(flat(model))
        return model

    def optimizer(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, **of_ours: Any
    ) -> torch.optim.Optimizer:
        """Return the optimizer to step; options of `DistributedOptimizer` mean something to it alone."""
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
        """Compute the gradients of these rows, in as many passes as the way has."""
        loss(rows).backward()  # type: ignore[no-untyped-call]

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
            (loss(part) / self.passes).backward()  # type: ignore[no-untyped-call]

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


@dataclass(frozen=True)
class Behaviour:
    """A program, and how it is compared.

    Attributes:
        program: what is run.
        options: names in OPTIONS that ours is run with.
        has_ddp: whether DDP can do it.
        has_one_process: whether it means the same for one process.
        bound: how far ours may be from DDP, by the largest weight.
        bound_of_one: how far ours may be from one process, whose sums have another order.
        refused: what ours says where it refuses the program.
    """

    program: Callable[[Way], Result]
    options: tuple[str, ...]
    has_ddp: bool = True
    has_one_process: bool = True
    bound: float = 1e-12
    bound_of_one: float = 1e-10
    refused: str = ""


BEHAVIOURS: dict[str, Behaviour] = {}


def behaviour(
    *options: str, **how: Any
) -> Callable[[Callable[[Way], Result]], Callable[[Way], Result]]:
    """Enter a program into the table, to be run without options and with these."""

    def enter(program: Callable[[Way], Result]) -> Callable[[Way], Result]:
        name = program.__name__
        assert name not in BEHAVIOURS
        BEHAVIOURS[name] = Behaviour(program, ("plain", *options), **how)
        return program

    return enter


def flat(result: Any) -> Tensor:
    """Return the parameters of modules, and tensors, in one vector of float64."""
    if isinstance(result, nn.Module):
        result = list(result.parameters())
    if isinstance(result, Tensor):
        real = torch.view_as_real(result) if result.is_complex() else result
        return real.detach().double().flatten().clone()
    return torch.cat([flat(part) for part in result])


@dataclass(frozen=True)
class Outcome:
    """The end of a program on a rank: what it gave, how far its weights moved, or its error."""

    values: Tensor
    moved: float = 0.0
    error: str = ""


def outcome(program: Callable[[Way], Result], way: Way) -> Outcome:
    """Run a program one way."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DDP's advice, and torch's of features that are young
        values = flat(program(way))
    start = torch.cat(way.at_start)
    return Outcome(values, float((values[: len(start)] - start[: len(values)]).abs().max()))


def attempted(program: Callable[[Way], Result], way: Way) -> Outcome:
    """Run a program on a rank; an error is an outcome too."""
    try:
        found = outcome(program, way)
        if isinstance(way, Ours):
            hvd.barrier()  # where a rank that goes on hears of another's error
    except Exception:  # noqa: BLE001 - told to the test
        return Outcome(torch.empty(0), error=traceback.format_exc())
    return found


def run_all(meeting: str, names: Sequence[str]) -> dict[tuple[str, str], Outcome]:
    """Run programs by DDP and by ours on this rank, and some of them alone."""
    hvd.init()
    dist.init_process_group(
        "gloo",
        f"file://{meeting}",
        rank=hvd.rank(),
        world_size=hvd.size(),
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    found: dict[tuple[str, str], Outcome] = {}
    for name in names:
        entry = BEHAVIOURS[name]
        if entry.has_ddp:
            found[name, "ddp"] = attempted(entry.program, DDP())
        for options in entry.options:
            found[name, options] = attempted(entry.program, Ours(options))
            if found[name, options].error:
                hvd.shutdown()  # ends whatever the other rank waits for, which then comes here too
                hvd.init()
    dist.destroy_process_group()
    for name in names[hvd.rank() :: hvd.size()]:
        found[name, "one process"] = attempted(BEHAVIOURS[name].program, Way())
    return found


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
    """Return a batch that at times has a row, of one rank, whose gradients are not finite."""
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
    """Return a model with smooth activations: at a kink, rounding would choose the branch."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 2)).double()


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a model that has the same weights wherever it is made."""
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
    """Train a model; `change` is called between `backward()` and `step()`."""
    net, optimizer = way.pair(model, make, ddp=ddp, ours=ours)
    parameters = list(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        way.backward(lambda rows: loss(net, rows), way.share(data(step)))
        if change is not None:
            change(parameters, optimizer, step)
        optimizer.step()
    return model


# --- Gradients between backward() and step(). ---

ANYHOW = ("views", "accumulated")


@behaviour(*ANYHOW, "sharded")
def clipping_by_norm(way: Way) -> Result:
    norms: list[Tensor] = []
    model = learn(
        way,
        mlp(),
        change=lambda ps, optimizer, _: norms.append(way.clip_grad_norm(optimizer, ps, 0.3)),
    )
    return model, norms


@behaviour("halves", bound=2e-3, bound_of_one=2e-3)
def clipping_by_norm_roughly(way: Way) -> Result:
    """Gradients travel as halves: about 1e-3 of a gradient, of which the weights have moved by a part."""
    return learn(way, mlp(), change=lambda ps, *_: clip_grad_norm_(ps, 0.3))


@behaviour(*ANYHOW)
def clipping_by_value(way: Way) -> Result:
    return learn(way, mlp(), change=lambda ps, *_: clip_grad_value_(ps, 0.05))


@behaviour(*ANYHOW)
def clipping_each_group(way: Way) -> Result:
    def change(_: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        for number, group in enumerate(optimizer.param_groups):
            clip_grad_norm_(group["params"], 0.1 * (number + 1 + step % 2))

    return learn(way, mlp(), in_two_groups, change=change)


@behaviour(*ANYHOW)
def scaling_in_place(way: Way) -> Result:
    def change(parameters: list[nn.Parameter], _: Any, step: int) -> None:
        for p in parameters:
            grad(p).mul_(0.5 + 0.1 * step)

    return learn(way, mlp(), change=change)


# Only a rank's part of the gradients is reduced.
BEHAVIOURS["scaling_in_place_of_shards"] = Behaviour(
    scaling_in_place, ("sharded",), refused="optimizer.clip_grad_norm_("
)


@behaviour("views")
def scaling_all_at_once(way: Way) -> Result:
    return learn(way, mlp(), change=lambda ps, *_: torch._foreach_mul_([grad(p) for p in ps], 0.5))


@behaviour("views")
def scaling_data(way: Way) -> Result:
    """As old code does, which torch's count of changes does not see."""

    def change(parameters: list[nn.Parameter], *_: Any) -> None:
        for p in parameters:
            grad(p).data.mul_(0.5)

    return learn(way, mlp(), change=change)


@behaviour(*ANYHOW)
def replacing_gradients(way: Way) -> Result:
    def change(parameters: list[nn.Parameter], *_: Any) -> None:
        for p in parameters:
            p.grad = grad(p).sign() * 0.01

    return learn(way, mlp(), change=change)


@behaviour("views")
def normalizing_gradients(way: Way) -> Result:
    def change(parameters: list[nn.Parameter], *_: Any) -> None:
        for p in parameters:
            grad(p).div_(grad(p).norm() + 0.1)

    return learn(way, mlp(), change=change)


@behaviour("views")
def centring_gradients(way: Way) -> Result:
    def change(parameters: list[nn.Parameter], *_: Any) -> None:
        for p in parameters:
            if p.dim() > 1:
                grad(p).sub_(grad(p).mean(dim=1, keepdim=True))

    return learn(way, mlp(), change=change)


@behaviour("views")
def adding_noise_that_is_the_same_everywhere(way: Way) -> Result:
    def change(parameters: list[nn.Parameter], _: Any, step: int) -> None:
        for p in parameters:
            grad(p).add_(numbers(step, *p.shape), alpha=0.02)

    return learn(way, mlp(), change=change)


@behaviour("views")
def weight_decay_by_hand(way: Way) -> Result:
    def change(parameters: list[nn.Parameter], *_: Any) -> None:
        for p in parameters:
            grad(p).add_(p.detach(), alpha=0.05)

    return learn(way, mlp(), change=change)


@behaviour(*ANYHOW)
def zeroing_some_gradients(way: Way) -> Result:
    """The bias of the first layer, and at times rows of the last one."""

    def change(parameters: list[nn.Parameter], _: Any, step: int) -> None:
        grad(parameters[1]).zero_()
        grad(parameters[2])[step % 2] = 0

    return learn(way, mlp(), change=change)


@behaviour(*ANYHOW)
def dropping_some_gradients(way: Way) -> Result:
    """Which keeps a parameter as it is for a step, momentum and decay too."""

    def change(parameters: list[nn.Parameter], _: Any, step: int) -> None:
        if step % 3:
            parameters[step % 4].grad = None

    decaying = torch.optim.SGD
    return learn(
        way,
        mlp(),
        lambda ps: decaying(ps, lr=0.05, momentum=0.9, weight_decay=0.1),
        change=change,
    )


@behaviour("views")
def logging_norms(way: Way) -> Result:
    norms: list[Tensor] = []
    model = learn(
        way, mlp(), change=lambda ps, *_: norms.extend(grad(p).norm().clone() for p in ps)
    )
    return model, norms


@behaviour(*ANYHOW)
def reading_gradients(way: Way) -> Result:
    read: list[Tensor] = []
    model = learn(way, mlp(), change=lambda ps, *_: read.extend(grad(p).clone() for p in ps))
    return model, read


@behaviour(*ANYHOW, "sharded")
def learning_rate_from_the_norm(way: Way) -> Result:
    def change(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, _: int) -> None:
        norm = way.clip_grad_norm(optimizer, parameters, 1e9)
        optimizer.param_groups[0]["lr"] = 0.05 / (1 + norm.item())

    return learn(way, mlp(), change=change)


@behaviour("views")
def skipping_steps_whose_norm_is_not_finite(way: Way) -> Result:
    """Every rank must leave them out."""
    model = mlp()
    net, optimizer = way.pair(model, sgd)
    skipped = 0
    for step in range(STEPS):
        optimizer.zero_grad()
        way.backward(lambda rows: mean_squares(net, rows), way.share(spoiled(step)))
        norm = clip_grad_norm_(model.parameters(), 1.0)
        if norm.isfinite():
            optimizer.step()
        else:
            skipped += 1
    return model, torch.tensor(skipped)


@behaviour("views")
def unscaling_by_hand_and_clipping(way: Way) -> Result:
    def change(parameters: list[nn.Parameter], *_: Any) -> None:
        for p in parameters:
            grad(p).div_(1024)
        clip_grad_norm_(parameters, 0.3)

    return learn(way, mlp(), loss=lambda net, rows: 1024 * mean_squares(net, rows), change=change)


@behaviour(*ANYHOW)
def updating_weights_by_hand(way: Way) -> Result:
    """The optimizer only reduces; it never steps."""
    model = mlp()
    net, optimizer = way.pair(model, sgd)
    for step in range(STEPS):
        optimizer.zero_grad()
        way.backward(lambda rows: mean_squares(net, rows), way.share(vectors(step)))
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(grad(p), alpha=0.1)
    return model


@behaviour()
def updating_weights_without_an_optimizer(way: Way) -> Result:
    model = mlp()
    net = way.model(model)
    for step in range(STEPS):
        model.zero_grad()
        mean_squares(net, way.share(vectors(step))).backward()  # type: ignore[no-untyped-call]
        way.reduce(model)
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(grad(p), alpha=0.1)
    return model


@behaviour(*ANYHOW)
def sharpness_aware_steps(way: Way) -> Result:
    """Gradients say where to look for the gradients of the step."""
    model = mlp()
    net, optimizer = way.pair(model, sgd)
    parameters = list(model.parameters())
    for step in range(STEPS):
        rows = way.share(vectors(step))
        optimizer.zero_grad()
        way.backward(lambda part: mean_squares(net, part), rows)
        with torch.no_grad():
            offsets = [0.05 * grad(p) / (grad(p).norm() + 0.1) for p in parameters]
            torch._foreach_add_(parameters, offsets)
        optimizer.zero_grad()
        way.backward(lambda part: mean_squares(net, part), rows)
        with torch.no_grad():
            torch._foreach_sub_(parameters, offsets)
        optimizer.step()
    return model


# --- Hooks. ---


@behaviour("views")
def clipping_in_a_hook_of_the_optimizer(way: Way) -> Result:
    model = mlp()
    net, optimizer = way.pair(model, sgd)
    optimizer.register_step_pre_hook(lambda *_: clip(list(model.parameters())))
    for step in range(STEPS):
        optimizer.zero_grad()
        way.backward(lambda rows: mean_squares(net, rows), way.share(vectors(step)))
        optimizer.step()
    return model


@behaviour(*ANYHOW, "sharded")
def scaling_in_a_hook_of_a_parameter(way: Way) -> Result:
    model = mlp()
    for p in model.parameters():
        p.register_hook(lambda gradient: gradient * 0.5)
    return learn(way, model)


@behaviour("sharded")
def scaling_in_a_hook_behind_accumulation(way: Way) -> Result:
    def halve(p: Any) -> None:
        grad(p).mul_(0.5 * p.dim())

    model = mlp()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(halve)
    return learn(way, model)


# --- Optimizers. ---


def in_two_groups(parameters: Any) -> torch.optim.Optimizer:
    every = list(parameters)
    return torch.optim.SGD(
        [{"params": every[:2], "lr": 0.02}, {"params": every[2:], "momentum": 0.5}],
        lr=0.1,
        weight_decay=0.01,
    )


# Where a gradient is nearly zero, dividing by its size would make steps of rounding.
EPS = 1e-2

OPTIMIZERS: dict[str, Make] = {
    "sgd": plain_sgd,
    "nesterov_and_decay": lambda ps: torch.optim.SGD(
        ps, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "dampened_momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.3),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.02, eps=EPS, weight_decay=0.01),
    "amsgrad": lambda ps: torch.optim.Adam(ps, lr=0.02, eps=EPS, amsgrad=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.02, eps=EPS, weight_decay=0.1),
    "fused_adamw": lambda ps: torch.optim.AdamW(ps, lr=0.02, eps=EPS, fused=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05, eps=EPS),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, eps=EPS, momentum=0.5, centered=True),
    "several_groups": in_two_groups,
}


def with_optimizer(make: Make) -> Callable[[Way], Result]:
    return lambda way: learn(way, mlp(), make)


for _name, _make in OPTIMIZERS.items():
    _others = ("accumulated",) if _name in ("adam", "several_groups") else ()
    BEHAVIOURS[_name] = Behaviour(with_optimizer(_make), ("plain", "sharded", *_others))


@behaviour("views", bound=1e-9, bound_of_one=1e-9)
def lbfgs(way: Way) -> Result:
    """Its directions are quotients of differences, which enlarge rounding."""
    model = mlp()
    net, optimizer = way.pair(
        model,
        lambda ps: torch.optim.LBFGS(
            ps, lr=0.1, max_iter=3, history_size=5, tolerance_grad=0, tolerance_change=0
        ),
    )
    rows = way.share(vectors(0))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mean_squares(net, rows)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)  # type: ignore[arg-type]  # a tensor is a loss too
    return model


@behaviour("views", "sharded")
def closures_of_other_optimizers(way: Way) -> Result:
    """Which clip inside."""
    model = mlp()
    net, optimizer = way.pair(model, sgd)
    for step in range(STEPS):
        rows = way.share(vectors(step))

        def closure(rows: Batch = rows) -> Tensor:
            optimizer.zero_grad()
            loss = mean_squares(net, rows)
            loss.backward()  # type: ignore[no-untyped-call]
            way.clip_grad_norm(optimizer, model.parameters(), 0.3)
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]  # a tensor is a loss too
    return model


@behaviour("sharded")
def a_group_added_later(way: Way) -> Result:
    model = mlp()
    net = way.model(model)
    optimizer = way.optimizer(sgd(model[2].parameters()), model[2])
    for step in range(STEPS):
        if step == 7:
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.02})
        net.zero_grad()  # DDP reduces what the optimizer does not have yet
        way.backward(lambda rows: mean_squares(net, rows), way.share(vectors(step)))
        way.clip_grad_norm(
            optimizer, [p for group in optimizer.param_groups for p in group["params"]], 0.3
        )
        optimizer.step()
    return model


@behaviour("sharded")
def two_networks_against_each_other(way: Way) -> Result:
    """A generator and its critic; the generator's loss leaves gradients in the critic."""
    maker, critic = mlp(1), nn.Sequential(*mlp(2)[:1], nn.Tanh(), nn.Linear(8, 1).double())
    torch.manual_seed(3)
    nn.init.normal_(critic[2].weight, std=0.3)
    (made, making), (judged, judging) = way.pair(maker, sgd), way.pair(critic, sgd)
    for step in range(STEPS):
        (noise, _), (real, _) = way.share(vectors(step)), way.share(vectors(step + 1000))
        drawn = torch.cat([made(noise), noise[:, :4]], dim=1)
        judging.zero_grad()
        both = judged(torch.cat([real, drawn.detach()]))
        (both[len(real) :].mean() - both[: len(real)].mean() + both.square().mean()).backward()
        judging.step()
        making.zero_grad()
        (-judged(drawn).mean()).backward()
        making.step()
    return maker, critic


# --- Schedules, averages, and starting again. ---

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step_schedule": lambda o: lr_scheduler.StepLR(o, step_size=5, gamma=0.3),
    "one_cycle_schedule": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=STEPS),
    "cosine_schedule": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=7),
}


def with_schedule(make: Callable[[Any], Any]) -> Callable[[Way], Result]:
    def program(way: Way) -> Result:
        model = mlp()
        net, optimizer = way.pair(model, sgd)
        schedule = make(optimizer)
        for step in range(STEPS):
            optimizer.zero_grad()
            way.backward(lambda rows: mean_squares(net, rows), way.share(vectors(step)))
            optimizer.step()
            schedule.step()
        return model

    return program


for _name, _schedule in SCHEDULES.items():
    BEHAVIOURS[_name] = Behaviour(with_schedule(_schedule), ("plain", "sharded"))


@behaviour()
def schedule_made_before_the_optimizer_was_wrapped(way: Way) -> Result:
    model = mlp()
    net, plain = way.model(model), sgd(model.parameters())
    schedule = lr_scheduler.StepLR(plain, step_size=5, gamma=0.3)
    optimizer = way.optimizer(plain, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        way.backward(lambda rows: mean_squares(net, rows), way.share(vectors(step)))
        optimizer.step()
        schedule.step()
    return model


@behaviour()
def schedule_by_the_mean_loss(way: Way) -> Result:
    model = mlp()
    net, optimizer = way.pair(model, sgd)
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    for step in range(STEPS):
        rows = way.share(vectors(step))
        optimizer.zero_grad()
        loss = mean_squares(net, rows)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step(way.mean(loss).item())
    return model, torch.tensor(optimizer.param_groups[0]["lr"])


@behaviour("sharded")
def learning_rate_by_hand(way: Way) -> Result:
    def change(_: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + step)

    return learn(way, mlp(), change=change)


@behaviour("views")
def moving_average_of_weights(way: Way) -> Result:
    model = mlp()
    average = copy.deepcopy(model)

    def change(parameters: list[nn.Parameter], *_: Any) -> None:
        with torch.no_grad():
            for kept, p in zip(average.parameters(), parameters, strict=True):
                kept.lerp_(p, 0.2)

    return learn(way, model, change=change), average


@behaviour()
def stochastic_weight_averaging(way: Way) -> Result:
    model = mlp()
    net, optimizer = way.pair(model, sgd)
    averaged = swa_utils.AveragedModel(model)
    schedule = swa_utils.SWALR(optimizer, swa_lr=0.02, anneal_epochs=3)
    for step in range(STEPS):
        optimizer.zero_grad()
        way.backward(lambda rows: mean_squares(net, rows), way.share(vectors(step)))
        optimizer.step()
        if step >= 10:
            averaged.update_parameters(model)
            schedule.step()
    return model, averaged.module


@behaviour("sharded", "views")
def saving_and_loading_in_the_middle(way: Way) -> Result:
    model = mlp()
    net, optimizer = way.pair(model, OPTIMIZERS["adam"])
    for step in range(STEPS):
        if step == 9:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model = mlp(seed=5)
            model.load_state_dict(saved[0])
            net, optimizer = way.pair(model, OPTIMIZERS["adam"])
            optimizer.load_state_dict(saved[1])
            way.at_start.pop()
        optimizer.zero_grad()
        mean_squares(net, way.share(vectors(step))).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model


@behaviour()
def ranks_that_begin_with_other_weights(way: Way) -> Result:
    return learn(way, mlp(seed=1 + way.rank))


@behaviour("views")
def looking_at_other_data_between_steps(way: Way) -> Result:
    model = mlp()
    net, optimizer = way.pair(model, sgd)
    losses = []
    for step in range(STEPS):
        net.train()
        optimizer.zero_grad()
        way.backward(lambda rows: mean_squares(net, rows), way.share(vectors(step)))
        net.eval()
        with torch.no_grad():
            losses.append(mean_squares(net, vectors(500)))
        optimizer.step()
    return model, losses


# --- Several passes. ---


@behaviour()
def accumulating_without_sync(way: Way) -> Result:
    model = mlp()
    net, optimizer = way.pair(model, sgd, ours={"backward_passes_per_step": 3})
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(3):
            last = number == 2
            with contextlib.nullcontext() if last else way.no_sync(net):
                rows = way.share(vectors(3 * step + number))
                (mean_squares(net, rows) / 3).backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    return model


@behaviour("views")
def accumulating_with_a_reduction_each(way: Way) -> Result:
    model = mlp()
    net, optimizer = way.pair(model, sgd)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(2):
            rows = way.share(vectors(2 * step + number))
            (mean_squares(net, rows) / 2).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model


@behaviour("views")
def gradients_that_are_never_zeroed(way: Way) -> Result:
    model = mlp()
    net, optimizer = way.pair(model, lambda ps: torch.optim.SGD(ps, lr=0.005))
    for step in range(STEPS):
        way.backward(lambda rows: mean_squares(net, rows), way.share(vectors(step)))
        optimizer.step()
    return model


@behaviour("sharded", "views")
def zeroing_instead_of_dropping(way: Way) -> Result:
    model = mlp()
    net, optimizer = way.pair(model, sgd)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        way.backward(lambda rows: mean_squares(net, rows), way.share(vectors(step)))
        optimizer.step()
    return model


@behaviour("views", "sharded")
def dropping_gradients_by_the_model(way: Way) -> Result:
    model = mlp()
    net, optimizer = way.pair(model, sgd)
    for step in range(STEPS):
        way.backward(lambda rows: mean_squares(net, rows), way.share(vectors(step)))
        optimizer.step()
        model.zero_grad()
    return model


@behaviour("views")
def two_losses_at_once(way: Way) -> Result:
    def loss(net: Any, rows: Batch) -> Tensor:
        x, y = rows
        out = net(x)
        both: Tensor = (out - y).square().mean() + 0.3 * (out - y).abs().square().square().mean()
        return both

    return learn(way, mlp(), loss=loss)


@behaviour("views")
def gradients_of_the_inputs_first(way: Way) -> Result:
    """The graph is kept for them; the parameters' come later."""

    def loss(net: Any, rows: Batch) -> Tensor:
        x, y = rows
        x = x.clone().requires_grad_()
        loss = mean_squares(net, (x, y))
        (inputs,) = torch.autograd.grad(loss, x, retain_graph=True)
        return loss * (1 + inputs.detach().norm() * 0)

    model = mlp()
    net, optimizer = way.pair(model, sgd)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(net, way.share(vectors(step))).backward(retain_graph=True)  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    return model


@behaviour("views")
def gradient_penalty(way: Way) -> Result:
    def loss(net: Any, rows: Batch) -> Tensor:
        x, y = rows
        x = x.clone().requires_grad_()
        out = net(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        penalised: Tensor = (out - y).square().mean() + 0.1 * slope.square().sum(1).mean()
        return penalised

    return learn(way, mlp(), loss=loss, change=lambda ps, *_: clip_grad_norm_(ps, 0.3))


@behaviour()
def anomalies_are_looked_for(way: Way) -> Result:
    with torch.autograd.set_detect_anomaly(True):
        return learn(way, mlp())


@behaviour("views")
def a_batch_that_fails_is_left_out(way: Way) -> Result:
    model = mlp()
    net, optimizer = way.pair(model, sgd)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = way.share(vectors(step))
        with contextlib.suppress(RuntimeError):
            mean_squares(net, (x[:, : 5 + (step % 4 > 0)], y)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model


@behaviour(has_one_process=False)
def ranks_with_different_numbers_of_batches(way: Way) -> Result:
    model = mlp()
    net, optimizer = way.pair(model, sgd)
    with way.uneven(net):
        for step in range(STEPS + 3 * way.rank):
            optimizer.zero_grad()
            mean_squares(net, way.share(vectors(step))).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model


# --- Parameters. ---


class Branches(nn.Module):
    """The last of its layers is used by nobody; which of the others, a function says."""

    def __init__(self, used: Callable[[int], bool]) -> None:
        super().__init__()
        self.first = nn.Linear(6, 2)
        self.others = nn.ModuleList(nn.Linear(6, 2) for _ in range(3))
        self.used = used

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(x)
        for number, layer in enumerate(self.others):
            if number < 2 and self.used(number):
                out = out + layer(x)
        return out


def decaying(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)


UNUSED = {"find_unused_parameters": True}


@behaviour(has_one_process=False)
def parameters_that_one_rank_uses(way: Way) -> Result:
    model = seeded(lambda: Branches(lambda number: number == way.rank))
    return learn(way, model, decaying, ddp=UNUSED)


@behaviour("accumulated")
def parameters_that_nobody_uses(way: Way) -> Result:
    model = seeded(lambda: Branches(lambda number: number == 0))
    return learn(
        way,
        model,
        decaying,
        ddp=UNUSED,
        change=lambda ps, *_: clip_grad_norm_([p for p in ps if p.grad is not None], 0.3),
    )


@behaviour()
def layers_left_out_by_chance(way: Way) -> Result:
    dice = torch.Generator().manual_seed(3)

    def used(_: int) -> bool:
        return bool(torch.rand((), generator=dice) < 0.5)

    return learn(way, seeded(lambda: Branches(used)), decaying, ddp=UNUSED)


class Tied(nn.Module):
    """One weight in two places, one layer under two names, and one called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.same = self.inner
        self.out = nn.Linear(6, 6)
        self.out.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.same(torch.tanh(self.inner(torch.tanh(self.inner(x)))))
        out: Tensor = self.out(x)[:, :2]
        return out


@behaviour(*ANYHOW, "sharded")
def weights_that_are_shared(way: Way) -> Result:
    return learn(way, seeded(Tied))


@behaviour("sharded")
def frozen_parameters(way: Way) -> Result:
    model = mlp()
    model[0].requires_grad_(False)
    return learn(way, model)


@behaviour("views")
def thawing_frozen_parameters(way: Way) -> Result:
    """DDP is made anew for them; clipping needs them reduced in their first step too."""
    model = mlp()
    model[0].requires_grad_(False)
    net, optimizer = way.pair(model, sgd)
    for step in range(STEPS):
        if step == 8:
            model[0].requires_grad_(True)
            net = way.model(model)
            way.at_start.pop()
        optimizer.zero_grad()
        mean_squares(net, way.share(vectors(step))).backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.3)
        optimizer.step()
    return model


@behaviour()
def freezing_parameters_later(way: Way) -> Result:
    model = mlp()
    net, optimizer = way.pair(model, sgd)
    for step in range(STEPS):
        optimizer.zero_grad()
        if step == 8:
            model[0].requires_grad_(False)
            net = way.model(model)
            way.at_start.pop()
        mean_squares(net, way.share(vectors(step))).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model[2]


class Mixed(nn.Module):
    """Parameters of three types, one without elements, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8).float()
        self.last = nn.Linear(8, 2).double()
        self.shift = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x.float()).tanh().double()) * self.scale
        return out + self.shift.double() + self.empty.sum()


@behaviour("views", bound=1e-7, bound_of_one=3e-3)
def parameters_of_several_types(way: Way) -> Result:
    """A bfloat16 has 8 bits, which one process rounds once."""
    torch.manual_seed(1)
    return learn(way, Mixed(), change=lambda ps, *_: clip_grad_norm_(ps[:4], 0.3))


class Phases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(6, 2, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ self.turn).abs()


@behaviour(refused="complex128")
def complex_parameters(way: Way) -> Result:
    torch.manual_seed(1)
    return learn(way, Phases())


class Weighing(nn.Module):
    """Gradients that are one number seen many times, or a view with other strides."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.weights = nn.Parameter(numbers(3, 5))
        self.square = nn.Parameter(numbers(4, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out * self.weights.sum() + self.square.t().sum(1)[:2]


@behaviour(*ANYHOW)
def gradients_that_are_expanded(way: Way) -> Result:
    def change(parameters: list[nn.Parameter], *_: Any) -> None:
        clip_grad_norm_(parameters, 0.3)

    return learn(way, Weighing(), change=change)


@behaviour("views")
def weight_norm(way: Way) -> Result:
    model = mlp()
    parametrizations.weight_norm(model[0])
    return learn(way, model)


class Rescaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        scaled = {name: 0.9 * p for name, p in self.inner.named_parameters()}
        out: Tensor = functional_call(self.inner, scaled, (x,))
        return out


@behaviour("views")
def functional_calls(way: Way) -> Result:
    return learn(way, Rescaled())


# --- Layers. ---


class Words(nn.Module):
    """A table of words, or bags of them."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table(x)
        out: Tensor = self.last(torch.tanh(rows.mean(1) if rows.dim() == 3 else rows))
        return out


class Sequences(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x.view(len(x), 2, 3))
        out = out[0] if isinstance(out, tuple) else out
        last: Tensor = self.last(out[:, -1])
        return last


def convolutions(norm: Callable[[int], nn.Module] = lambda width: nn.GroupNorm(2, width)) -> Any:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        norm(4),
        nn.SiLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 2),
    )


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch], tuple[str, ...]]] = {
    "embedding": (lambda: Words(nn.Embedding(15, 3)), words, ("sharded",)),
    "embedding_bag": (lambda: Words(nn.EmbeddingBag(15, 3)), words, ("views",)),
    "sparse_embedding": (lambda: Words(nn.Embedding(15, 3, sparse=True)), words, ()),
    "sparse_embedding_bag": (
        lambda: Words(nn.EmbeddingBag(15, 3, sparse=True, mode="sum")),
        words,
        (),
    ),
    "lstm": (lambda: Sequences(nn.LSTM(3, 3, batch_first=True)), vectors, ("views",)),
    "gru_in_two_layers": (lambda: Sequences(nn.GRU(3, 3, 2, batch_first=True)), vectors, ()),
    "attention": (
        lambda: Sequences(nn.TransformerEncoderLayer(3, 1, 8, 0.0, "gelu", batch_first=True)),
        vectors,
        ("sharded",),
    ),
    "layer_norm": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2)),
        vectors,
        ("views",),
    ),
    "convolutions_and_group_norm": (convolutions, pictures, ("views", "sharded")),
}


def with_layer(
    make: Callable[[], nn.Module], data: Callable[[int], Batch]
) -> Callable[[Way], Result]:
    return lambda way: learn(way, seeded(make), plain_sgd, data=data)


for _name, (_build, _data, _options) in LAYERS.items():
    BEHAVIOURS[_name] = Behaviour(with_layer(_build, _data), ("plain", *_options))


@behaviour("views", "accumulated", "sharded")
def channels_last(way: Way) -> Result:
    model = seeded(convolutions).to(memory_format=torch.channels_last)
    return learn(
        way,
        model,
        data=lambda step: (
            pictures(step)[0].to(memory_format=torch.channels_last),
            pictures(step)[1],
        ),
        change=lambda ps, optimizer, _: way.clip_grad_norm(optimizer, ps, 0.3),
    )


@behaviour("views", has_one_process=False)
def batch_norm_of_each_rank(way: Way) -> Result:
    return learn(way, seeded(lambda: convolutions(nn.BatchNorm2d)), data=pictures)


@behaviour(has_ddp=False)
def batch_norm_of_all_ranks(way: Way) -> Result:
    """torch's own needs a GPU."""
    norm: Any = hvd.SyncBatchNorm if isinstance(way, Ours) else nn.BatchNorm2d
    return learn(way, seeded(lambda: convolutions(norm)), data=pictures)


@behaviour("views", has_one_process=False)
def dropout_by_the_same_seed(way: Way) -> Result:
    model = mlp()
    model.insert(2, nn.Dropout(0.3))
    torch.manual_seed(7)
    return learn(way, model)


class Drifting(nn.Module):
    """Its buffer follows the data of its rank, and changes what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("level", torch.zeros(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x - self.level)
        with torch.no_grad():
            self.level.lerp_(x.mean(0), 0.3)
        return out


@behaviour(has_one_process=False)
def buffers_of_the_first_rank(way: Way) -> Result:
    """DDP sends them before each forward pass; with ours a line does."""
    model = Drifting()
    net, optimizer = way.pair(model, sgd)
    for step in range(STEPS):
        optimizer.zero_grad()
        way.send_buffers(model)
        mean_squares(net, way.share(vectors(step))).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model


# --- Machinery of torch. ---


class Checkpointed(nn.Module):
    """Computes its layers again in backward; one of them several times."""

    def __init__(self, times: int, *, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.times, self.use_reentrant = times, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for _ in range(self.times):
            x = torch.tanh(
                checkpoint(self.middle, x, use_reentrant=self.use_reentrant)  # type: ignore[arg-type]
            )
        out: Tensor = self.last(x)
        return out


def clip(parameters: list[nn.Parameter], *_: Any) -> None:
    clip_grad_norm_(parameters, 0.3)


@behaviour(*ANYHOW)
def checkpoints(way: Way) -> Result:
    return learn(way, seeded(lambda: Checkpointed(2, use_reentrant=False)), change=clip)


@behaviour("views")
def reentrant_checkpoints(way: Way) -> Result:
    model = seeded(lambda: Checkpointed(1, use_reentrant=True))
    return learn(way, model, ddp={"static_graph": True}, change=clip)


@behaviour(*ANYHOW)
def a_layer_in_two_reentrant_checkpoints(way: Way) -> Result:
    model = seeded(lambda: Checkpointed(2, use_reentrant=True))
    return learn(way, model, ddp={"static_graph": True}, change=clip)


@behaviour()
def compiled_model(way: Way) -> Result:
    model = mlp()
    net, optimizer = way.pair(model, sgd)
    fast = torch.compile(net, backend="eager")
    for step in range(STEPS):
        optimizer.zero_grad()
        mean_squares(fast, way.share(vectors(step))).backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    return model


@behaviour("views", bound=1e-6, bound_of_one=2e-2)
def autocast(way: Way) -> Result:
    """Parts of a batch are rounded to bfloat16 where one process rounds their sum."""

    def loss(net: Any, rows: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = net(rows[0].float())
        squares: Tensor = (out.float() - rows[1].float()).square().mean()
        return squares

    return learn(way, mlp().float(), loss=loss, change=clip)


def scaled_steps(way: Way, *, clips: bool) -> Result:
    """Steps with a row that is not finite are left out, and lower the scale."""
    model = mlp().float()
    net, optimizer = way.pair(model, sgd)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=3)
    for step in range(STEPS):
        rows: Any = tuple(tensor.float() for tensor in way.share(spoiled(step)))
        optimizer.zero_grad()
        way.backward(lambda part: scaler.scale(mean_squares(net, part)), rows)
        if clips:
            scaler.unscale_(optimizer)
            way.clip_grad_norm(optimizer, model.parameters(), 0.3)
        scaler.step(optimizer)
        scaler.update()
    return model, torch.tensor(scaler.get_scale())


@behaviour("views", "sharded", bound=1e-6, bound_of_one=1e-5)
def gradient_scaler(way: Way) -> Result:
    return scaled_steps(way, clips=False)


@behaviour("views", bound=1e-6, bound_of_one=1e-5)
def gradient_scaler_and_clipping(way: Way) -> Result:
    return scaled_steps(way, clips=True)


@behaviour("views")
def views_of_both(way: Way) -> Result:
    return learn(way, mlp(), ddp={"gradient_as_bucket_view": True}, change=clip)


@behaviour(bound=2e-3, bound_of_one=2e-3)
def halves_of_both(way: Way) -> Result:
    """A half has 11 bits, and the two divide at different ends of the sum."""
    return learn(
        way,
        mlp().float(),
        loss=lambda net, rows: mean_squares(net, (rows[0].float(), rows[1].float())),
        ddp={"hook": fp16_compress_hook},
        ours={"compression": hvd.Compression.fp16},
    )
