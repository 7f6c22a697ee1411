"""Models, gradients and optimizers with `DistributedOptimizer`, with the changes that users make to them."""

from __future__ import annotations

import copy
import functools
import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError
from tests.torch.exact import (
    BOUNDS,
    MLP,
    SMALL,
    Batch,
    compare,
    distance,
    fill,
    mine,
    values,
)
from tests.torch.on_ranks import on_ranks

pytestmark = pytest.mark.ranks

F64 = torch.float64
STEPS = 8


def sgd(parameters: Any, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=0.01)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-2)


def wrap(optimizer: torch.optim.Optimizer, distributed: bool, **options: Any) -> Any:
    return hvd.DistributedOptimizer(optimizer, **options) if distributed else optimizer


def batch(step: int, distributed: bool, dtype: torch.dtype = F64) -> Batch:
    whole = MLP.batch(step, dtype)
    return mine(whole) if distributed else whole


def learn(
    model: nn.Module,
    optimizer: Any,
    distributed: bool,
    steps: range = range(STEPS),
    loss: Callable[[nn.Module, Batch], Tensor] = MLP.loss,
) -> Tensor:
    """Run plain steps, and return the weights."""
    for step in steps:
        optimizer.zero_grad()
        loss(model, batch(step, distributed)).backward()
        optimizer.step()
    return values(model)


def loss_in_float32(model: nn.Module, batch: Batch) -> Tensor:
    return MLP.loss(model, tuple(t.float() for t in batch))


# --- Several backward passes, and parts of them. ---


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoints_equal_one_process(reentrant: Any, passes: Any) -> None:
    def loss(model: Any, batch: Batch) -> Tensor:
        x, y = batch
        hidden = checkpoint(model[:2], x.clone().requires_grad_(), use_reentrant=reentrant)
        hidden = checkpoint(model[2:4], hidden, use_reentrant=reentrant)
        return (model[4](hidden) - y).square().mean()

    def run(distributed: bool) -> Tensor:
        model = MLP.build()
        optimizer = wrap(sgd(model.parameters()), distributed, backward_passes_per_step=passes)
        for step in range(STEPS):
            optimizer.zero_grad()
            for number in range(passes):
                (loss(model, batch(step * passes + number, distributed)) / passes).backward()
            optimizer.step()
        return values(model)

    compare(run, size=3)


def test_nested_activation_checkpoints_equal_one_process() -> None:
    def loss(model: Any, batch: Batch) -> Tensor:
        x, y = batch

        def inner(hidden: Tensor) -> Tensor:
            return checkpoint(model[2:4], hidden, use_reentrant=True)

        def outer(x: Tensor) -> Tensor:
            return model[4](inner(model[:2](x)))

        return (
            (checkpoint(outer, x.clone().requires_grad_(), use_reentrant=True) - y).square().mean()
        )

    def run(distributed: bool) -> Tensor:
        model = MLP.build()
        return learn(model, wrap(sgd(model.parameters()), distributed), distributed, loss=loss)

    compare(run)


@pytest.mark.parametrize("reentrant", [False, True])
def test_layer_reused_in_activation_checkpoints_equals_one_process(reentrant: Any) -> None:
    """Re-entrant checkpoints give the layer several gradients in one backward()."""

    def loss(model: Any, batch: Batch) -> Tensor:
        x, y = batch
        hidden = x.clone().requires_grad_()
        for _ in range(3):
            hidden = checkpoint(lambda h: model[0](h).tanh(), hidden, use_reentrant=reentrant)
        return (model[1](hidden) - y).square().mean()

    def run(distributed: bool) -> Tensor:
        model = fill(nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 2)]).double())
        optimizer = wrap(sgd(model.parameters()), distributed)
        return learn(model, optimizer, distributed, loss=loss)

    compare(run)
    compare(run, hosts=[0, 1])


@pytest.mark.parametrize("make", [sgd, adamw])
def test_parameters_unused_on_varying_ranks_equal_one_process(make: Any) -> None:
    """Each rank uses one of four experts per step. Both ranks use some experts, no rank uses others."""
    choices = [(0, 1), (1, 1), (2, 0), (0, 0), (1, 2), (2, 2), (0, 1), (1, 0)]

    def build() -> Any:
        return fill(nn.ModuleList(nn.Linear(6, 2) for _ in range(4)).double())

    def part(model: Any, step: int, rank: int) -> Tensor:
        x, y = (t.chunk(2)[rank] for t in MLP.batch(step, F64))
        return (model[choices[step][rank]](x) - y).square().mean()

    def run(distributed: bool) -> Tensor:
        model = build()
        optimizer = wrap(make(model.parameters()), distributed)
        for step in range(STEPS):
            optimizer.zero_grad()
            parts = [hvd.rank()] if distributed else [0, 1]
            torch.stack([part(model, step, rank) for rank in parts]).mean().backward()
            optimizer.step()
        for p in model[3].parameters():
            assert p.grad is None
            assert p not in optimizer.state
        return values(model)

    compare(run)


@pytest.mark.parametrize("as_dense", [True, False], ids=["as dense", "as sparse"])
@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "SparseAdam"])
def test_sparse_layers_unused_on_some_ranks_equal_one_process(kind: Any, as_dense: Any) -> None:
    """In turn, both ranks use the table, only rank 1, no rank, and only rank 0."""
    users = [(0, 1), (1,), (), (0,)]

    def part(table: nn.Module, step: int, rank: int) -> Tensor:
        x, _ = (t.chunk(2)[rank] for t in MLP.batch(step, F64))
        if rank not in users[step % 4]:
            return x.sum() * 0.0
        tokens = (x[:, :3].abs() * 5).long().clamp(max=9)
        return (table(tokens).mean(1) - x[:, :4]).square().mean()

    def run(distributed: bool) -> Tensor:
        table = fill(nn.Embedding(10, 4, sparse=True).double())
        eps = {} if kind == "SGD" else {"eps": 1e-2}
        optimizer = wrap(
            getattr(torch.optim, kind)(table.parameters(), lr=0.05, **eps),
            distributed,
            sparse_as_dense=as_dense,
        )
        for step in range(2 * STEPS):
            optimizer.zero_grad()
            parts = [hvd.rank()] if distributed else [0, 1]
            loss = torch.stack([part(table, step, rank) for rank in parts]).mean()
            if loss.requires_grad:
                loss.backward()
            optimizer.step()
        return values(table)

    compare(run)


@pytest.mark.parametrize("passes", [1, 4])
def test_any_number_of_passes_has_one_reduction_per_step(passes: Any) -> None:
    """The engine counts the reductions, and the whole model is one bucket."""

    def reductions() -> tuple[int, int]:
        entries = [
            entry
            for entry in hvd.metrics(show=False).counters["collectives"]
            if entry["collective"] == "allreduce"
        ]
        return sum(e["operations"] for e in entries), sum(e["bytes"] for e in entries)

    def body() -> Any:
        model = MLP.build()
        optimizer = hvd.DistributedOptimizer(
            sgd(model.parameters()), backward_passes_per_step=passes
        )
        seen = []
        for step in range(4):
            optimizer.zero_grad()
            for _ in range(passes):
                MLP.loss(model, batch(step, True)).backward()
            optimizer.step()
            seen.append(reductions())
        return [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(seen)]

    num_bytes = 8 * sum(p.numel() for p in MLP.build().parameters())
    flags = 8 * len(list(MLP.build().parameters()))
    for steps in on_ranks(
        2, body
    ):  # in the previous step, ranks also agree on the tensors to reduce
        assert steps == [(1, num_bytes + flags)] * 3


# --- Several optimizers. ---


def test_two_optimizers_of_one_model_equal_one_process() -> None:
    """One backward pass computes the gradients for both optimizers, which have different classes."""

    def run(distributed: bool) -> Tensor:
        model: Any = MLP.build()
        body = wrap(sgd(model[:3].parameters()), distributed)
        head = wrap(adamw(model[3:].parameters()), distributed)
        for step in range(STEPS):
            body.zero_grad()
            head.zero_grad()
            MLP.loss(model, batch(step, distributed)).backward()
            for optimizer in (head, body) if step % 2 else (body, head):
                optimizer.step()
        return values(model)

    compare(run, size=3)


def test_optimizers_with_different_step_intervals_equal_one_process() -> None:
    def run(distributed: bool) -> Tensor:
        model: Any = MLP.build()
        often = wrap(sgd(model[:3].parameters()), distributed)
        seldom = wrap(adamw(model[3:].parameters()), distributed, backward_passes_per_step=2)
        for step in range(STEPS):
            often.zero_grad()
            MLP.loss(model, batch(step, distributed)).backward()
            often.step()
            if step % 2:
                seldom.step()
                seldom.zero_grad()
        return values(model)

    compare(run, size=3)


@pytest.mark.parametrize("to_none", [True, False])
def test_gan_with_three_optimizers_equals_one_process(to_none: Any) -> None:
    """Both networks share an encoder, and the discriminator gets gradients of its own loss and of the others' losses."""

    def run(distributed: bool) -> Tensor:
        nets = [
            fill(nn.Linear(*shape).double(), n) for n, shape in enumerate([(6, 6), (6, 6), (6, 2)])
        ]
        encoder, generator, discriminator = nets
        e_opt, g_opt, d_opt = (
            wrap(make(net.parameters()), distributed)
            for net, make in zip(nets, (adamw, sgd, sgd), strict=True)
        )
        for step in range(STEPS):
            x, _ = batch(step, distributed)
            d_opt.zero_grad(set_to_none=to_none)
            with torch.no_grad():
                fake = generator(encoder(x).tanh())
            (discriminator(fake).mean() - discriminator(x).square().mean()).backward()
            d_opt.step()
            for optimizer in (e_opt, g_opt):
                optimizer.zero_grad(set_to_none=to_none)
            d_opt.zero_grad(set_to_none=to_none)
            discriminator(generator(encoder(x).tanh())).square().mean().backward()
            g_opt.step()
            e_opt.step()
        return torch.cat([values(net) for net in nets])

    compare(run, size=3)


def test_gradient_penalty_equals_one_process() -> None:
    """The loss contains gradients, as in a Wasserstein GAN."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return MLP.loss(model, batch) + (slope.norm(dim=1) - 1).square().mean()

    def run(distributed: bool) -> Tensor:
        model = MLP.build()
        return learn(model, wrap(sgd(model.parameters()), distributed), distributed, loss=loss)

    compare(run, size=3)


class Tied(nn.Module):
    """The last layer's weight is the first one's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())[:, :2]


def test_tied_weights_equal_one_process() -> None:
    def run(distributed: bool) -> Tensor:
        model = fill(Tied().double())
        optimizer = sgd(model.parameters())
        if distributed:
            # Names of all places of a weight, as in a checkpoint, are accepted too.
            named = model.named_parameters(remove_duplicate=False)
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named)
        return learn(model, optimizer, distributed)

    compare(run, size=3)


# --- Hooks of the user, and parameters that change. ---


@pytest.mark.parametrize("when", ["before", "after"])
def test_gradient_scaling_hooks_equal_one_process(when: Any) -> None:
    def run(distributed: bool) -> Tensor:
        model = MLP.build()

        def hook() -> None:
            for number, p in enumerate(model.parameters()):
                p.register_hook(lambda grad, n=number: grad * (0.5 + n / 4))

        if when == "before":
            hook()
        optimizer = wrap(sgd(model.parameters()), distributed)
        if when == "after":
            hook()
        return learn(model, optimizer, distributed)

    compare(run, size=3)


def test_earlier_post_accumulate_hooks_equal_one_process() -> None:
    """They change this rank's gradient before the reduction, so a factor has the same effect as in one process."""

    def run(distributed: bool) -> Tensor:
        model = MLP.build()

        def halve(p: Tensor) -> None:
            p.grad.mul_(0.5)

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(halve)
        return learn(model, wrap(sgd(model.parameters()), distributed), distributed)

    compare(run, size=3)


def test_post_accumulate_hooks_that_replace_gradients_equal_one_process() -> None:
    def run(distributed: bool) -> Tensor:
        model = MLP.build()

        def replace(p: Tensor) -> None:
            p.grad = p.grad * 0.5

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(replace)
        return learn(model, wrap(sgd(model.parameters()), distributed), distributed)

    compare(run, size=3)


def test_requires_grad_toggled_between_steps_equals_one_process() -> None:
    def run(distributed: bool) -> Tensor:
        model: Any = MLP.build()
        optimizer = wrap(adamw(model.parameters()), distributed)
        for step in range(STEPS):
            model[2 * (step % 3)].requires_grad_(step % 2 == 0)
            optimizer.zero_grad()
            MLP.loss(model, batch(step, distributed)).backward()
            optimizer.step()
        return values(model)

    compare(run, size=3)


def test_gradients_set_by_the_user_are_reduced() -> None:
    """No backward pass ends in the parameters."""

    def run(distributed: bool) -> Tensor:
        model = MLP.build()
        optimizer = wrap(sgd(model.parameters()), distributed)
        parameters = list(model.parameters())
        for step in range(STEPS):
            loss = MLP.loss(model, batch(step, distributed))
            for p, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                p.grad = grad
            optimizer.step()
        return values(model)

    compare(run, size=3)


@pytest.mark.parametrize("as_views", [False, True], ids=["", "views"])
@pytest.mark.parametrize("after_a_step", [False, True])
def test_model_moved_to_another_dtype_is_reduced_or_raises(
    after_a_step: Any, as_views: Any
) -> None:
    def gradients(distributed: bool) -> Tensor:
        model = MLP.build(torch.float32)
        optimizer = wrap(
            torch.optim.SGD(model.parameters(), lr=0.0),  # weights keep their float32 values
            distributed,
            gradient_as_bucket_view=as_views,
        )
        if after_a_step:
            learn(model, optimizer, distributed, range(1), loss_in_float32)
            optimizer.zero_grad()
        model.double()
        MLP.loss(model, batch(1, distributed)).backward()
        optimizer.step()
        return torch.cat([p.grad.view(-1) for p in model.parameters()])

    def body() -> Any:
        try:
            return gradients(True)
        except InvalidArgumentError as error:
            return str(error)

    for result in on_ranks(2, body, settings=SMALL):
        if isinstance(result, str):
            assert "float32" in result
            assert "float64" in result
        else:
            assert distance(result, gradients(False)) <= BOUNDS[F64]


@pytest.mark.parametrize("as_views", [False, True], ids=["", "views"])
def test_model_moved_to_another_layout_equals_one_process(as_views: Any) -> None:
    """torch moves the memory of `.grad` within the same tensor."""

    def run(distributed: bool) -> Tensor:
        model = conv_model()
        optimizer = wrap(sgd(model.parameters()), distributed, gradient_as_bucket_view=as_views)
        layouts = (torch.contiguous_format, torch.channels_last)
        for step in range(STEPS):
            model = model.to(memory_format=layouts[step // 2 % 2])
            optimizer.zero_grad()
            model = model.to(memory_format=layouts[step // 3 % 2])
            rows = slice(3 * hvd.rank(), 3 * hvd.rank() + 3) if distributed else slice(None)
            conv_loss(model, step, rows, torch.contiguous_format).backward()
            optimizer.step()
        return torch.cat([p.detach().contiguous().view(-1) for p in model.parameters()])

    compare(run)


def test_zero_dimensional_parameters_equal_one_process() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.shift = nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale + self.shift)[:, :2]

    def run(distributed: bool, as_views: bool = False) -> Tensor:
        model = fill(Scaled().double())
        optimizer = wrap(sgd(model.parameters()), distributed, gradient_as_bucket_view=as_views)
        return learn(model, optimizer, distributed)

    compare(run, size=3)
    compare(lambda distributed: run(distributed, as_views=True), size=3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"compression": hvd.Compression.fp16}, "FP16Compressor is for real numbers"),
        ({"compression": hvd.Compression.powersgd()}, "is for real numbers"),
        ({"op": hvd.Max}, "op=Max is not defined for complex numbers"),
    ],
    ids=["fp16", "powersgd", "max"],
)
def test_options_for_real_numbers_refuse_complex_parameters(options: Any, says: str) -> None:
    def body() -> Any:
        p = nn.Parameter(torch.ones(3, dtype=torch.complex128))
        with pytest.raises(InvalidArgumentError, match=says) as caught:
            wrap(sgd([p]), True, named_parameters=[("phase", p)], **options)
        return str(caught.value)

    for message in on_ranks(2, body):
        assert "'phase' is torch.complex128" in message


@pytest.mark.parametrize("kind", ["owned", "shared"])
def test_owned_and_shared_complex_parameters_equal_one_process(kind: str) -> None:
    """Each rank owns whole parameters (no dimension, or an optimizer that is not elementwise), or all ranks share one copy."""

    class Own(torch.optim.SGD):
        """A user's optimizer, which may read every element of a parameter."""

    def run(distributed: bool) -> Tensor:
        turn = nn.Parameter(torch.linspace(0, 1, 12, dtype=F64).view(6, 2) * (1 + 0.5j))
        shift = nn.Parameter(torch.tensor(0.3 - 0.2j, dtype=torch.complex128))
        make = functools.partial(Own, momentum=0.9) if kind == "owned" else adamw
        optimizer = make([turn, shift])
        if distributed:
            shares = kind == "shared"
            optimizer = hvd.DistributedOptimizer(optimizer, sharded=True, share_parameters=shares)
        for step in range(5):
            batch = MLP.batch(step, F64)
            x, y = mine(batch) if distributed else batch
            optimizer.zero_grad()
            ((x.to(turn.dtype) @ turn * shift).abs() - y).square().mean().backward()
            if distributed:
                optimizer.clip_grad_norm_(0.5)
            else:
                nn.utils.clip_grad_norm_([turn, shift], 0.5)
            optimizer.step()
        state = optimizer.state_dict()["state"]
        kept = [state[n]["momentum_buffer" if kind == "owned" else "exp_avg"] for n in range(2)]
        return torch.cat([torch.view_as_real(t.detach()).flatten() for t in (turn, shift, *kept)])

    compare(run)


def test_parameter_groups_keep_learning_rates_with_generated_names() -> None:
    def run(distributed: bool) -> Tensor:
        model: Any = MLP.build()
        weights = [p for p in model.parameters() if p.dim() > 1]
        biases = [p for p in model.parameters() if p.dim() == 1]
        groups = [
            {"params": weights, "lr": 0.05},
            {"params": biases, "lr": 0.2, "weight_decay": 0.0},
        ]
        named = (pair for pair in model.named_parameters())
        options = {"named_parameters": named} if distributed else {}
        optimizer = wrap(sgd(groups), distributed, **options)
        result = learn(model, optimizer, distributed)
        assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.2]
        return result

    compare(run, size=3)


# --- Save, resume, copy. ---


@pytest.mark.parametrize("hosts", [[0, 0], [0, 0, 0], [0, 1, 1]], ids=str)
@pytest.mark.parametrize("make", [sgd, adamw])
def test_saved_and_resumed_training_has_the_same_bits(make: Any, hosts: Any) -> None:
    def parts() -> Any:
        model = MLP.build()
        return model, hvd.DistributedOptimizer(make(model.parameters()))

    def body() -> Any:
        model, optimizer = parts()
        learn(model, optimizer, True, range(4))
        saved = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
        straight = learn(model, optimizer, True, range(4, STEPS))

        saved.seek(0)
        state = torch.load(saved)
        model, optimizer = parts()
        learn(model, optimizer, True, range(2))  # what is loaded replaces this
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return straight, learn(model, optimizer, True, range(4, STEPS))

    for straight, resumed in on_ranks(len(hosts), body, hosts=hosts, settings=SMALL):
        assert torch.equal(straight, resumed)


def test_optimizer_state_loads_from_one_process_to_ranks_and_back() -> None:
    """The checkpoint is loaded with another number of ranks than wrote it."""

    def go_on(state: Any, steps: range, distributed: bool) -> Any:
        model = MLP.build()
        optimizer = wrap(adamw(model.parameters()), distributed)
        if state:
            model.load_state_dict(state[0])
            optimizer.load_state_dict(copy.deepcopy(state[1]))  # torch would keep its tensors
        learn(model, optimizer, distributed, steps)
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    first = go_on(None, range(3), False)
    seconds = on_ranks(2, lambda: go_on(first, range(3, 6), True), settings=SMALL)
    last, _ = go_on(seconds[1], range(6, 9), False)
    expected, _ = go_on(None, range(9), False)
    for key, value in expected.items():
        assert distance(last[key], value) <= BOUNDS[F64]


@pytest.mark.parametrize("how", ["load_state_dict", "broadcast_optimizer_state"])
def test_scheduler_created_before_wrapping_continues_to_work(how: Any) -> None:
    """Loaded or broadcast state must not leave the scheduler with parameter groups that the optimizer does not use."""

    def run(distributed: bool) -> Any:
        model = MLP.build()
        plain = sgd(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(plain, step_size=1, gamma=0.5)
        optimizer = wrap(plain, distributed)
        if how == "load_state_dict":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif distributed:
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for step in range(3):
            learn(model, optimizer, distributed, range(step, step + 1))
            scheduler.step()
        return torch.cat([values(model), torch.tensor([optimizer.param_groups[0]["lr"]]).double()])

    compare(run)


def test_weight_averages_in_copies_equal_one_process() -> None:
    """Neither a deep copy between the steps nor torch's own average has hooks."""

    def run(distributed: bool) -> Tensor:
        model = MLP.build()
        optimizer = wrap(sgd(model.parameters()), distributed)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        for step in range(STEPS):
            optimizer.zero_grad()
            MLP.loss(model, batch(step, distributed)).backward()
            between = copy.deepcopy(model)  # gradients are in flight
            optimizer.step()
            average.update_parameters(model)
        MLP.loss(between, batch(0, distributed)).backward()  # must not disturb the others
        MLP.loss(average.module, batch(0, distributed)).backward()
        last = [values(m) for m in (model, average.module, between)]
        learn(model, optimizer, distributed, range(2))
        return torch.cat([*last, values(model)])

    compare(run, size=3)


# --- Memory layouts. ---


def conv_model() -> Any:
    """Make convolutions, which keep the layout of their input, so a rank's input decides the layout of gradients."""
    layers = (nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(16, 2))
    return fill(nn.Sequential(*layers).double())


def conv_loss(model: nn.Module, step: int, rows: slice, layout: torch.memory_format) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(6, 2, 4, 4, generator=generator, dtype=F64)[rows]
    return (model(x.to(memory_format=layout)) - x[:, 0, 0, :2]).square().mean()


@pytest.mark.parametrize("what", ["inputs", "parameters", "gradients"])
@pytest.mark.parametrize("as_views", [False, True], ids=["", "views"])
def test_channels_last_on_one_rank_equals_one_process(what: Any, as_views: Any) -> None:
    """On rank 1 the inputs, the whole model, or gradients that the user makes have another layout than on rank 0."""

    def run(distributed: bool) -> Tensor:
        model = conv_model()
        odd = distributed and hvd.rank() == 1
        layout = torch.channels_last if odd else torch.contiguous_format
        if what == "parameters":
            model = model.to(memory_format=layout)
        optimizer = wrap(sgd(model.parameters()), distributed, gradient_as_bucket_view=as_views)
        for step in range(STEPS):
            optimizer.zero_grad()
            if what == "gradients" and not as_views:
                for p in model.parameters():  # backward adds to what it finds
                    p.grad = torch.zeros_like(p)
                    if p.dim() == 4:
                        p.grad = p.grad.to(memory_format=layout)
            rows = slice(3 * hvd.rank(), 3 * hvd.rank() + 3) if distributed else slice(None)
            conv_loss(model, step, rows, layout).backward()
            optimizer.step()
        return torch.cat([p.detach().contiguous().view(-1) for p in model.parameters()])

    compare(run)


def expanded(like: Tensor, values: Tensor) -> Tensor:
    """Make one row, expanded to all, as in the gradient of a sum."""
    return values.expand_as(like)


def overlapping(like: Tensor, values: Tensor) -> Tensor:
    """Make rows that share elements with the next."""
    rows, columns = like.shape
    memory = torch.arange(rows + columns, dtype=values.dtype) * float(values[0])
    return memory.as_strided((rows, columns), (1, 1))


def with_holes(like: Tensor, values: Tensor) -> Tensor:
    """Take every second element of a wider matrix."""
    wide = torch.zeros(like.shape[0], 2 * like.shape[1], dtype=values.dtype)
    wide[:, ::2] = values
    return wide[:, ::2]


def transposed(like: Tensor, values: Tensor) -> Tensor:
    """Make a transposed tensor."""
    return (values * torch.ones_like(like)).t().contiguous().t()


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["", "views"])
@pytest.mark.parametrize("one_rank_only", [False, True])
@pytest.mark.parametrize("make", [expanded, overlapping, with_holes, transposed])
def test_gradients_of_any_memory_layout_equal_one_process(
    make: Any, one_rank_only: Any, options: Any
) -> None:
    """The user sets the gradients, because backward copies gradients of these layouts."""

    def gradient(p: Tensor, step: int, rank: int) -> Tensor:
        values = torch.arange(1.0, 4.0, dtype=F64) * (1 + rank) / (1 + step)
        if rank == 0 and one_rank_only:
            # The other rank's memory layout could not hold this: no two elements are equal.
            return torch.arange(15.0, dtype=F64).view(5, 3) * values[0]
        return make(p, values)

    def run(distributed: bool) -> Tensor:
        p = nn.Parameter(torch.ones(5, 3, dtype=F64))
        optimizer = wrap(sgd([p]), distributed, **options)
        for step in range(4):
            ranks = [hvd.rank()] if distributed else [0, 1]
            parts = [gradient(p, step, rank) for rank in ranks]
            p.grad = parts[0] if distributed else (parts[0] + parts[1]) / 2
            optimizer.step()
        return p.detach().clone()

    compare(run)


def test_expanded_gradients_equal_one_process() -> None:
    """The gradient of sum() is one element, expanded to the shape."""

    def run(distributed: bool) -> Tensor:
        p = nn.Parameter(torch.ones(5, 3, dtype=F64))
        q = nn.Parameter(torch.ones(3, 5, dtype=F64).t())
        optimizer = wrap(sgd([p, q]), distributed)
        for step in range(4):
            optimizer.zero_grad()
            factor = batch(step, distributed)[0].mean()
            (p.sum() * factor + q.expand(2, 5, 3).sum() * factor).backward()
            optimizer.step()
        return torch.cat([p.detach().reshape(-1), q.detach().reshape(-1)])

    compare(run, size=3)


def test_parameters_in_one_flat_tensor_equal_one_process() -> None:
    """Their gradients are such views too, as in optimizers that keep all parameters flat."""

    def run(distributed: bool) -> Tensor:
        model = MLP.build()
        parameters = list(model.parameters())
        flat = torch.cat([p.detach().reshape(-1) for p in parameters])
        grads = torch.zeros_like(flat)
        offset = 0
        for p in parameters:
            p.data = flat[offset : offset + p.numel()].view_as(p)
            p.grad = grads[offset : offset + p.numel()].view_as(p)
            offset += p.numel()
        optimizer = wrap(sgd(parameters), distributed)
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=False)
            MLP.loss(model, batch(step, distributed)).backward()
            optimizer.step()
        assert torch.equal(flat, values(model))
        last = torch.cat([p.grad.reshape(-1) for p in parameters])
        assert torch.equal(grads, last)  # reduced where they lie
        return torch.cat([flat, grads])

    compare(run, size=3)


def test_noncontiguous_slices_of_one_matrix_equal_one_process() -> None:
    """Their memory is not dense, so autograd makes contiguous gradients for them."""

    def run(distributed: bool) -> Tensor:
        memory = torch.linspace(-1, 1, 24, dtype=F64).view(4, 6).clone()
        left = nn.Parameter(memory[:, :3])
        right = nn.Parameter(memory[:, 3:].t())
        optimizer = wrap(sgd([left, right]), distributed)
        for step in range(STEPS):
            optimizer.zero_grad()
            x = batch(step, distributed)[0][:, :4]
            (x @ left @ right).square().mean().backward()
            optimizer.step()
        return memory.clone()

    compare(run, size=3)
