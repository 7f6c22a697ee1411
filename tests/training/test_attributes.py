"""Attributes of modules: values changed in training are stored in a file and set on another module."""

from __future__ import annotations

import copy
import enum
import io
import logging
import random
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sparkhvd.training.modules.attributes import Attributes, Entry, is_record, set_attributes, views

pytestmark = pytest.mark.pure


def through_a_file(entries: list[Entry]) -> list[Entry]:
    buffer = io.BytesIO()
    torch.save(entries, buffer)
    buffer.seek(0)
    found: list[Entry] = torch.load(buffer, weights_only=True)
    return found


VALUES: list[Any] = [
    True,
    7,
    0.1,
    float("nan"),
    1j,
    "text",
    b"bytes",
    None,
    [1, [2.5, None]],
    (1, "a"),
    {"a": [1], 2: (3,)},
    OrderedDict(b=1, a=2),
    {1, 2},
    frozenset({"x"}),
    deque([1, 2], maxlen=3),
    Counter({(1, 2): 3}),
    np.float16(2.5),
    np.int64(3),
    np.datetime64("2026-11-28"),
    np.arange(6, dtype=np.uint8).reshape(2, 3),
    np.zeros((0, 2)),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    torch.tensor([1.5, float("inf")]),
    torch.zeros(0, 3, dtype=torch.int16),
    torch.arange(3).to(torch.bfloat16),
    [torch.ones(2), {"a": np.ones(1)}],
    torch.float64,
    torch.device("cpu"),
    torch.Size([2, 3]),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: f"{type(v).__name__} {v!r:.20}")
def test_attribute_values_of_every_type_survive_a_round_trip(value: Any) -> None:
    module, other = nn.Module(), nn.Module()
    attributes = Attributes(lambda: {"": module})
    module.value = value
    (entry,) = through_a_file(attributes.changes())
    set_attributes({"": other}, [entry])
    assert type(other.value) is type(value)
    assert repr(other.value) == repr(value)
    assert getattr(other.value, "dtype", None) == getattr(value, "dtype", None)
    # Neither the same value again nor an equal value is a change.
    again = Attributes(lambda: {"": other})
    assert again.changes() == []
    other.value = copy.deepcopy(other.value)
    assert again.changes() == []


class Configuration:
    def __init__(self) -> None:
        self.rate = 0.1
        self.inner = SimpleNamespace(depth=2, path=Path("x"))
        self.limits = {"low": [1, 2]}
        self.myself = self


def change_record(module: Any) -> None:
    module.configuration.inner.depth = 3


def change_dict(module: Any) -> None:
    module.configuration.limits["low"].append(3)


def add_to_dict(module: Any) -> None:
    module.mixed["new"] = 1.5


def change_in_list(module: Any) -> None:
    module.records[1].rate = 7


def change_array(module: Any) -> None:
    module.array[1] = 5


def change_tensor(module: Any) -> None:
    module.tensor.data[0] = 9


def delete(module: Any) -> None:
    del module.number


def rounding_alone(module: Any) -> None:
    module.number = 1.0  # was 1


def make() -> Any:
    module: Any = nn.Linear(2, 2)
    module.configuration = Configuration()
    module.records = [Configuration(), Configuration()]
    module.mixed = {"lock": threading.Lock(), "a": 1}
    module.array, module.tensor, module.number = np.zeros(3), torch.zeros(2), 1
    return module


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (change_record, [[".", "configuration"], [".", "inner"], [".", "depth"]]),
        (change_dict, [[".", "configuration"], [".", "limits"]]),
        (add_to_dict, [[".", "mixed"], ["[]", "new"]]),
        (change_in_list, [[".", "records"], ["[]", 1], [".", "rate"]]),
        (change_array, [[".", "array"]]),
        (change_tensor, [[".", "tensor"]]),
        (delete, [[".", "number"]]),
        (rounding_alone, [[".", "number"]]),
    ],
)
def test_in_place_attribute_changes_are_found_and_reapplied(
    change: Callable[[Any], None], path: list[Any]
) -> None:
    module, other = make(), make()
    held = other.configuration.limits
    attributes, of_other = (Attributes(lambda m=m: {"layer": m}) for m in (module, other))
    assert attributes.changes() == []
    change(module)
    (entry,) = through_a_file(attributes.changes())
    assert entry[:2] == ["layer", path]
    of_other.load([entry], own=True)
    (found,) = of_other.changes()
    assert repr(found) == repr(entry)
    assert other.configuration.limits is held  # others may hold it
    of_other.reset()
    assert of_other.changes() == []


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2


def test_enum_defaultdict_and_generator_attributes_keep_their_class() -> None:
    def made() -> Any:
        module: Any = nn.Module()
        module.mode, module.settings = (
            Mode.FAST,
            SimpleNamespace(mode=Mode.FAST, d={"a": 1, "b": 2}),
        )
        module.counts = defaultdict(int)
        module.generators = [np.random.default_rng(0), random.Random(0), torch.Generator()]
        module.state = np.random.RandomState(0)
        return module

    module, other = made(), made()
    attributes, of_other = (Attributes(lambda m=m: {"": m}) for m in (module, other))
    module.mode = module.settings.mode = Mode.SLOW
    module.settings.d = dict(reversed(module.settings.d.items()))
    module.counts[1, "x"] += 2
    module.generators[0].random(), module.generators[1].random(), module.state.rand()
    torch.rand((), generator=module.generators[2])
    of_other.load(through_a_file(attributes.changes()), own=True)
    assert (other.mode, other.settings.mode) == (Mode.SLOW, Mode.SLOW)
    assert list(other.settings.d) == ["b", "a"]
    assert (other.counts, other.counts["new"]) == ({(1, "x"): 2, "new": 0}, 0)
    assert module.generators[0].random() == other.generators[0].random()
    assert module.generators[1].random() == other.generators[1].random()
    assert module.state.rand() == other.state.rand()
    a, b = (torch.rand((), generator=m.generators[2]) for m in (module, other))
    assert a == b


@pytest.mark.parametrize("value", [{"k": 1.0}, np.ones(2), torch.ones(2), [1], Configuration()])
def test_shared_attribute_objects_stay_shared_after_loading(value: Any) -> None:
    def made(*, is_shared: bool) -> Any:
        module: Any = nn.Module()
        module.a = copy.deepcopy(value)
        module.b = module.a if is_shared else copy.deepcopy(value)
        return module

    def changed(module: Any, name: str) -> None:
        setattr(module, name, copy.deepcopy(value))
        change_in_place(getattr(module, name))

    for was in (True, False):
        for name in ("a", "b"):
            module, other = made(is_shared=was), made(is_shared=was)
            attributes, of_other = (Attributes(lambda m=m: {"": m}) for m in (module, other))
            changed(module, name)
            of_other.load(through_a_file(attributes.changes()), own=True)
            assert [repr_of(m.a) for m in (module, other)] == [repr_of(module.a)] * 2
            assert repr_of(other.b) == repr_of(module.b)
            assert other.a is not other.b
            module.b = module.a
            of_other.load(through_a_file(attributes.changes()), own=True)
            assert other.a is other.b
            assert repr_of(other.a) == repr_of(module.a)
            change_in_place(module.a)  # both
            of_other.load(through_a_file(attributes.changes()), own=True)
            assert other.a is other.b
            assert repr_of(other.a) == repr_of(module.a)


def change_in_place(value: Any) -> None:
    if isinstance(value, Configuration):
        value.rate += 1
    elif isinstance(value, dict):
        value["k"] += 1
    else:
        value[0] += 1


def repr_of(value: Any) -> str:
    return repr(vars(value)["rate"] if isinstance(value, Configuration) else value)


def test_loading_attributes_keeps_object_identity() -> None:
    module, other = make(), make()
    inner = other.configuration.limits["low"]
    attributes, of_other = (Attributes(lambda m=m: {"": m}) for m in (module, other))
    change_dict(module)
    of_other.load(attributes.changes(), own=True)
    assert other.configuration.limits["low"] is inner
    assert inner == [1, 2, 3]


def test_recursive_and_meta_tensor_attributes_are_ignored() -> None:
    module: Any = nn.Module()
    module.endless = [1]
    module.endless.append(module.endless)
    module.empty = torch.ones(2, device="meta")
    attributes = Attributes(lambda: {"": module})
    module.empty = torch.ones(3, device="meta")
    assert attributes.changes() == []


def test_attribute_that_is_a_view_of_a_parameter_is_found() -> None:
    module: Any = nn.Sequential(nn.Linear(2, 2))
    module.view = module[0].weight.detach()[0]
    module.copy = module[0].weight.detach().clone()
    # An untrained tensor does not change: a constant under a second name, as in rotary embeddings.
    module.register_buffer("constant", torch.ones(4))
    module.half, module.same = module.constant[:2], module.constant
    owners: dict[str, object] = dict(module.named_modules())
    assert list(views(owners)) == [("view", "0.weight")]


def test_other_ranks_keep_attributes_set_before_training() -> None:
    module, other = make(), make()
    attributes, of_other = (Attributes(lambda m=m: {"": m}) for m in (module, other))
    for each, rank in ((module, 0), (other, 1)):
        each.rank, each.number = rank, 5
    attributes.begun()
    of_other.begun()
    module.number = 6
    entries = through_a_file(attributes.changes())
    assert {entry[1][0][1]: entry[3] for entry in entries} == {"rank": False, "number": True}
    of_other.load(entries, own=False)
    assert (other.rank, other.number) == (1, 6)
    of_other.load(entries, own=True)
    assert (other.rank, other.number) == (0, 6)


def test_loggers_outputs_and_large_tensors_are_not_recorded() -> None:
    module: Any = nn.Linear(2, 2)
    module.logger = logging.getLogger("of a module")
    attributes = Attributes(lambda: {"": module})
    assert not is_record(module.logger)
    module.logger.setLevel("DEBUG")
    module.output = module(torch.zeros(1, 2))
    module.remembered = torch.zeros(1 << 19)
    module.weight.requires_grad_(False)
    module.eval()
    assert attributes.changes() == []
    # A callback that has set it is noted.
    (entry,) = attributes.changes({("", "remembered")})
    assert entry[1] == [[".", "remembered"]]
