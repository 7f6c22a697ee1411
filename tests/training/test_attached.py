"""Hooks and attributes of parameters: in ranks, in copies, on the driver and in saved models."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator import TorchModel
from sparkhvd.training import program
from sparkhvd.training.modules.architecture import (
    describe,
    dump_shell,
    load_shell,
    rebuild,
    tensors_of,
)
from sparkhvd.training.modules.copies import copied, copy_with, hooks_of, light_copy
from sparkhvd.training.optimizer import check_optimizer
from sparkhvd.training.program import Program, dump_program
from tests.training.ranks import Case, linear

pytestmark = pytest.mark.ranks


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def masked() -> nn.Module:
    """Make a module whose gradients are masked in two ways, one of them by the parameter itself."""
    model = linear()
    mask = torch.tensor([[1.0, 0.0, 1.0]])
    model[0].weight.register_hook(lambda grad: grad * mask)

    def keep_zeros(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(parameter != 0)

    with torch.no_grad():
        model[2].weight[0, :3] = 0.0
    model[2].weight.register_post_accumulate_grad_hook(keep_zeros)
    return model


def assert_masked(found: dict[str, Tensor], model: nn.Module) -> None:
    before = model.state_dict()
    changed = {name: found[name] != before[name] for name in found}
    # Units after a weight of zero have no gradient.
    assert changed["0.weight"].tolist() == [[False] * 3] * 3 + [[True, False, True]] * 2
    assert changed["2.weight"].tolist() == [[False, False, False, True, True]]
    assert changed["2.bias"].all()


def decay_some(parameters: Any) -> torch.optim.Optimizer:
    parameters = list(parameters)
    decayed = [p for p in parameters if not p.no_decay]
    rest = [p for p in parameters if p.no_decay]
    assert len(decayed) == len(rest) == 2
    return torch.optim.SGD([{"params": decayed, "weight_decay": 0.5}, {"params": rest}], lr=0.05)


@pytest.mark.parametrize("is_large", [False, True])
def test_parameter_hooks_and_attributes_reach_the_ranks(
    store: Store, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_large:  # its tensors are in a file beside the program
        monkeypatch.setattr(program, "CLOSURE_BYTES", 0)
    model = masked()
    for parameter in model.parameters():
        parameter.no_decay = parameter.ndim == 1  # type: ignore[attr-defined]
    assert check_optimizer(decay_some, model, model).param_groups[0]["weight_decay"] == 0.5
    case = Case(store, model, decay_some, options={"epochs": 2, "batch_size": 16})
    case.train(2)
    # Weight decay is added to the masked gradient, so masked weights decay, and zeros stay zeros.
    found, before = case.weights(2), model.state_dict()
    decay = (1 - 0.05 * 0.5) ** (2 * 4)
    torch.testing.assert_close(found["0.weight"][:, 1], before["0.weight"][:, 1] * decay)
    assert not found["2.weight"][0, :3].any()
    assert (found["2.weight"][0, 3:] != before["2.weight"][0, 3:]).all()


def test_given_optimizer_trains_parameters_with_hooks(store: Store) -> None:
    model = masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    case = Case(store, model, optimizer, options={"epochs": 1, "batch_size": 16})
    case.train(2)
    assert_masked(case.weights(1), model)


class Remembers:
    """A hook that is an object, refers to its parameter, and counts."""

    def __init__(self, parameter: Tensor) -> None:
        self.parameter, self.calls = parameter, 0

    def __call__(self, grad: Tensor) -> Tensor:
        self.calls += 1
        return grad * (self.parameter > 0)


def hooked() -> nn.Module:
    """Make a module with attributes, tied parameters, and hooks that refer to their own parameter or module."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    weight = model[0].weight
    weight.register_hook(Remembers(weight))
    own = weight
    weight.register_hook(lambda grad: grad + own * 0)
    weight.register_hook(lambda grad: grad * 1)
    frozen = model[0].bias
    frozen.register_post_accumulate_grad_hook(lambda parameter: None)
    frozen.requires_grad = False
    weight.no_decay, weight.partner, weight.tags = True, frozen, ["a"]  # type: ignore[attr-defined]
    model[1].running_mean.is_statistic = True
    return model


@pytest.mark.parametrize("way", ["copy", "light copy", "copy with", "shell", "getModel"])
def test_module_copies_have_their_own_hooks_and_attributes(way: str) -> None:
    model = hooked()
    made: nn.Module = {
        "copy": lambda: copied(model),
        "light copy": lambda: light_copy(model),
        "copy with": lambda: copy_with(model, {n: t.clone() for n, t in tensors_of(model).items()}),
        "shell": lambda: load_shell(dump_shell(model), tensors_of(model)),
        "getModel": lambda: TorchModel.from_module(model, feature_cols=["x"]).getModel(),
    }[way]()
    weight, bias = made[0].weight, made[0].bias
    assert weight is made[2].weight is not model[0].weight
    assert (weight.no_decay, weight.tags, weight.partner is bias) == (True, ["a"], True)
    assert made[1].running_mean.is_statistic
    assert not bias.requires_grad
    hooks = hooks_of(weight)
    assert hooks is not None
    first, second, _ = hooks.backward
    assert isinstance(first, Remembers)
    assert first.parameter is weight
    assert second.__closure__[0].cell_contents is weight  # type: ignore[attr-defined]
    after = hooks_of(bias)
    assert after is not None
    assert len(after.accumulated) == 1
    assert hooks_of(made[1].weight) is None
    weight.square().sum().backward()
    assert first.calls == 1
    assert torch.equal(weight.grad, 2 * weight.detach() * (weight > 0))
    assert model[0].weight.grad is None
    original = hooks_of(model[0].weight)
    assert original is not None
    assert original.backward[0].calls == 0  # type: ignore[attr-defined]


def test_module_descriptions_contain_attributes_but_no_hooks() -> None:
    model = nn.Linear(2, 1)
    model.weight.no_decay = True  # type: ignore[attr-defined]
    text = describe(model)
    assert text is not None
    made = rebuild(text, tensors_of(model))
    assert made.weight.no_decay  # type: ignore[union-attr]
    text["parameters"]["weight"]["attributes"] = {"detach": 1}  # type: ignore[index]
    with pytest.raises(ValueError, match="'detach' is not an attribute"):
        rebuild(text, tensors_of(model))
    model.weight.register_hook(lambda grad: grad)
    assert describe(model) is None  # it is pickled


def test_parameters_that_refer_to_each_other_are_pickled() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first, last = model[0].weight, model[1].weight
    first.partner, last.partner = last, first  # type: ignore[attr-defined]
    loaded = load_shell(dump_shell(model), tensors_of(model))
    assert loaded[0].weight.partner is loaded[1].weight
    assert loaded[1].weight.partner is loaded[0].weight


def test_saved_prediction_modules_contain_no_hooks() -> None:
    model = nn.Linear(2, 1)
    lock = threading.Lock()
    model.weight.register_hook(lambda grad: grad if lock.locked() else None)
    fitted = TorchModel.from_module(model, feature_cols=["x"])._require_fitted()
    assert hooks_of(load_shell(fitted.shell, fitted.weights.load()).weight) is None


@pytest.mark.parametrize("what", ["a hook", "attributes"])
def test_error_names_a_parameter_that_cannot_be_sent(what: str) -> None:
    model, lock = linear(), threading.Lock()
    if what == "a hook":
        model[0].bias.register_hook(lambda grad: grad if lock.locked() else None)
    else:
        model[0].bias.lock = lock  # type: ignore[union-attr]
    sent = Program(model, torch.optim.Adam, (nn.MSELoss(),), (False,), ())
    with pytest.raises(
        InvalidArgumentError,
        match=rf"^model: {what} of parameter '0.bias' cannot be sent to the ranks",
    ):
        dump_program(sent)
