"""`DistributedOptimizer(sharded=True)` over parameters on GPUs, with the stand-in for CUDA, against one process on the CPU."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError, MismatchError
from sparkhvd.settings import Settings
from sparkhvd.torch.gradients.layout import Slices
from sparkhvd.torch.optimizer.shards import DeviceShards
from tests.harness import device_training as training
from tests.harness.fake_cuda import Driver, Factories, FakeDevice, gpu
from tests.harness.soak import SOAK, left_to_soak, soak
from tests.torch.on_gpus import on_gpus
from tests.torch.test_sharded import (
    OPTIMIZERS,
    STEPS,
    Model,
    alone,
    assert_close,
    batch,
    loss_of,
    mine,
    one_step,
)

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("fake_gpus")]

# Several buckets even for small models.
SMALL = Settings(device_bucket_bytes=1024)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().cpu().reshape(-1).double() for p in model.parameters()])


def sharded(
    gpu: FakeDevice,
    make: Callable[..., torch.optim.Optimizer],
    steps: int = STEPS,
    **options: Any,
) -> tuple[nn.Module, Any]:
    model = gpu.module(Model())
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters()), model.named_parameters(), sharded=True, **options
    )
    for step in range(steps):
        one_step(model, optimizer, step, gpu.tensor(mine(batch(step))))
    return model, optimizer


# They make tensors on the parameter's device, where the fake driver has none.
NOT_HERE = ("ASGD", "Rprop")


# Moments of each element, and of whole matrices.
CROSS_SECTION = ("AdamW", *{"Adafactor"}.intersection(OPTIMIZERS))
OTHERS = [name for name in OPTIMIZERS if name not in (*NOT_HERE, *CROSS_SECTION)]


@pytest.mark.parametrize(
    "name", [*CROSS_SECTION, *left_to_soak("the cross-section here, test_sharded", *OTHERS)]
)
def test_gpu_sharded_weights_equal_one_process(name: str) -> None:
    expected = weights(alone(OPTIMIZERS[name]))

    def body(gpu: FakeDevice) -> Tensor:
        with Factories(gpu):
            return weights(sharded(gpu, OPTIMIZERS[name])[0])

    found = on_gpus(3, body, settings=SMALL)
    for each in found:
        assert_close(each, expected)
        assert torch.equal(each, found[0])


OPTIONS: list[dict[str, Any]] = [
    {"backward_passes_per_step": 2},
    {"gradient_predivide_factor": 2.0},
    {"groups": 3},
    {"op": hvd.Sum},
    {"sparse_as_dense": True},
]


@pytest.mark.parametrize(
    ("options", "delay_us"),
    [
        ({}, 300),
        ({"groups": 3}, 300),
        *left_to_soak(
            "groups with a delay here, all of them without shards in test_device_optimizer and on the CPU in test_sharded",
            *((options, 0) for options in [{}, *OPTIONS]),
            *((options, 300) for options in OPTIONS if "groups" not in options),
        ),
    ],
    ids=str,
)
def test_gpu_sharded_training_with_any_option_equals_one_process(
    fake_gpus: Driver, options: dict[str, Any], delay_us: int
) -> None:
    fake_gpus.control("fake_cuda_stream_delay_us", delay_us)
    passes = options.get("backward_passes_per_step", 1)

    def train(
        model: nn.Module, optimizer: Any, rows: Callable[[Tensor], list[Tensor]], factor: float
    ) -> Tensor:
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in rows(batch(step)):
                (loss_of(model, part) * factor).backward()
            optimizer.step()
        return weights(model)

    model = Model()
    factor = 2.0 if options.get("op") is hvd.Sum else 1.0
    plain = OPTIMIZERS["Adam"](model.parameters())
    expected = train(model, plain, lambda x: list(x.chunk(passes)), factor)

    def body(gpu: FakeDevice) -> Tensor:
        model, optimizer = sharded(gpu, OPTIMIZERS["Adam"], 0, **options)
        return train(
            model, optimizer, lambda x: [gpu.tensor(mine(part)) for part in x.chunk(passes)], 1.0
        )

    for found in on_gpus(2, body, settings=SMALL):
        assert_close(found, expected)


@pytest.mark.parametrize(
    ("dtype", "compression", "bound"),
    [
        (torch.float32, hvd.Compression.none, 1e-5),
        *left_to_soak(
            "float32 here, the others without shards in test_device_optimizer",
            (torch.float32, hvd.Compression.fp16, 2e-2),
            (torch.float64, hvd.Compression.bf16, 5e-2),
            (torch.bfloat16, hvd.Compression.none, 5e-2),
        ),
    ],
    ids=str,
)
def test_gpu_sharded_training_works_with_every_dtype_and_compression(
    dtype: torch.dtype, compression: Any, bound: float
) -> None:
    expected = training.alone(dtype=torch.float64, extra_for=lambda step, row: row >= 8)
    found = on_gpus(
        3,
        functools.partial(
            training.together,
            dtype=dtype,
            sharded=True,
            compression=compression,
            uses_extra=lambda step, rank: rank == 2,
        ),
        settings=SMALL,
    )
    for each in found:
        assert torch.equal(each, found[0])
        assert float((each - expected).abs().max()) < bound


class Halving(hvd.Compression.fp16):
    """A user's compression with a state."""

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor / 2, 2.0

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor * ctx


@soak("without shards, in test_device_optimizer")
def test_gpu_sharded_training_accepts_a_custom_compressor() -> None:
    expected = weights(alone(OPTIMIZERS["Adam"]))
    body = lambda gpu: weights(sharded(gpu, OPTIMIZERS["Adam"], compression=Halving)[0])  # noqa: E731
    for found in on_gpus(2, body, settings=SMALL):
        assert float((found - expected).abs().max()) < 1e-10


def test_sharded_gpu_parameter_that_no_rank_uses_has_no_gradient() -> None:
    def body(gpu: FakeDevice) -> None:
        model: Any = gpu.module(training.model())
        optimizer: Any = hvd.DistributedOptimizer(training.sgd(model.parameters()), sharded=True)
        for step in range(2):
            x = gpu.tensor(training.batch(step, torch.float64)[0])
            model(x, with_extra=hvd.rank() == 0).sum().backward()
            optimizer.synchronize()
            assert model.idle.weight.grad is None
            assert model.extra.weight.grad is not None
            optimizer.zero_grad()

    on_gpus(2, body)


def test_sharded_optimizer_state_is_divided_and_on_the_gpu() -> None:
    def body(gpu: FakeDevice) -> tuple[int, int]:
        model, optimizer = sharded(gpu, OPTIMIZERS["Adam"], steps=1)
        held = 0
        for state in optimizer.state.values():
            assert state["exp_avg"].is_cuda
            held += state["exp_avg"].numel()
        return held, sum(p.numel() for p in model.parameters() if p.grad is not None)

    found = on_gpus(3, body)
    total = found[0][1]
    assert sum(held for held, _ in found) == total
    assert max(held for held, _ in found) < total / 3 + 64


def moved(state: dict[str, Any], move: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Copy an optimizer's state to another device. The step stays on the CPU."""
    return {
        "param_groups": state["param_groups"],
        "state": {
            number: {key: value if key == "step" else move(value) for key, value in values.items()}
            for number, values in state["state"].items()
        },
    }


def home(value: Tensor) -> Tensor:
    assert value.is_cuda
    return value.cpu()


@pytest.mark.parametrize("name", ["Adam", *left_to_soak("Adam here", "Adafactor")])
def test_gpu_sharded_state_dict_equals_the_plain_optimizer(name: str) -> None:
    model = Model()
    plain = OPTIMIZERS[name](model.parameters())
    for step in range(3):
        one_step(model, plain, step, batch(step))
    expected = plain.state_dict()

    def body(gpu: FakeDevice) -> dict[str, Any]:
        return moved(sharded(gpu, OPTIMIZERS[name], 3)[1].state_dict(), home)

    for found in on_gpus(3, body, settings=SMALL):
        assert found["param_groups"] == expected["param_groups"]
        assert found["state"].keys() == expected["state"].keys()
        for number, values in expected["state"].items():
            for key, value in values.items():
                assert_close(found["state"][number][key], value)


@pytest.mark.parametrize("size", [2, *left_to_soak("two ranks here", 1)])
@pytest.mark.parametrize("name", ["Adam", *left_to_soak("Adam here", "Adafactor")])
def test_gpu_sharded_optimizer_loads_the_state_of_a_plain_optimizer(name: str, size: int) -> None:
    model = Model()
    plain = OPTIMIZERS[name](model.parameters())
    for step in range(3):
        one_step(model, plain, step, batch(step))
    begun, state = copy.deepcopy(model.state_dict()), copy.deepcopy(plain.state_dict())
    for step in range(3, 5):
        one_step(model, plain, step, batch(step))

    def body(gpu: FakeDevice) -> Tensor:
        model, optimizer = sharded(gpu, OPTIMIZERS[name], 0)
        with torch.no_grad():
            for name_of, p in model.named_parameters():
                p.copy_(begun[name_of])
        optimizer.load_state_dict(moved(copy.deepcopy(state), gpu.tensor))
        for step in range(3, 5):
            one_step(model, optimizer, step, gpu.tensor(mine(batch(step))))
        return weights(model)

    for each in on_gpus(size, body, settings=SMALL):
        assert_close(each, weights(model))


@pytest.mark.parametrize("norm_type", [2.0, *left_to_soak("the 2-norm here", float("inf"))])
def test_gpu_sharded_norm_clipping_equals_one_process(norm_type: float) -> None:
    model = Model()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)))
        optimizer.step()

    def body(gpu: FakeDevice) -> tuple[Tensor, list[float]]:
        model, optimizer = sharded(gpu, OPTIMIZERS["momentum"], 0)
        found = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, gpu.tensor(mine(batch(step)))).backward()
            if step % 3 == 0:  # torch's own, over whole gradients
                optimizer.synchronize()
                found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type).item())
            else:
                found.append(optimizer.clip_grad_norm_(0.1, norm_type).item())
            optimizer.step()
        return weights(model), found

    assert min(norms) > 0.1  # it does clip
    for found, found_norms in on_gpus(3, body, settings=SMALL):
        assert found_norms == pytest.approx(norms, rel=1e-10)
        assert_close(found, weights(model))


def test_gpu_sharded_closures_unfreezing_and_added_parameters_equal_one_process() -> None:
    def train(model: Any, optimizer: Any, x_of: Callable[[int], Tensor]) -> Tensor:
        for step in range(6):
            if step == 2:
                model.first.weight.requires_grad_(True)
            if step == 3:
                optimizer.add_param_group({"params": [model.single], "lr": 0.02})

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, x_of(step))
                loss.backward()
                return loss

            optimizer.step(closure)
        return weights(model)

    def begin(model: Any) -> torch.optim.Optimizer:
        model.first.weight.requires_grad_(False)
        return OPTIMIZERS["Adam"]([p for p in model.parameters() if p is not model.single])

    model = Model()
    expected = train(model, begin(model), batch)

    def body(gpu: FakeDevice) -> Tensor:
        model = gpu.module(Model())
        optimizer = hvd.DistributedOptimizer(begin(model), sharded=True)
        return train(model, optimizer, lambda step: gpu.tensor(mine(batch(step))))

    for found in on_gpus(2, body, settings=SMALL):
        assert_close(found, expected)


def test_sharded_gpu_parameters_may_get_new_memory() -> None:
    expected = weights(alone(OPTIMIZERS["Adam"]))

    def body(gpu: FakeDevice) -> Tensor:
        model, optimizer = sharded(gpu, OPTIMIZERS["Adam"], 0)
        for step in range(STEPS):
            one_step(model, optimizer, step, gpu.tensor(mine(batch(step))))
            with torch.no_grad():
                for p in model.parameters():
                    p.data = p.detach().clone()
        return weights(model)

    for found in on_gpus(2, body, settings=SMALL):
        assert_close(found, expected)


def test_sharded_parameters_on_cpu_and_gpu_are_clipped_together() -> None:
    """Sharded and whole parameters of both planes are clipped together."""

    class Number(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.here = nn.Parameter(torch.linspace(-1, 1, 23, dtype=torch.float64))
            self.there = nn.Parameter(torch.linspace(-1, 2, 37, dtype=torch.float64))
            self.single = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def train(model: Any, optimizer: Any, clip: Callable[[], Tensor], factor: float) -> Tensor:
        for step in range(4):
            optimizer.zero_grad()
            here = (model.here * (factor + step)).square().sum()
            there = (model.there * model.single * (factor - step)).square().sum()
            here.backward()
            there.backward()
            clip()
            optimizer.step()
        return weights(model)

    model = Number()
    optimizer = OPTIMIZERS["momentum"](model.parameters())

    def both() -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    expected = train(model, optimizer, both, 3.0)

    def body(gpu: FakeDevice) -> Tensor:
        model: Any = Number()
        for name in ("there", "single"):
            setattr(model, name, nn.Parameter(gpu.tensor(getattr(model, name))))
        made = OPTIMIZERS["momentum"](model.parameters())
        optimizer: Any = hvd.DistributedOptimizer(made, sharded=True, backward_passes_per_step=1)
        return train(model, optimizer, lambda: optimizer.clip_grad_norm_(0.5), 3.0)

    for found in on_gpus(2, body):
        assert_close(found, expected)


def test_gpu_sharded_training_in_a_process_set_equals_one_process() -> None:
    expected = weights(alone(OPTIMIZERS["Adam"]))

    def body(gpu: FakeDevice) -> Tensor | None:
        process_set = hvd.add_process_set([1, 2])
        if not process_set.included():
            return None
        model, optimizer = sharded(gpu, OPTIMIZERS["Adam"], 0, process_set=process_set)
        for step in range(STEPS):
            x = batch(step).chunk(2)[process_set.rank()]
            one_step(model, optimizer, step, gpu.tensor(x))
        return weights(model)

    found = on_gpus(3, body, settings=SMALL)
    assert found[0] is None
    for each in found[1:]:
        assert_close(each, expected)


def test_sharded_step_does_not_block_the_host(fake_gpus: Driver) -> None:
    def body(gpu: FakeDevice) -> None:
        model: Any = gpu.module(training.model())
        optimizer: Any = hvd.DistributedOptimizer(training.sgd(model.parameters()), sharded=True)
        before = 0
        for step in range(4):
            if step == 2:
                before = gpu.host_waits
            optimizer.zero_grad()
            x = gpu.tensor(training.batch(step, torch.float64)[0])
            loss = model(x, with_extra=True).sum()
            loss = loss + sum(p.sum() for p in model.idle.parameters())
            loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        assert gpu.host_waits == before

    on_gpus(2, body)


def train_with_one_missing_wait(
    fake_gpus: Driver, skipped: int, slow: int, behind_s: float = 0.02
) -> tuple[int, list[Tensor]]:
    """Run two steps in which one rank's GPU is `behind_s` later than the other's, and one event wait does nothing (0: all work).

    Return the number of waits, and the weights.
    """
    before: list[int] = []

    def body(gpu: FakeDevice) -> Tensor:
        model: Any = gpu.module(training.model())
        hvd.allreduce(gpu.tensor(torch.ones(1)))  # the communicator is made
        gpu.synchronize()
        hvd.barrier()
        if hvd.rank() == 0:
            before.append(fake_gpus.control("fake_cuda_count", "cuStreamWaitEvent"))
            if skipped:
                fake_gpus.control("fake_cuda_skip_wait", skipped)
        hvd.barrier()
        optimizer: Any = hvd.DistributedOptimizer(training.sgd(model.parameters()), sharded=True)
        for step in range(2):
            optimizer.zero_grad()
            x, y = (t.chunk(hvd.size())[hvd.rank()] for t in training.batch(step, torch.float64))
            loss = (model(gpu.tensor(x)) - gpu.tensor(y)).square().mean()
            loss = loss + 0 * sum(p.sum() for p in model.parameters())
            if hvd.rank() == slow:  # just before backward packs and reduces the gradients
                model.body[0].weight.register_hook(
                    lambda _: gpu.enqueue(lambda: time.sleep(behind_s))
                )
            loss.backward()
            optimizer.step()
        return weights(model)

    gather = DeviceShards.gather_parameters

    def late_gather(self: DeviceShards, shards: Any) -> None:
        if hvd.rank() == slow:  # between the step of the parts and the exchange
            gpu(hvd.rank()).enqueue(lambda: time.sleep(behind_s))
        gather(self, shards)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceShards, "gather_parameters", late_gather)
        results = on_gpus(2, body)
    return fake_gpus.control("fake_cuda_count", "cuStreamWaitEvent") - before[0], results


@soak("without shards, in test_device_optimizer")
def test_removing_any_event_wait_breaks_the_sharded_training(fake_gpus: Driver) -> None:
    expected = training.alone(steps=2)
    for slow in (0, 1):
        count, results = train_with_one_missing_wait(fake_gpus, 0, slow)
        for each in results:
            assert_close(each, expected)
    assert count >= 16  # two steps, two ranks, before and behind the reduction and the exchange
    # Every run has the waits of the second step, which is like all later steps.
    for number in range(1 if SOAK else count // 2 + 1, count + 1):
        # The wait may belong to either rank, and its absence shows if one rank is later than the other. On a busy machine the other
        # one's host may itself be late by more than a short lag.
        for attempt in range(20):
            lag = 0.02 * 2 ** min(attempt // 2, 5)
            _, results = train_with_one_missing_wait(fake_gpus, number, attempt % 2, lag)
            if any(float((found - expected).abs().max()) > 1e-9 for found in results):
                break
        else:
            pytest.fail(f"Without event wait {number} of {count} everything is right.")


def test_sharded_gpu_ranks_with_different_parameters_raise_a_mismatch() -> None:
    def body(gpu: FakeDevice) -> None:
        model: Any = gpu.module(nn.Linear(3, 2 + (hvd.rank() == 1)))
        optimizer = hvd.DistributedOptimizer(training.sgd(model.parameters()), sharded=True)
        with pytest.raises(MismatchError, match="ranks disagree on parameter 0"):
            model(gpu.tensor(torch.ones(2, 3))).sum().backward()
        optimizer.zero_grad()

    on_gpus(2, body)


def test_sharing_gpu_parameters_raises() -> None:
    def body(gpu: FakeDevice) -> None:
        model = gpu.module(nn.Linear(2, 2))
        with pytest.raises(InvalidArgumentError, match="ranks can share only CPU memory"):
            hvd.DistributedOptimizer(
                training.sgd(model.parameters()), sharded=True, share_parameters=True
            )

    on_gpus(2, body)


@pytest.mark.parametrize("num", [1, 2, 3, 5])
def test_shard_slices_cover_every_element_once(num: int) -> None:
    counts = [1, 7, 64, 1031, 2]
    owners = [0, num - 1, 0, num // 2, 0]
    for slices in (Slices.cut(counts, 4, num), Slices.owned(counts, owners, 4, num)):
        assert slices.total == slices.length * num
        for number, count in enumerate(counts):
            parts = [slices.part(number, place) for place in range(num)]
            covered = [index for first, last in parts for index in range(first, last)]
            assert covered == list(range(count))
            assert 0 <= slices.offsets[number] <= slices.total - count
