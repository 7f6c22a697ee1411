"""`DistributedOptimizer` over parameters on GPUs, with the stand-in for CUDA, against one process on the CPU."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.settings import Settings
from sparkhvd.torch.gradients import cuda
from tests.harness import device_training as training
from tests.harness.fake_cuda import Driver, FakeDevice
from tests.harness.soak import SOAK, left_to_soak
from tests.torch.on_gpus import on_gpus

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("fake_gpus")]

# Several buckets even for small models.
SMALL = Settings(device_bucket_bytes=1024)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, eps=1e-2)


def uses_extra(step: int, rank: int) -> bool:
    return (step + rank) % 3 == 0


def of_row(step: int, row: int, *, size: int) -> bool:
    return uses_extra(step, row // (training.ROWS // size))


def agree(results: list[Tensor], expected: Tensor, bound: float = 1e-12) -> None:
    for result in results:
        assert torch.equal(result, results[0])
        assert float((result - expected).abs().max()) <= bound


@pytest.mark.parametrize("size", [3, *left_to_soak("three ranks here, two below", 2)])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("make", [training.sgd, adam], ids=["sgd", "adam"])
def test_gpu_training_equals_one_process(
    size: int, set_to_none: bool, make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    train = functools.partial(training.together, make=make, set_to_none=set_to_none)
    agree(on_gpus(size, train, settings=SMALL), training.alone(make=make))


OPTIONS: list[dict[str, Any]] = [
    {"gradient_predivide_factor": 3.0},
    {"groups": 2},
    {"sparse_as_dense": True},
    {"op": hvd.Average},
    {"gradient_as_bucket_view": True},
    {"gradient_as_bucket_view": True, "set_to_none": False},
    {"gradient_as_bucket_view": True, "sparse_as_dense": True},
]


@pytest.mark.parametrize(
    ("options", "delay_us"),
    [
        ({}, 0),
        ({}, 300),
        *((options, 300) for options in OPTIONS),
        *left_to_soak("with a delay, here", *((options, 0) for options in OPTIONS)),
    ],
    ids=str,
)
def test_gpu_training_with_any_option_equals_one_process(
    fake_gpus: Driver, options: dict[str, Any], delay_us: int
) -> None:
    fake_gpus.control("fake_cuda_stream_delay_us", delay_us)
    train = functools.partial(training.together, **options)
    agree(on_gpus(2, train, settings=SMALL), training.alone())


def test_gpu_gradient_accumulation_equals_one_process() -> None:
    train = functools.partial(training.together, passes=2)
    agree(on_gpus(2, train, settings=SMALL), training.alone(passes=2))


@pytest.mark.parametrize("large_bytes", [0, 200])
@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.bf16])
def test_large_gradients_are_scaled_while_they_are_copied(
    monkeypatch: pytest.MonkeyPatch, large_bytes: int, compression: Any
) -> None:
    monkeypatch.setattr(cuda, "_LARGE_BYTES", large_bytes)
    train = functools.partial(training.together, uses_extra=uses_extra, compression=compression)
    expected = training.alone(extra_for=functools.partial(of_row, size=3))
    bound = 1e-12 if compression is hvd.Compression.none else 5e-2
    agree(on_gpus(3, train, settings=SMALL), expected, bound)


def test_gpu_accumulation_into_bucket_views_equals_one_process() -> None:
    train = functools.partial(training.together, passes=2, gradient_as_bucket_view=True)
    agree(on_gpus(3, train, settings=SMALL), training.alone(passes=2))


def test_bucket_views_exist_before_backward_and_keep_their_memory() -> None:
    def body(gpu: FakeDevice) -> None:
        model: Any = gpu.module(training.model())
        with torch.no_grad():
            model.head.bias.grad = gpu.tensor(torch.tensor([3.0, 4.0], dtype=torch.float64))
        optimizer: Any = hvd.DistributedOptimizer(
            training.sgd(model.parameters()), gradient_as_bucket_view=True
        )
        assert model.head.bias.grad.tolist() == [3.0, 4.0]
        optimizer.zero_grad()
        before = [p.grad for p in model.parameters()]
        for step in range(2):
            assert all(p.grad.count_nonzero().item() == 0 for p in model.parameters())
            x = gpu.tensor(training.batch(step, torch.float64)[0])
            if step == 1:
                model.zero_grad()  # of the module, which drops them
            model(x, with_extra=hvd.rank() == 0).sum().backward()
            optimizer.step()
            assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))
            assert model.extra.weight.grad.count_nonzero().item() > 0
            assert model.idle.weight.grad.count_nonzero().item() == 0
            optimizer.zero_grad()

    on_gpus(2, body)


def test_bucket_views_on_cpu_and_gpu_equal_one_process() -> None:
    def body(gpu: FakeDevice) -> Tensor:
        model: Any = training.model()
        gpu.module(model.head)
        optimizer: Any = hvd.DistributedOptimizer(
            training.sgd(model.parameters()), gradient_as_bucket_view=True
        )
        for step in range(4):
            x, y = (t.chunk(hvd.size())[hvd.rank()] for t in training.batch(step, torch.float64))
            found = model.head(ToGpu.apply(model.body(x), gpu))
            (found - gpu.tensor(y)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return training.weights(model)

    agree(on_gpus(2, body, settings=SMALL), training.alone(steps=4))


def test_gpu_clipping_after_synchronize_equals_one_process() -> None:
    train = functools.partial(training.together, change=training.clip)
    agree(on_gpus(2, train, settings=SMALL), training.alone(change=training.clip))


@pytest.mark.parametrize(
    ("scheme", "bound"), [(hvd.Compression.fp16, 1e-2), (hvd.Compression.bf16, 5e-2)]
)
def test_gpu_compressed_training_is_close_to_uncompressed(scheme: Any, bound: float) -> None:
    train = functools.partial(training.together, compression=scheme, uses_extra=uses_extra)
    expected = training.alone(extra_for=functools.partial(of_row, size=3))
    agree(on_gpus(3, train, settings=SMALL), expected, bound)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sharded": True},
        {"gradient_as_bucket_view": True},
        {"gradient_predivide_factor": 3.0},
        {"compression": hvd.Compression.fp16},
    ],
    ids=str,
)
def test_average_of_equal_gpu_gradients_is_exact(options: Any) -> None:
    # Sums of 8 bits are exact, of halves too.
    values = torch.arange(1.0, 256.0)

    def body(gpu: FakeDevice) -> None:
        parameter = nn.Parameter(gpu.tensor(torch.zeros(255)))
        optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), **options)
        for step in range(1, 3):
            optimizer.zero_grad()
            (parameter * gpu.tensor(values)).sum().backward()
            optimizer.step()
            assert torch.equal(parameter.detach().cpu(), -step * values)

    on_gpus(3, body)


def test_gpu_parameters_unused_on_some_or_all_ranks_equal_one_process() -> None:
    train = functools.partial(training.together, uses_extra=uses_extra)
    expected = training.alone(extra_for=functools.partial(of_row, size=3))
    agree(on_gpus(3, train, settings=SMALL), expected)


def test_gpu_parameter_that_no_rank_uses_has_no_gradient() -> None:
    def body(gpu: FakeDevice) -> None:
        model: Any = gpu.module(training.model())
        optimizer: Any = hvd.DistributedOptimizer(training.sgd(model.parameters()))
        for step in range(2):
            x = gpu.tensor(training.batch(step, torch.float64)[0])
            model(x, with_extra=hvd.rank() == 0).sum().backward()
            optimizer.synchronize()
            assert model.idle.weight.grad is None
            assert model.extra.weight.grad is not None
            optimizer.zero_grad()

    on_gpus(2, body)


def test_host_may_run_fifty_steps_ahead_of_the_gpu(fake_gpus: Driver) -> None:
    stalled = threading.Event()

    def body(gpu: FakeDevice) -> Any:
        plain = nn.Linear(5, 3, bias=False).double()
        nn.init.zeros_(plain.weight)
        model: Any = gpu.module(plain)
        optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        x = gpu.tensor(torch.full((1, 5), hvd.rank() + 1.0, dtype=torch.float64))

        def step() -> None:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        step()  # the first one makes communicators and memory
        hvd.barrier()
        waits = gpu.host_waits
        gpu.enqueue(lambda: stalled.wait(30))
        for _ in range(50):
            step()
        assert gpu.host_waits == waits
        assert not stalled.is_set()
        hvd.barrier()  # every rank has come here although no GPU has
        stalled.set()
        return model.weight.tolist()

    # 51 steps of half the mean gradient of 1 and 2.
    assert on_gpus(2, body) == [[[-51 * 0.75] * 5] * 3] * 2


def test_gpu_gradients_become_bucket_views_without_a_copy_back() -> None:
    def body(gpu: FakeDevice) -> None:
        model: Any = gpu.module(nn.Linear(5, 3).double())
        optimizer: Any = hvd.DistributedOptimizer(training.sgd(model.parameters()))
        places = []
        for _ in range(3):
            optimizer.zero_grad()
            model(gpu.tensor(torch.ones(2, 5, dtype=torch.float64))).sum().backward()
            optimizer.synchronize()
            places.append([p.grad.data_ptr() for p in model.parameters()])
        assert places[1] == places[2]
        weight, bias = sorted(places[1])
        assert bias - weight < 256  # one piece of memory

    on_gpus(2, body)


def test_optimizer_step_does_not_block_the_host(fake_gpus: Driver) -> None:
    def body(gpu: FakeDevice) -> None:
        model: Any = gpu.module(training.model())
        optimizer: Any = hvd.DistributedOptimizer(training.sgd(model.parameters()))
        before = 0
        for step in range(4):
            if step == 2:
                before = gpu.host_waits
            optimizer.zero_grad()
            # Every parameter is used: the ranks only agree on parameters that another rank used.
            x = gpu.tensor(training.batch(step, torch.float64)[0])
            loss = model(x, with_extra=True).sum()
            loss = loss + sum(p.sum() for p in model.idle.parameters())
            loss.backward()
            optimizer.step()
        assert gpu.host_waits == before

    on_gpus(2, body)


def test_gpu_adasum_optimizer_equals_the_cpu() -> None:
    def train(place: Any) -> Tensor:
        return training.together(place, op=hvd.Adasum, steps=4)

    class Cpu:
        def tensor(self, values: Tensor) -> Tensor:
            return values

        def module(self, module: nn.Module) -> nn.Module:
            return module

    results = on_gpus(2, lambda gpu: (train(gpu), train(Cpu())))
    for found, expected in results:
        assert torch.equal(found, results[0][0])
        assert float((found - expected).abs().max()) < 1e-12


class Whole(torch.autograd.Function):
    """Forward and backward of a whole model as one function, as `torch.compile` makes it: all gradients at once."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], Tensor], *parameters: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.parameters = [p.detach().requires_grad_() for p in parameters]
            ctx.found = run(*ctx.parameters)
        return ctx.found.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: D102
        return None, *torch.autograd.grad(ctx.found, ctx.parameters, gradients, allow_unused=True)


@pytest.mark.parametrize("sharded", [False, True])
def test_gradients_that_arrive_together_from_a_compiled_model_are_reduced(sharded: bool) -> None:
    def compiled(module: nn.Module) -> Any:
        names = [name for name, _ in module.named_parameters()]

        def call(x: Tensor, *, with_extra: bool) -> Tensor:
            def run(*parameters: Tensor) -> Tensor:
                found: Tensor = torch.func.functional_call(
                    module, dict(zip(names, parameters, strict=True)), (x,)
                )
                return found

            made: Tensor = Whole.apply(run, *module.parameters())
            return made

        return call

    train = functools.partial(training.together, prepare=compiled, sharded=sharded)
    agree(on_gpus(2, train, settings=SMALL), training.alone())


def test_streams_may_change_between_steps(fake_gpus: Driver) -> None:
    fake_gpus.control("fake_cuda_stream_delay_us", 300)
    agree(on_gpus(2, training.two_streams, settings=SMALL), training.alone(steps=4))


class ToGpu(torch.autograd.Function):
    """Move a tensor, as `x.cuda()` does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gpu: FakeDevice) -> Tensor:
        return gpu.tensor(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: D102
        return gradients[0].cpu(), None


def test_parameters_on_cpu_and_gpu_equal_one_process() -> None:
    def body(gpu: FakeDevice) -> Tensor:
        model: Any = training.model()
        gpu.module(model.head)
        gpu.module(model.extra)
        optimizer: Any = hvd.DistributedOptimizer(training.sgd(model.parameters()))
        for step in range(training.STEPS):
            optimizer.zero_grad()
            x, y = (t.chunk(hvd.size())[hvd.rank()] for t in training.batch(step, torch.float64))
            found = model.head(ToGpu.apply(model.body(x), gpu))
            (found - gpu.tensor(y)).square().mean().backward()
            optimizer.step()
        return training.weights(model)

    agree(on_gpus(2, body, settings=SMALL), training.alone())


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
        optimizer: Any = hvd.DistributedOptimizer(training.sgd(model.parameters()))
        for step in range(2):
            optimizer.zero_grad()
            x, y = (t.chunk(hvd.size())[hvd.rank()] for t in training.batch(step, torch.float64))
            # All parameters, so that no rank has to read the flags.
            loss = (model(gpu.tensor(x)) - gpu.tensor(y)).square().mean()
            loss = loss + 0 * sum(p.sum() for p in model.parameters())
            if hvd.rank() == slow:  # just before backward packs and reduces the gradients
                model.body[0].weight.register_hook(
                    lambda _: gpu.enqueue(lambda: time.sleep(behind_s))
                )
            loss.backward()
            optimizer.step()
        return training.weights(model)

    results = on_gpus(2, body)
    return fake_gpus.control("fake_cuda_count", "cuStreamWaitEvent") - before[0], results


def test_removing_any_event_wait_breaks_the_training(fake_gpus: Driver) -> None:
    expected = training.alone(steps=2)
    for slow in (0, 1):
        count, results = train_with_one_missing_wait(fake_gpus, 0, slow)
        agree(results, expected)
    assert count >= 8  # two steps, two ranks, before and behind the sum
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


def test_optimizer_step_under_graph_capture_is_refused() -> None:
    def body(gpu: FakeDevice) -> None:
        model: Any = gpu.module(nn.Linear(2, 2))
        optimizer: Any = hvd.DistributedOptimizer(training.sgd(model.parameters()))
        loss = model(gpu.tensor(torch.ones(3, 2))).sum()
        gpu.is_capturing = True
        try:
            with pytest.raises(InvalidArgumentError) as caught:
                loss.backward()
            assert str(caught.value) == (
                "The current stream is being captured into a CUDA graph, but a graph cannot wait for "
                "other ranks, as collectives must. Run backward and step outside of the capture; "
                "torch.cuda.make_graphed_callables captures a model so that its gradients arrive "
                "outside of the graph."
            )
            assert optimizer.param_groups
        finally:
            gpu.is_capturing = False

    on_gpus(2, body)


def test_complex_parameters_on_a_gpu_are_refused() -> None:
    def body(gpu: FakeDevice) -> None:
        phase = nn.Parameter(gpu.tensor(torch.ones(3, dtype=torch.complex64)))
        with pytest.raises(InvalidArgumentError, match="on cuda:. gradients must be real"):
            hvd.DistributedOptimizer(training.sgd([phase]))

    on_gpus(2, body)
