"""Agreement of the ranks in the first step, and gradients that share memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError, MismatchError
from sparkhvd.settings import Settings
from sparkhvd.torch.compressors import Compressor
from tests.torch.on_ranks import on_ranks

pytestmark = pytest.mark.ranks

SMALL = Settings(bucket_bytes=256)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape))


def sgd(*parameters: nn.Parameter, lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr)


# --- Ranks that reach the first step in different ways. ---


def each_another_optimizer() -> list[float]:
    a, b = parameter(3), parameter(3)
    first, second = (
        hvd.DistributedOptimizer(sgd(p), synchronize_in_backward=False) for p in (a, b)
    )
    (a if hvd.rank() == 0 else b).sum().backward()
    first.step()
    second.step()
    return [float(a.detach()[0]), float(b.detach()[0])]


def each_another_group() -> list[float]:
    a, b = parameter(3), parameter(3)
    optimizer = hvd.DistributedOptimizer(sgd(a))
    optimizer.add_param_group({"params": [b]})
    (a if hvd.rank() == 0 else b).sum().backward()
    optimizer.step()
    return [float(a.detach()[0]), float(b.detach()[0])]


def one_without_a_batch() -> list[float]:
    a = parameter(3)
    optimizer = hvd.DistributedOptimizer(sgd(a), synchronize_in_backward=False)
    if hvd.rank() == 0:
        a.sum().backward()
    hvd.allreduce(torch.ones(1), name="loss")  # before step(), on every rank
    optimizer.step()
    return [float(a.detach()[0])]


@pytest.mark.parametrize("body", [each_another_optimizer, each_another_group, one_without_a_batch])
def test_rank_without_gradients_does_not_block_backward_on_others(
    body: Callable[[], list[float]],
) -> None:
    for found in on_ranks(2, body):
        assert found == [0.5] * len(found)


def test_strides_may_differ_on_a_rank_that_uses_another_optimizer() -> None:
    def body() -> list[torch.Tensor]:
        layers = [nn.Conv2d(3, 4, 3, bias=False) for _ in range(2)]
        optimizers = []
        for layer in layers:
            nn.init.ones_(layer.weight)
            if hvd.rank() == 0:
                layer.to(memory_format=torch.channels_last)
            optimizers.append(
                hvd.DistributedOptimizer(sgd(layer.weight), synchronize_in_backward=False)
            )
        x = torch.arange(75.0).view(1, 3, 5, 5)
        layers[hvd.rank()](x).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        return [layer.weight.detach() for layer in layers]

    weight = parameter(4, 3, 3, 3)
    nn.functional.conv2d(torch.arange(75.0).view(1, 3, 5, 5), weight).sum().backward()
    assert weight.grad is not None
    for found in on_ranks(2, body):
        for each in found:
            assert torch.equal(each, 1.0 - weight.grad / 2)


def test_second_backward_pass_raises_for_sums_in_every_step() -> None:
    def body() -> None:
        a, b = parameter(3), parameter(3)
        optimizer = hvd.DistributedOptimizer(sgd(a, b), op=hvd.Sum)
        for _ in range(2):
            a.sum().backward()
            with pytest.raises(InvalidArgumentError, match="more than backward_passes_per_step=1"):
                b.sum().backward()
            optimizer.zero_grad()
        twice = hvd.DistributedOptimizer(sgd(a, b), backward_passes_per_step=2)
        (a * (hvd.rank() + 1.0)).sum().backward()
        (b * (hvd.rank() + 1.0)).sum().backward()
        twice.step()
        assert torch.equal(a, torch.full((3,), -0.5))
        assert torch.equal(b, torch.full((3,), -0.5))

    on_ranks(2, body)


# --- Ranks that have joined. ---


def test_a_parameter_first_used_while_a_rank_has_joined_is_reduced() -> None:
    def body() -> list[float]:
        a, b = parameter(2), parameter(2)
        optimizer = hvd.DistributedOptimizer(sgd(a, b))
        for step in range(2 if hvd.rank() == 2 else 3):
            optimizer.zero_grad()
            loss = (a * (hvd.rank() + 1.0)).sum()
            if step == 2:
                loss = loss + (b * (hvd.rank() + 1.0)).sum()
            loss.backward()
            optimizer.step()
        hvd.join()
        return [float(a.detach()[0]), float(b.detach()[0])]

    found = on_ranks(3, body)
    assert found[0] == found[1] == [1 - 2 - 2 - 1, 0.0]  # (1 + 2 + 3) / 3 twice, (1 + 2) / 3
    assert found[2] == [1 - 2 - 2, 1.0]


def test_join_after_unequal_epochs_works_with_a_late_parameter() -> None:
    num_steps = [[1, 3, 2], [2, 1, 3], [3, 1, 1]]

    def body() -> list[float]:
        a, b = parameter(100), parameter(100)
        optimizer = hvd.DistributedOptimizer(sgd(a, b))
        factor = hvd.rank() + 1.0
        for epoch, lengths in enumerate(num_steps):
            for step in range(lengths[hvd.rank()]):
                optimizer.zero_grad()
                loss = a.sum() * factor
                if epoch == 1 or (epoch, step) == (0, 1):
                    loss = loss + b.sum() * factor
                loss.backward()
                optimizer.step()
            last = hvd.join()
            for p in (a, b):
                hvd.broadcast_(p.data, last)
        return [float(a.detach()[0]), float(b.detach()[0])]

    # Computed here: for each step, the sum of the present ranks' factors, divided by 3.
    steps = [
        [sum(r + 1 for r in range(3) if step < lengths[r]) / 3 for step in range(max(lengths))]
        for lengths in num_steps
    ]
    expected = [1 - sum(map(sum, steps)), 1 - steps[0][1] - sum(steps[1])]
    for hosts in (None, [0, 1, 1]):
        for found in on_ranks(3, body, settings=SMALL, hosts=hosts):
            assert found == pytest.approx(expected, abs=1e-4)


def test_member_of_a_process_set_may_join_in_the_first_step() -> None:
    def body() -> float | None:
        pair = hvd.add_process_set([0, 1])
        a, b = parameter(2), parameter(200)
        if hvd.rank() == 0:
            optimizer = hvd.DistributedOptimizer(sgd(a, b), process_set=pair)
            for _ in range(2):
                optimizer.zero_grad()
                (a.sum() + b.sum()).backward()
                optimizer.step()
        elif hvd.rank() == 1:
            hvd.DistributedOptimizer(sgd(a, b), process_set=pair)
        hvd.join()
        return float(a.detach()[0])

    assert on_ranks(3, body, settings=SMALL)[0] == 0.0  # half a step, twice


def test_strides_may_differ_from_a_rank_joined_in_the_first_step() -> None:
    def body() -> float:
        weight = nn.Parameter(torch.ones(4, 3, 2, 2))
        if hvd.rank() == 0:
            weight = nn.Parameter(weight.detach().to(memory_format=torch.channels_last))
        optimizer = hvd.DistributedOptimizer(sgd(weight))
        for epoch in range(2):
            for _ in range(1 if hvd.rank() == 0 else epoch):
                optimizer.zero_grad()
                weight.sum().backward()
                optimizer.step()
            hvd.join()
        return float(weight.detach().mean())

    assert on_ranks(2, body)[0] == 1 - 0.5 - 1.0


# --- Gradients that are not a parameter's own memory. ---


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("num_elements", [1000, 100_000])
@pytest.mark.parametrize("hosts", [[0, 0], [0, 0, 0], [0, 1, 1]])
def test_two_gradients_that_share_memory_are_both_correct(
    hosts: list[int], num_elements: int, sharded: bool
) -> None:
    def body() -> list[list[float]]:
        a, b = parameter(50, num_elements // 50), parameter(num_elements // 50, 50)
        optimizer = hvd.DistributedOptimizer(sgd(a, b, lr=0.0), sharded=sharded)
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = (a.view(-1) + b.view(-1)).square().sum()
            (loss * (hvd.rank() + 1.0)).backward()
            optimizer.synchronize()
            found += [a.grad.unique().tolist(), b.grad.unique().tolist()]
            optimizer.step()
        return found

    mean = (len(hosts) + 1) / 2
    for found in on_ranks(len(hosts), body, hosts=hosts):
        assert found == [[4 * mean]] * 6


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": hvd.Compression.fp16},
        {"gradient_as_bucket_view": True},
        {"sharded": True},
    ],
    ids=str,
)
def test_gradient_that_backward_still_reads_is_not_overwritten(options: dict[str, Any]) -> None:
    # With one row, the bias' gradient is the very memory from which the layer before gets its own.
    def body() -> list[tuple[float, float]]:
        layer = nn.Linear(4, 300_000, bias=False)
        bias = nn.Parameter(torch.zeros(300_000))
        nn.init.constant_(layer.weight, 0.125)
        optimizer = hvd.DistributedOptimizer(sgd(layer.weight, bias, lr=0.0), **options)
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            out = layer(torch.ones(1, 4)) + bias.view(1, -1)
            (out.square().sum() / 2 * (hvd.rank() + 1.0)).backward()
            optimizer.synchronize()
            found.append((float(layer.weight.grad.min()), float(layer.weight.grad.max())))
            optimizer.step()
        return found

    for found in on_ranks(2, body, settings=SMALL):
        assert found == [(0.75, 0.75)] * 3


@pytest.mark.parametrize("how", ["buckets", "optimizers", "groups", "powersgd"])
def test_gradients_may_share_memory_on_one_rank_only(how: str) -> None:
    # Only rank 0 uses q, and there p and q get the same memory; on rank 1 p has its own.
    def body() -> list[list[float]]:
        p, q = parameter(2, 3), parameter(3, 2)
        if how == "optimizers":
            optimizers = [hvd.DistributedOptimizer(sgd(each, lr=0.0)) for each in (p, q)]
        elif how == "groups":
            optimizers = [hvd.DistributedOptimizer(sgd(p, lr=0.0))]
            optimizers[0].add_param_group({"params": [q]})
        else:
            low_rank = {"compression": hvd.Compression.powersgd(rank=2, warm_up_steps=1)}
            options = low_rank if how == "powersgd" else {}
            optimizers = [hvd.DistributedOptimizer(sgd(p, q, lr=0.0), **options)]
        found = []
        for _ in range(2):
            for optimizer in optimizers:
                optimizer.zero_grad()
            if hvd.rank() == 0:
                ((p.view(-1) + q.view(-1)) * torch.arange(6.0)).sum().backward()
            else:
                (p.view(-1) * 10).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            found += [p.grad.view(-1).tolist(), q.grad.view(-1).tolist()]
        return found

    expected = [[5, 5.5, 6, 6.5, 7, 7.5], [0, 0.5, 1, 1.5, 2, 2.5]]
    for found in on_ranks(2, body, settings=Settings(bucket_bytes=8)):
        for each, wanted in zip(found, expected * 2, strict=True):
            assert each == pytest.approx(wanted, abs=1e-5)


def test_gradients_in_a_flat_user_tensor_are_reduced_in_place() -> None:
    def body() -> list[float]:
        a, b = parameter(3), parameter(2, 2)
        optimizer = hvd.DistributedOptimizer(sgd(a, b))
        flat = torch.zeros(7)
        for _ in range(2):
            flat.zero_()
            a.grad, b.grad = flat[:3], flat[3:].view(2, 2)
            ((a.sum() + 2 * b.sum()) * (hvd.rank() + 1.0)).backward()
            optimizer.step()
        return flat.tolist()

    for found in on_ranks(2, body):
        assert found == [1.5] * 3 + [3.0] * 4


# --- Values by which ranks are compared. ---


def test_mismatch_error_is_raised_again_on_repeated_calls() -> None:
    def body() -> list[str]:
        a = parameter(3 + hvd.rank())
        optimizer = hvd.DistributedOptimizer(sgd(a))
        texts = []
        if hvd.rank() == 0:
            with pytest.raises(MismatchError) as caught:
                a.sum().backward()
            texts.append(str(caught.value))
        for _ in range(2):
            with pytest.raises(MismatchError) as caught:
                optimizer.step()
            texts.append(str(caught.value))
        return texts

    for texts in on_ranks(2, body):
        assert len(set(texts)) == 1
        assert "Rank 0 has 'allreduce.noname.0.0' with shape (3,)" in texts[0]


def test_custom_compressor_may_be_a_separate_object_on_each_rank() -> None:
    class Halves(Compressor):
        def compress(self, tensor: torch.Tensor) -> Any:  # type: ignore[override]  # an object of its own
            return tensor / 2, None

        def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:  # type: ignore[override]  # as above
            return tensor * 2

    def body() -> float:
        a = parameter(3)
        optimizer = hvd.DistributedOptimizer(sgd(a), compression=Halves())
        (a.sum() * (hvd.rank() + 1.0)).backward()
        optimizer.step()
        return float(a.detach()[0])

    assert on_ranks(2, body) == [-0.5, -0.5]
