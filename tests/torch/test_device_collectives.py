"""Collectives of tensors on GPUs, on the stand-in, compared with the CPU's plane."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError, MismatchError
from tests.harness import device_bodies as bodies
from tests.harness.device_bodies import Gpu
from tests.harness.fake_cuda import Driver, FakeDevice, gpu
from tests.harness.soak import left_to_soak
from tests.torch.on_gpus import on_gpus

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("fake_gpus")]

DTYPES = [str(dtype).removeprefix("torch.") for dtype in bodies.DTYPES]
EVERY_KIND = ("float32", "float16", "bfloat16", "int64", "uint8", "bool")
DELAY_US = 300


@pytest.mark.parametrize(
    "dtype",
    [
        *EVERY_KIND,
        *left_to_soak("other widths, here", *(name for name in DTYPES if name not in EVERY_KIND)),
    ],
)
@pytest.mark.parametrize(
    "body",
    [
        bodies.allreduces,
        bodies.gathers,
        bodies.alltoalls,
        bodies.broadcasts,
        bodies.reducescatters,
    ],
    ids=lambda body: body.__name__,
)
def test_gpu_collectives_equal_the_cpu_for_every_dtype(
    body: Callable[[Gpu, torch.dtype], None], dtype: str
) -> None:
    on_gpus(3, lambda gpu: body(gpu, getattr(torch, dtype)))


@pytest.mark.parametrize(
    "dtype",
    [
        *(name for name in EVERY_KIND if name != "bool"),
        *left_to_soak("other widths, here", *(name for name in DTYPES if name not in EVERY_KIND)),
    ],
)
def test_gpu_scale_factors_equal_the_cpu(dtype: str) -> None:
    on_gpus(3, lambda gpu: bodies.factors(gpu, getattr(torch, dtype)))


@pytest.mark.parametrize(
    "body",
    [
        bodies.asynchronous,
        bodies.batch_norm,
        bodies.compressed,
        bodies.gathers_go_on_alone,
        bodies.gradients,
        bodies.grouped,
        bodies.parameters,
        bodies.strided,
        bodies.subset,
    ],
    ids=lambda body: body.__name__,
)
@pytest.mark.parametrize(
    "delay_us", [DELAY_US, *left_to_soak("with a delay, here; every type without one", 0)]
)
def test_gpu_collectives_wait_for_late_streams(
    fake_gpus: Driver, body: Callable[[Gpu], None], delay_us: int
) -> None:
    fake_gpus.control("fake_cuda_stream_delay_us", delay_us)
    on_gpus(3, body)


def test_synchronize_on_a_gpu_does_not_block_the_host(fake_gpus: Driver) -> None:
    fake_gpus.control("fake_cuda_stream_delay_us", 20_000)

    def body(gpu: FakeDevice) -> None:
        x = gpu.tensor(torch.ones(4))
        before = gpu.host_waits
        handle = hvd.allreduce_async(x, op=hvd.Sum)
        assert not hvd.poll(handle)
        y = hvd.synchronize(handle) * 2
        assert gpu.host_waits == before
        assert y.tolist() == [4.0] * 4

    on_gpus(2, body)


def sum_with_one_missing_wait(fake_gpus: Driver, skipped: int, slow: int) -> list[Any]:
    """Return sums for which one rank's GPU is later than the other's, and one event wait does nothing (0: all work)."""

    def body(gpu: FakeDevice) -> Any:
        hvd.allreduce(gpu.tensor(torch.zeros(8)), op=hvd.Sum).cpu()  # the communicator is made
        x = gpu.tensor(torch.zeros(8))
        gpu.synchronize()
        hvd.barrier()
        if skipped and hvd.rank() == 0:
            fake_gpus.control("fake_cuda_skip_wait", skipped)
        hvd.barrier()
        if hvd.rank() == slow:
            gpu.enqueue(lambda: time.sleep(0.03))
        x.add_(3)
        hvd.allreduce_(x, op=hvd.Sum)
        return x.tolist()

    return on_gpus(2, body)


def test_removing_any_event_wait_breaks_the_allreduce(fake_gpus: Driver) -> None:
    for slow in (0, 1):
        assert sum_with_one_missing_wait(fake_gpus, 0, slow) == [[6.0] * 8] * 2
    # For each of two ranks: the operation waits for the input, and the caller for the operation.
    for number in range(1, 5):
        # The wait may belong to either rank, and its absence shows if one rank is later than the other.
        for attempt in range(20):
            if sum_with_one_missing_wait(fake_gpus, number, attempt % 2) != [[6.0] * 8] * 2:
                break
        else:
            pytest.fail(f"Without event wait {number} everything is right.")


def test_a_name_may_be_reused_before_the_gpu_has_finished(fake_gpus: Driver) -> None:
    def body(gpu: FakeDevice) -> Any:
        x = gpu.tensor(torch.ones(4))
        hvd.allreduce_(x, name="again")
        gpu.enqueue(lambda: time.sleep(0.05))
        for _ in range(3):
            hvd.allreduce_(x, op=hvd.Sum, name="again")
        return x.tolist()

    assert on_gpus(2, body) == [[8.0] * 4] * 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_gpu_adasum_has_the_bits_of_the_cpu(dtype: str) -> None:
    def body(gpu: FakeDevice) -> None:
        for shape in ((), (7,), (3, 5)):
            values = bodies.mine(shape, getattr(torch, dtype))
            there = gpu.tensor(values)
            factors = {"prescale_factor": 0.5, "postscale_factor": 3.0}
            for arguments in ({}, factors):
                expected = hvd.allreduce(values, op=hvd.Adasum, **arguments)
                found = hvd.allreduce(there, op=hvd.Adasum, **arguments)
                bodies.equal(found, expected, is_sum=False)
                bodies.equal(there, values, is_sum=False)
            handle = hvd.grouped_allreduce_async_([there], op=hvd.Adasum)
            assert hvd.synchronize(handle)[0] is there
            bodies.equal(there, hvd.allreduce(values, op=hvd.Adasum), is_sum=False)
        both = [bodies.mine((4,), torch.float32), gpu.tensor(bodies.mine((5,), torch.float32))]
        here, there = hvd.grouped_allreduce(both, op=hvd.Adasum)
        assert torch.equal(here, hvd.allreduce(both[0], op=hvd.Adasum))
        bodies.equal(there, hvd.allreduce(both[1].cpu(), op=hvd.Adasum), is_sum=False)

    on_gpus(2, body)


def test_gpu_adasum_supports_only_allreduce() -> None:
    def body(gpu: FakeDevice) -> None:
        with pytest.raises(NotImplementedError, match="Adasum is for allreduce only"):
            hvd.reducescatter(gpu.tensor(torch.ones(2)), op=hvd.Adasum)

    on_gpus(2, body)


def test_gpu_average_of_bool_raises() -> None:
    def body(gpu: FakeDevice) -> None:
        with pytest.raises(InvalidArgumentError, match="bool has no Average"):
            hvd.allreduce(gpu.tensor(torch.ones(2, dtype=torch.bool)))

    on_gpus(2, body)


def test_stream_under_graph_capture_is_refused() -> None:
    def body(gpu: FakeDevice) -> None:
        x = gpu.tensor(torch.ones(2))
        gpu.is_capturing = True
        try:
            for call in (hvd.allreduce, hvd.allgather, hvd.allreduce_async, hvd.alltoall):
                with pytest.raises(
                    InvalidArgumentError, match="is being captured into a CUDA graph"
                ):
                    call(x)
        finally:
            gpu.is_capturing = False
        assert hvd.allreduce(x).tolist() == [1.0, 1.0]

    on_gpus(2, body)


def test_a_tensor_on_another_gpu_is_refused() -> None:
    def body(mine: FakeDevice) -> None:
        hvd.allreduce(mine.tensor(torch.ones(2)))
        other = gpu(mine.ordinal + 2)
        with pytest.raises(
            InvalidArgumentError,
            match=f"on cuda:{other.ordinal}, but this rank uses cuda:{mine.ordinal}",
        ):
            hvd.allreduce(other.tensor(torch.ones(2)))

    on_gpus(2, body)


def test_wrong_gpu_alltoall_splits_raise_before_any_rank_waits() -> None:
    def body(gpu: FakeDevice) -> None:
        x = gpu.tensor(torch.ones(4, 2))
        for splits in ([1], [3, 2], [-1, 2]):
            with pytest.raises(InvalidArgumentError, match="splits are"):
                hvd.alltoall(x, splits)
        with pytest.raises(InvalidArgumentError, match="cannot be divided into 2 equal parts"):
            hvd.alltoall(x[:3])

    on_gpus(2, body)


def test_mismatched_gpu_operations_raise_on_every_rank() -> None:
    def body(gpu: FakeDevice) -> None:
        is_first = hvd.rank() == 0
        x = gpu.tensor(torch.ones(4, 2))
        with pytest.raises(MismatchError):
            hvd.allreduce(x, op=hvd.Sum if is_first else hvd.Average, name="op")
        with pytest.raises(MismatchError):
            hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0 if is_first else 3.0, name="factor")
        with pytest.raises(MismatchError):
            hvd.allgather(x if is_first else x[:, :1], name="columns")
        with pytest.raises(MismatchError):
            hvd.allreduce(x if is_first else torch.ones(4, 2), op=hvd.Sum, name="plane")
        assert hvd.allreduce(x).cpu().equal(torch.ones(4, 2))

    on_gpus(2, body)


def test_joined_ranks_contribute_zeros_on_gpus() -> None:
    def body(gpu: FakeDevice) -> Any:
        found = None
        if hvd.rank() == 0:
            x = gpu.tensor(torch.full((3,), 4.0))
            found = hvd.allreduce(x, name="alone").tolist()
        hvd.join(gpu.ordinal)
        return found

    assert on_gpus(2, body) == [[2.0] * 3, None]


def test_registered_gpu_memory_is_reduced_and_outlives_the_engine() -> None:
    def body(gpu: FakeDevice) -> None:
        place = torch.device("cuda", gpu.ordinal)
        x = hvd.registered_empty((3, 5), torch.float64, device=place)
        assert x.is_cuda
        assert x.tolist() == [[0.0] * 5] * 3
        values = bodies.mine((3, 5), torch.float64)
        x.copy_(gpu.tensor(values))
        part = x[1]
        assert hvd.allreduce_(x) is x
        del x  # the part keeps the memory, also beyond the engine
        bodies.equal(part, hvd.allreduce(values)[1])
        assert hvd.registered_empty(4, device="cuda").dtype == torch.float32

    on_gpus(2, body)


def test_registered_memory_on_another_device_is_refused() -> None:
    def body(gpu: FakeDevice) -> None:
        hvd.allreduce(gpu.tensor(torch.ones(1)))
        with pytest.raises(InvalidArgumentError, match=f"uses cuda:{gpu.ordinal}"):
            hvd.registered_empty(4, device=f"cuda:{gpu.ordinal + 2}")
        with pytest.raises(InvalidArgumentError, match="NVIDIA GPUs can be registered"):
            hvd.registered_empty(4, device="meta")
        with pytest.raises(InvalidArgumentError, match="is not a torch device"):
            hvd.registered_empty(4, device="nowhere")

    on_gpus(2, body)


def test_cuda_built_and_nccl_built_match_torch() -> None:
    assert hvd.cuda_built() is (torch.version.cuda is not None)
    assert (hvd.nccl_built() > 0) is (hvd.cuda_built() and torch.distributed.is_nccl_available())
