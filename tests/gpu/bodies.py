"""What ranks do on a real GPU, as bodies of `tests.harness.rank_process`.

Every rank makes the data of all ranks from the same seeds, so it knows what must come out. All ranks use device 0.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import sparkhvd.torch as hvd
from sparkhvd.engine import Engine
from sparkhvd.torch._context import use_engine
from tests.harness.rank_process import Talk

REDUCED = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip
MOVED = (*REDUCED, torch.bool)
SIZES = ((), (0,), (1,), (7,), (3, 0, 2), (1023, 3), (1 << 20,))


@contextmanager
def on_gpu(engine: Engine) -> Iterator[torch.device]:
    """Makes the engine the thread's own, with NCCL told that the ranks of one GPU are hosts of their own."""
    # Two ranks on one GPU: by the first up to 2.29, by the second from 2.30 on. Before NCCL reads them.
    os.environ["NCCL_HOSTID"] = f"rank-{engine.rank}"
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_IB_DISABLE", "1")
    os.environ.setdefault("NCCL_MAX_CTAS", "8")
    torch.cuda.set_device(0)
    with use_engine(engine):
        yield torch.device("cuda", 0)


def made(seed: int, rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The data of a rank, on the CPU."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    low = 0 if dtype is torch.uint8 else -9
    return torch.randint(low, 10, shape, generator=generator).to(dtype)


def check(what: str, found: Tensor, expected: Tensor) -> None:
    """Raises unless the values are the expected ones, within rounding."""
    assert found.is_cuda, what
    torch.testing.assert_close(found.cpu(), expected, msg=lambda text: f"{what}: {text}")


def collectives(engine: Engine, talk: Talk) -> dict[str, Any]:
    """Every collective, on every element type and odd sizes, against what the CPU computes."""
    count = 0
    with on_gpu(engine) as device:
        rank, size = hvd.rank(), hvd.size()
        for seed, shape in enumerate(SIZES):
            for dtype in MOVED:
                data = [made(seed, r, shape, dtype) for r in range(size)]
                mine = data[rank].to(device)
                what = f"{dtype} {tuple(shape)}"
                count += check_moves(what, data, mine)
                if dtype in REDUCED:
                    count += check_reductions(what, data, mine)
        count += check_grouped(device)
    return {"checks": count, "versions": torch.cuda.nccl.version()}


def check_moves(what: str, data: list[Tensor], mine: Tensor) -> int:
    size, rank = len(data), hvd.rank()
    root = size - 1
    check(f"broadcast {what}", hvd.broadcast(mine, root), data[root])
    if mine.dim() == 0:
        return 1
    check(f"allgather {what}", hvd.allgather(mine), torch.cat(data))
    uneven = [part[: part.shape[0] // (r + 1)] for r, part in enumerate(data)]
    check(
        f"allgather uneven {what}", hvd.allgather(uneven[rank].to(mine.device)), torch.cat(uneven)
    )
    splits = [split(part.shape[0], size, r) for r, part in enumerate(data)]
    parts = [list(part.split(split)) for part, split in zip(data, splits, strict=True)]
    received, rows = hvd.alltoall(mine, torch.tensor(splits[rank]))
    check(f"alltoall {what}", received, torch.cat([part[rank] for part in parts]))
    assert rows.tolist() == [part[rank].shape[0] for part in parts]
    return 4


def split(rows: int, size: int, rank: int) -> list[int]:
    """Rows for each rank, unequal."""
    first = rows // (rank + 2)
    return [first, *[0] * (size - 2), rows - first] if size > 1 else [rows]


def check_reductions(what: str, data: list[Tensor], mine: Tensor) -> int:
    wide = [part.double() if part.dtype.is_floating_point else part.long() for part in data]
    stacked = torch.stack(wide)
    expected = {
        hvd.Sum: stacked.sum(0),
        hvd.Min: stacked.amin(0),
        hvd.Max: stacked.amax(0),
        hvd.Product: stacked.prod(0),
    }
    dtype = mine.dtype
    for op, values in expected.items():
        check(f"allreduce {op.name} {what}", hvd.allreduce(mine, op=op), values.to(dtype))
        if mine.dim() > 0:
            rows = torch.tensor_split(values.to(dtype), len(data))[hvd.rank()]
            check(f"reducescatter {op.name} {what}", hvd.reducescatter(mine, op=op), rows)
    if dtype.is_floating_point:
        average = stacked.mean(0).to(dtype)
        check(f"allreduce Average {what}", hvd.allreduce(mine), average)
        scaled = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
        check(f"allreduce scaled {what}", scaled, (stacked.sum(0) * 1.5).to(dtype))
    in_place = mine.clone()
    hvd.allreduce_(in_place, op=hvd.Sum)
    check(f"allreduce_ {what}", in_place, expected[hvd.Sum].to(dtype))
    return 11


def check_grouped(device: torch.device) -> int:
    shapes = [(1 + 37 * i,) for i in range(100)]
    data = [
        [made(500 + i, r, shape, torch.float32) for i, shape in enumerate(shapes)]
        for r in range(hvd.size())
    ]
    mine = [part.to(device) for part in data[hvd.rank()]]
    for i, found in enumerate(hvd.grouped_allreduce(mine, op=hvd.Sum)):
        check(f"grouped_allreduce {i}", found, torch.stack([part[i] for part in data]).sum(0))
    mixed = hvd.grouped_allreduce([mine[0], data[hvd.rank()][1]], op=hvd.Sum)
    assert mixed[0].is_cuda
    assert mixed[1].device.type == "cpu"
    return len(shapes) + 1


def streams(engine: Engine, talk: Talk) -> int:
    """Operations on several streams in turns, behind long kernels: a missing dependency shows as stale data."""
    with on_gpu(engine) as device:
        side = torch.cuda.Stream()
        for number in range(50):
            tensor = torch.zeros(1 << 18, device=device)
            with torch.cuda.stream(side if number % 2 else torch.cuda.current_stream()):
                side.wait_stream(torch.cuda.default_stream())
                torch.cuda._sleep(2_000_000)
                tensor.fill_(float(engine.rank + number))
                handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name=f"stream {number}")
                hvd.synchronize(handle)
                found = float(tensor.sum())
            ranks = engine.size
            expected = (number * ranks + ranks * (ranks - 1) / 2) * tensor.numel()
            assert found == expected, (number, found, expected)
    return 50


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 33), nn.GELU(), nn.Linear(33, 1)
    )


def training(engine: Engine, talk: Talk) -> float:
    """DistributedOptimizer over the ranks gives the weights of one process with the whole batch."""
    with on_gpu(engine) as device:
        rank, size = hvd.rank(), hvd.size()
        ours, alone = network().to(device), network().to(device)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(ours.parameters(), lr=1e-3), named_parameters=ours.named_parameters()
        )
        plain = torch.optim.Adam(alone.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(11)
        for _ in range(20):
            x = torch.randn(8 * size, 20, generator=generator).to(device)
            for model, opt, rows in (
                (ours, optimizer, x[8 * rank : 8 * rank + 8]),
                (alone, plain, x),
            ):
                opt.zero_grad()
                (model(rows) ** 2).mean().backward()
                opt.step()
        worst = 0.0
        for a, b in zip(ours.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)
            worst = max(worst, float((a - b).abs().max()))
        return worst


def unsynchronized(engine: Engine, talk: Talk) -> list[str]:
    """The host waits for the GPU nowhere in a step: CUDA's own words for waiting, found in a profile of five."""
    from torch.profiler import ProfilerActivity, profile

    with on_gpu(engine) as device:
        model = network().to(device)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1e-3), named_parameters=model.named_parameters()
        )
        x = torch.randn(8, 20, device=device)

        def step() -> None:
            optimizer.zero_grad()
            (model(x) ** 2).mean().backward()
            optimizer.step()

        for _ in range(5):
            step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            for _ in range(5):
                step()
        names = [event.name for event in seen.events()]
        waits = [name for name in names if "Synchronize" in name and "Device" not in name]
        assert any("nccl" in name.lower() or "foreach" in name for name in names), names[:50]
        assert not waits, waits
        return sorted(set(names))[:20]


def capture(engine: Engine, talk: Talk) -> str:
    """A collective inside a CUDA graph's capture is refused, and the engine goes on."""
    from sparkhvd.errors import InvalidArgumentError

    with on_gpu(engine) as device:
        tensor = torch.ones(10, device=device)
        hvd.allreduce_(tensor, op=hvd.Sum)
        graph = torch.cuda.CUDAGraph()
        text = ""
        with torch.cuda.graph(graph):
            other = tensor * 2
            try:
                hvd.allreduce_(other, op=hvd.Sum)
            except InvalidArgumentError as error:
                text = str(error)
        assert "captured" in text, text
        hvd.allreduce_(tensor, op=hvd.Sum)
        assert float(tensor[0]) == engine.size**2
        return text


def until_killed(engine: Engine, talk: Talk) -> None:
    """Allreduces until a peer is gone; then the error is the rank's outcome."""
    with on_gpu(engine) as device:
        tensor = torch.ones(1 << 20, device=device)
        hvd.allreduce_(tensor, op=hvd.Average)
        talk.say("running")
        while True:
            for number in range(20):
                hvd.allreduce_(tensor, op=hvd.Average, name=f"{number}")
            torch.cuda.synchronize()


def late(engine: Engine, talk: Talk) -> None:
    """Rank 1 dies while the others wait for it inside NCCL's initialization or its first collective."""
    with on_gpu(engine) as device:
        tensor = torch.ones(1 << 20, device=device)
        talk.say("ready")
        talk.hear()
        handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name="first")
        if engine.rank == 1:
            os.kill(os.getpid(), 9)
        hvd.synchronize(handle)
        torch.cuda.synchronize()
        time.sleep(20)
