from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError, MismatchError
from tests.torch.on_ranks import on_ranks
from tests.torch.test_optimizer import batch, fill, loss_of, mlp, weights

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("form", ["dict", "list", "generator", "state_dict"])
@pytest.mark.parametrize("root", [0, 2])
def test_broadcast_parameters_sends_the_root_values_to_every_rank(form: str, root: int) -> None:
    def body() -> Any:
        model = mlp(seed=hvd.rank())
        named: Any = model.named_parameters()
        if form == "dict":
            named = dict(named)
        elif form == "list":
            named = list(named)
        elif form == "state_dict":
            named = model.state_dict()
        hvd.broadcast_parameters(named, root_rank=root)
        return weights(model)

    for result in on_ranks(3, body):
        assert torch.equal(result, weights(mlp(seed=root)))


def test_broadcast_includes_buffers_noncontiguous_and_empty_parameters() -> None:
    def body() -> Any:
        model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4)).to(
            memory_format=torch.channels_last
        )
        fill(model, hvd.rank())
        model[1].num_batches_tracked += 7 * (hvd.rank() + 1)
        strides = model[0].weight.stride()
        tied = torch.full((2, 3), float(hvd.rank())).t()
        state = {**model.state_dict(), "empty": torch.empty(0, 2), "none": None, "tied": tied}
        hvd.broadcast_parameters(state, root_rank=1)
        assert model[0].weight.stride() == strides
        return weights(model), int(model[1].num_batches_tracked), tied.tolist()

    for result, count, tied in on_ranks(2, body):
        expected = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4))
        fill(expected, 1)
        assert torch.equal(result, weights(expected))
        assert count == 14
        assert tied == [[1.0, 1.0]] * 3


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_parameters_reach_every_rank(dtype: torch.dtype) -> None:
    def tensors(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        made = {
            str(shape): torch.randn(shape, dtype=dtype, generator=generator)
            for shape in [(), (0, 2), (5,), (3, 4)]
        }
        return {
            **made,
            "strided": made["(3, 4)"].clone().t(),
            "conjugate": made["(5,)"].clone().conj(),
        }

    def body() -> Any:
        mine = tensors(hvd.rank())
        hvd.broadcast_parameters(mine, root_rank=1)
        return mine

    for result in on_ranks(3, body):
        for name, value in tensors(1).items():
            assert torch.equal(result[name], value), name


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"a": 3}, "found int for 'a'"),
        ([3], "expected tensors or .name, tensor. pairs, found int"),
        ([("a", torch.ones(1)), ("a", torch.ones(1))], "two tensors have the name 'a'"),
    ],
    ids=str,
)
def test_broadcast_parameters_refuses_invalid_arguments(params: Any, message: str) -> None:
    def body() -> Any:
        with pytest.raises(InvalidArgumentError, match=message):
            hvd.broadcast_parameters(params, 0)

    on_ranks(1, body)


def test_mismatch_error_names_parameters_of_another_shape() -> None:
    def body() -> Any:
        with pytest.raises(MismatchError, match=r"layer\.weight"):
            hvd.broadcast_parameters({"layer.weight": torch.ones(2 + hvd.rank())}, 0)

    on_ranks(2, body)


class Own:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own) and other.value == self.value

    def __hash__(self) -> int:
        return 0


def test_objects_of_any_size_are_broadcast_and_gathered() -> None:
    def body() -> Any:
        rank = hvd.rank()
        for value in (None, {"lr": 0.1, "x": [1, 2]}, Own("a" * 100_000), b"", lambda: rank):
            got = hvd.broadcast_object(value if rank == 1 else None, root_rank=1)
            assert got() == 1 if callable(got) else got == value
        # Pickles of up to 1016 bytes fit into the first message.
        for size in range(980, 1030):
            value = bytes(range(256)) * 4 + bytes(size)
            assert hvd.broadcast_object(value[-size:] if rank == 2 else None, 2) == value[-size:]
        mine = Own("x" * (rank * 50_000))
        assert hvd.allgather_object(mine) == [Own("x" * (r * 50_000)) for r in range(3)]
        kinds = hvd.allgather_object([1, "two", None][rank])
        assert kinds == [1, "two", None]

    on_ranks(3, body)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD without state": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "Adam with a tensor for lr": lambda p: torch.optim.Adam(
        p, lr=torch.tensor(0.01), foreach=False
    ),
    "AdamW": torch.optim.AdamW,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.1),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=3, history_size=4),
}
if hasattr(torch.optim, "Adafactor"):  # not before torch 2.5
    OPTIMIZERS["Adafactor"] = lambda p: torch.optim.Adafactor(p)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch(step))
            loss.backward()
            return loss

        optimizer.step(closure)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("state", ["root only", "others only", "all"])
def test_optimizer_state_of_the_root_reaches_every_rank(name: str, state: str) -> None:
    """From equal parameters, every rank then steps as the root would."""

    def body() -> Any:
        rank = hvd.rank()
        model = mlp(seed=rank)
        optimizer = OPTIMIZERS[name](model.parameters())
        if state == "all" or (rank == 1) == (state == "root only"):
            train(model, optimizer, range(rank + 2))
        if rank == 1 and name == "Adam":
            optimizer.param_groups[0]["lr"] = 0.07
        before = weights(model)
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        assert torch.equal(weights(model), before)
        hvd.broadcast_parameters(model.named_parameters(), root_rank=1)
        described = repr(optimizer), len(optimizer.state)
        train(model, optimizer, range(10, 13))
        return weights(model), described

    def root() -> Any:
        model = mlp(seed=1)
        optimizer = OPTIMIZERS[name](model.parameters())
        if state != "others only":
            train(model, optimizer, range(3))
        if name == "Adam":
            optimizer.param_groups[0]["lr"] = 0.07
        train(model, optimizer, range(10, 13))
        return weights(model)

    expected = root()
    results = on_ranks(2, body)
    assert results[0][1] == results[1][1]
    for result, _ in results:
        assert torch.equal(result, expected)


@pytest.mark.parametrize("as_views", [False, True])
def test_broadcasting_empty_optimizer_state_creates_zero_gradients(as_views: bool) -> None:
    def body() -> Any:
        model = mlp(seed=0)
        model[0].bias.requires_grad_(False)  # type: ignore[index,operator]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), gradient_as_bucket_view=as_views
        )
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        gradients = [None if p.grad is None else float(p.grad.sum()) for p in model.parameters()]
        loss_of(model, batch(hvd.rank())).backward()  # no zero_grad() before it
        optimizer.step()
        return gradients, weights(model)

    def plain() -> Any:
        model = mlp(seed=0)
        model[0].bias.requires_grad_(False)  # type: ignore[index,operator]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for rank in range(2):
            (loss_of(model, batch(rank)) / 2).backward()
        optimizer.step()
        return weights(model)

    results = on_ranks(2, body)
    for gradients, found in results:
        assert gradients[0] == 0.0
        assert gradients[1] is None
        assert set(gradients[2:]) == {0.0}
        torch.testing.assert_close(found, plain())


def test_broadcast_optimizer_state_works_with_distributed_optimizer_and_scheduler() -> None:
    def body() -> Any:
        model = mlp(seed=hvd.rank())
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        if hvd.rank() == 0:
            optimizer.param_groups[0]["lr"] = 0.5
        hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, batch(step)).backward()
            optimizer.step()
            scheduler.step()
        return weights(model), optimizer.param_groups[0]["lr"]

    (one, lr), (other, other_lr) = on_ranks(2, body)
    assert torch.equal(one, other)
    assert lr == other_lr == 0.125


def test_optimizer_state_values_of_any_type_survive_broadcast() -> None:
    def body() -> Any:
        p = nn.Parameter(torch.ones(2, 3))
        optimizer = torch.optim.SGD([p], lr=0.1)
        if hvd.rank() == 0:
            optimizer.state[p] = {
                "nan": math.nan,
                "inf": -math.inf,
                "text": "x",
                "nested": [(1, torch.arange(3)), {"k": True, 5: None}],
                "half": torch.ones(2, dtype=torch.bfloat16),
                "master": torch.full((3, 2), 1.5, dtype=torch.float64).t(),
                "scalar": torch.tensor(3),
            }
            optimizer.state["global"] = {"count": 4}
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        state = optimizer.state[p]
        assert list(state) == ["nan", "inf", "text", "nested", "half", "master", "scalar"]
        assert math.isnan(state["nan"])
        assert state["inf"] == -math.inf
        assert state["nested"][0][1].tolist() == [0, 1, 2]
        assert state["nested"][1] == {"k": True, 5: None}
        assert isinstance(state["nested"][0], tuple)
        assert state["half"].dtype == torch.bfloat16
        assert state["master"].stride() == (1, 2)
        assert state["master"].dtype == torch.float64
        assert state["scalar"].item() == 3
        assert optimizer.state["global"] == {"count": 4}

    on_ranks(2, body)


def test_optimizer_state_that_cannot_be_sent_raises_on_every_rank() -> None:
    def body() -> Any:
        p = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([p], lr=0.1)
        if hvd.rank() == 0:
            optimizer.state[p] = {"thing": Own(1)}
        with pytest.raises(InvalidArgumentError) as caught:
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        return str(caught.value)

    root, other = on_ranks(2, body)
    assert "holds a Own" in root
    assert "rank 0 cannot send its optimizer's state" in other


def test_optimizers_of_different_structure_raise_a_mismatch_on_every_rank() -> None:
    def body() -> Any:
        parameters = [nn.Parameter(torch.ones(2)) for _ in range(2 + hvd.rank())]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        with pytest.raises(MismatchError, match=r"Rank 0 has \[2\], rank 1 has \[3\]"):
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    on_ranks(2, body)
