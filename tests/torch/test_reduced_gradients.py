"""`.grad` after `backward()` is reduced, so code of a one-process script that changes it is right on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError, MismatchError
from tests.torch.exact import MLP, SMALL, compare, fill, mine, values
from tests.torch.on_ranks import on_ranks

pytestmark = pytest.mark.ranks

STEPS = 20

OPTIONS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"op": hvd.Sum},
    {"gradient_predivide_factor": 3.0},
    {"groups": 2},
    {"backward_passes_per_step": 2},
    {"gradient_as_bucket_view": True, "backward_passes_per_step": 2},
]


def clip(model: nn.Module) -> None:
    """Scale all gradients by their norm. The bound is below it, so each step is clipped."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    assert norm > 0.05


def scale(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.mul_(0.5).sub_(p.grad.mean())


def replace(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad = p.grad.clamp(-0.01, 0.01)


def train(
    distributed: bool,
    options: dict[str, Any],
    change: Callable[[nn.Module], Any],
    steps: int = STEPS,
) -> Tensor:
    """Return the weights after steps in which gradients are changed between backward() and step()."""
    model = MLP.build()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    passes = options.get("backward_passes_per_step", 1)
    # Sums over the ranks are means if every rank has its share of the mean.
    share = 1.0 / hvd.size() if options.get("op") is hvd.Sum and distributed else 1.0
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer, **options)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(passes):
            batch = MLP.batch(passes * step + part, torch.float64)
            loss = MLP.loss(model, mine(batch) if distributed else batch)
            (loss * share / passes).backward()
        change(model)
        optimizer.step()
    return values(model)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("change", [clip, scale, replace])
def test_gradients_changed_before_the_step_give_the_weights_of_one_process(
    change: Callable[[nn.Module], Any], options: dict[str, Any]
) -> None:
    compare(lambda distributed: train(distributed, options, change), size=3)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
def test_gradients_are_completely_reduced_when_backward_returns(
    options: dict[str, Any],
) -> None:
    compare(lambda distributed: train(distributed, options, clip), hosts=[0, 1])


@pytest.mark.parametrize(
    "options",
    [
        {"compression": hvd.Compression.fp16},
        {"compression": hvd.Compression.bf16},
        {"op": hvd.Max},
        {"gradient_as_bucket_view": True},
        {"backward_passes_per_step": 2},
    ],
)
def test_clipping_keeps_ranks_equal_in_every_bit(options: dict[str, Any]) -> None:
    first, *others = on_ranks(3, lambda: train(True, options, clip, steps=6), settings=SMALL)
    assert all(torch.equal(first, other) for other in others)


def test_low_rank_gradients_are_reduced_after_backward() -> None:
    def body() -> Any:
        p = nn.Parameter(torch.zeros(40, 60))
        powersgd = hvd.Compression.powersgd(rank=1, warm_up_steps=1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), compression=powersgd)
        seen = []
        for _ in range(3):
            optimizer.zero_grad()
            (p * (1.0 + hvd.rank())).sum().backward()
            assert p.grad is not None
            seen.append(p.grad.clone())
            nn.utils.clip_grad_norm_([p], 0.1)
            optimizer.step()
        return [*seen, p.detach()]

    first, second = on_ranks(2, body)
    for mine_, theirs in zip(first, second, strict=True):
        assert torch.equal(mine_, theirs)
    for gradient in first[:3]:
        assert torch.allclose(gradient, torch.full_like(gradient, 1.5))


def test_sparse_gradients_have_the_rows_of_all_ranks_after_backward() -> None:
    def body() -> Any:
        table = nn.Embedding(4, 2, sparse=True)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0))
        seen = []
        for _ in range(2):
            optimizer.zero_grad()
            table(torch.tensor([hvd.rank()])).sum().backward()
            assert table.weight.grad is not None
            seen.append(table.weight.grad.to_dense().tolist())
            optimizer.step()
        return seen

    expected = [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0], [0.0, 0.0]]
    assert on_ranks(2, body) == [[expected] * 2] * 2


def test_gradients_of_earlier_passes_are_not_reduced() -> None:
    def body() -> Any:
        p = nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([p], lr=1.0), backward_passes_per_step=2
        )
        seen = []
        for _ in range(2):
            (p * float(hvd.rank())).sum().backward()
            assert p.grad is not None
            seen.append(p.grad.item())
        optimizer.step()
        return seen

    assert on_ranks(2, body) == [[0.0, 1.0], [1.0, 1.0]]


def test_further_pass_adds_to_averages_and_raises_for_other_reductions() -> None:
    def body() -> Any:
        p = nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))
        for _ in range(3):
            (p * float(hvd.rank())).sum().backward()
        optimizer.step()
        for options in ({"op": hvd.Sum}, {"sharded": True}):
            other = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), **options)
            other.zero_grad()
            p.sum().backward()
            with pytest.raises(InvalidArgumentError, match="more than backward_passes_per_step"):
                p.sum().backward()
        return p.item()

    assert on_ranks(2, body) == [-1.5] * 2


@pytest.mark.parametrize("size", [2, 3])
def test_changed_sharded_gradients_raise_on_every_rank(size: int) -> None:
    def body() -> Any:
        model = fill(nn.Linear(6, 5)).double()
        optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.Adam(model.parameters()), model.named_parameters(), sharded=True
        )
        for change in (clip, scale, replace):
            optimizer.zero_grad()
            model(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
            if change is clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            else:
                change(model)
            with pytest.raises(InvalidArgumentError) as caught:
                optimizer.step()
            assert "optimizer.clip_grad_norm_(max_norm)" in str(caught.value)
            assert "optimizer.synchronize()" in str(caught.value)
        optimizer.zero_grad()
        model(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
        optimizer.clip_grad_norm_(1e-3)
        optimizer.step()

    on_ranks(size, body)


def test_sharded_gradients_that_are_never_zeroed_raise_unless_synchronized() -> None:
    def body() -> Any:
        p = nn.Parameter(torch.zeros(5))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), sharded=True)
        for zero in (
            lambda: optimizer.zero_grad(),
            lambda: optimizer.zero_grad(set_to_none=False),
            lambda: p.grad.zero_() if p.grad is not None else None,
        ):
            zero()
            (p * float(hvd.rank())).sum().backward()
            optimizer.step()
        p.sum().backward()  # like another optimizer's loss, after which they are dropped
        with pytest.raises(InvalidArgumentError, match=r"Call zero_grad\(\) in every step"):
            optimizer.step()
        optimizer.zero_grad()
        for _ in range(2):
            (p * float(hvd.rank())).sum().backward()
            optimizer.synchronize()
            optimizer.step()
        return p.tolist()

    assert on_ranks(2, body) == [[-1.5 - 0.5 - 1.0] * 5] * 2


def test_sharded_gradients_can_change_after_synchronize_or_be_clipped_sharded() -> None:
    def run(distributed: bool, *, whole: bool) -> Tensor:
        model = MLP.build()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-2)
        if distributed:
            optimizer = hvd.DistributedOptimizer(optimizer, sharded=True)
        for step in range(STEPS):
            optimizer.zero_grad()
            batch = MLP.batch(step, torch.float64)
            MLP.loss(model, mine(batch) if distributed else batch).backward()
            if distributed and whole:
                optimizer.synchronize()
            if whole or not distributed:
                clip(model)
            else:
                optimizer.clip_grad_norm_(0.05)
            optimizer.step()
        return values(model)

    compare(lambda distributed: run(distributed, whole=True), size=3)
    compare(lambda distributed: run(distributed, whole=False), size=3)


def test_parameter_unfrozen_after_zero_grad_is_reduced() -> None:
    def body() -> Any:
        a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1), requires_grad=False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a, b], lr=1.0))
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            b.requires_grad_(step > 0)
            ((a + b) * float(hvd.rank())).sum().backward()
            seen.append(None if b.grad is None else b.grad.item())
            optimizer.step()
        return seen

    assert on_ranks(2, body) == [[None, 0.5, 0.5]] * 2


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1]])
def test_modules_used_only_in_reentrant_checkpoints_are_reduced(hosts: Any) -> None:
    """No parameter gets its gradient in the outermost pass."""

    def body() -> Any:
        layer = fill(nn.Linear(4, 4)).double()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1))
        seen = []
        for times in (1, 2, 1, 3):
            optimizer.zero_grad()
            hidden = torch.ones(1, 4, dtype=torch.float64).requires_grad_()
            for _ in range(times if hosts == [0, 0] else 2):
                hidden = checkpoint(layer, hidden, use_reentrant=True)
            (hidden.sum() * float(hvd.rank())).backward()
            assert layer.weight.grad is not None
            seen.append(layer.weight.grad.clone())
            optimizer.step()
        return seen

    for mine_, theirs in zip(*on_ranks(2, body, hosts=hosts), strict=True):
        assert torch.equal(mine_, theirs)
        assert mine_.any()


def test_module_in_more_reentrant_checkpoints_than_before_raises() -> None:
    def body() -> Any:
        layer = nn.Linear(4, 4)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(layer.parameters(), lr=0.1), layer.named_parameters()
        )
        for times in (1, 2):
            optimizer.zero_grad()
            hidden = torch.ones(1, 4).requires_grad_()
            for _ in range(times):
                hidden = checkpoint(layer, hidden, use_reentrant=True)
            if times == 1:
                hidden.sum().backward()
                optimizer.step()
                continue
            with pytest.raises(InvalidArgumentError, match=r"use_reentrant=False"):
                hidden.sum().backward()
            optimizer.zero_grad()

    on_ranks(2, body, hosts=[0, 1])


def test_gradients_of_a_failed_backward_are_discarded() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            raise ZeroDivisionError

    def body() -> Any:
        p = nn.Parameter(torch.zeros(1))
        q = nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p, q], lr=1.0))
        for fails in (False, True, False, True, False):
            optimizer.zero_grad()
            x = (q * 1.0) + 0.0
            inner = Failing.apply(x) if fails else x
            try:
                ((p * 2.0 + inner) * (1.0 + hvd.rank())).sum().backward()
                assert not fails
            except ZeroDivisionError:
                continue
            assert p.grad is not None
            assert p.grad.item() == 3.0
            optimizer.step()
        return p.item()

    assert on_ranks(2, body) == [-9.0] * 2


def test_backward_raises_a_mismatch_error_if_ranks_differ() -> None:
    def body() -> Any:
        p = nn.Parameter(torch.zeros(3 + hvd.rank()))
        hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("w", p)])
        kept = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("w", p)])
        with pytest.raises(MismatchError, match="'w'"):
            p.sum().backward()
        del kept

    on_ranks(2, body)


def test_optimizers_work_when_gradient_order_differs_between_ranks() -> None:
    """All ranks wait for the optimizers in the same order, also in the first step."""

    def body() -> Any:
        a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        optimizers = [hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0)) for p in (a, b)]
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            first, last = (a, b) if hvd.rank() == 0 else (b, a)
            ((first * 1.0).tanh().exp() * last * 0.0 + first + last).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        return a.tolist(), b.tolist()

    assert on_ranks(2, body) == [([-3.0] * 2, [-3.0] * 2)] * 2


def test_step_inside_a_backward_pass_ends_the_reduction_cycle() -> None:
    """Meta-learning does this. The outer pass then has nothing to wait for at its end."""

    def body() -> Any:
        p = nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))

        class Inner(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> Any:
                with torch.enable_grad():
                    (p * float(hvd.rank())).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                return gradients

        for _ in range(2):
            Inner.apply(torch.ones(1, requires_grad=True)).sum().backward()
        return p.item()

    assert on_ranks(2, body) == [-1.0] * 2
