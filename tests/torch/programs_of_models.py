"""Programs of `ways.py` about parameters, layers and torch's mechanisms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_, parametrizations
from torch.utils.checkpoint import checkpoint

import sparkhvd.torch as hvd
from tests.torch.ways import (
    ANYHOW,
    BEHAVIOURS,
    LATER,
    STEPS,
    Batch,
    Behaviour,
    Ours,
    Result,
    Way,
    behaviour,
    clip,
    learn,
    mean_squares,
    mlp,
    numbers,
    pictures,
    plain_sgd,
    seeded,
    sgd,
    spoiled,
    vectors,
    words,
)

# --- Parameters. ---


class Branches(nn.Module):
    """Model of several layers, of which a function chooses one. The last is never used."""

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
    """Model with a weight in two places, a layer under two names, and a layer called twice."""

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
    """Thaw frozen parameters. DDP is created again for them, and clipping needs their reduction already in their first step."""
    model = mlp()
    model[0].requires_grad_(False)
    net, optimizer = way.pair(model, sgd)
    for step in range(STEPS):
        if step == LATER:
            model[0].requires_grad_(True)
            net = way.model(model)
            way.at_start.pop()
        optimizer.zero_grad()
        mean_squares(net, way.share(vectors(step))).backward()
        clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.3)
        optimizer.step()
    return model


@behaviour()
def freezing_parameters_later(way: Way) -> Result:
    model = mlp()
    net, optimizer = way.pair(model, sgd)
    for step in range(STEPS):
        optimizer.zero_grad()
        if step == LATER:
            model[0].requires_grad_(False)
            net = way.model(model)
            way.at_start.pop()
        mean_squares(net, way.share(vectors(step))).backward()
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
    """Train parameters of several types. A bfloat16 has 8 bits, which one process rounds once."""
    torch.manual_seed(1)
    return learn(way, Mixed(), change=lambda ps, *_: clip_grad_norm_(ps[:4], 0.3))


class Phases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Fortran's order, so that memory and rows differ.
        self.turn = nn.Parameter(torch.randn(2, 6, dtype=torch.complex128).t())
        self.shift = nn.Parameter(torch.randn((), dtype=torch.complex128))
        self.out = nn.Linear(2, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        turned = x.to(torch.complex128) @ self.turn.conj()
        return self.out((turned * self.shift).abs())


# Gloo of torch 2.4 has no complex numbers.
@behaviour("views", "accumulated", "sharded", has_ddp=not torch.__version__.startswith("2.4."))
def complex_parameters(way: Way) -> Result:
    torch.manual_seed(1)
    return learn(way, Phases())


class Weighing(nn.Module):
    """Its gradients are one expanded number, or a view with other strides."""

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
    """Synchronize batch norm. torch's own layer needs a GPU."""
    norm: Any = hvd.SyncBatchNorm if isinstance(way, Ours) else nn.BatchNorm2d
    return learn(way, seeded(lambda: convolutions(norm)), data=pictures)


@behaviour("views", has_one_process=False)
def dropout_by_the_same_seed(way: Way) -> Result:
    model = mlp()
    model.insert(2, nn.Dropout(0.3))
    torch.manual_seed(7)
    return learn(way, model)


class Drifting(nn.Module):
    """Its buffer follows the data of its rank, and changes its output."""

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
    """Send the buffers of rank 0. DDP does so before each forward pass, ours by one line."""
    model = Drifting()
    net, optimizer = way.pair(model, sgd)
    for step in range(STEPS):
        optimizer.zero_grad()
        way.send_buffers(model)
        mean_squares(net, way.share(vectors(step))).backward()
        optimizer.step()
    return model


# --- Machinery of torch. ---


class Checkpointed(nn.Module):
    """Computes its layers again in backward, one of them several times."""

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
        mean_squares(fast, way.share(vectors(step))).backward()
        clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    return model


@behaviour("views", bound=1e-6, bound_of_one=2e-2)
def autocast(way: Way) -> Result:
    """Train with autocast. Parts of a batch are rounded to bfloat16, while one process rounds their sum."""

    def loss(net: Any, rows: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = net(rows[0].float())
        squares: Tensor = (out.float() - rows[1].float()).square().mean()
        return squares

    return learn(way, mlp().float(), loss=loss, change=clip)


def scaled_steps(way: Way, *, clips: bool) -> Result:
    """Skip steps with a non-finite row, and lower the scale."""
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
    """Send halves with 11 bits. DDP and DistributedOptimizer divide at different ends of the sum."""
    return learn(
        way,
        mlp().float(),
        loss=lambda net, rows: mean_squares(net, (rows[0].float(), rows[1].float())),
        ddp={"hook": fp16_compress_hook},
        ours={"compression": hvd.Compression.fp16},
    )
