"""Models and optimizers as functions, Params that change the optimizer's groups, losses from constructors."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import sparkhvd.torch as hvd
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.training.loss_functions import construct_losses
from sparkhvd.training.model import build_model, check_model
from sparkhvd.training.optimizer import Overrides, joined
from sparkhvd.training.schedule import describe_scheduler
from tests.training.ranks import Case, assert_close, linear

pytestmark = pytest.mark.pure


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def drawn() -> nn.Module:
    """Make a module whose first weights are random."""
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def test_model_function_is_called_in_each_rank(store: Store) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    case = Case(
        store,
        build_model(drawn, seed=7),  # the ranks' random numbers
        lambda p: torch.optim.SGD(p, lr=0.1),
        model_function=drawn,
        options={"epochs": 2, "batch_size": 16, "seed": 7},
    )
    assert torch.equal(torch.get_rng_state(), before)
    case.train(2)
    assert_close(case.weights(2), case.reference(2, 2)[1], 1e-5)
    module = linear()
    assert build_model(module) is module


def test_model_function_draws_reproducible_numpy_and_random_numbers() -> None:
    def drawn_elsewhere() -> nn.Module:
        module = nn.Linear(2, 1)
        with torch.no_grad():
            module.weight.copy_(torch.tensor([[random.random(), np.random.random()]]))
        return module

    random.seed(1)
    np.random.seed(1)
    first = build_model(drawn_elsewhere, seed=7)
    own = random.random(), np.random.random()
    assert torch.equal(build_model(drawn_elsewhere, seed=7).weight, first.weight)
    random.seed(1)
    np.random.seed(1)
    assert (random.random(), np.random.random()) == own


def two_groups(model: nn.Module, **values: float) -> torch.optim.Optimizer:
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
    if not values:
        groups[1].update(lr=0.5, weight_decay=0.2)
    return torch.optim.SGD(groups, **(values or {"lr": 0.3}))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (Overrides(learning_rate=0.02), {"lr": 0.02}),
        (
            Overrides(learning_rate=0.02, weight_decay=0.1, lr_scaling="linear"),
            {"lr": 0.04, "weight_decay": 0.1},
        ),
    ],
    ids=["learning rate", "all"],
)
def test_overrides_change_all_parameter_groups(
    store: Store, overrides: Overrides, expected: dict[str, float]
) -> None:
    model = linear()
    options = {"epochs": 2, "batch_size": 16, "overrides": overrides}
    case = Case(store, model, two_groups(model), options=options)
    result = case.train(2)
    case.optimizer = two_groups(model, **{"weight_decay": 0.0, **expected})
    if "weight_decay" not in expected:
        case.optimizer.param_groups[1]["weight_decay"] = 0.2
    assert_close(case.weights(2), case.reference(2, 2)[1], 1e-5)
    assert result.history[0]["lr"] == pytest.approx(expected["lr"])


def test_overrides_change_initial_and_tensor_learning_rates() -> None:
    optimizer = torch.optim.Adam(linear().parameters(), lr=torch.tensor(0.5))
    optimizer.param_groups[0]["initial_lr"] = 0.5
    Overrides(lr_scaling="linear").apply(optimizer, 4)
    assert float(optimizer.param_groups[0]["lr"]) == 2.0
    assert optimizer.param_groups[0]["initial_lr"] == 2.0


def test_optimizer_list_steps_like_separate_optimizers_without_changing_them() -> None:
    def make() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        weight, bias = model.parameters()
        return model, [torch.optim.Adam([weight], lr=0.1), torch.optim.SGD([bias], lr=0.1)]

    def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: range) -> None:
        for step in steps:
            for each in optimizers:
                each.zero_grad()
            model(torch.full((2, 3), 1.0 + step)).square().mean().backward()
            for each in optimizers:
                each.step()

    apart, both = make()
    train(apart, both, range(3))
    model, given = make()
    first = joined(given)
    train(model, [first], range(2))
    assert not any(each.state for each in given)
    # A state dict makes new groups and states, which the members must follow.
    second = joined(given)
    second.load_state_dict(first.state_dict())
    train(model, [second], range(2, 3))
    for found, expected in zip(model.parameters(), apart.parameters(), strict=True):
        assert torch.equal(found, expected)
    extra = nn.Parameter(torch.ones(1))
    second.add_param_group({"params": [extra], "lr": 0.5})
    extra.grad = torch.ones(1)
    second.step()
    assert extra.item() == 0.5
    described = describe_scheduler(lambda o: torch.optim.lr_scheduler.StepLR(o, 1), second)
    assert described is not None
    assert described["kind"] == "StepLR"
    assert second.param_groups[-1] is second.optimizers[-1].param_groups[-1]
    assert [len(each.param_groups) for each in given] == [1, 1]


def test_compressed_training_is_close_but_not_equal(store: Store) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"epochs": 1, "batch_size": 16}
    case = Case(store, model, optimizer, compression=hvd.Compression.bf16, options=options)
    case.train(2)
    expected = case.reference(2, 1)[0]
    assert_close(case.weights(1), expected, 2e-2)
    with pytest.raises(AssertionError):
        assert_close(case.weights(1), expected, 1e-6)


def test_loss_constructors_build_the_losses_from_the_model() -> None:
    model = linear()
    made = construct_losses(
        None, [nn.MSELoss, lambda **kw: kw["model"], lambda model: (model,)], model
    )
    assert isinstance(made[0], nn.MSELoss)
    assert made[1:] == [model, (model,)]
    assert isinstance(construct_losses(None, [nn.L1Loss], model), nn.L1Loss)
    assert construct_losses(abs, None, model) is abs
    with pytest.raises(InvalidArgumentError, match="loss_constructors holds 3"):
        construct_losses(None, 3, model)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_sparse_buffer_is_refused_before_any_job(persistent: bool) -> None:
    model = linear()
    model.register_buffer("adjacency", torch.eye(3).to_sparse(), persistent=persistent)
    with pytest.raises(InvalidArgumentError) as failed:
        check_model(model)
    assert str(failed.value) == (
        "model: 'adjacency' has the layout torch.sparse_coo, but ranks can share only dense "
        "parameters and buffers. Register its indices and values, or the tensor as .to_dense(). A "
        "tensor that never changes may be a plain attribute instead of a buffer."
    )


@pytest.mark.parametrize("name", ["0.weight", "scale"])
def test_a_model_on_another_device_is_refused_before_any_job(name: str) -> None:
    """A rank without that device could not even unpickle its parameters or buffers."""
    model = linear()
    if name == "scale":
        model.register_buffer("scale", torch.ones(2, device="meta"))
    else:
        model.to("meta")
    with pytest.raises(InvalidArgumentError) as failed:
        check_model(model)
    assert str(failed.value) == (
        f"model: {name!r} is on the meta device and has no values. Give a function that makes the module and initializes it, for example with "
        "module.to_empty(device='cpu') and reset_parameters() of its layers."
    )


def test_sparse_tensor_attribute_is_allowed(store: Store) -> None:
    class OverGraph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)
            self.adjacency = torch.eye(3).to_sparse()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer((self.adjacency @ x.t()).t())

    model = check_model(OverGraph())
    case = Case(store, model, torch.optim.SGD(model.parameters(), lr=0.1), options={"epochs": 1})
    case.train(2)
    assert_close(case.weights(1), case.reference(2, 1)[0], 1e-5)


def test_a_complex_parameter_is_trained(store: Store) -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.tensor([[0.1 + 0.2j], [0.3j], [-0.2 + 0.1j]]))
            self.out = nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out((x.to(self.turn.dtype) @ self.turn).abs())

    model = check_model(Turned())
    case = Case(
        store,
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        options={"epochs": 2, "gradient_clip_norm": 1.0},
    )
    before = model.turn.detach().clone()
    case.train(2)
    trained = case.weights(2)
    assert_close(trained, case.reference(2, 2)[1], 1e-5)
    assert float((trained["turn"] - before).abs().max()) > 1e-3
