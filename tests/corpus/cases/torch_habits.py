"""Habits of users' code around torch: attributes, hooks, state, signatures, own optimizers."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
import logging
import pathlib
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - everyone's name

from tests.corpus.case import (
    TABLE,
    Case,
    Data,
    adam,
    binary,
    floats,
    labelled,
    mlp,
    rows,
    sgd,
    target,
)

CE = nn.CrossEntropyLoss
NOTHING = Data({"x": floats(4)})
PAIR = Data({"a": floats(3), "b": floats(4)}, {"y": target(floats(3))})
RANDOM = "random numbers"
BUFFERS = "training changes buffers, which DistributedDataParallel takes from rank 0 before each forward, the estimator before each step"
T = TypeVar("T")


class Wraps(nn.Module):
    """A network with an additional attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


# ----------------------------------------------------------------------------------------------------
# Attributes.


@dataclasses.dataclass(eq=False)
class AsDataclass(nn.Module):
    inputs: int = 4
    hidden: int = 6

    def __post_init__(self) -> None:
        super().__init__()
        self.body = mlp(self.inputs, 1, self.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Kind(enum.Enum):
    TANH = "tanh"
    RELU = "relu"


@dataclasses.dataclass(frozen=True)
class Settings:
    kind: Kind = Kind.TANH
    folder: pathlib.Path = pathlib.Path("somewhere")
    names: tuple[str, ...] = ("a", "b")


class Configured(Wraps):
    """Keeps its configuration, a logger, a device, functions and other objects."""

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__()
        self.settings = settings or Settings()
        self.log = logging.getLogger("corpus")
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.activation = F.gelu
        self.scale = functools.partial(torch.mul, other=0.5)
        self.seen: collections.Counter[str] = collections.Counter()
        self.table: dict[str, Any] = collections.defaultdict(list)

    def forward(self, x: Tensor) -> Tensor:
        self.seen["calls"] += 1
        out = self.body(x)
        return self.scale(out) if self.settings.kind is Kind.TANH else self.activation(out)


class NumpyNoise(Wraps):
    """Draws from an own numpy generator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x + 0.1 * torch.from_numpy(
                self.generator.standard_normal(x.shape).astype(np.float32)
            )
        return self.body(x)


class TorchNoise(Wraps):
    """Draws from an own torch generator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x + 0.1 * torch.randn(x.shape, generator=self.generator)
        return self.body(x)


@functools.lru_cache
def positions(length: int) -> Tensor:
    return torch.linspace(0, 1, length)


class CachedFunction(Wraps):
    def forward(self, x: Tensor) -> Tensor:
        return self.body(x + positions(x.shape[1]))


class CachedMethod(Wraps):
    @functools.lru_cache  # noqa: B019 - as people do
    def positions(self, length: int) -> Tensor:
        return torch.linspace(0, 1, length)

    @functools.cached_property
    def scale(self) -> float:
        return 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.body(x + self.positions(x.shape[1]))


class Delegates(nn.Module):
    """Passes unknown attributes on to the module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Wraps()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


class Empty(Wraps):
    """Has a length of 0 and compares by value."""

    def __len__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Empty)

    __hash__ = nn.Module.__hash__


class Parent(nn.Module):
    """Its submodule refers to the parent."""

    class Part(nn.Module):
        def __init__(self, whole: nn.Module) -> None:
            super().__init__()
            self.body = mlp()
            self.__dict__["whole"] = whole

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) * self.whole.scale

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.part = Parent.Part(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


class Weak(Wraps):
    """Has a weak reference to its submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.first = weakref.ref(self.body[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.first()(x).mean(1, keepdim=True)

    def __getstate__(self) -> dict[str, Any]:
        return {n: v for n, v in vars(self).items() if n != "first"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.first = weakref.ref(self.body[0])


class Locked(Wraps):
    """Has a lock that it recreates."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {n: v for n, v in vars(self).items() if n != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.lock = threading.Lock()


class Typed(Wraps, Generic[T]):
    pass


class Described(Wraps):
    """Has properties over its parameters, and a class attribute."""

    outputs = 1

    @property
    def weight(self) -> Tensor:
        return self.body[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.weight.mean()


class Counts(Wraps):
    """Counts its steps in a number that controls its warm-up."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return self.body(x) * min(1.0, self.steps / 4)


ATTRIBUTES = [
    Case("dataclass", AsDataclass, TABLE),
    Case("configuration", Configured, TABLE),
    Case("own generator of numpy", NumpyNoise, TABLE, apart=RANDOM),
    Case("own generator of torch", TorchNoise, TABLE, apart=RANDOM),
    Case("lru_cache of a function", CachedFunction, TABLE),
    Case("lru_cache of a method", CachedMethod, TABLE),
    Case("passes attributes on", Delegates, TABLE),
    Case("length of 0", Empty, TABLE),
    Case("a part that knows the whole", Parent, TABLE),
    Case("weak reference", Weak, TABLE),
    Case("lock left out of its state", Locked, TABLE),
    Case("generic", Typed[int], TABLE),
    Case("properties", Described, TABLE),
    Case("counts steps in a number", Counts, TABLE, apart="a number counts steps", resumes=True),
]


# ----------------------------------------------------------------------------------------------------
# Parameters, buffers and state.


class Strided(nn.Module):
    """Parameters with strided memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(6, 4).t() * 0.3)
        self.last = nn.Parameter(torch.randn(6, 2)[:, :1] * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first) @ self.last


class Whole(Wraps):
    """Has integers and bits as parameters that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.randperm(4), requires_grad=False)
        self.mask = nn.Parameter(torch.ones(4, dtype=torch.bool), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x[:, self.order] * self.mask)


class Scalars(Wraps):
    """Has parameters without axes, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(()))
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.body(x) + self.shift + self.nothing.sum()


class Buffers(Wraps):
    """Has a non-persistent buffer, a buffer that is None, and its own running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0, 1, 4), persistent=False)
        self.register_buffer("missing", None)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.body(x - self.mean + self.table)


class OwnState(Wraps):
    """Writes its state in its own form, which has more than tensors."""

    def state_dict(self, *args: Any, **keywords: Any) -> dict[str, Any]:  # type: ignore[override]
        return {"net": self.body.state_dict(*args, **keywords), "version": 3}

    def load_state_dict(self, state: Any, *args: Any, **keywords: Any) -> Any:
        return self.body.load_state_dict(state["net"], *args, **keywords)


class ExtraState(Wraps):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return self.body(x)


class FrozenNorm(nn.Module):
    """Keeps its BatchNorm in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.body[1].eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class MonteCarlo(nn.Module):
    """Uses dropout in eval mode too, and returns the mean there."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(4, 4)
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        if self.training:
            return self.last(F.dropout(hidden, 0.3))
        generator = torch.random.get_rng_state()
        torch.manual_seed(0)
        mean = torch.stack([self.last(F.dropout(hidden, 0.3)) for _ in range(4)]).mean(0)
        torch.random.set_rng_state(generator)
        return mean


class Byol(nn.Module):
    """A student, and a teacher whose weights follow the student's in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.predict = mlp(4, 3), nn.Linear(3, 3)
        self.teacher = copy.deepcopy(self.student).requires_grad_(requires_grad=False)

    @torch.no_grad()
    def follow(self) -> None:
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            slow.lerp_(fast, 0.1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            self.follow()
        return self.predict(self.student(x)), self.teacher(x)


def byol_step(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    del ctx
    out, wanted = model(batch["x"] + 0.1 * torch.randn_like(batch["x"]))
    return 2 - 2 * F.cosine_similarity(out, wanted.detach()).mean()


class Thaws(nn.Module):
    """Trains its first layer only after some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        hidden = self.body[:2](x)
        return self.body[2](hidden if self.steps > 3 else hidden.detach())


STATE = [
    Case("strided parameters", Strided, TABLE, resumes=True),
    Case("parameters of integers", Whole, TABLE),
    Case("parameters without axes", Scalars, TABLE),
    Case(
        "buffers", Buffers, TABLE, apart="a running mean of batches", no_ddp=BUFFERS, resumes=True
    ),
    Case("own state_dict", OwnState, TABLE),
    Case("extra state", ExtraState, TABLE, apart="a number counts steps"),
    Case("BatchNorm kept in eval mode", FrozenNorm, TABLE, apart=""),
    Case("Monte Carlo dropout", MonteCarlo, TABLE, apart=RANDOM),
    Case("BYOL", Byol, NOTHING, None, adam, step=byol_step, apart=RANDOM, resumes=True),
    Case("layers that thaw", Thaws, TABLE, apart="a buffer counts steps"),
]


# ----------------------------------------------------------------------------------------------------
# Hooks.


def halve(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
    del module, grad_output
    return tuple(g if g is None else g * 0.5 for g in grad_input)


def shifted(module: nn.Module, args: Any, kwargs: Any) -> Any:
    del module
    return tuple(a + 0.1 for a in args), kwargs


def hooked(attach: Callable[[nn.Module], object]) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        module = Wraps()
        attach(module)
        return module

    return model


def renamed(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> dict[str, Any]:
    del module, prefix, metadata
    return {n.replace("body", "network"): v for n, v in state.items()}


def found(module: nn.Module, state: dict[str, Any], *rest: Any) -> None:
    del module, rest
    for name in list(state):
        state[name.replace("network", "body")] = state.pop(name)


class Records(Wraps):
    """Records the hidden values of a layer by a hook, for a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Tensor] = {}
        self.body[1].register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        del module, args
        self.seen["hidden"] = output


def sparse_codes(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    del ctx
    out = model(batch["x"])
    module = getattr(model, "module", model)
    return F.mse_loss(out.squeeze(1), batch["y"]) + 0.1 * module.seen["hidden"].abs().mean()


HOOKS = [
    Case(
        "full backward hook", hooked(lambda m: m.body[2].register_full_backward_hook(halve)), TABLE
    ),
    Case(
        "forward pre-hook with keywords",
        hooked(lambda m: m.body.register_forward_pre_hook(shifted, with_kwargs=True)),
        TABLE,
    ),
    Case(
        "names of its own in the state",
        hooked(
            lambda m: (
                m._register_state_dict_hook(renamed),
                m.register_load_state_dict_pre_hook(found),
            )
        ),
        TABLE,
    ),
    Case("hook that is a method", Records, TABLE, None, step=sparse_codes),
    Case(
        "gradient hook of a parameter",
        hooked(lambda m: m.body[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))),
        TABLE,
        no_ddp="a hook gets a rank's gradient before the average, in `fit` scaled to its share",
        apart="the hook limits the gradient of each rank",
    ),
]


# ----------------------------------------------------------------------------------------------------
# Signatures and calls.


class Keyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(7)

    def forward(self, *, a: Tensor, b: Tensor) -> Tensor:
        return self.body(torch.cat([a, b], 1))


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(7)

    def forward(self, *columns: Tensor) -> Tensor:
        return self.body(torch.cat(columns, 1))


class Defaults(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(
        self, x: Tensor, scale: float = 0.5, mask: Tensor | None = None, **more: Any
    ) -> Tensor:
        return self.body(x) * scale * (1 if mask is None else mask)


class TakesDict(nn.Module):
    """Takes one dict, as many repositories do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(7)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"out": self.body(torch.cat([batch["a"], batch["b"]], 1))}


def dict_step(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    del ctx
    return F.mse_loss(model(batch)["out"].squeeze(1), batch["y"])


class Recurses(nn.Module):
    """Sends its input through one layer several times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.layer(x)) + x
        return self.last(x)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def penalized(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    """Return a loss with a penalty of gradients, as of WGAN-GP."""
    del ctx
    x = batch["x"].clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.mse_loss(out.squeeze(1), batch["y"]) + 0.1 * (slope.norm(dim=1) - 1).square().mean()


def reinforce(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    del ctx
    policy = torch.distributions.Categorical(logits=model(batch["x"]))
    action = policy.sample()
    reward = (action == batch["c"]).float()
    return -(policy.log_prob(action) * (reward - 0.3)).mean() - 0.01 * policy.entropy().mean()


def two_views(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    """Call the model twice per step."""
    del ctx
    first, second = model(batch["x"]), model(-batch["x"])
    return F.mse_loss(first.squeeze(1), batch["y"]) + 0.1 * (first + second).square().mean()


def by_hand(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    """Log numbers, and weigh the loss by the epoch."""
    loss = F.mse_loss(model(batch["x"]).squeeze(1), batch["y"])
    ctx.log("rmse", loss.detach().sqrt())
    return loss


def in_autocast(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    with torch.autocast(ctx.device.type, torch.bfloat16):
        out = model(batch["x"])
    return F.mse_loss(out.float().squeeze(1), batch["y"])


CALLS = [
    Case("keywords alone", Keyword, Data(PAIR.features, PAIR.labels, by_name=True)),
    Case("any number of arguments", Several, PAIR),
    Case("defaults and more keywords", Defaults, TABLE),
    Case(
        "one dict", TakesDict, Data(PAIR.features, PAIR.labels, is_dict=True), None, step=dict_step
    ),
    Case("one layer several times", Recurses, TABLE),
    Case(
        "gradient penalty",
        Critic,
        TABLE,
        None,
        adam,
        step=penalized,
        no_ddp="DistributedDataParallel does not average gradients of autograd.grad",
    ),
    Case("REINFORCE", lambda: mlp(4, 3), labelled(4), None, adam, step=reinforce, apart=RANDOM),
    Case("two calls per step", mlp, TABLE, None, step=two_views),
    Case("logs numbers", mlp, TABLE, None, step=by_hand),
    Case(
        "autocast in a step", mlp, TABLE, None, step=in_autocast, apart="sums are rounded to 8 bits"
    ),
]


# ----------------------------------------------------------------------------------------------------
# The user's own losses and optimizers.


class Balanced:
    """A loss as an object."""

    def __init__(self, share: float) -> None:
        self.share = share

    def __call__(self, output: Tensor, label: Tensor) -> Tensor:
        return self.share * F.mse_loss(output, label) + (1 - self.share) * F.l1_loss(output, label)

    def huber(self, output: Tensor, label: Tensor) -> Tensor:
        return F.huber_loss(output, label, delta=self.share)


class Buffered(nn.Module):
    """A loss with a buffer that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.ones(()))

    def forward(self, output: Tensor, label: Tensor) -> Tensor:
        self.level = 0.9 * self.level + 0.1
        return F.mse_loss(output, label) * self.level


class SignDescent(torch.optim.Optimizer):
    """An optimizer of the user's own."""

    def __init__(self, parameters: Any, lr: float = 0.01, momentum: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                mean = state.setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 1 - group["momentum"])
                state["step"] = state.get("step", 0) + 1
                p.sub_(mean.sign(), alpha=group["lr"])
        return loss


def lookahead(parameters: Any) -> torch.optim.Optimizer:
    """Make an optimizer around another one. Each call makes a class, because torch patches a class when a state is loaded."""

    class Lookahead(torch.optim.Optimizer):
        def __init__(self, base: torch.optim.Optimizer, k: int = 3) -> None:
            # Without the constructor of the base class, as in several libraries.
            self.base, self.k, self.count = base, k, 0
            self.param_groups, self.defaults = base.param_groups, base.defaults
            self.state = collections.defaultdict(dict)
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["slow"] = p.detach().clone()

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.base.zero_grad(set_to_none)

        def step(self, closure: Any = None) -> Any:
            loss = self.base.step(closure)
            self.count += 1
            if self.count % self.k == 0:
                with torch.no_grad():
                    for group in self.param_groups:
                        for p in group["params"]:
                            slow = self.state[p]["slow"]
                            slow.lerp_(p, 0.5)
                            p.copy_(slow)
            return loss

    return Lookahead(sgd(parameters))


def outer(parameters: Any) -> torch.optim.Optimizer:
    """Make an optimizer with a property that returns the groups of an inner optimizer."""

    class Outer(torch.optim.Optimizer):
        def __init__(self, base: torch.optim.Optimizer) -> None:
            self.base, self.defaults = base, base.defaults
            self.state = collections.defaultdict(dict)

        @property
        def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
            return self.base.param_groups

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.base.zero_grad(set_to_none)

        def step(self, closure: Any = None) -> Any:
            return self.base.step(closure)

    return Outer(sgd(parameters))


class Sam(torch.optim.Optimizer):
    """Sharpness-aware steps, which compute the loss at a second point."""

    def __init__(self, parameters: Any, lr: float = 0.05, rho: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        closure = torch.enable_grad()(closure)
        loss = closure()
        given = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in given]).norm() + 1e-12
        moves = [p.grad * (self.param_groups[0]["rho"] / norm) for p in given]
        for p, move in zip(given, moves, strict=True):
            p.add_(move)
        closure()
        for p, move in zip(given, moves, strict=True):
            p.sub_(move)
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])
        return loss


class TwoStepSam(Sam):
    """Moves by the existing gradient, and computes a second gradient."""

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        given = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in given]).norm() + 1e-12
        for p in given:
            self.state[p]["move"] = p.grad * (self.param_groups[0]["rho"] / norm)
            p.add_(self.state[p]["move"])
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "move" in self.state[p]:
                    p.sub_(self.state[p].pop("move"))
                    p.sub_(p.grad, alpha=group["lr"])
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is not None, "it needs a closure"
        self.first_step(zero_grad=True)
        torch.enable_grad()(closure)()
        self.second_step()


def decayed_layers(parameters: Any) -> torch.optim.Optimizer:
    """Give each parameter its own rate, the last the largest."""
    given = list(parameters)
    groups = [{"params": [p], "lr": 0.05 * 0.7 ** (len(given) - i)} for i, p in enumerate(given)]
    return torch.optim.SGD(groups, momentum=0.9)


class OwnSchedule(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self) -> list[float]:
        return [base / (1 + self.last_epoch) for base in self.base_lrs]


def as_lightning_module() -> nn.Module:
    """Make a LightningModule that is trained as a module."""
    import lightning

    class Lit(lightning.LightningModule):
        def __init__(self, hidden: int = 6) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.body = mlp(4, 1, hidden)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    return Lit()


def of_torchmetrics(name: str) -> Callable[[], Any]:
    """Return a function that makes a loss of a function of torchmetrics."""

    def loss(output: Tensor, label: Tensor) -> Tensor:
        import torchmetrics.functional

        return getattr(torchmetrics.functional, name)(output, label).mean()

    return lambda: loss


PARTS = [
    Case("LightningModule", as_lightning_module, TABLE),
    Case("torchmetrics log_cosh_error", mlp, TABLE, of_torchmetrics("log_cosh_error")),
    Case(
        "torchmetrics pearson_corrcoef",
        mlp,
        TABLE,
        lambda: lambda o, y: -of_torchmetrics("pearson_corrcoef")()(o.squeeze(1), y.squeeze(1)),
        adam,
        apart="compares the rows of a batch",
    ),
    Case("loss as an object", mlp, TABLE, lambda: Balanced(0.7)),
    Case("loss as a method", mlp, TABLE, lambda: Balanced(0.7).huber),
    Case("loss with a buffer", mlp, TABLE, Buffered, apart="a buffer counts steps"),
    Case("own optimizer", mlp, TABLE, optimizer=SignDescent, twice_tolerance=1e-4, resumes=True),
    Case("Lookahead", mlp, TABLE, optimizer=lookahead),
    Case(
        "Lookahead with a schedule",
        mlp,
        TABLE,
        optimizer=lookahead,
        scheduler=OwnSchedule,
        is_per_step=True,
    ),
    Case("SAM", mlp, TABLE, optimizer=Sam, has_closure=True),
    Case("SAM of two steps", mlp, TABLE, optimizer=TwoStepSam, has_closure=True),
    Case("groups by a property", mlp, TABLE, optimizer=outer),
    Case("a rate per layer", mlp, TABLE, optimizer=decayed_layers, has_own_optimizer=True),
    Case("own schedule", mlp, TABLE, scheduler=OwnSchedule, is_per_step=True),
    Case(
        "imbalanced classes",
        mlp,
        binary(4),
        lambda: nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0])),
    ),
    Case(
        "numbers of several outputs",
        lambda: mlp(4, 3),
        rows(4, outputs=3),
        lambda: nn.SmoothL1Loss(beta=0.5),
    ),
]

CASES = [*ATTRIBUTES, *STATE, *HOOKS, *CALLS, *PARTS]
