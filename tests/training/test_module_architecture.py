"""Modules without their weights: descriptions of torch.nn modules, and shells of any module."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sparkhvd.training.modules.architecture import (
    describe,
    dump_shell,
    foreign_class,
    load_shell,
    rebuild,
    tensors_of,
)
from sparkhvd.training.modules.copies import copy_with, light_copy

pytestmark = pytest.mark.pure


def tied() -> nn.Module:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    shared = nn.ReLU()
    return nn.Sequential(first, shared, second, shared)


MODULES: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4, 2)), (5, 3)),
    (
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 4, 3, padding="same"),
            nn.BatchNorm2d(4),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64, 10),
        ),
        (5, 64),
    ),
    (lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True), (2, 5, 3)),
    (lambda: nn.GRU(3, 4), (2, 5, 3)),
    (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, activation=nn.functional.gelu), 2
        ),
        (4, 2, 8),
    ),
    (tied, (3, 4)),
    (lambda: nn.Sequential(nn.LayerNorm(4), nn.Upsample(scale_factor=2)), (2, 3, 4)),
]


@pytest.mark.parametrize(("make", "shape"), MODULES)
def test_modules_of_torch_nn_are_described_in_json(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    module = make().eval()
    description = describe(module)
    assert description is not None
    assert foreign_class(module) is None
    rebuilt = rebuild(json.loads(json.dumps(description)), tensors_of(module))
    x = torch.randn(shape)
    found, expected = rebuilt(x), module(x)
    if isinstance(expected, tuple):
        found, expected = found[0], expected[0]
    assert torch.equal(found, expected)
    assert len(list(rebuilt.parameters())) == len(list(module.parameters()))
    assert repr(rebuilt) == repr(module)
    assert not rebuilt.training
    rebuilt.train()
    rebuilt(x)


class Mine(nn.Linear):
    pass


def hooked() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    "module",
    [
        Mine(2, 2),
        nn.Sequential(nn.Linear(2, 2), Mine(2, 2)),
        hooked(),
        torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        nn.TransformerEncoderLayer(4, 2, activation=lambda x: x),
    ],
    ids=["own class", "own class inside", "hook", "parametrization", "own function"],
)
def test_modules_with_user_code_have_no_description(module: nn.Module) -> None:
    assert describe(module) is None


def test_foreign_class_returns_the_name_of_a_user_class() -> None:
    assert foreign_class(nn.Sequential(Mine(2, 2))) == f"{__name__}.Mine"


@pytest.mark.parametrize(
    "change",
    [
        {"class": "Mine"},
        {"class": "__builtins__"},
        {"class": "functional"},
        {"attributes": {"forward": {"function": "relu"}}},
        {"attributes": {"_forward_hooks": {"tuple": []}}},
        {"attributes": {"x": {"function": "boolean_dispatch"}}},
        {"attributes": {"x": {"function": "__class__"}}},
        {"attributes": {"x": {"function": "importlib"}}},
        {"attributes": {"x": {"dtype": "load"}}},
        {"attributes": {"x": {"other": "load"}}},
    ],
)
def test_forged_module_description_is_refused(change: dict[str, Any]) -> None:
    module = nn.Linear(2, 2)
    description = describe(module)
    assert description is not None
    with pytest.raises((ValueError, AttributeError)):
        rebuild({**description, **change}, tensors_of(module))


def test_module_shell_contains_no_weights_and_keeps_identities() -> None:
    module = nn.Sequential(Mine(500, 500), nn.ReLU(), Mine(500, 2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    shell = dump_shell(module, (module, optimizer))
    assert len(shell) < 10_000
    loaded, its_optimizer = load_shell(shell, tensors_of(module))
    x = torch.randn(3, 500)
    assert torch.equal(loaded(x), module(x))
    assert its_optimizer.param_groups[0]["params"][0] is next(loaded.parameters())


def test_cached_functions_and_properties_are_pickled_by_value() -> None:
    @functools.lru_cache(maxsize=5)
    def steps(length: int) -> torch.Tensor:
        return torch.arange(length) if length < 2 else torch.cat([steps(length - 1), torch.ones(1)])

    class Cached(nn.Module):
        @functools.cached_property
        def scale(self) -> float:
            return 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * x + steps(3)

    loaded = load_shell(dump_shell(Cached()), {})
    assert loaded(torch.ones(3)).tolist() == [2.0, 3.0, 3.0]
    assert load_shell(dump_shell(nn.Identity(), importable), {}) is importable


@functools.lru_cache
def importable() -> None: ...


def test_light_copy_shares_only_parameter_memory() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    copied = light_copy(module).eval()
    assert module.training
    for original, copy in zip(module.parameters(), copied.parameters(), strict=True):
        assert original is not copy
        assert original.data_ptr() == copy.data_ptr()
    copied[1].running_mean.fill_(3.0)
    assert float(module[1].running_mean.sum()) == 0.0


def test_light_copy_forward_does_not_rescale_the_original_embedding() -> None:
    module = nn.Sequential(nn.Embedding(3, 4, max_norm=0.1), nn.Flatten())
    before = module[0].weight.detach().clone()
    light_copy(module)(torch.tensor([[0], [2]]))
    assert torch.equal(module[0].weight, before)


def test_copied_module_uses_the_tensors_of_the_given_state() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    module[0].bias.requires_grad_(False)
    before = {n: t.clone() for n, t in module.state_dict().items()}
    state = {n: t.clone() + 1 for n, t in module.state_dict().items()}
    state["2.weight"] = state["0.weight"].clone()
    copied = copy_with(module, state)
    assert copied is not module
    for name, tensor in copied.state_dict().items():
        assert torch.equal(tensor, state[name])
        assert torch.equal(module.state_dict()[name], before[name])
        if name != "2.weight":
            assert tensor.data_ptr() == state[name].data_ptr()
    assert copied[2].weight is copied[0].weight
    assert not copied[0].bias.requires_grad
    assert copied[0].weight.requires_grad
    with pytest.raises(RuntimeError, match="Missing key"):
        copy_with(module, {})


def test_code_sent_to_ranks_keeps_its_file_name() -> None:
    source = "class Net(torch.nn.Module):\n    def forward(self, x):\n        return (lambda y: y / 0)(x)\n"
    names: dict[str, Any] = {"torch": torch, "__name__": "__main__"}  # so it is pickled by value
    exec(compile(source, "/home/me/net.py", "exec"), names)
    loaded = load_shell(dump_shell(nn.Module(), names["Net"](), names_files=True), {})
    with pytest.raises(ZeroDivisionError) as raised:
        loaded(3)
    frames = [str(entry.path) for entry in raised.traceback]
    assert frames[-2:] == ["/home/me/net.py"] * 2
