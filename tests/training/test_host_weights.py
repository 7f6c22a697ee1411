"""Frozen parameters that the ranks of a host hold once: real processes, measured by the kernel's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sparkhvd.torch as hvd
from sparkhvd.runner import run_local
from sparkhvd.training.host_memory import SHARED_BYTES, share_frozen
from tests.harness.by_value import by_value

pytestmark = pytest.mark.processes

travels_by_value = by_value(__name__)

# Square matrices of 4 MiB.
WIDTH, LAYERS = 1 << 10, 4


def net() -> nn.Module:
    torch.manual_seed(4)
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = nn.Sequential(*layers).requires_grad_(False)
    model.append(nn.Linear(WIDTH, 1))
    return model


def place_of(tensor: torch.Tensor) -> str:
    """Return the name of the mapping that a tensor lies in."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *others = line.split(maxsplit=5)
        begin, end = (int(each, 16) for each in addresses.split("-"))
        if begin <= tensor.data_ptr() < end:
            return others[-1]
    raise AssertionError("no mapping has the tensor")


def private_mib() -> int:
    words = Path("/proc/self/smaps_rollup").read_text().split()
    return sum(int(words[words.index(n) + 1]) for n in ("Private_Clean:", "Private_Dirty:")) >> 10


def share() -> dict[str, Any]:
    """Share the frozen parameters of a module that each rank has made, and write to one on rank 1."""
    hvd.init()
    share_frozen(net())  # memory of its imports is not part of the measurement
    model = net()
    tied = nn.Parameter(model[0].weight.detach().reshape(-1), requires_grad=False)
    model.register_parameter("tied", tied)  # over the memory of another
    model[1].weight.data[0, 0] = float("nan")
    before = private_mib()
    share_frozen(model)
    found: dict[str, Any] = {"freed": before - private_mib()}
    found["places"] = [place_of(layer.weight) for layer in model]
    if hvd.rank() == 1:
        model[2].weight.data.add_(1.0)
    hvd.barrier()
    found["weights"] = [float(layer.weight.detach().double().nansum()) for layer in model]
    model[3].requires_grad_()
    model(torch.ones(2, WIDTH)).nansum().backward()
    assert model[3].weight.grad is not None
    hvd.shutdown()
    return found


def test_ranks_map_one_weights_file_and_write_to_private_copies() -> None:
    first, second = run_local(share, num_proc=2)
    for found in (first, second):
        shared = ["memfd:sparkhvd-frozen" in place for place in found["places"]]
        # The first shares its memory with another parameter, the last is trained.
        assert shared == [False, True, True, True, False]
        assert found["freed"] >= 10
    whole = [float(layer.weight.detach().double().nansum()) for layer in net()]
    assert first["weights"][2] == whole[2]
    assert abs(second["weights"][2] - whole[2] - WIDTH * WIDTH) < 1
    assert first["weights"][3] == second["weights"][3] == whole[3]


def keep(names: frozenset[str], changed: bool, width: int) -> list[str]:
    hvd.init()
    torch.manual_seed(4)
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(LAYERS)])
    model.requires_grad_(False)
    if changed and hvd.rank() == 1:
        model[1].weight.data[0, 0] += 1
    share_frozen(model, names)
    places = [place_of(layer.weight) for layer in model]
    hvd.shutdown()
    return ["frozen" if "memfd:sparkhvd-frozen" in each else "own" for each in places]


def test_different_or_unnamed_parameters_stay_private() -> None:
    names = frozenset({"0.weight", "1.weight", "2.weight"})
    first, second = run_local(keep, (names, True, WIDTH), num_proc=2)
    assert first == ["frozen"] * 3 + ["own"]
    assert second == ["frozen", "own", "frozen", "own"]


def test_small_frozen_parameters_stay_private() -> None:
    width = int((SHARED_BYTES / 4 / LAYERS) ** 0.5) - 1
    names = frozenset(f"{n}.weight" for n in range(LAYERS))
    assert run_local(keep, (names, False, width), num_proc=2) == [["own"] * LAYERS] * 2
