"""What sparkhvd costs on one GPU: a step, a collective, gradients packed and reduced; each beside torch or NCCL alone.

    .venv/bin/python benchmarks/gpu.py [--rounds 7] [--only step,overhead,pack] [--json FILE] [--write]

One rank, because one GPU can show what the optimizer and the engine cost, and not what a network does: with one rank
NCCL moves nothing. Needs torch with CUDA and libnccl, and no Spark. All variants of a part run in turns; ratios are of
neighbours, and the table shows their median and quartiles.

- `step`: a training step in bfloat16 with `DistributedOptimizer`, and the same step with torch's optimizer.
- `overhead`: what one allreduce costs the caller's thread and the GPU, over a raw `ncclAllReduce` of the same process.
- `pack`: 1 GiB of gradients in 300 tensors, packed and reduced, beside a copy of as many bytes on the device.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from gpu_models import TASKS, Task  # noqa: E402 - of this folder

import sparkhvd.torch as hvd  # noqa: E402 - of the checkout
from common import Report, Target, median_and_quartiles, shown  # noqa: E402 - of this folder
from sparkhvd.torch.device import find_nccl  # noqa: E402 - of the checkout

PARTS = ("step", "overhead", "pack")
PACK_BYTES = 1 << 30
PACK_TENSORS = 300
CALLS = 300


# --- Clocks. ---


def wall(run: Callable[[], Any]) -> float:
    """Seconds until the GPU has finished what `run` starts."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def on_gpu(run: Callable[[], Any]) -> float:
    """Seconds between two events around what `run` enqueues on the current stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


# --- A training step. ---


def stepper(task: Task, network: nn.Module, optimizer: Any) -> Callable[[], None]:
    """Runs `task.steps` training steps."""
    inputs, targets = task.batch(torch.device("cuda"))

    def run() -> None:
        for _ in range(task.steps):
            optimizer.zero_grad()
            task.loss(network, inputs, targets).backward()
            optimizer.step()

    return run


def measure_steps(report: Report, rounds: int) -> None:
    rows: list[Sequence[Any]] = []
    for name, task in TASKS.items():
        plain = task.build().cuda()
        ours = copy.deepcopy(plain)
        optimizers = [
            torch.optim.SGD(network.parameters(), lr=1e-4, momentum=0.9, fused=True)
            for network in (plain, ours)
        ]
        wrapped = hvd.DistributedOptimizer(optimizers[1], named_parameters=ours.named_parameters())
        variants = {
            "plain": stepper(task, plain, optimizers[0]),
            "ours": stepper(task, ours, wrapped),
        }
        for run in variants.values():  # kernels are chosen, buckets are planned
            run()
            run()
        seconds: dict[str, list[float]] = {variant: [] for variant in variants}
        for number in range(rounds):
            for variant in sorted(variants, reverse=number % 2 == 1):
                seconds[variant].append(wall(variants[variant]) / task.steps)
        ratios = [a / b for a, b in zip(seconds["ours"], seconds["plain"], strict=True)]
        share = 100 * (statistics.median(ratios) - 1)
        rows.append(
            [
                task.title,
                median_and_quartiles(seconds["plain"]),
                median_and_quartiles(seconds["ours"]),
                f"{min(ratios):.4f} to {max(ratios):.4f}",
                [Target("longer", share, 1.0, at_least=False, unit="%")],
            ]
        )
        report.raw[f"step {name}"] = seconds
        del plain, ours, optimizers, wrapped, variants
        torch.cuda.empty_cache()
    report.table(["step", "torch's optimizer", "DistributedOptimizer", "ratios", "target"], rows)


# --- One collective. ---


class UniqueId(ctypes.Structure):
    """NCCL's, which is passed by value."""

    _fields_ = (("bytes", ctypes.c_char * 128),)


class RawNccl:
    """`ncclAllReduce` and nothing around it: a communicator of one rank."""

    SUM, FLOAT32 = 0, 7

    def __init__(self) -> None:
        self._library = library = ctypes.CDLL(find_nccl())
        unique = UniqueId()
        self._comm = ctypes.c_void_p()
        self._check(library.ncclGetUniqueId(ctypes.byref(unique)))
        library.ncclCommInitRank.argtypes = (
            ctypes.c_void_p,
            ctypes.c_int,
            UniqueId,
            ctypes.c_int,
        )
        self._check(library.ncclCommInitRank(ctypes.byref(self._comm), 1, unique, 0))
        library.ncclAllReduce.argtypes = (
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_void_p,
        )

    def _check(self, result: int) -> None:
        if result != 0:
            raise RuntimeError(f"libnccl answered {result}")

    def allreduce(self, tensor: Tensor) -> None:
        """Sum of one rank, in place, on the current stream."""
        stream = torch.cuda.current_stream().cuda_stream
        self._check(
            self._library.ncclAllReduce(
                tensor.data_ptr(),
                tensor.data_ptr(),
                tensor.numel(),
                self.FLOAT32,
                self.SUM,
                self._comm,
                stream,
            )
        )

    def close(self) -> None:
        """Frees the communicator."""
        torch.cuda.synchronize()
        self._library.ncclCommDestroy(self._comm)


def measure_overhead(report: Report, rounds: int) -> None:
    nccl = RawNccl()
    rows: list[Sequence[Any]] = []
    for count in (1, 1 << 18):
        tensor = torch.ones(count, device="cuda")

        def raw(tensor: Tensor = tensor) -> None:
            for _ in range(CALLS):
                nccl.allreduce(tensor)

        def ours(tensor: Tensor = tensor) -> None:
            for _ in range(CALLS):
                hvd.synchronize(hvd.allreduce_async_(tensor, op=hvd.Sum, name="benchmark"))

        variants = {"raw": raw, "ours": ours}
        for run in variants.values():
            run()
        seconds: dict[str, list[float]] = {variant: [] for variant in variants}
        for number in range(rounds):
            for variant in sorted(variants, reverse=number % 2 == 1):
                seconds[variant].append(wall(variants[variant]) / CALLS)
        more = [a - b for a, b in zip(seconds["ours"], seconds["raw"], strict=True)]
        rows.append(
            [
                f"{4 * count} bytes",
                median_and_quartiles(seconds["raw"]),
                median_and_quartiles(seconds["ours"]),
                [Target("more", statistics.median(more) * 1e6, 10.0, at_least=False, unit="us")],
            ]
        )
        report.raw[f"overhead {4 * count}"] = seconds
    nccl.close()
    columns = [
        "allreduce of",
        "ncclAllReduce, per call",
        "hvd.allreduce_async_ and synchronize",
        "target",
    ]
    report.table(columns, rows)


# --- Gradients. ---


def sizes(total: int, count: int) -> list[int]:
    """`count` odd sizes between a thousandth and a hundredth, whose sum is `total`."""
    generator = torch.Generator().manual_seed(5)
    weights = torch.rand(count, generator=generator) ** 3 + 0.05
    numbers = [int(weight) | 1 for weight in weights / weights.sum() * total]
    numbers[0] += total - sum(numbers)
    return numbers


def measure_pack(report: Report, rounds: int) -> None:
    elements = PACK_BYTES // 4
    parameters = [
        nn.Parameter(torch.zeros(size, device="cuda")) for size in sizes(elements, PACK_TENSORS)
    ]
    gradients = [torch.randn_like(parameter) for parameter in parameters]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=0.0),
        named_parameters=[(f"p{i}", p) for i, p in enumerate(parameters)],
    )
    flat, other = (torch.empty(elements, device="cuda") for _ in range(2))

    def pack() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.synchronize()

    variants: dict[str, Callable[[], Any]] = {"copy": lambda: other.copy_(flat), "pack": pack}
    for run in variants.values():
        run()
        run()
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    for number in range(rounds):
        for variant in sorted(variants, reverse=number % 2 == 1):
            seconds[variant].append(on_gpu(variants[variant]))
    ratios = [a / b for a, b in zip(seconds["pack"], seconds["copy"], strict=True)]
    bandwidth = 2 * PACK_BYTES / statistics.median(seconds["copy"]) / 1e12
    report.table(
        ["1 GiB", "copy on the device", "packed and reduced, 300 tensors", "target"],
        [
            [
                f"float32, {bandwidth:.2f} TB/s read and written by the copy",
                median_and_quartiles(seconds["copy"]),
                median_and_quartiles(seconds["pack"]),
                [Target("slower", statistics.median(ratios), 1.15, at_least=False)],
            ]
        ],
    )
    report.raw["pack"] = seconds
    if not torch.equal(parameters[7].grad, gradients[7]):
        raise RuntimeError("the reduced gradients of one rank are not its gradients")
    report.note(
        f"A step of the pack is {shown(statistics.median(seconds['pack']))} on the GPU's clock."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas")
    parser.add_argument("--json", help="write every single time to this file")
    parser.add_argument("--write", action="store_true", help="keep the table in docs/results")
    arguments = parser.parse_args()
    parts = arguments.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only knows {', '.join(PARTS)}, and not {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        raise SystemExit(
            "benchmarks/gpu.py: torch sees no CUDA device. Run it on a machine with a GPU."
        )
    hvd.init()
    device = torch.cuda.get_device_properties(0)
    report = Report(f"One {device.name}: what sparkhvd adds")
    report.note(
        f"{device.name}, {device.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda},"
        f" NCCL {'.'.join(map(str, torch.cuda.nccl.version()))} with torch."
    )
    measures = {"step": measure_steps, "overhead": measure_overhead, "pack": measure_pack}
    for part in parts:
        measures[part](report, arguments.rounds)
    hvd.shutdown()
    report.finish(
        f"benchmarks/gpu.py --rounds {arguments.rounds}",
        write=arguments.write,
        json_path=arguments.json,
    )


if __name__ == "__main__":
    main()
