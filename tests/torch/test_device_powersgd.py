"""`Compression.powersgd` over parameters on GPUs, with the stand-in for CUDA, against the same on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparkhvd.torch as hvd
from sparkhvd.settings import Settings
from tests.harness.fake_cuda import Driver, FakeDevice
from tests.harness.soak import left_to_soak
from tests.torch.on_gpus import on_gpus
from tests.torch.test_error_feedback import loss_of, mine, network, pictures

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("fake_gpus")]

SMALL = Settings(bucket_bytes=6000, device_bucket_bytes=6000)
STEPS = 4


class Cpu:
    """Device of the tests without a GPU: tensors stay on the CPU."""

    def tensor(self, values: Tensor) -> Tensor:
        return values

    def module(self, module: nn.Module) -> nn.Module:
        return module


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().cpu().reshape(-1).double() for p in model.parameters()])


def train(
    place: Any,
    compression: Any,
    *,
    factor_of: Any = lambda step: 1.0,
    passes: int = 1,
    **options: Any,
) -> Tensor:
    model: Any = place.module(network())
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=compression,
        backward_passes_per_step=passes,
        **options,
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in mine(pictures(step)).chunk(passes):
            loss = loss_of(model, place.tensor(part)) / passes
            (loss * factor_of(step)).backward()
        optimizer.synchronize()
        if all(bool(p.grad.isfinite().all()) for p in model.parameters()):
            optimizer.step()
    return weights(model)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"op": hvd.Sum},
    "predivide": {"gradient_predivide_factor": 2.0},
    "passes": {"passes": 2},
    "warm_up": {"warm_up_steps": 2},
    # On one rank in one step: every rank skips the step, which has no effect.
    "nan": {"factor_of": lambda step: float("nan") if step == 2 and hvd.rank() else 1.0},
    "inf": {"factor_of": lambda step: float("inf") if step == 3 and not hvd.rank() else 1.0},
}
SHORT = ("plain", "passes", "nan")


@pytest.mark.parametrize(
    ("name", "delay_us"),
    [
        *((name, 300) for name in SHORT),
        *left_to_soak(
            "a cross-section with a delay here, options on the CPU in test_error_feedback",
            *((name, 300) for name in OPTIONS if name not in SHORT),
            *((name, 0) for name in OPTIONS),
        ),
    ],
)
def test_gpu_powersgd_equals_the_cpu(fake_gpus: Driver, name: str, delay_us: int) -> None:
    fake_gpus.control("fake_cuda_stream_delay_us", delay_us)
    options = dict(OPTIONS[name])
    warm_up_steps = options.pop("warm_up_steps", 0)

    def body(gpu: FakeDevice) -> tuple[Tensor, Tensor]:
        made = [hvd.Compression.powersgd(rank=2, warm_up_steps=warm_up_steps) for _ in range(2)]
        return train(gpu, made[0], **options), train(Cpu(), made[1], **options)

    results = on_gpus(2, body, settings=SMALL)
    for found, expected in results:
        assert torch.equal(found, results[0][0])
        assert bool(found.isfinite().all())
        assert float((found - expected).abs().max()) < 1e-9
    if name == "plain" and delay_us:
        plain = on_gpus(2, lambda _: train(Cpu(), hvd.Compression.none), settings=SMALL)
        assert float((results[0][0] - plain[0]).abs().max()) > 1e-6  # it does compress


def test_gpu_powersgd_reduces_a_layer_unused_on_some_ranks() -> None:
    def body(gpu: FakeDevice) -> None:
        model: Any = gpu.module(nn.ModuleList([nn.Linear(40, 40), nn.Linear(40, 40)]).double())
        optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), compression=hvd.Compression.powersgd()
        )
        x = gpu.tensor(torch.ones(2, 40, dtype=torch.float64))
        for uses in ([0, 1], [0], [1] if hvd.rank() else [0, 1]):
            optimizer.zero_grad()
            sum(model[number](x).sum() for number in uses).backward()
            optimizer.synchronize()
            used = hvd.allgather_object(uses)
            for number in range(2):
                grad = model[number].weight.grad
                if any(number in each for each in used):
                    # Of rank 1, so nothing is lost: as many of 2 as rows, of the ranks that used it.
                    share = sum(number in each for each in used) / 2
                    assert float((grad.cpu() - 2 * share).abs().max()) < 1e-9
                else:
                    assert grad is None

    on_gpus(2, body)


def test_powersgd_state_saved_on_the_cpu_resumes_on_the_gpu() -> None:
    def body(gpu: FakeDevice) -> None:
        first = hvd.Compression.powersgd(rank=2)
        train(gpu, first)
        state = first.state_dict()
        assert all(each["q"].is_cuda and each["error"].is_cuda for each in state.values())
        home = {
            name: {"steps": s["steps"], "q": s["q"].cpu(), "error": s["error"].cpu()}
            for name, s in state.items()
        }
        there, here = hvd.Compression.powersgd(rank=2), hvd.Compression.powersgd(rank=2)
        there.load_state_dict(home)
        here.load_state_dict(home)
        found, expected = train(gpu, there), train(Cpu(), here)
        assert float((found - expected).abs().max()) < 1e-9

    on_gpus(2, body, settings=SMALL)


def test_powersgd_step_does_not_block_the_host() -> None:
    def body(gpu: FakeDevice) -> None:
        model: Any = gpu.module(nn.Linear(40, 40).double())
        optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), compression=hvd.Compression.powersgd()
        )
        before = 0
        for step in range(4):
            if step == 2:
                before = gpu.host_waits
            optimizer.zero_grad()
            model(gpu.tensor(torch.ones(2, 40, dtype=torch.float64))).sum().backward()
            optimizer.step()
        assert gpu.host_waits == before

    on_gpus(2, body)
