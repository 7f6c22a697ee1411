"""`Compression.powersgd` loses nothing, keeps ranks equal, and has a state that can be saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError, MismatchError
from sparkhvd.settings import Settings
from tests.torch.on_ranks import on_ranks

pytestmark = pytest.mark.ranks

SMALL = Settings(bucket_bytes=6000)  # several buckets


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Build a layer too small to be compressed, a convolution, two large layers, biases."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16 * 16, 32),
        nn.Tanh(),
        nn.Linear(32, 40),
        nn.Tanh(),
        nn.Linear(40, 2),
    ).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.1)
    return model


def pictures(step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 3, 4, 4, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.flatten(1)[:, :2].sin()).square().mean()


def mine(x: Tensor) -> Tensor:
    return x.chunk(hvd.size())[hvd.rank()]


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1).double() for p in model.parameters()])


def train(
    compression: Any,
    *,
    steps: int = 6,
    first: int = 0,
    model: nn.Module | None = None,
    dtype: torch.dtype = torch.float64,
    passes: int = 1,
    **options: Any,
) -> nn.Module:
    model = model or network(dtype)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=compression,
        backward_passes_per_step=passes,
        **options,
    )
    for step in range(first, first + steps):
        optimizer.zero_grad()
        for part in mine(pictures(step, dtype)).chunk(passes):
            (loss_of(model, part) / passes).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_powersgd_weights_have_the_same_bits_on_every_rank(size: Any, dtype: Any) -> None:
    def body() -> Any:
        return weights(train(hvd.Compression.powersgd(rank=2), dtype=dtype))

    results = on_ranks(size, body, settings=SMALL)
    again = on_ranks(size, body, settings=SMALL)
    for result in results + again:
        assert torch.isfinite(result).all()
        assert torch.equal(result, results[0])
    assert not torch.equal(results[0], weights(network(dtype)))


def random_gradients(
    compression: Any,
    shapes: list[tuple[int, ...]],
    steps: int,
    scale: Any = lambda step, rank: 1.0,
    **options: Any,
) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
    """Return the sums over the steps of inputs and outputs, and the compression's state."""
    parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=1.0),
        named_parameters=[(f"p{i}", p) for i, p in enumerate(parameters)],
        compression=compression,
        **options,
    )
    generator = torch.Generator().manual_seed(hvd.rank())
    given = [torch.zeros_like(p.detach()) for p in parameters]
    got = [torch.zeros_like(p.detach()) for p in parameters]
    for step in range(steps):
        optimizer.zero_grad()
        for p, total in zip(parameters, given, strict=True):
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            p.grad *= scale(step, hvd.rank())
            total += p.grad
        optimizer.synchronize()
        for p, total in zip(parameters, got, strict=True):
            total += p.grad
    return given, got, compression.state_dict()


@pytest.mark.parametrize("size", [3, 5, 6, 7])
def test_powersgd_averages_p_and_q_with_one_division(size: int) -> None:
    def gradient(rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(rank)
        return torch.randn(60, 50, generator=generator)

    def body() -> Any:
        parameter = nn.Parameter(torch.zeros(60, 50))
        compression = hvd.Compression.powersgd(rank=2)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([parameter], lr=1.0),
            named_parameters=[("p", parameter)],
            compression=compression,
        )
        q = compression.state_dict()["p"]["q"].clone()
        parameter.grad = gradient(hvd.rank())
        optimizer.synchronize()
        return q, parameter.grad

    results = on_ranks(size, body)
    q = results[0][0]
    p = torch.linalg.qr(sum(gradient(rank) @ q for rank in range(size)) / size)[0]
    next_q = sum(gradient(rank).t() @ p for rank in range(size)) / size
    for _, found in results:
        assert torch.equal(found, p @ next_q.t())


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_applied_and_unsent_gradients_add_up_to_the_total(op: Any) -> None:
    shapes = [(40, 30), (20, 3, 3, 5), (7,)]

    def body() -> Any:
        compression = hvd.Compression.powersgd(rank=2)
        return random_gradients(compression, shapes, 7, op=op)

    results = on_ranks(3, body)
    factor = 1 if op == hvd.Average else 3
    for number, shape in enumerate(shapes):
        mean_given = sum(given[number] for given, _, _ in results) / 3
        left = torch.zeros(shape, dtype=torch.float64)
        if number < 2:
            left = sum(state[f"p{number}"]["error"] for _, _, state in results) / 3
            assert left.abs().max() > 0.1
        for _, got, _ in results:
            found = got[number] / factor + left.view(shape)
            assert torch.allclose(found, mean_given, rtol=0, atol=1e-12)


def test_powersgd_reduces_a_low_rank_gradient_without_loss() -> None:
    def body() -> Any:
        generator = torch.Generator().manual_seed(5)
        whole = torch.randn(50, 2, generator=generator) @ torch.randn(2, 40, generator=generator)
        p = nn.Parameter(torch.zeros(50, 40))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([p], lr=1.0), compression=hvd.Compression.powersgd(rank=2)
        )
        p.grad = whole * (hvd.rank() * 2)
        optimizer.synchronize()
        return torch.allclose(p.grad, whole, rtol=1e-4, atol=1e-4)

    assert on_ranks(2, body) == [True, True]


def test_powersgd_recovers_after_a_zero_gradient() -> None:
    def body() -> Any:
        compression = hvd.Compression.powersgd(rank=2)
        scale = lambda step, rank: 0.0 if step < 2 else 1.0  # noqa: E731
        return random_gradients(compression, [(40, 30)], 5, scale)

    for _, (got,), state in on_ranks(2, body):
        assert got.norm() > 1
        assert state["p0"]["q"].norm() > 0.5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_gradients_reach_all_ranks_and_do_not_persist(bad: Any) -> None:
    def body() -> Any:
        p, q = nn.Parameter(torch.zeros(40, 30)), nn.Parameter(torch.zeros(40, 30))
        compression = hvd.Compression.powersgd(rank=2)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([p, q], lr=1.0),
            named_parameters=[("p", p), ("q", q)],
            compression=compression,
        )
        generator = torch.Generator().manual_seed(hvd.rank())
        seen = []
        for step in range(4):
            optimizer.zero_grad()
            for each in (p, q):
                each.grad = torch.randn(40, 30, generator=generator)
            if step == 2 and hvd.rank() == 1:
                p.grad[3, 4] = bad
            before = {k: v["error"].clone() for k, v in compression.state_dict().items()}
            optimizer.synchronize()
            after = compression.state_dict()
            assert torch.isfinite(after["p"]["error"]).all()
            seen.append(
                (
                    bool(torch.isfinite(p.grad).all()),
                    bool(torch.isfinite(q.grad).all()),
                    torch.equal(before["p"], after["p"]["error"]),
                )
            )
        return seen

    whole = (True, True, False)
    assert on_ranks(2, body) == [[whole, whole, (False, True, True), whole]] * 2


def test_grad_scaler_skips_a_powersgd_step() -> None:
    def body() -> Any:
        p = nn.Parameter(torch.zeros(40, 30))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([p], lr=1.0), compression=hvd.Compression.powersgd()
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            factor = float("inf") if step == 1 and hvd.rank() == 1 else 1.0
            scaler.scale((p * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            seen.append((round(float(p.mean().detach()), 4), scaler.get_scale()))
        return seen

    assert on_ranks(2, body) == [[(-1.0, 8.0), (-1.0, 4.0), (-2.0, 4.0)]] * 2


@pytest.mark.parametrize("warm_up_steps", [3, 100])
def test_powersgd_warm_up_sends_uncompressed_gradients(warm_up_steps: Any) -> None:
    def body() -> Any:
        plain = [weights(train(hvd.Compression.none, steps=n)) for n in (3, 5)]
        warm = [weights(train(hvd.Compression.powersgd(1, warm_up_steps), steps=n)) for n in (3, 5)]
        return [torch.equal(x, y) for x, y in zip(plain, warm, strict=True)]

    expected = [True, warm_up_steps > 5]
    assert on_ranks(2, body, settings=SMALL) == [expected] * 2


def test_accumulated_passes_equal_a_single_powersgd_gradient() -> None:
    def body() -> Any:
        one, two = (
            weights(train(hvd.Compression.powersgd(rank=2), passes=passes)) for passes in (1, 2)
        )
        return torch.allclose(one, two, rtol=0, atol=1e-8)

    assert on_ranks(2, body, settings=SMALL) == [True, True]


def test_powersgd_training_resumes_exactly_from_a_saved_state() -> None:
    def body() -> Any:
        straight = weights(train(hvd.Compression.powersgd(2, 1), steps=6))
        compression = hvd.Compression.powersgd(2, 1)
        model = train(compression, steps=3)
        again = hvd.Compression.powersgd(2, 1)
        again.load_state_dict(compression.state_dict())
        resumed = weights(train(again, steps=3, first=3, model=model))
        return torch.equal(straight, resumed), float((straight - resumed).abs().max())

    for is_equal, difference in on_ranks(2, body, settings=SMALL):
        assert is_equal, difference


def test_ranks_that_load_different_powersgd_states_raise() -> None:
    def body() -> Any:
        compression = hvd.Compression.powersgd(2)
        model = train(compression, steps=2)
        again = hvd.Compression.powersgd(2)
        if hvd.rank() == 0:
            again.load_state_dict(compression.state_dict())
        with pytest.raises(MismatchError, match=r"ranks disagree on parameter 0.*after 2 steps"):
            train(again, model=model)

    on_ranks(2, body, settings=SMALL)


def test_powersgd_reduces_parameters_unused_on_some_or_all_ranks() -> None:
    def body() -> Any:
        used, partly = nn.Parameter(torch.zeros(40, 30)), nn.Parameter(torch.zeros(40, 30))
        never, twice = nn.Parameter(torch.zeros(40, 30)), nn.Parameter(torch.zeros(40, 30))
        compression = hvd.Compression.powersgd(rank=1)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([used, partly, never, twice], lr=1.0),
            compression=compression,
        )
        for step in range(3):
            optimizer.zero_grad()
            loss = used.sum() + (partly.sum() * 4 if hvd.rank() == 1 else 0)
            (loss + (twice.sum() if step != 1 else 0)).backward()
            optimizer.step()
            assert never.grad is None
            assert (twice.grad is None) == (step == 1)
        return [round(float(p.detach().mean()), 3) for p in (used, partly, never, twice)]

    assert on_ranks(2, body) == [[-3.0, -6.0, 0.0, -2.0]] * 2


def test_powersgd_ranks_continue_training_after_join() -> None:
    def body() -> Any:
        model = network()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            compression=hvd.Compression.powersgd(2, warm_up_steps=3),
        )

        def steps(count: int, first: int) -> None:
            for step in range(first, first + count):
                optimizer.zero_grad()
                loss_of(model, mine(pictures(step))).backward()
                optimizer.step()

        steps(2 if hvd.rank() else 4, 0)
        hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        steps(3, 10)
        return weights(model)

    one, other = on_ranks(2, body, settings=SMALL)
    assert torch.equal(one, other)


def test_powersgd_reduces_within_a_process_set() -> None:
    def body() -> Any:
        pair = hvd.add_process_set([0, 2])
        return weights(train(hvd.Compression.powersgd(2), process_set=pair))

    zero, one, two = on_ranks(3, body, settings=SMALL)
    assert torch.equal(zero, two)
    assert not torch.equal(zero, one)


def test_powersgd_result_reaches_gradients_with_other_strides() -> None:
    def body() -> Any:
        p = nn.Parameter(torch.zeros(16, 4, 3, 3).to(memory_format=torch.channels_last))
        compression = hvd.Compression.powersgd(rank=1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), compression=compression)
        generator = torch.Generator().manual_seed(1)
        left, right = torch.randn(16, 1, generator=generator), torch.randn(1, 36)
        whole = (left @ torch.ones_like(right)).view(16, 4, 3, 3)
        p.grad = whole.contiguous(memory_format=torch.channels_last)
        optimizer.synchronize()
        first = torch.allclose(p.grad, whole, atol=1e-5)
        optimizer.zero_grad()
        p.grad = torch.ones(1).expand(16, 4, 3, 3)
        optimizer.synchronize()
        return first, p.grad.is_contiguous()

    assert on_ranks(2, body) == [(True, True)] * 2


def test_options_incompatible_with_powersgd_raise() -> None:
    def body() -> Any:
        messages = []
        p = [nn.Parameter(torch.zeros(40, 30))]
        compression = hvd.Compression.powersgd()
        for options in ({"op": hvd.Adasum}, {"op": hvd.Max}, {"gradient_as_bucket_view": True}):
            with pytest.raises(InvalidArgumentError) as caught:
                hvd.DistributedOptimizer(
                    torch.optim.SGD(p, lr=1.0), compression=compression, **options
                )
            messages.append(str(caught.value))
        with pytest.raises(InvalidArgumentError) as caught:
            hvd.allreduce(torch.ones(3), compression=compression)
        return [*messages, str(caught.value)]

    for adasum, maximum, views, alone in on_ranks(2, body):
        assert "op=Adasum combines the optimizer's steps" in adasum
        assert "op is Max" in maximum
        assert "does not support compression" in views
        assert "cannot compress a tensor of shape (3,) alone" in alone


def test_invalid_powersgd_arguments_raise() -> None:
    with pytest.raises(InvalidArgumentError, match="rank must be 1 or more"):
        hvd.Compression.powersgd(rank=0)
    with pytest.raises(InvalidArgumentError, match="warm_up_steps 0 or more"):
        hvd.Compression.powersgd(warm_up_steps=-1)


def test_powersgd_object_cannot_be_shared_by_two_optimizers() -> None:
    def body() -> Any:
        compression = hvd.Compression.powersgd()
        train(compression, steps=1)
        with pytest.raises(InvalidArgumentError, match="belongs to another optimizer"):
            train(compression, steps=1)
        with pytest.raises(InvalidArgumentError, match="after the optimizer was built"):
            compression.load_state_dict({})
        other = hvd.Compression.powersgd(rank=2)
        other.load_state_dict(compression.state_dict())
        with pytest.raises(
            InvalidArgumentError, match="Load a state of the same model and the same rank="
        ):
            train(other, steps=1)

    on_ranks(2, body)
