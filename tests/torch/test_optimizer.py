from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError, MismatchError, NotInitializedError
from sparkhvd.settings import Settings
from sparkhvd.torch.context import context
from tests.torch.on_ranks import on_ranks

pytestmark = pytest.mark.ranks

# Several buckets even for small models.
SMALL = Settings(bucket_bytes=256)


def mlp(dtype: torch.dtype = torch.float64, seed: int = 1) -> nn.Sequential:
    # Layers are filled without torch's global generator, which ranks as threads share.
    model = nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 2)
    ).to(dtype)
    fill(model, seed)
    return model


def fill(model: nn.Module, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3)


def batch(step: int, dtype: torch.dtype = torch.float64, rows: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(rows, 6, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x[:, :2].sin()).square().mean()


def mine(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(hvd.size())[hvd.rank()]


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).double() for p in model.parameters()])


def train(
    make: Callable[[Any], torch.optim.Optimizer],
    *,
    distributed: bool,
    steps: int = 6,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> torch.Tensor:
    model = mlp(dtype)
    optimizer = make(model.parameters())
    if distributed:
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), **options
        )
    for step in range(steps):
        x = batch(step, dtype)
        optimizer.zero_grad()
        loss_of(model, mine(x) if distributed else x).backward()
        optimizer.step()
    return weights(model)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "asgd": lambda p: torch.optim.ASGD(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_one_process_in_float64(name: Any) -> None:
    make = OPTIMIZERS[name]
    expected = train(make, distributed=False)
    for size in (2, 3):
        results = on_ranks(size, lambda: train(make, distributed=True), settings=SMALL)
        for result in results:
            assert torch.equal(result, results[0])
            # Rprop steps by the sign of a gradient, which rounding may flip at zero.
            assert torch.allclose(result, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_training_equals_one_process_in_float32(size: Any) -> None:
    make = OPTIMIZERS["sgd"]
    expected = train(make, distributed=False, dtype=torch.float32)
    for result in on_ranks(
        size, lambda: train(make, distributed=True, dtype=torch.float32), settings=SMALL
    ):
        assert torch.allclose(result, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"groups": 2},
        {"groups": 100},
        {"gradient_predivide_factor": 4.0},
        {"backward_passes_per_step": 1},
    ],
    ids=str,
)
def test_optimizer_options_do_not_change_the_result(options: Any) -> None:
    make = OPTIMIZERS["sgd"]
    expected = train(make, distributed=False)
    for result in on_ranks(2, lambda: train(make, distributed=True, **options), settings=SMALL):
        assert torch.allclose(result, expected, rtol=0, atol=1e-12)


def test_groups_of_parameters_share_a_bucket() -> None:
    def body() -> Any:
        model = mlp()
        p = list(model.parameters())
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), groups=[[p[0], p[5]], [p[1]]]
        )
        return [[e.index for e in b.entries] for b in optimizer._reducers[0].buckets]

    for plan in on_ranks(2, body, settings=Settings(bucket_bytes=1)):
        assert sorted(plan) == [[1], [2], [3], [4], [5, 0]]


@pytest.mark.parametrize("compression", [hvd.Compression.fp16, hvd.Compression.bf16])
def test_compressed_training_is_close_to_uncompressed(compression: Any) -> None:
    make = OPTIMIZERS["sgd"]
    expected = train(make, distributed=False, dtype=torch.float32)
    results = on_ranks(
        2, lambda: train(make, distributed=True, dtype=torch.float32, compression=compression)
    )
    assert torch.equal(results[0], results[1])
    assert torch.allclose(results[0], expected, rtol=0, atol=0.02)
    assert not torch.equal(results[0], expected)


def test_op_sum_adds_gradients_of_all_ranks() -> None:
    def body() -> Any:
        p = nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), op=hvd.Sum)
        (p * float(hvd.rank() + 1)).sum().backward()
        optimizer.step()
        return p.tolist()

    assert on_ranks(2, body) == [[-3.0] * 3] * 2


def test_every_bucket_is_reduced_when_backward_returns() -> None:
    class Spy:
        def __init__(self, engine: Any) -> None:
            self.engine, self.calls = engine, []

        def __getattr__(self, name: str) -> Any:
            return getattr(self.engine, name)

        def start(self, call: Any, name: str, *rest: Any) -> Any:
            if not name.endswith(("digest", "order", "layouts")):
                self.calls.append((name, depth[0], len(call.tensors)))
            return self.engine.start(call, name, *rest)

    depth = [0]

    def body() -> Any:
        model = mlp()
        unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
        parameters = [*model.parameters(), unused]
        spy = context().engine = Spy(context().engine)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1))
        for step in range(3):
            spy.calls.clear()
            loss_of(model, mine(batch(step))).backward()
            submitted = len(spy.calls)
            assert submitted > 2
            assert optimizer._reducers[0].is_reduced
            assert not optimizer._reducers[0].in_flight
            optimizer.step()
            optimizer.zero_grad()
            assert len(spy.calls) == submitted

    on_ranks(2, body, settings=SMALL)


def test_bucket_order_follows_the_first_backward() -> None:
    class Backwards(nn.Module):
        """Layers registered in the order of use, so that the default order is right. `flip` makes it wrong."""

        def __init__(self, flip: bool) -> None:
            super().__init__()
            layers = [nn.Linear(6, 6, bias=False) for _ in range(4)]
            self.layers = nn.ModuleList(layers)
            self.flip = flip

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in reversed(self.layers) if self.flip else self.layers:
                x = layer(x).tanh()
            return x

    def body() -> Any:
        # Ranks see different orders; rank 0's counts.
        model = Backwards(flip=hvd.rank() == 0)
        fill(model)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        plans = []
        for step in range(3):
            reducer = optimizer._reducers[0]
            plans.append([e.index for b in reducer.buckets for e in b.entries])
            model(batch(step, torch.float32)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return plans

    for plans in on_ranks(2, body, settings=Settings(bucket_bytes=150)):
        assert plans == [[3, 2, 1, 0], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_parameter_unused_on_some_ranks_counts_as_zero_there() -> None:
    def body() -> Any:
        used, partly = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([used, partly], lr=1.0))
        for _ in range(3):
            optimizer.zero_grad()
            loss = used.sum() + (partly.sum() * 4 if hvd.rank() == 1 else 0)
            loss.backward()
            optimizer.step()
        return used.tolist(), partly.tolist()

    assert on_ranks(2, body) == [([-3.0] * 2, [-6.0] * 3)] * 2


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_a_parameter_that_no_rank_uses_keeps_no_gradient(op: Any) -> None:
    def body() -> Any:
        used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.AdamW([used, unused], lr=0.1, weight_decay=0.5), op=op
        )
        for _ in range(2):
            used.sum().backward()
            optimizer.step()
            assert unused.grad is None
            optimizer.zero_grad()
        return unused.tolist(), used.tolist() != [1.0, 1.0], len(optimizer.state)

    assert on_ranks(2, body) == [([1.0] * 3, True, 1)] * 2


def test_unused_parameter_has_zero_gradient_with_other_reductions() -> None:
    def body() -> Any:
        used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([used, unused], lr=0.1), op=hvd.Max)
        used.sum().backward()
        optimizer.step()
        return unused.grad.tolist()

    assert on_ranks(2, body) == [[0.0] * 3] * 2


def test_rank_without_any_backward_steps_with_the_others() -> None:
    def body() -> Any:
        model = mlp()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(3):
            if hvd.rank() == 0:
                loss_of(model, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    one, other = on_ranks(2, body, settings=SMALL)
    assert torch.equal(one, other)
    assert not torch.equal(one, weights(mlp()))


def test_frozen_parameters_are_reduced_after_unfreezing() -> None:
    def body() -> Any:
        model = mlp()
        model[0].weight.requires_grad_(False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
        )
        for step in range(4):
            model[0].weight.requires_grad_(step >= 2)
            optimizer.zero_grad()
            loss_of(model, mine(batch(step))).backward()
            optimizer.step()
        return weights(model)

    def alone() -> Any:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            model[0].weight.requires_grad_(step >= 2)
            optimizer.zero_grad()
            loss_of(model, batch(step)).backward()
            optimizer.step()
        return weights(model)

    for result in on_ranks(2, body, settings=SMALL):
        assert torch.allclose(result, alone(), rtol=0, atol=1e-12)


def test_parameters_added_later_are_reduced() -> None:
    def body() -> Any:
        first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first], lr=1.0))
        optimizer.add_param_group({"params": [second], "lr": 2.0})
        for _ in range(2):
            optimizer.zero_grad()
            ((first + second) * float(hvd.rank())).sum().backward()
            optimizer.step()
        return first.tolist(), second.tolist()

    assert on_ranks(2, body) == [([-1.0] * 2, [-2.0] * 2)] * 2


def test_gradient_accumulation_adds_and_does_not_divide() -> None:
    def body() -> Any:
        model = mlp()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), backward_passes_per_step=3
        )
        for step in range(3):
            optimizer.zero_grad()
            for part in mine(batch(step)).chunk(3):
                (loss_of(model, part) / 3).backward()
            optimizer.step()
        return weights(model)

    expected = train(lambda p: torch.optim.SGD(p, lr=0.1), distributed=False, steps=3)
    for result in on_ranks(2, body, settings=SMALL):
        assert torch.allclose(result, expected, rtol=0, atol=1e-12)


def test_gradient_accumulation_reduces_only_in_the_last_pass() -> None:
    def body() -> Any:
        model = mlp()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), backward_passes_per_step=2
        )
        loss_of(model, batch(0)).backward()
        first = optimizer._reducers[0].is_reduced
        loss_of(model, batch(1)).backward()
        second = optimizer._reducers[0].is_reduced
        optimizer.step()
        optimizer.set_backward_passes_per_step(1)
        optimizer.zero_grad()
        loss_of(model, batch(2)).backward()
        third = optimizer._reducers[0].is_reduced
        optimizer.step()
        return first, second, third

    assert on_ranks(2, body) == [(False, True, True)] * 2


def test_losses_on_disjoint_parameters_count_as_separate_passes() -> None:
    def body() -> Any:
        a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([a, b], lr=1.0), backward_passes_per_step=2
        )
        for _ in range(2):
            optimizer.zero_grad()
            (a.sum() * float(hvd.rank())).backward()
            (b.sum() * 3.0).backward()
            optimizer.step()
        return a.tolist(), b.tolist()

    assert on_ranks(2, body) == [([-1.0] * 2, [-6.0] * 2)] * 2


def test_extra_backward_raises_for_op_sum() -> None:
    def body() -> Any:
        model = mlp()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            named_parameters=model.named_parameters(),
            op=hvd.Sum,
        )
        loss_of(model, batch(0)).backward()
        with pytest.raises(InvalidArgumentError) as caught:
            loss_of(model, batch(1)).backward()
        optimizer.synchronize()
        return str(caught.value)

    for message in on_ranks(2, body):
        assert message == (
            "DistributedOptimizer: '4.bias' got a gradient in more than backward_passes_per_step=1 "
            "backward passes before step(). Call step() or zero_grad() of this optimizer between the "
            "backward passes, or set backward_passes_per_step to the number of passes per step."
        )


@pytest.mark.parametrize("drop", ["optimizer", "module"])
def test_gan_with_two_optimizers_equals_one_process(drop: Any) -> None:
    """The generator's loss leaves gradients in the discriminator, which are dropped."""

    def run(distributed: bool) -> torch.Tensor:
        generator, discriminator = mlp(seed=1), mlp(seed=2)
        adapt = torch.eye(2, 6, dtype=torch.float64)
        g_opt = torch.optim.SGD(generator.parameters(), lr=0.1)
        d_opt = torch.optim.SGD(discriminator.parameters(), lr=0.1)
        if distributed:
            g_opt = hvd.DistributedOptimizer(
                g_opt, named_parameters=generator.named_parameters("g")
            )
            d_opt = hvd.DistributedOptimizer(
                d_opt, named_parameters=discriminator.named_parameters("d")
            )
        for step in range(4):
            x = mine(batch(step)) if distributed else batch(step)
            (d_opt if drop == "optimizer" else discriminator).zero_grad()
            fake = generator(x).detach() @ adapt
            (discriminator(fake).mean() - discriminator(x).square().mean()).backward()
            d_opt.step()
            (g_opt if drop == "optimizer" else generator).zero_grad()
            discriminator(generator(x) @ adapt).square().mean().backward()
            g_opt.step()
        return torch.cat([weights(generator), weights(discriminator)])

    expected = run(False)
    for result in on_ranks(2, lambda: run(True), settings=SMALL):
        assert torch.allclose(result, expected, rtol=0, atol=1e-12)


def test_clipping_between_synchronize_and_step_equals_one_process() -> None:
    def run(distributed: bool, skip: bool) -> torch.Tensor:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if distributed:
            optimizer = hvd.DistributedOptimizer(optimizer)
        for step in range(3):
            x = batch(step)
            optimizer.zero_grad()
            loss_of(model, mine(x) if distributed else x).backward()
            if distributed:
                optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            if distributed and skip:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        return weights(model)

    expected = run(False, False)
    for skip in (False, True):
        for result in on_ranks(2, lambda s=skip: run(True, s), settings=SMALL):
            assert torch.allclose(result, expected, rtol=0, atol=1e-12)


def test_grad_scaler_skips_the_step_on_every_rank() -> None:
    def body() -> Any:
        p = nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            factor = float("inf") if step == 1 and hvd.rank() == 1 else float(hvd.rank())
            scaler.scale((p * factor).sum()).backward()
            if step == 2:
                scaler.unscale_(optimizer)
                seen.append(p.grad.tolist())
            scaler.step(optimizer)
            scaler.update()
            seen.append((p.tolist(), scaler.get_scale()))
        return seen

    assert (
        on_ranks(2, body)
        == [[([-0.5] * 3, 8.0), ([-0.5] * 3, 4.0), [0.5] * 3, ([-1.0] * 3, 4.0)]] * 2
    )


def test_gradients_are_reduced_at_every_closure_call() -> None:
    def run(distributed: bool, make: Callable[[Any], torch.optim.Optimizer]) -> torch.Tensor:
        model = mlp()
        optimizer = make(model.parameters())
        if distributed:
            optimizer = hvd.DistributedOptimizer(optimizer)
        for step in range(3):
            x = mine(batch(step)) if distributed else batch(step)

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, x)
                loss.backward()
                return loss

            optimizer.step(closure)
        return weights(model)

    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.LBFGS(p, max_iter=5, line_search_fn="strong_wolfe"),
    ):
        expected = run(False, make)
        for result in on_ranks(2, lambda m=make: run(True, m), settings=SMALL):
            assert torch.allclose(result, expected, rtol=0, atol=1e-9)


class Scaled(torch.optim.SGD):
    def step(self, closure: Any = None, *, factor: float = 0.0) -> Any:
        for group in self.param_groups:
            group["lr"] = 0.1 * factor
        return super().step(closure)


@pytest.mark.parametrize(
    "options", [{}, {"sharded": True}, {"op": hvd.Adasum}], ids=["plain", "sharded", "adasum"]
)
def test_step_forwards_its_keyword_arguments(options: dict[str, Any]) -> None:
    def run(distributed: bool) -> tuple[torch.Tensor, list[Any]]:
        model, seen = mlp(), list[Any]()
        optimizer: Any = Scaled(model.parameters(), lr=1.0)
        if distributed:
            optimizer = hvd.DistributedOptimizer(optimizer, **options)
        optimizer.register_step_post_hook(lambda _, __, given: seen.append(given.get("factor")))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch(1))  # all ranks have the same rows
            loss.backward()
            return loss

        optimizer.step(closure, factor=0.5)
        optimizer.step(closure=closure, factor=2.0)
        closure()
        optimizer.step(factor=1.0)
        with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
            optimizer.step(other=1)
        return weights(model), seen

    expected, seen = run(False)
    assert seen[-1] == 1.0
    for found, seen_there in on_ranks(2, lambda: run(True)):
        assert torch.allclose(found, expected, rtol=0, atol=1e-9)
        assert [each for each in seen_there if each] == [each for each in seen if each]


def test_noncontiguous_parameters_and_gradients_equal_one_process() -> None:
    def run(distributed: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(5)
        start = [
            torch.randn(s, generator=generator, dtype=torch.float64)
            for s in [(5, 4), (2, 3, 4, 4), (6,), (1, 7)]
        ]
        a = nn.Parameter(start[0].clone().t())  # transposed, dense
        b = nn.Parameter(start[1].clone().to(memory_format=torch.channels_last))
        c = nn.Parameter(start[2].clone()[::2])  # with holes
        d = nn.Parameter(start[3].clone())
        optimizer = torch.optim.SGD([a, b, c, d], lr=0.1, momentum=0.9)
        if distributed:
            optimizer = hvd.DistributedOptimizer(optimizer)
        for step in range(3):
            x = batch(step)
            x = mine(x) if distributed else x
            optimizer.zero_grad()
            scale = x.mean()
            weight = torch.arange(20.0, dtype=torch.float64).view(4, 5)
            loss = (a * weight * scale).sum() + (b.square() * b).sum() * scale
            loss = loss + (c * torch.tensor([1.0, 2.0, 3.0])).sum() * scale + d.expand(3, 7).sum()
            loss.backward()
            optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in (a, b, c, d)])

    expected = run(False)
    for result in on_ranks(2, lambda: run(True)):
        assert torch.allclose(result, expected, rtol=0, atol=1e-12)


def test_gradients_are_reduced_in_place() -> None:
    def body() -> Any:
        model = mlp()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loss_of(model, mine(batch(0))).backward()
        reducer = optimizer._reducers[0]
        assert all(not bucket.sent for bucket in reducer.buckets)
        before = [p.grad for p in model.parameters()]
        addresses = [g.data_ptr() for g in before]
        optimizer.synchronize()
        after = [p.grad for p in model.parameters()]
        assert all(x is y for x, y in zip(before, after, strict=True))
        assert [g.data_ptr() for g in after] == addresses

    on_ranks(2, body)


def test_each_dtype_has_its_own_buckets() -> None:
    def run(distributed: bool) -> list[list[float]]:
        parameters = [
            nn.Parameter(torch.zeros(3, dtype=dtype))
            for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32)
        ]
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        if distributed:
            optimizer = hvd.DistributedOptimizer(optimizer)
        factor = float(hvd.rank()) if distributed else 0.5
        sum((p * factor).sum().double() for p in parameters).backward()
        optimizer.step()
        return [p.tolist() for p in parameters]

    assert on_ranks(2, lambda: run(True)) == [run(False)] * 2


def test_sparse_gradients_are_reduced_sparse_or_dense() -> None:
    def body(sparse_as_dense: bool) -> Any:
        table = nn.Embedding(5, 2, sparse=True)
        fill(table)
        start = table.weight.detach().clone()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1.0), sparse_as_dense=sparse_as_dense
        )
        for _ in range(2):
            optimizer.zero_grad()
            loss = table(torch.tensor([hvd.rank(), 3])).sum()
            loss.backward()
            optimizer.step()
            assert table.weight.grad.is_sparse
        return (start - table.weight).detach()

    expected = torch.tensor([[1.0], [1.0], [0.0], [2.0], [0.0]]).expand(5, 2)
    for sparse_as_dense in (True, False):
        for result in on_ranks(2, lambda dense=sparse_as_dense: body(dense)):
            assert torch.allclose(result, expected)


def test_reentrant_checkpoint_equals_one_process() -> None:
    def run(distributed: bool) -> torch.Tensor:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if distributed:
            optimizer = hvd.DistributedOptimizer(optimizer)
        for step in range(3):
            x = mine(batch(step)) if distributed else batch(step)
            optimizer.zero_grad()
            hidden = checkpoint(model[:2], x.clone().requires_grad_(), use_reentrant=True)
            hidden = checkpoint(model[2:4], hidden, use_reentrant=True)
            (model[4](hidden) - x[:, :2].sin()).square().mean().backward()
            optimizer.step()
        return weights(model)

    expected = run(False)
    for result in on_ranks(2, lambda: run(True), settings=SMALL):
        assert torch.allclose(result, expected, rtol=0, atol=1e-12)


def test_training_continues_after_an_exception_in_backward() -> None:
    class Bomb(torch.autograd.Function):
        armed = threading.local()

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            if getattr(Bomb.armed, "on", False):
                raise KeyError("boom")
            return grad

    def body() -> Any:
        model = mlp()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(4):
            Bomb.armed.on = step in (0, 2)
            optimizer.zero_grad()
            try:
                hidden = Bomb.apply(model[:2](mine(batch(step))))
                model[2:](hidden).square().mean().backward()
            except KeyError:
                continue
            optimizer.step()
        return weights(model)

    one, other = on_ranks(2, body, settings=SMALL)
    assert torch.equal(one, other)


def test_distributed_optimizer_is_an_instance_of_the_original_class() -> None:
    def body() -> Any:
        model = mlp()
        plain = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
        assert isinstance(optimizer, torch.optim.Adam)
        assert type(optimizer).__name__ == "Adam"
        assert repr(optimizer).startswith("Adam (")
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss_of(model, batch(0)).backward()
            optimizer.step()
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.005
        assert sorted(optimizer._parameter_names.values())[0] == "0.bias"
        with pytest.raises(InvalidArgumentError, match="is already a DistributedOptimizer"):
            hvd.DistributedOptimizer(optimizer)

    on_ranks(2, body)
    on_ranks(1, body)


def test_state_dict_equals_that_of_the_plain_optimizer() -> None:
    def body() -> Any:
        model, twin = mlp(), mlp()
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))
        plain = torch.optim.Adam(twin.parameters(), lr=0.01)
        for step in range(2):
            loss_of(model, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            loss_of(twin, batch(step)).backward()
            plain.step()
            plain.zero_grad()
        ours, theirs = optimizer.state_dict(), plain.state_dict()
        assert ours.keys() == theirs.keys()
        assert ours["param_groups"] == theirs["param_groups"]
        for number, state in theirs["state"].items():
            for key, value in state.items():
                assert torch.allclose(ours["state"][number][key], value, rtol=0, atol=1e-12)

        other_model = mlp()
        other = hvd.DistributedOptimizer(torch.optim.Adam(other_model.parameters(), lr=1.0))
        other.load_state_dict(theirs)
        other_model.load_state_dict(model.state_dict())
        for pair in ((model, optimizer), (other_model, other)):
            loss_of(pair[0], mine(batch(5))).backward()
            pair[1].step()
        return torch.equal(weights(model), weights(other_model))

    assert on_ranks(2, body) == [True, True]


def test_step_hooks_run_once() -> None:
    def body() -> Any:
        model = mlp()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        optimizer.load_state_dict(optimizer.state_dict())
        calls = []
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))
        loss_of(model, batch(0)).backward()
        optimizer.step()
        return calls

    assert on_ranks(2, body) == [["pre", "post"]] * 2


def test_copied_and_pickled_optimizers_are_plain() -> None:
    def body() -> Any:
        model = mlp()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        )
        loss_of(model, batch(0)).backward()
        optimizer.step()
        for made in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert type(made) is torch.optim.SGD
            assert made.param_groups[0]["momentum"] == 0.9
            assert len(made.state) == len(optimizer.state)
        pickle.dumps(model)  # hooks on parameters do not stop that

    on_ranks(2, body)


def test_newer_optimizer_replaces_the_older_for_its_parameters() -> None:
    def body() -> Any:
        model = mlp()
        old = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        new = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(2):
            loss_of(model, mine(batch(step))).backward()
            new.step()
            new.zero_grad()
        with pytest.raises(InvalidArgumentError, match="newer DistributedOptimizer"):
            old.step()
        return weights(model)

    expected = train(lambda p: torch.optim.SGD(p, lr=0.1), distributed=False, steps=2)
    for result in on_ranks(2, body):
        assert torch.allclose(result, expected, rtol=0, atol=1e-12)


def test_backward_works_and_step_raises_after_shutdown() -> None:
    models = [mlp(), mlp()]
    optimizers: dict[int, Any] = {}

    def body() -> Any:
        model = models[hvd.rank()]
        optimizers[hvd.rank()] = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1)
        )
        loss_of(model, batch(0)).backward()
        optimizers[hvd.rank()].step()
        loss_of(model, batch(0)).backward()  # in flight at shutdown

    on_ranks(2, body)
    for model, optimizer in zip(models, optimizers.values(), strict=True):
        loss_of(model, batch(1)).backward()
        optimizer.zero_grad()
        with pytest.raises(NotInitializedError, match="was built before shutdown"):
            optimizer.step()
    optimizers.clear()
    on_ranks(2, body)


def test_deleting_an_optimizer_removes_its_hooks() -> None:
    def body() -> Any:
        model = mlp()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        del optimizer
        gc.collect()
        assert all(not p._post_accumulate_grad_hooks for p in model.parameters())

    on_ranks(2, body)


def test_single_rank_communicates_nothing() -> None:
    def body() -> Any:
        model = mlp()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        assert optimizer._reducers == ()
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, batch(step)).backward()
            loss_of(model, batch(step)).backward()
            optimizer.synchronize()
            optimizer.step()

    on_ranks(1, body)


@pytest.mark.parametrize("kind", ["name", "shape", "count", "factor"])
def test_error_shows_both_values_of_different_parameters(kind: Any) -> None:
    def body() -> Any:
        odd = hvd.rank() == 1
        shape = (3, 4) if not (odd and kind == "shape") else (3, 5)
        p = nn.Parameter(torch.ones(shape))
        named = [("other" if odd and kind == "name" else "weight", p)]
        if odd and kind == "count":
            named.append(("more", nn.Parameter(torch.ones(1))))
        factor = 2.0 if odd and kind == "factor" else 1.0
        _optimizer = hvd.DistributedOptimizer(  # noqa: F841 - its hooks live as long as it does
            torch.optim.SGD([p for _, p in named], lr=0.1),
            named_parameters=named,
            gradient_predivide_factor=factor,
        )
        with pytest.raises(MismatchError) as caught:
            sum(p.sum() for _, p in named).backward()
        return str(caught.value)

    expected = {
        "name": "ranks disagree on parameter 0. Rank 0 has 'weight' with shape (3, 4)",
        "shape": "rank 1 has 'weight' with shape (3, 5)",
        "count": "ranks disagree on the number of parameters. Rank 0 has 1, rank 1 has 2.",
        "factor": "ranks disagree on the options",
    }[kind]
    for message in on_ranks(2, body):
        assert expected in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backward_passes_per_step": 0}, "backward_passes_per_step is 0"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "needs op=Average, got Sum"),
        ({"gradient_predivide_factor": 0.0}, "finite and more than 0"),
        ({"groups": 0}, "groups is 0"),
        ({"groups": [["x"]]}, "groups holds str"),
        ({"named_parameters": [1]}, "named_parameters holds int"),
        ({"named_parameters": [("a", torch.ones(1))]}, "are not in named_parameters"),
    ],
    ids=str,
)
def test_invalid_optimizer_arguments_raise(arguments: Any, message: Any) -> None:
    def body() -> Any:
        with pytest.raises(ValueError, match=message):
            hvd.DistributedOptimizer(torch.optim.SGD(mlp().parameters(), lr=0.1), **arguments)

    on_ranks(1, body)


def test_duplicate_names_and_parameters_raise() -> None:
    def body() -> Any:
        a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        with pytest.raises(ValueError, match="uses 'x' more than once"):
            hvd.DistributedOptimizer(
                torch.optim.SGD([a, b], lr=0.1), named_parameters=[("x", a), ("x", b)]
            )
        with pytest.raises(ValueError, match="appears twice in groups"):
            hvd.DistributedOptimizer(torch.optim.SGD([a, b], lr=0.1), groups=[[a], [a, b]])

    on_ranks(1, body)


def test_num_groups_argument_is_deprecated() -> None:
    def body() -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hvd.DistributedOptimizer(torch.optim.SGD(mlp().parameters(), lr=0.1), num_groups=2)
        assert [w.category for w in caught] == [DeprecationWarning]

    on_ranks(1, body)


def test_parameters_without_elements_are_not_reduced() -> None:
    def body() -> Any:
        empty, full = nn.Parameter(torch.ones(0, 3)), nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([empty, full], lr=1.0))
        (full.sum() + empty.sum()).backward()
        optimizer.step()
        return full.tolist()

    assert on_ranks(2, body) == [[-1.0, -1.0]] * 2


@pytest.mark.parametrize("sharded", [False, True])
def test_step_after_synchronize_without_skip_warns_like_horovod(sharded: bool) -> None:
    def body() -> list[str]:
        model = torch.nn.Linear(3, 1)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), sharded=sharded
        )
        model(torch.ones(2, 3)).sum().backward()
        optimizer.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        return [str(each.message) for each in caught]

    (found,) = on_ranks(1, body)  # threads share what is caught
    assert len(found) == (not sharded)
    # Programs filter the warning by these words.
    wanted = "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can cause training slowdown."
    assert all(text.startswith(wanted) for text in found)
