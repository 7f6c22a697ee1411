"""Random training programs over the users' API, and the same in one process, as functions of rank processes.

Every rank draws the same programs from the same seed, and runs them at its own pace until it is killed.
"""

from __future__ import annotations

import copy
import random
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.checkpoint import checkpoint

import sparkhvd.torch as hvd
from sparkhvd.engine.engine import Engine
from sparkhvd.errors import PeerLostError
from sparkhvd.torch.context import use_engine
from tests.harness.rank_process import Talk

# Relative to the largest weight, after a few steps in float64 whose sums have another order.
BOUND = 1e-9
WORDS, FEATURES = 11, 5
# If a gradient is nearly zero, a division by its size would turn rounding into steps.
EPS = 1e-2

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.03, momentum=0.9, weight_decay=0.05),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01, eps=EPS),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, eps=EPS, weight_decay=0.1),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.02, eps=EPS),
}
# Of those that keep the tensors, and of all.
IN_PLACE = ("clip", "clip values", "scale", "noise", "zero one", "read")
CHANGES = (*IN_PLACE, "replace", "drop one")


@dataclass(frozen=True)
class Program:
    """Program of all members.

    Attributes:
        name: its seed.
        members: the ranks whose gradients are combined.
        shape: of the model: width, layers, how often each is used, how it is recomputed in backward.
        is_sparse: whether the table of words has sparse gradients.
        optimizer: a name in OPTIMIZERS.
        options: of `DistributedOptimizer`.
        passes: backward passes of a step.
        changes: of the gradients of each step, between backward() and step().
        synchronizes: whether `synchronize()` is called before the changes.
        zeroing: how gradients are dropped.
        frozen: whether the last branch is frozen.
        reload_at: the step before which the optimizer's state is saved and loaded.
        left_out: a step that ends without `optimizer.step()`.
    """

    name: str
    members: tuple[int, ...]
    shape: tuple[int, int, int, str]
    is_sparse: bool
    optimizer: str
    options: dict[str, Any]
    passes: int
    changes: tuple[tuple[str, ...], ...]
    synchronizes: bool
    zeroing: str
    frozen: bool
    reload_at: int
    left_out: int

    def dice(self, *what: Any) -> random.Random:
        return random.Random(f"{self.name} {what}")

    def numbers(self, *what: Any, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(self.dice(*what).randrange(2**32))
        return torch.randn(shape, generator=generator, dtype=torch.float64)


def draw(name: str, sets: list[tuple[int, ...]]) -> Program:
    """Draw the program of a name."""
    dice = random.Random(name)
    is_sparse = dice.random() < 0.15
    options: dict[str, Any] = {}
    mode = dice.choice(("plain", "plain", "views", "sharded"))
    if mode == "views":
        options["gradient_as_bucket_view"] = True
    if mode == "sharded":
        options["sharded"] = True
    if dice.random() < 0.2:
        options["groups"] = dice.randint(1, 4)
    if dice.random() < 0.2:
        options["gradient_predivide_factor"] = dice.choice((0.5, 2.0, 4.0))
    elif dice.random() < 0.2:
        options["op"] = hvd.Sum
    if is_sparse and (mode != "plain" or dice.random() < 0.5):
        options["sparse_as_dense"] = True
    stays_sparse = is_sparse and mode == "plain"  # also of what travels as dense
    known = ("read", "scale") if stays_sparse else CHANGES if mode == "plain" else IN_PLACE
    changes = [
        tuple(dice.choices(known, k=dice.choice((0, 1, 1, 2)))) for _ in range(dice.randint(2, 7))
    ]
    synchronizes = dice.random() < 0.2
    if mode == "sharded" and not synchronizes:
        changes = [tuple(change for change in step if change == "clip")[:1] for step in changes]
    return Program(
        name=name,
        members=dice.choice(sets),
        shape=(
            dice.choice((1, 3, 8, 40)),
            dice.randrange(4),
            dice.choice((1, 1, 2)),
            dice.choice(("", "", "again", "again, reentrant")),
        ),
        is_sparse=is_sparse,
        optimizer="sgd" if stays_sparse else dice.choice(list(OPTIMIZERS)),
        options=options,
        passes=dice.choice((1, 1, 2, 3)),
        changes=tuple(changes),
        synchronizes=synchronizes,
        zeroing=dice.choice(("optimizer", "optimizer", "zeros", "model")),
        frozen=dice.random() < 0.2,
        reload_at=dice.randrange(12),
        left_out=dice.randrange(12),
    )


class Net(nn.Module):
    """Words and features, through layers that may be used several times, into one of three branches."""

    def __init__(self, program: Program, *, is_sparse: bool) -> None:
        super().__init__()
        width, layers, self.times, self.again = program.shape
        self.table = nn.Embedding(WORDS, FEATURES, sparse=is_sparse)
        self.first = nn.Linear(FEATURES, width)
        self.middle = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.branches = nn.ModuleList(nn.Linear(width, 2) for _ in range(3))
        self.double()
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.copy_(0.3 * program.numbers("weights", name, shape=tuple(p.shape)))
        self.branches[2].requires_grad_(not program.frozen)

    def forward(self, words: Tensor, x: Tensor, branch: int) -> Tensor:
        hidden = torch.tanh(self.first(x + self.table(words).mean(1)))
        for layer in self.middle:
            for _ in range(self.times):
                if self.again:
                    reentrant: Any = "reentrant" in self.again
                    hidden = torch.tanh(checkpoint(layer, hidden, use_reentrant=reentrant))
                else:
                    hidden = torch.tanh(layer(hidden))
        out: Tensor = self.branches[branch](hidden)
        return out


def loss_of(program: Program, net: Net, rank: int, step: int, number: int) -> Tensor:
    """Return the loss of a rank in a pass, with its own rows, number of rows and branch."""
    dice = program.dice("rows", rank, step, number)
    rows = dice.randint(1, 6)
    words = torch.tensor([dice.choices(range(WORDS), k=3) for _ in range(rows)])
    x = program.numbers("x", rank, step, number, shape=(rows, FEATURES))
    # At times a branch is one rank's, or no rank's.
    branch = dice.choice((0, 0, 1, 2))
    return (net(words, x, branch) - x[:, :2].sin()).square().mean() / program.passes


def loss_of_all(program: Program, net: Net, rank: int | None, step: int, number: int) -> Tensor:
    """Return the loss of a rank, or of all members together (rank None)."""
    if rank is not None:
        return loss_of(program, net, rank, step, number)
    losses = torch.stack([loss_of(program, net, r, step, number) for r in program.members])
    return losses.sum() if program.options.get("op") is hvd.Sum else losses.mean()


def clip(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    """Clip by the optimizer's method if it has one, which a sharded optimizer needs."""
    if hasattr(optimizer, "clip_grad_norm_"):
        optimizer.clip_grad_norm_(0.1)
    else:
        clip_grad_norm_(parameters, 0.1)


def change_gradients(program: Program, optimizer: Any, net: Net, step: int) -> None:
    """Change gradients between backward() and step(), in one process or on a rank."""
    dice = program.dice("changes", step)
    is_sharded = "sharded" in program.options
    for kind in program.changes[step]:
        parameters = [p for p in net.parameters() if p.grad is not None]
        if not parameters:  # the others have been dropped
            return
        grads = [p.grad for p in parameters]
        place = dice.randrange(len(parameters))
        one = grads[place]
        assert one is not None
        noise = program.numbers("noise", step, shape=tuple(one.shape))
        changes: dict[str, Callable[[], object]] = {
            "clip": lambda ps=parameters: (
                clip(optimizer, ps) if is_sharded else clip_grad_norm_(ps, 0.1)
            ),
            "clip values": lambda ps=parameters: clip_grad_value_(ps, 0.03),
            "scale": lambda gs=grads: torch._foreach_mul_(gs, 0.5 + step),
            "noise": lambda g=one, n=noise: g.add_(n, alpha=0.1),
            "zero one": lambda g=one: g.zero_(),
            "replace": lambda p=parameters[place], g=one: setattr(p, "grad", g.clamp(-0.02, 0.02)),
            "drop one": lambda p=parameters[place]: setattr(p, "grad", None),
            "read": lambda g=one: g.to_dense().sum().item(),
        }
        changes[kind]()


def zero_gradients(program: Program, optimizer: Any, net: Net) -> None:
    if program.zeroing == "model":
        net.zero_grad()
    else:
        optimizer.zero_grad(set_to_none=program.zeroing == "optimizer")


def train(program: Program, rank: int | None = None, process_set: Any = None) -> Tensor:
    """Train and return the weights: as a rank of a set, or as one process for all members (rank None)."""
    net = Net(program, is_sparse=program.is_sparse and rank is not None)
    optimizer = OPTIMIZERS[program.optimizer](net.parameters())
    if rank is not None:
        optimizer = hvd.DistributedOptimizer(
            optimizer,
            net.named_parameters(),
            backward_passes_per_step=program.passes,
            process_set=process_set,
            **program.options,
        )
    own = random.Random(rank)
    for step in range(len(program.changes)):
        if step == program.reload_at:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        zero_gradients(program, optimizer, net)
        for number in range(program.passes):
            if own.random() < 0.1:
                time.sleep(own.random() * 0.005)
            loss = loss_of_all(program, net, rank, step, number)
            loss.backward()
        if rank is None and "gradient_as_bucket_view" in program.options:  # which are never None
            for p in net.parameters():
                if p.grad is None and p.requires_grad:
                    p.grad = torch.zeros_like(p)
        if rank is not None and program.synchronizes:
            optimizer.synchronize()
        change_gradients(program, optimizer, net, step)
        if step != program.left_out:
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def check(program: Program, rank: int, process_set: Any) -> None:
    """Train on this rank, and compare with the others and with one process."""
    weights = train(program, rank, process_set)
    checksum = zlib.crc32(weights.numpy().tobytes())
    checksums = hvd.allgather_object(checksum, name=program.name, process_set=process_set)
    assert checksums == [checksum] * len(program.members), "ranks differ"
    if rank == program.members[0]:
        expected = train(program)
        apart = float((weights - expected).abs().max() / expected.abs().max())
        assert apart <= BOUND, f"{apart:.1e} from one process"


def work(engine: Engine, talk: Talk) -> Any:
    """Run the programs of the test's seed one after the other, and report the number of each."""
    seed = talk.hear()
    torch.set_num_threads(1)
    every = tuple(range(engine.size))
    dice = random.Random(seed)
    with use_engine(engine):
        sets = {every: hvd.global_process_set}
        for size in range(2, engine.size):
            members = tuple(sorted(dice.sample(every, size)))
            sets[members] = hvd.add_process_set(members)
        talk.say("running")
        number = 0
        while True:
            program = draw(f"{seed} {number}", [every, *sets])
            if engine.rank in program.members:
                try:
                    check(program, engine.rank, sets[program.members])
                except PeerLostError:
                    raise
                except Exception as error:
                    raise AssertionError(f"{type(error).__name__}: {error} in {program}") from error
                talk.say(number)
            number += 1
