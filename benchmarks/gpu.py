"""Cost of sparkhvd on one GPU, beside torch, torch.distributed and NCCL.

    .venv/bin/python benchmarks/gpu.py [--rounds 7] [--only step,overhead,pack] [--json FILE]

`make gpu` runs it, too, and keeps its tables.

One rank, because one GPU can show what the optimizer and the engine cost, and not what a network does: with one rank
NCCL moves nothing. The optimizer of a job of one rank would do nothing at all; here it packs, reduces and hands out
gradients as with others. Needs torch with CUDA and libnccl, and no Spark. All variants of a part run in turns; ratios are of
neighbours, and the table shows their median and quartiles.

- `step`: a training step in bfloat16 with `DistributedOptimizer`, the same step with torch's optimizer, and with torch's
  DistributedDataParallel, whose gradients are views of its buckets, as ours are.
- `overhead`: what one allreduce costs over a raw `ncclAllReduce` of the same process: waited for one by one (the way to
  the engine's threads and back counts), and 16 at a time, as a step has them in flight; and as one of torch.distributed.
- `pack`: a backward that does nothing but hand out 1 GiB of gradients in 300 tensors, with and without packing and
  reducing them: the difference beside a copy of as many bytes on the device, by the GPU's clock from an idle GPU (the
  host's work counts), and behind other work (only the GPU's counts, as in a step whose backward keeps the GPU busy).

With SPARKHVD_TEST_STAND_IN=1 it runs in small on the CPU with the stand-in for CUDA and NCCL, which tests the program;
the figures then mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
import tests.gpu  # noqa: E402, F401 - first, because cloudpickle may be missing

# isort: split
from gpu_models import TASKS, TINY, Task  # noqa: E402 - of this folder

import sparkhvd.torch as hvd  # noqa: E402 - of the checkout
from common import Report, Target, median_and_quartiles  # noqa: E402 - of this folder
from tests.gpu.machine import (  # noqa: E402 - of the checkout
    Cuda,
    Machine,
    as_with_partners,
    description,
    is_stand_in,
    machine,
    why_not,
)

PARTS = ("step", "overhead", "pack")
IS_SMALL = is_stand_in()
PACK_BYTES = 1 << (18 if IS_SMALL else 30)
PACK_TENSORS = 30 if IS_SMALL else 300
CALLS = 32 if IS_SMALL else 320
IN_FLIGHT = 16


# --- Clocks. ---


def wall(gpu: Machine, run: Callable[[], Any]) -> float:
    """Measure the seconds from the call of `run` to the end of its work on the GPU."""
    gpu.synchronize()
    began = time.perf_counter()
    run()
    gpu.synchronize()
    return time.perf_counter() - began


def timed(gpu: Machine, run: Callable[[], Any], count: int) -> Callable[[], float]:
    """Make a function to measure the seconds of one step of `run`, which runs `count` steps."""
    return lambda: wall(gpu, run) / count


def on_gpu(gpu: Machine, run: Callable[[], Any], *, is_behind_work: bool = False) -> float:
    """Measure the seconds between two events around `run` on the current stream.

    Args:
        gpu: which has the clock.
        run: enqueues.
        is_behind_work: the GPU has something else to do until the host has enqueued everything.
    """
    gpu.synchronize()
    if is_behind_work:
        for _ in range(1 if IS_SMALL else 40):  # about a millisecond each
            gpu.busy()
    begin = gpu.mark()
    run()
    return gpu.seconds_between(begin, gpu.mark())


def in_turns(rounds: int, variants: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Measure every variant, round by round, each round in the other order."""
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    for number in range(rounds):
        for variant in sorted(variants, reverse=number % 2 == 1):
            seconds[variant].append(variants[variant]())
    return seconds


@contextlib.contextmanager
def torch_distributed(gpu: Machine) -> Iterator[bool]:
    """Make torch.distributed's default group of this rank, on NCCL.

    Yields False on the stand-in, which torch.distributed does not know.
    """
    if not isinstance(gpu, Cuda):
        yield False
        return
    dist.init_process_group(
        "nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=gpu.place
    )
    try:
        yield True
    finally:
        dist.destroy_process_group()


# --- A training step. ---


def stepper(gpu: Machine, task: Task, network: nn.Module, optimizer: Any) -> Callable[[], None]:
    """Make a function to run `task.steps` training steps."""
    inputs, targets = (gpu.tensor(each) for each in task.batch(torch.device("cpu")))

    def run() -> None:
        for _ in range(task.steps):
            optimizer.zero_grad()
            task.loss(network, inputs, targets).backward()
            optimizer.step()

    return run


def measure_steps(gpu: Machine, report: Report, rounds: int) -> None:
    rows: list[Sequence[Any]] = []
    with torch_distributed(gpu) as has_ddp:
        found = {
            name: (task, time_steps(gpu, task, rounds, has_ddp=has_ddp))
            for name, task in (TINY if IS_SMALL else TASKS).items()
        }
    for name, (task, seconds) in found.items():
        ratios = [a / b for a, b in zip(seconds["ours"], seconds["plain"], strict=True)]
        share = 100 * (statistics.median(ratios) - 1)
        targets: list[Target] = []
        if task.longer is not None:
            targets.append(Target("longer", share, task.longer, at_least=False, unit="%"))
        if has_ddp:
            of_ddp = [a / b for a, b in zip(seconds["ours"], seconds["ddp"], strict=True)]
            targets.append(Target("of DDP's", statistics.median(of_ddp), 1.0, at_least=False))
        rows.append(
            [
                task.title,
                median_and_quartiles(seconds["plain"]),
                median_and_quartiles(seconds["ddp"]) if has_ddp else "-",
                median_and_quartiles(seconds["ours"]),
                f"{min(ratios):.4f} to {max(ratios):.4f}",
                targets,
            ]
        )
        report.raw[f"step {name}"] = seconds
    columns = ("torch's optimizer", "torch's DDP", "DistributedOptimizer", "ours by torch's")
    report.table(["step", *columns, "target"], rows)


def time_steps(gpu: Machine, task: Task, rounds: int, *, has_ddp: bool) -> dict[str, list[float]]:
    """Measure the seconds of a step of each variant."""
    built = task.build()
    names = ("plain", "ours", *(["ddp"] if has_ddp else []))
    networks = {name: gpu.module(copy.deepcopy(built)) for name in names}
    optimizers: dict[str, Any] = {
        name: torch.optim.SGD(network.parameters(), lr=1e-4, momentum=0.9, fused=not IS_SMALL)
        for name, network in networks.items()
    }
    optimizers["ours"] = hvd.DistributedOptimizer(
        optimizers["ours"], named_parameters=networks["ours"].named_parameters()
    )
    if has_ddp:
        networks["ddp"] = nn.parallel.DistributedDataParallel(
            networks["ddp"], device_ids=[0], gradient_as_bucket_view=True
        )
    runs = {name: stepper(gpu, task, networks[name], optimizers[name]) for name in names}
    for run in runs.values():  # kernels are chosen, buckets are planned
        run()
        run()
    return in_turns(rounds, {name: timed(gpu, run, task.steps) for name, run in runs.items()})


# --- One collective. ---


class UniqueId(ctypes.Structure):
    """NCCL's unique id, passed by value."""

    _fields_ = (("bytes", ctypes.c_char * 128),)


class RawNccl:
    """`ncclAllReduce` and nothing around it: a communicator of one rank."""

    SUM, FLOAT32 = 0, 7

    def __init__(self, gpu: Machine) -> None:
        self._gpu = gpu
        self._library = library = ctypes.CDLL(gpu.nccl())
        unique = UniqueId()
        self._comm = ctypes.c_void_p()
        self._check(library.ncclGetUniqueId(ctypes.byref(unique)))
        library.ncclCommInitRankConfig.argtypes = (
            ctypes.c_void_p,
            ctypes.c_int,
            UniqueId,
            ctypes.c_int,
            ctypes.c_void_p,
        )
        # Without a configuration its calls block, so that there is nothing to poll.
        self._check(library.ncclCommInitRankConfig(ctypes.byref(self._comm), 1, unique, 0, None))
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
        self._check(
            self._library.ncclAllReduce(
                tensor.data_ptr(),
                tensor.data_ptr(),
                tensor.numel(),
                self.FLOAT32,
                self.SUM,
                self._comm,
                self._gpu.handle(),
            )
        )

    def close(self) -> None:
        """Free the communicator."""
        self._gpu.synchronize()
        self._library.ncclCommDestroy(self._comm)


def measure_overhead(gpu: Machine, report: Report, rounds: int) -> None:
    nccl = RawNccl(gpu)
    rows: list[Sequence[Any]] = []
    with torch_distributed(gpu) as has_torch:
        for count in (1, 1 << 18):
            tensors = [gpu.tensor(torch.ones(count)) for _ in range(IN_FLIGHT)]
            seconds = time_calls(gpu, nccl, tensors, rounds, has_torch=has_torch)
            report.raw[f"overhead {4 * count}"] = seconds
            for variant in ("one by one", "in flight"):
                ours, raw = seconds[variant], seconds["raw"]
                more = [a - b for a, b in zip(ours, raw, strict=True)]
                us = statistics.median(more) * 1e6
                targets = [Target("more", us, 10.0, at_least=False, unit="us")]
                theirs = seconds.get(f"torch, {variant}", [])
                if theirs:
                    of_torch = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
                    targets.append(Target("of torch's", of_torch, 1.0, at_least=False))
                rows.append(
                    [
                        f"{4 * count} bytes, {variant}",
                        median_and_quartiles(raw),
                        median_and_quartiles(theirs) if theirs else "-",
                        median_and_quartiles(ours),
                        targets,
                    ]
                )
    nccl.close()
    columns = ("ncclAllReduce, per call", "torch.distributed, per call", "sparkhvd, per call")
    report.table(["allreduce of", *columns, "target"], rows)


def time_calls(
    gpu: Machine, nccl: RawNccl, tensors: list[Tensor], rounds: int, *, has_torch: bool
) -> dict[str, list[float]]:
    """Measure the seconds of an allreduce of each variant."""

    def raw() -> None:
        for number in range(CALLS):
            nccl.allreduce(tensors[number % IN_FLIGHT])

    def ours(number: int) -> Any:
        return hvd.allreduce_async_(tensors[number], op=hvd.Sum, name=f"benchmark {number}")

    def theirs(number: int) -> Any:
        return dist.all_reduce(tensors[number], async_op=True)

    runs = {
        "raw": raw,
        "one by one": lambda: one_by_one(ours, hvd.synchronize),
        "in flight": lambda: in_flight(ours, hvd.synchronize),
    }
    if has_torch:
        runs["torch, one by one"] = lambda: one_by_one(theirs, dist.Work.wait)
        runs["torch, in flight"] = lambda: in_flight(theirs, dist.Work.wait)
    for run in runs.values():
        run()
    return in_turns(rounds, {name: timed(gpu, run, CALLS) for name, run in runs.items()})


def one_by_one(start: Callable[[int], Any], wait: Callable[[Any], Any]) -> None:
    for number in range(CALLS):
        wait(start(number % IN_FLIGHT))


def in_flight(start: Callable[[int], Any], wait: Callable[[Any], Any]) -> None:
    for _ in range(CALLS // IN_FLIGHT):
        for handle in [start(number) for number in range(IN_FLIGHT)]:
            wait(handle)


# --- Gradients. ---


def sizes(total: int, count: int) -> list[int]:
    """Draw `count` odd sizes with the sum `total`, each a thousandth to a hundredth of it."""
    generator = torch.Generator().manual_seed(5)
    weights = torch.rand(count, generator=generator) ** 3 + 0.05
    numbers = [int(weight) | 1 for weight in weights / weights.sum() * total]
    numbers[0] += total - sum(numbers)
    return numbers


def measure_pack(gpu: Machine, report: Report, rounds: int) -> None:
    """Measure backward of leaves with given gradients, with and without the optimizer.

    Backward copies the given gradients.
    """
    elements = PACK_BYTES // 4
    shapes = sizes(elements, PACK_TENSORS)
    plain, ours = (
        [nn.Parameter(gpu.tensor(torch.zeros(size))) for size in shapes] for _ in range(2)
    )
    gradients = [gpu.tensor(torch.randn(size)) for size in shapes]
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(ours, lr=0.0),
        named_parameters=[(f"p{i}", p) for i, p in enumerate(ours)],
    )
    flat, other = (gpu.tensor(torch.zeros(elements)) for _ in range(2))

    def alone() -> None:
        for parameter in plain:
            parameter.grad = None
        torch.autograd.backward(plain, gradients)

    def packed() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(ours, gradients)
        optimizer.synchronize()

    def copied() -> None:
        other.copy_(flat)

    for run in (copied, alone, packed):
        run()
        run()
    seconds = in_turns(
        rounds,
        {
            "copy": lambda: on_gpu(gpu, copied, is_behind_work=True),
            **{
                f"{name} {place}": lambda run=run, is_busy=is_busy: on_gpu(
                    gpu, run, is_behind_work=is_busy
                )
                for name, run in (("alone", alone), ("packed", packed))
                for place, is_busy in (("busy", True), ("idle", False))
            },
        },
    )
    bandwidth = 2 * PACK_BYTES / statistics.median(seconds["copy"]) / 1e12
    rows: list[Sequence[Any]] = []
    for name, what in (("busy", "behind other work"), ("idle", "from an idle GPU")):
        ratios = [
            (packed - alone) / copy
            for packed, alone, copy in zip(
                seconds[f"packed {name}"], seconds[f"alone {name}"], seconds["copy"], strict=True
            )
        ]
        rows.append(
            [
                what,
                f"{median_and_quartiles(seconds['copy'])}, {bandwidth:.2f} TB/s read and written",
                median_and_quartiles(seconds[f"alone {name}"]),
                median_and_quartiles(seconds[f"packed {name}"]),
                [Target("more, in copies", statistics.median(ratios), 1.15, at_least=False)],
            ]
        )
    size = f"{PACK_BYTES / 2**30:.3g} GiB of float32"
    columns = (f"backward of {PACK_TENSORS} leaves", "packed and reduced, too")
    report.table([size, "copy on the device", *columns, "target"], rows)
    report.raw["pack"] = seconds
    for parameter, gradient in zip(ours, gradients, strict=True):
        found = parameter.grad
        if found is None or not torch.equal(found.cpu(), gradient.cpu()):
            raise RuntimeError("the reduced gradients of one rank are not its gradients")
    memory = {parameter.grad.untyped_storage().data_ptr() for parameter in ours}  # type: ignore[union-attr]  # just found
    if not gpu.is_stand_in and len(memory) != 1:
        raise RuntimeError(f"the gradients are in {len(memory)} places and were not packed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas")
    parser.add_argument("--json", help="write every single time to this file")
    arguments = parser.parse_args()
    parts = arguments.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only knows {', '.join(PARTS)}, and not {', '.join(sorted(unknown))}")
    if reason := why_not():
        raise SystemExit(f"benchmarks/gpu.py: {reason}. Run it on a machine with a GPU.")
    gpu = machine()
    gpu.init()
    report = Report(f"One GPU: what sparkhvd adds, {', '.join(parts)}")
    report.note(f"{description()}.")
    measures = {"step": measure_steps, "overhead": measure_overhead, "pack": measure_pack}
    with as_with_partners():
        for part in parts:
            measures[part](gpu, report, arguments.rounds)
    hvd.shutdown()
    report.finish(
        f"benchmarks/gpu.py --only {arguments.only} --rounds {arguments.rounds}",
        write=False,
        json_path=arguments.json,
    )


if __name__ == "__main__":
    main()
