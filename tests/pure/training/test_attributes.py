"""Attributes of modules: values that differ from those of the beginning, through a file, set on another module."""

from __future__ import annotations

import copy
import io
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sparkhvd.training.modules.attributes import Attributes, Entry, is_record, set_attributes


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
def test_every_kind_of_value_comes_back(value: Any) -> None:
    module, other = nn.Module(), nn.Module()
    attributes = Attributes(lambda: {"": module})
    module.value = value
    (entry,) = through_a_file(attributes.changes())
    set_attributes({"": other}, [entry])
    assert type(other.value) is type(value)
    assert repr(other.value) == repr(value)
    assert getattr(other.value, "dtype", None) == getattr(value, "dtype", None)
    # The same once more is no change, and an equal one is none either.
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
def test_changes_in_place_are_found_and_made_again(
    change: Callable[[Any], None], path: list[Any]
) -> None:
    module, other = make(), make()
    held = other.configuration.limits
    attributes, of_other = (Attributes(lambda m=m: {"layer": m}) for m in (module, other))
    assert attributes.changes() == []
    change(module)
    (entry,) = through_a_file(attributes.changes())
    assert entry[:2] == ["layer", path]
    of_other.load([entry])
    (found,) = of_other.changes()
    assert repr(found) == repr(entry)
    assert other.configuration.limits is held  # others may hold it
    of_other.reset()
    assert of_other.changes() == []


def test_what_a_start_sets_by_itself_is_not_loaded() -> None:
    module, other = make(), make()
    attributes, of_other = (Attributes(lambda m=m: {"": m}) for m in (module, other))
    for each, rank in ((module, 0), (other, 1)):
        each.rank, each.number = rank, 5
    attributes.begun()
    of_other.begun()
    module.number = 6
    entries = through_a_file(attributes.changes())
    assert {entry[1][0][1]: entry[3] for entry in entries} == {"rank": False, "number": True}
    of_other.load(entries)
    assert (other.rank, other.number) == (1, 6)


def test_services_outputs_and_large_tensors_are_left_alone() -> None:
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
