"""The estimator's training on processes of this host, by the device: no Spark, no Java, no pytest.

`CHECKS` are functions of a `Place` that return what they found or raise. They train on packed data, as the ranks of a fit
do, and compare with plain PyTorch on the CPU.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sparkhvd import topology
from sparkhvd.data.store.store import Store
from sparkhvd.runner import context, run_local
from sparkhvd.settings import Settings
from sparkhvd.training.spec import TrainResult, TrainSpec
from sparkhvd.training.train import train
from tests.training.ranks import Case, assert_close

# A rank imports torch and makes a CUDA context, NCCL loads its kernels, and the compiler runs.
_SETTINGS = replace(Settings(), connect_timeout_s=120.0, stall_shutdown_s=120.0)
_EPOCHS = 3


@dataclass(frozen=True)
class Place:
    """Ranks and device of a check's training.

    Attributes:
        size: number of ranks.
        kind: "cuda" or "cpu".
        is_shared: whether the ranks share the first GPU, as `run_local(use_gpu=True)` lets none.
    """

    size: int = 1
    kind: str = "cuda"
    is_shared: bool = False


def _train_rank(spec: TrainSpec, place: Place) -> tuple[TrainResult, str]:
    """Train in a rank, and return the result and the device of the dense layers' inputs."""
    mine = context()
    assert mine is not None
    if place.is_shared:
        # NCCL treats the ranks as separate hosts: by the first variable up to 2.29, by the second from 2.30 on.
        os.environ["NCCL_HOSTID"] = f"rank-{mine.rank}"
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_IB_DISABLE", "1")
        topology.install_rank_context(replace(mine, gpu=0))
    seen: list[str] = []
    forward = nn.Linear.forward

    def watched(self: nn.Linear, x: Tensor) -> Tensor:
        seen.append(x.device.type)
        return forward(self, x)

    if not spec.compile:
        nn.Linear.forward = watched  # type: ignore[method-assign]
    result = train(spec)
    assert spec.compile or set(seen) == {place.kind}, f"computed on {set(seen)}"
    return result, place.kind


def _trained(case: Case, place: Place, **options: Any) -> TrainResult:
    """Train on processes. Every rank must report the same losses."""
    spec = TrainSpec(**{**vars(case.spec()), **options})
    # Ranks that share a GPU are given none, and take the first by themselves.
    use_gpu = False if place.kind == "cpu" else None if place.is_shared else True
    found = run_local(
        _train_rank,
        (spec, place),
        num_proc=place.size,
        settings=_SETTINGS,
        verbose=0,
        use_gpu=use_gpu,
    )
    losses = [[record["loss"] for record in result.history] for result, _ in found]
    assert all(one == losses[0] for one in losses), losses
    result: TrainResult = found[0][0]
    return result


class Net(nn.Module):
    """Dense layers with running statistics. It draws no random numbers, so that every device gives the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 3) to (rows,)."""
        out: Tensor = self.layers(x)
        return out[:, 0]


class Picture(nn.Module):
    """A convolution over rows as pictures of one line, in channels-last memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, (1, 3)).to(memory_format=torch.channels_last)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 3) to (rows,)."""
        pixels = x.reshape(-1, 1, 1, 3).to(memory_format=torch.channels_last)
        out: Tensor = self.head(torch.relu(self.conv(pixels)).flatten(1))
        return out[:, 0]


class Noisy(nn.Module):
    """A model that draws random numbers on its device."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 3) to (rows,)."""
        out: Tensor = self.layers(x)
        return out[:, 0]


def _case(folder: str, model: type[nn.Module], **options: Any) -> Case:
    torch.manual_seed(4)
    made = model()
    # With ten times as much the training of `Noisy` diverges for half of all random numbers.
    optimizer = torch.optim.SGD(
        made.parameters(), lr=0.005 if model is Noisy else 0.05, momentum=0.9
    )
    given = {"batch_size": 16, "epochs": _EPOCHS, "seed": 5, **options}
    return Case(Store.create(folder), made, optimizer, rows=256, options=given)


def _on_cpu(case: Case, epoch: int) -> Mapping[str, Tensor]:
    """Return the model of a checkpoint, which must load completely on a machine without a GPU."""
    checkpoint = case.checkpoint(epoch)
    devices = {t.device.type for t in _tensors(vars(checkpoint))}
    assert devices == {"cpu"}, devices
    weights: Mapping[str, Tensor] = checkpoint.model
    return weights


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value
    if isinstance(parts, (str, bytes)) or not hasattr(parts, "__iter__"):
        return []
    return [tensor for part in parts for tensor in _tensors(part)]


def _equals_one_process(
    place: Place, model: type[nn.Module], precision: str, tolerance: float
) -> str:
    """Training equals one process of plain PyTorch within a tolerance.

    That process computes on the CPU, or with bfloat16 on the place's device, because a relative change of 1e-3 of the
    first weights changes the last ones by up to 0.15.
    """
    with tempfile.TemporaryDirectory() as folder:
        case = _case(folder, model, precision=precision)
        history = _trained(case, place).history
        device = "cpu" if precision == "32" else place.kind
        expected = case.reference(place.size, _EPOCHS, device)[-1]
        found = {
            name: value
            for name, value in _on_cpu(case, _EPOCHS).items()
            # Statistics of batch normalization are of rank 0's rows.
            if place.size == 1 or "running" not in name
        }
        if place.size == 1 or model is not Net:  # whose batches are normalized by each rank's rows
            assert_close(found, expected, tolerance)
        assert history[-1]["loss"] < history[0]["loss"], history
        if any(p.ndim == 4 for p in case.model.parameters()):
            kept = found["conv.weight"].is_contiguous(memory_format=torch.channels_last)
            assert kept, "channels_last was lost"
    return f"loss {history[0]['loss']:.4f} to {history[-1]['loss']:.4f}"


def _resumed(place: Place) -> str:
    """Check that a resumed run equals an uninterrupted one, with its optimizer and random numbers."""
    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as parts:
        one, two = _case(whole, Noisy), _case(parts, Noisy)
        history = _trained(one, place).history
        _trained(two, place, epochs=1)
        again = _trained(two, place).history
        assert abs(again[0]["loss"] - history[0]["loss"]) < 1e-6, (again[0], history[0])
        assert_close(dict(_on_cpu(two, _EPOCHS)), dict(_on_cpu(one, _EPOCHS)), 1e-6)
    return f"{_EPOCHS - 1} of {_EPOCHS} epochs after the interruption"


def _scaled(place: Place) -> str:
    """float16 with a scaled loss. The scale is part of the checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        case = _case(folder, Picture, precision="16-mixed")
        history = _trained(case, place).history
        scale = case.checkpoint(_EPOCHS).scaler["scale"]
        assert history[-1]["loss"] < history[0]["loss"], history
    return f"loss {history[-1]['loss']:.4f} at the scale {scale:g}"


def _compiled(place: Place) -> str:
    with tempfile.TemporaryDirectory() as folder:
        case = _case(folder, Picture, compile=True)
        _trained(case, place)
        assert_close(dict(_on_cpu(case, _EPOCHS)), case.reference(place.size, _EPOCHS)[-1], 1e-2)
    return "weights as without"


CHECKS: dict[str, Callable[[Place], str]] = {
    "training equals one process": functools.partial(
        _equals_one_process, model=Net, precision="32", tolerance=1e-3
    ),
    # Convolutions of float32 compute with TF32's 10 bits on GPUs that have it.
    "channels_last": functools.partial(
        _equals_one_process, model=Picture, precision="32", tolerance=1e-2
    ),
    "bf16-mixed": functools.partial(
        _equals_one_process, model=Picture, precision="bf16-mixed", tolerance=5e-2
    ),
    "16-mixed": _scaled,
    "a resumed run": _resumed,
    "compile": _compiled,
}
