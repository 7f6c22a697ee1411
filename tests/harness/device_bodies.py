"""Bodies of GPU tests for every rank, on the stand-in's GPU or a real one.

Each body runs on all ranks. `gpu` moves tensors and modules there. Results are compared with the CPU's plane,
which has its own tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import sparkhvd.torch as hvd

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)
SHAPES: Sequence[tuple[int, ...]] = ((), (0,), (1,), (7,), (3, 5), (2, 0, 3), (1031,))
# Halves are summed as halves on the GPU, and in float32 on the CPU.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 4e-2, torch.float32: 1e-6, torch.float64: 1e-14}


class Gpu(Protocol):
    """GPU of a test."""

    def tensor(self, values: Tensor) -> Tensor:
        """Copy values to the GPU, as `values.cuda()` does."""

    def module(self, module: nn.Module) -> nn.Module:
        """Move a module to the GPU, as `module.cuda()` does."""


class RealGpu:
    """A device of torch.cuda."""

    def __init__(self, ordinal: int = 0) -> None:
        self.place = torch.device("cuda", ordinal)

    def tensor(self, values: Tensor) -> Tensor:
        """To the device."""
        return values.to(self.place)

    def module(self, module: nn.Module) -> nn.Module:
        """To the device."""
        return module.to(self.place)


def random(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Draw small values of any type, so that products stay in range."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).to(dtype)
    if dtype.is_floating_point:
        return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)
    low = 0 if torch.iinfo(dtype).min == 0 else -5
    return torch.randint(low, 12, tuple(shape), generator=generator).to(dtype)


def mine(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Draw this rank's values."""
    return random(shape, dtype, 1000 * seed + hvd.rank())


def equal(found: Tensor, expected: Tensor, *, is_sum: bool = True) -> None:
    """Fail unless a result from the GPU equals the CPU's: in all bits, or approximately for sums of floats."""
    assert found.is_cuda
    home = found.cpu()
    assert home.dtype == expected.dtype
    assert home.shape == expected.shape
    if is_sum and expected.dtype in TOLERANCE:
        bound = TOLERANCE[expected.dtype]
        assert torch.allclose(home, expected, rtol=bound, atol=bound), (home, expected)
    else:
        assert torch.equal(_bits(home), _bits(expected)), (home, expected)


def _bits(tensor: Tensor) -> Tensor:
    # torch compares some unsigned types only as others.
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor


# --- Collectives. ---


def allreduces(gpu: Gpu, dtype: torch.dtype) -> None:
    """Compare every reduction of a type, in all sizes."""
    ops = [hvd.Sum, hvd.Min, hvd.Max, hvd.Product]
    if dtype != torch.bool:
        ops.append(hvd.Average)
    for op in ops:
        for number, shape in enumerate(SHAPES):
            values = mine(shape, dtype, number)
            equal(hvd.allreduce(gpu.tensor(values), op=op), hvd.allreduce(values, op=op))
            there = gpu.tensor(values)
            assert hvd.allreduce_(there, op=op) is there
            equal(there, hvd.allreduce(values, op=op))
            if op is hvd.Average and dtype.is_floating_point:
                total = hvd.allreduce(gpu.tensor(values), op=hvd.Sum).cpu()
                equal(there, (total.double() / hvd.size()).to(dtype), is_sum=False)


def factors(gpu: Gpu, dtype: torch.dtype) -> None:
    """Check prescale, postscale, and both with Average. Inputs stay unchanged."""
    for op in (hvd.Sum, hvd.Average, hvd.Max):
        for before, after in ((0.37, 1.0), (1.0, 2.6), (1.7, 0.4), (-1.3, 1e30)):
            values = mine((41,), dtype, 3)
            arguments = {"op": op, "prescale_factor": before, "postscale_factor": after}
            if dtype.is_floating_point and after > 1e3:
                continue
            there = gpu.tensor(values)
            equal(hvd.allreduce(there, **arguments), hvd.allreduce(values, **arguments))
            equal(there, values, is_sum=False)
            equal(hvd.reducescatter(there, **arguments), hvd.reducescatter(values, **arguments))
            equal(there, values, is_sum=False)


def grouped(gpu: Gpu) -> None:
    """Groups of several types, on both planes at once, also in place."""
    kinds = [torch.float32, torch.int16, torch.float32, torch.bool, torch.int64, torch.bfloat16]
    values = [mine((5, number), dtype, number) for number, dtype in enumerate(kinds)]
    expected = hvd.grouped_allreduce(values, op=hvd.Sum)
    for found, wanted in zip(
        hvd.grouped_allreduce([gpu.tensor(x) for x in values], op=hvd.Sum), expected, strict=True
    ):
        equal(found, wanted)
    there = [gpu.tensor(x) for x in values]
    for found, wanted in zip(hvd.grouped_allreduce_(there, op=hvd.Sum), expected, strict=True):
        equal(found, wanted)
    mixed = [x if number % 2 else gpu.tensor(x) for number, x in enumerate(values)]
    reduced = hvd.grouped_allreduce(mixed, op=hvd.Sum)
    for number, (found, wanted) in enumerate(zip(reduced, expected, strict=True)):
        if number % 2:
            assert torch.equal(found, wanted)
        else:
            equal(found, wanted)
    rows = [mine((hvd.rank() + number, 2), dtype, number) for number, dtype in enumerate(kinds)]
    joined = hvd.grouped_allgather(rows)
    for found, wanted in zip(
        hvd.grouped_allgather([gpu.tensor(x) for x in rows]), joined, strict=True
    ):
        equal(found, wanted, is_sum=False)
    parts = hvd.grouped_reducescatter(values, op=hvd.Sum)
    for found, wanted in zip(
        hvd.grouped_reducescatter([gpu.tensor(x) for x in values], op=hvd.Sum), parts, strict=True
    ):
        equal(found, wanted)


def compressed(gpu: Gpu) -> None:
    """Halves on the wire."""
    values = mine((100,), torch.float32)
    for scheme in (hvd.Compression.fp16, hvd.Compression.bf16):
        found = hvd.allreduce(gpu.tensor(values), compression=scheme)
        assert found.dtype == torch.float32
        expected = hvd.allreduce(values, compression=scheme)
        assert torch.allclose(found.cpu(), expected, rtol=4e-2, atol=4e-2)


def gathers(gpu: Gpu, dtype: torch.dtype) -> None:
    """Compare gathers of rows that differ between the ranks, with no rows on some ranks or on all."""
    rank = hvd.rank()
    for number, shape in enumerate([(rank,), (3, 2), (0, 4), (2 * rank + 1, 0), (rank % 2, 3, 2)]):
        values = mine(shape, dtype, number)
        equal(hvd.allgather(gpu.tensor(values)), hvd.allgather(values), is_sum=False)


def alltoalls(gpu: Gpu, dtype: torch.dtype) -> None:
    """Equal parts, and splits with zeros."""
    rank, size = hvd.rank(), hvd.size()
    values = mine((2 * size, 3), dtype)
    equal(hvd.alltoall(gpu.tensor(values)), hvd.alltoall(values), is_sum=False)
    splits = [(rank + other) % 3 for other in range(size)]
    values = mine((sum(splits) + 1, 2), dtype, 1)
    found, rows = hvd.alltoall(gpu.tensor(values), splits)
    expected, wanted = hvd.alltoall(values, splits)
    equal(found, expected, is_sum=False)
    assert torch.equal(rows, wanted)
    assert not rows.is_cuda
    nothing = hvd.alltoall(gpu.tensor(mine((0, 2), dtype)), [0] * size)[0]
    assert nothing.shape == (0, 2)


def broadcasts(gpu: Gpu, dtype: torch.dtype) -> None:
    """Compare broadcasts from every rank, in place and not."""
    for root in range(hvd.size()):
        for number, shape in enumerate(SHAPES):
            values = mine(shape, dtype, number)
            expected = hvd.broadcast(values, root)
            there = gpu.tensor(values)
            equal(hvd.broadcast(there, root), expected, is_sum=False)
            hvd.broadcast_(there, root)
            equal(there, expected, is_sum=False)


def reducescatters(gpu: Gpu, dtype: torch.dtype) -> None:
    """Compare reducescatters of rows that divide and rows that do not."""
    ops = [hvd.Sum, hvd.Max] if dtype == torch.bool else [hvd.Sum, hvd.Average, hvd.Min]
    for op in ops:
        for number, shape in enumerate([(1,), (2, 3), (7,), (12, 2), (0, 3)]):
            values = mine(shape, dtype, number)
            equal(hvd.reducescatter(gpu.tensor(values), op=op), hvd.reducescatter(values, op=op))


def strided(gpu: Gpu) -> None:
    """Check that transposed tensors are passed by value, and refused in place."""
    values = mine((3, 4), torch.float32)
    there = gpu.tensor(values).t()
    equal(hvd.allreduce(there, op=hvd.Sum), hvd.allreduce(values.t(), op=hvd.Sum))
    equal(hvd.allgather(there), hvd.allgather(values.t()), is_sum=False)
    pairs = torch.complex(values, values.square()).t()
    found = hvd.allreduce(gpu.tensor(pairs), op=hvd.Sum)
    assert found.is_cuda
    equal(torch.view_as_real(found), torch.view_as_real(hvd.allreduce(pairs, op=hvd.Sum)))


def asynchronous(gpu: Gpu) -> None:
    """Wait for handles that end in another order, in a different order on every rank."""
    rank, size = hvd.rank(), hvd.size()
    values = mine((64, 3), torch.float64)
    there = gpu.tensor(values)
    handles = {
        "sum": hvd.allreduce_async(there, op=hvd.Sum, name="sum"),
        "rows": hvd.allgather_async(there[: rank + 1], name="rows"),
        "more": hvd.allgather_async(there[:2], name="more"),
        "to all": hvd.alltoall_async(there[: 2 * size], name="to all"),
        "part": hvd.reducescatter_async(there, name="part", op=hvd.Sum),
        "first": hvd.broadcast_async(there, 0, name="first"),
        "mean": hvd.grouped_allreduce_async([there, there[:5]], name="mean"),
    }
    names = list(handles)
    if rank % 2:
        names.reverse()
    found = {name: hvd.synchronize(handles[name]) for name in names}
    equal(found["sum"], hvd.allreduce(values, op=hvd.Sum))
    equal(found["rows"], hvd.allgather(values[: rank + 1]), is_sum=False)
    equal(found["more"], hvd.allgather(values[:2]), is_sum=False)
    equal(found["to all"][0], hvd.alltoall(values[: 2 * size]), is_sum=False)
    equal(found["part"], hvd.reducescatter(values, op=hvd.Sum))
    equal(found["first"], hvd.broadcast(values, 0), is_sum=False)
    for ours, wanted in zip(
        found["mean"], hvd.grouped_allreduce([values, values[:5]]), strict=True
    ):
        equal(ours, wanted)
    assert all(_ends(handle) for handle in handles.values())


def _ends(handle: hvd.Handle) -> bool:
    """Wait until `poll` returns True. An operation whose result was read has ended."""
    return hvd.poll(handle)


def gathers_go_on_alone(gpu: Gpu) -> None:
    """Gather asynchronously while one rank first works on something else and the others wait for its part."""
    values = mine((4, 2), torch.float32)
    handle = hvd.allgather_async(gpu.tensor(values), name="alone")
    if hvd.rank() == 0:
        hvd.barrier()
        joined = hvd.synchronize(handle)
    else:
        joined = hvd.synchronize(handle)
        joined.cpu()
        hvd.barrier()
    equal(joined, hvd.allgather(values), is_sum=False)


def gradients(gpu: Gpu) -> None:
    """Compare the gradients of the collectives."""
    rank, size = hvd.rank(), hvd.size()
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda x: hvd.allreduce(x, prescale_factor=0.5),
        lambda x: hvd.allgather(x[: rank + 1] * 2),
        lambda x: hvd.broadcast(x, size - 1),
        lambda x: hvd.alltoall(x),
        lambda x: hvd.reducescatter(x, op=hvd.Sum),
        lambda x: torch.cat([each * 3 for each in hvd.grouped_allreduce([x, x[:1]])]),
    ]
    for function in functions:
        values = mine((2 * size, 3), torch.float64)
        here = values.clone().requires_grad_()
        there = gpu.tensor(values).requires_grad_()
        function(here).square().sum().backward()
        function(there).square().sum().backward()
        assert there.grad is not None
        assert here.grad is not None
        equal(there.grad, here.grad)


def subset(gpu: Gpu) -> None:
    """Compare operations of a process set of some ranks, beside all."""
    process_set = hvd.add_process_set([0, hvd.size() - 1])
    values = mine((9,), torch.float32)
    if process_set.included():
        arguments: dict[str, Any] = {"process_set": process_set}
        equal(hvd.allreduce(gpu.tensor(values), **arguments), hvd.allreduce(values, **arguments))
        equal(
            hvd.allgather(gpu.tensor(values), **arguments),
            hvd.allgather(values, **arguments),
            is_sum=False,
        )
    equal(hvd.allreduce(gpu.tensor(values)), hvd.allreduce(values))
    hvd.remove_process_set(process_set)


def parameters(gpu: Gpu) -> None:
    """Rank 0's parameters and optimizer state, on every rank."""
    model = gpu.module(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double())
    for number, each in enumerate(model.parameters()):
        with torch.no_grad():
            each.copy_(mine(each.shape, torch.float64, number))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for number, each in enumerate(model.parameters()):
        equal(each.detach(), random(each.shape, torch.float64, 1000 * number), is_sum=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + hvd.rank(), momentum=0.9)
    if hvd.rank() == 0:
        model(gpu.tensor(mine((6, 3), torch.float64))).square().sum().backward()
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.1
    for parameter in model.parameters():
        buffer = optimizer.state[parameter]["momentum_buffer"]
        assert buffer.is_cuda
        everywhere = hvd.allgather(buffer.cpu().reshape(1, -1))
        assert bool((everywhere == everywhere[0]).all())


def batch_norm(gpu: Gpu) -> None:
    """Compare `SyncBatchNorm` over all ranks' rows with one process with the whole batch."""
    rank, size = hvd.rank(), hvd.size()
    x = random((4 * size, 3, 4, 4), torch.float64, 1)
    factors = torch.arange(4.0 * size, dtype=torch.float64).view(-1, 1, 1, 1)
    whole, layer = x.clone().requires_grad_(), nn.BatchNorm2d(3).double()
    layer(whole).square().mul(factors).sum().backward()
    there = gpu.module(hvd.SyncBatchNorm(3).double())
    share = gpu.tensor(x.chunk(size)[rank]).requires_grad_()
    there(share).square().mul(gpu.tensor(factors.chunk(size)[rank])).sum().backward()
    assert share.grad is not None
    assert whole.grad is not None
    bound = 1e-11
    assert float((share.grad.cpu() - whole.grad.chunk(size)[rank]).abs().max()) < bound
    assert float((there.running_var.cpu() - layer.running_var).abs().max()) < bound
