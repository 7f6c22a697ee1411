"""Modules that torch refuses to copy or pickle: their copies, programs and shells compute the same, and train."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from sparkhvd.training.loss_functions import resolve_losses
from sparkhvd.training.model import check_model, is_compiled, uncompiled
from sparkhvd.training.modules.architecture import dump_shell, load_shell, tensors_of
from sparkhvd.training.modules.copies import copied, copy_with, light_copy
from sparkhvd.training.program import Program, dump_program

pytestmark = pytest.mark.pure


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


class KeepsOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 1)
        self.hidden: Tensor | None = None
        self.maps: list[dict[str, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = torch.tanh(self.first(x))
        self.maps = [{"map": self.hidden * 2}]
        out: Tensor = self.last(self.hidden)
        return out


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def called() -> nn.Module:
    module = KeepsOutputs()
    module(torch.ones(2, 4))
    return module


def old_weight_norm() -> nn.Module:
    module = mlp()
    nn.utils.weight_norm(module[0])
    return module


def old_spectral_norm() -> nn.Module:
    module = mlp()
    nn.utils.spectral_norm(module[0])
    return module


def pruned() -> nn.Module:
    module = mlp()
    prune.random_unstructured(module[0], "weight", amount=0.5)
    return module


def weight_norm() -> nn.Module:
    module = mlp()
    parametrizations.weight_norm(module[0])
    return module


def orthogonal() -> nn.Module:
    module = mlp()
    parametrizations.orthogonal(module[2])
    parametrizations.spectral_norm(module[0])
    return module


def own_parametrization() -> nn.Module:
    module = mlp()
    parametrize.register_parametrization(module[0], "weight", Doubled())
    parametrize.register_parametrization(module[0], "weight", Doubled())
    parametrize.register_parametrization(module[0], "bias", Doubled())
    return module


class Recurrent(nn.Module):
    """A layer that keeps weak references to its weights, which a parametrization computes."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.last = nn.LSTM(4, 6, num_layers=2), nn.Linear(6, 1)
        parametrizations.weight_norm(self.rnn, "weight_hh_l1")
        parametrizations.spectral_norm(self.rnn, "weight_hh_l0")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.rnn(x)[0])
        return out


class WithLock(nn.Linear):
    """Leaves a lock out of its state."""

    def __init__(self, width: int, made: int) -> None:
        super().__init__(width, made)
        self.lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        made = type(self).__new__(type(self))
        made.__setstate__(copy.deepcopy(WithLock.__getstate__(self), memo))
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.lock = threading.Lock()


def own_state() -> nn.Module:
    module = WithLock(4, 1)
    parametrizations.weight_norm(module)
    return module


def compiled_part() -> nn.Module:
    module = weight_norm()
    module[0].compile(backend="eager")  # type: ignore[index,operator]
    return module


def scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(mlp(), nn.BatchNorm1d(1)))


def traced() -> nn.Module:
    module: nn.Module = torch.jit.trace(mlp(), torch.ones(2, 4))
    return module


def from_a_file() -> nn.Module:
    buffer = io.BytesIO()
    torch.jit.save(scripted(), buffer)
    buffer.seek(0)
    module: nn.Module = torch.jit.load(buffer)
    return module


def partly_scripted() -> nn.Module:
    shared = torch.jit.script(nn.Linear(4, 4))
    return nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(4, 1))


KINDS = [
    *(called, old_weight_norm, old_spectral_norm, pruned, weight_norm, orthogonal),
    *(own_parametrization, Recurrent, own_state, compiled_part),
    *(scripted, traced, from_a_file, partly_scripted),
]
kinds = pytest.mark.parametrize("kind", KINDS)
X = torch.arange(20.0).reshape(5, 4) / 20


def output(module: nn.Module) -> Tensor:
    module.eval()
    with torch.no_grad():
        found: Tensor = module(X)
    return found.clone()


@kinds
def test_copied_modules_give_equal_outputs_and_are_independent(
    kind: Callable[[], nn.Module],
) -> None:
    module = check_model(kind())
    expected = output(module)
    whole, light = copied(module), light_copy(module)
    assert torch.equal(output(whole), expected)
    assert torch.equal(output(light), expected)
    state = {name: 0.5 * value for name, value in tensors_of(module).items()}
    replaced = copy_with(module, state)
    assert all(torch.equal(value, state[name]) for name, value in tensors_of(replaced).items())
    with torch.no_grad():
        for parameter in whole.parameters():
            assert parameter.is_leaf
            assert parameter.requires_grad
            parameter.zero_()
    assert not torch.equal(output(whole), expected)
    assert torch.equal(output(module), expected)
    assert torch.equal(output(light), expected)


@kinds
def test_loaded_program_has_the_optimizer_on_its_parameters(kind: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = kind()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses, is_sum = resolve_losses(nn.MSELoss(), 1, per_row=False)
    data, _ = dump_program(Program(module, optimizer, losses, is_sum, ()))
    program = load_shell(data, {})
    for net, steps in ((module, optimizer), (program.model, program.optimizer)):
        net.train()
        for _ in range(2):
            steps.zero_grad()
            net(X).square().mean().backward()
            steps.step()
    assert torch.equal(output(program.model), output(module))
    expected = tensors_of(module)
    found = tensors_of(program.model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


class Counting(torch.optim.SGD):
    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, lr=0.1)
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.steps
        return super().step(closure)


def test_loaded_optimizer_keeps_its_attributes_and_hooks() -> None:
    def halved(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            module[0].weight.mul_(0.5)

    for make in (Counting, torch.optim.LBFGS):
        module = mlp()
        optimizer: Any = make(module.parameters())
        optimizer.register_step_post_hook(halved)
        optimizer.step(lambda m=module: m(X).square().mean())
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces `step`
        losses, is_sum = resolve_losses(nn.MSELoss(), 1, per_row=False)
        program = load_shell(dump_program(Program(module, optimizer, losses, is_sum, ()))[0], {})
        for net, steps in ((module, optimizer), (program.model, program.optimizer)):

            def closure(net: nn.Module = net, steps: Any = steps) -> Tensor:
                steps.zero_grad()
                loss = net(X).square().mean()
                loss.backward()
                return loss

            steps.step(closure)
        assert torch.equal(output(program.model), output(module))


@kinds
def test_module_saved_without_weights_loads_with_given_weights(
    kind: Callable[[], nn.Module],
) -> None:
    module = kind()
    weights = {name: value.clone() for name, value in tensors_of(module).items()}
    data = dump_shell(module, with_hooks=False)
    expected = output(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert torch.equal(output(load_shell(data, weights)), expected)


def test_light_copy_of_an_embedding_with_max_norm_keeps_the_original() -> None:
    table = nn.Embedding(3, 4, max_norm=0.1)
    before = table.weight.detach().clone()
    light_copy(table)(torch.arange(3))
    assert torch.equal(table.weight, before)


def test_compiled_module_is_replaced_by_its_inner_module() -> None:
    module = mlp()
    compiled = torch.compile(module, backend="eager")
    assert uncompiled(compiled) is module
    assert is_compiled(compiled)
    assert not is_compiled(module)
    other = mlp()
    other.compile(backend="eager")
    assert is_compiled(other)
    assert list(copy.deepcopy(other).state_dict()) == list(module.state_dict())
