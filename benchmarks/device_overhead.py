"""Host's time per collective on a device, beyond a raw `ncclAllReduce` of the same process.

    .venv/bin/python benchmarks/device_overhead.py [--rounds 15] [--json FILE] [--write]

Without a GPU: against the stand-in of native/tests/fake_cuda, set to finish all device work at once. So this is only
the host's part, and does not measure a GPU; `benchmarks/gpu.py` does. Both legs use ctypes, in the same processes,
alternating:

    raw          `ncclAllReduce`, then `ncclCommGetAsyncError` until it is enqueued
    one by one   the same as an operation of the engine: submission, negotiation, `wait_stream`
    in flight    the same, 16 submitted before the first wait, as in a step

Target: at most 10 us more, with one rank.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import Report, Target, median_and_quartiles

BUILD = Path(__file__).resolve().parents[1] / "build" / "native"
IN_FLIGHT = 16
CALLS = 20 * IN_FLIGHT
MAY_ADD_US = 10.0
SUM, FLOAT32, IN_PROGRESS = 0, 7, 7


class Raw:
    """The stand-in's NCCL, called as a program without an engine calls it."""

    def __init__(self, rank: int, size: int, share: Callable[[Any], Any]) -> None:
        self.cuda, self.nccl = (
            ctypes.CDLL(str(BUILD / f"libfake_{name}.so")) for name in ("cuda", "nccl")
        )
        context = ctypes.c_void_p()
        self.check(self.cuda.cuInit(0))
        self.check(self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), rank))
        self.check(self.cuda.cuCtxSetCurrent(context))
        self.stream = ctypes.c_void_p()
        self.check(self.cuda.cuStreamCreateWithPriority(ctypes.byref(self.stream), 1, 0))
        address = ctypes.c_uint64()
        self.check(self.cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(4)))
        self.address = address.value
        # Passed by value. Made here, because a class of ctypes does not travel to the ranks.
        fields = {"_fields_": (("bytes", ctypes.c_char * 128),)}
        UniqueId: Any = type("UniqueId", (ctypes.Structure,), fields)  # noqa: N806
        unique = UniqueId()
        if rank == 0:
            self.check(self.nccl.ncclGetUniqueId(ctypes.byref(unique)))
        unique = UniqueId.from_buffer_copy(share(bytes(unique)))
        self.comm = ctypes.c_void_p()
        init = self.nccl.ncclCommInitRank
        init.argtypes = (ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int)
        self.check(init(ctypes.byref(self.comm), size, unique, rank))
        self.nccl.ncclAllReduce.argtypes = (
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
            *(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
        )
        self.state = ctypes.c_int()

    def check(self, result: int) -> None:
        if result != 0:
            raise RuntimeError(f"the stand-in answered {result}")

    def allreduce(self) -> None:
        """Allreduce one number in place."""
        place = self.address
        self.check(self.nccl.ncclAllReduce(place, place, 1, FLOAT32, SUM, self.comm, self.stream))
        state = ctypes.byref(self.state)
        self.check(self.nccl.ncclCommGetAsyncError(self.comm, state))
        while self.state.value == IN_PROGRESS:
            self.check(self.nccl.ncclCommGetAsyncError(self.comm, state))


def measure(rounds: int) -> dict[str, list[float]]:
    """Measure the seconds of a call in a rank, one mean per round and leg."""
    import sparkhvd.torch as hvd
    from sparkhvd.engine.calls import Reduction, TensorView
    from sparkhvd.engine.library import Collective, DType, ReduceOp
    from sparkhvd.torch.context import context

    hvd.init()
    engine = context().engine
    engine.open_device(hvd.rank(), str(BUILD / "libfake_cuda.so"), str(BUILD / "libfake_nccl.so"))
    raw = Raw(hvd.rank(), hvd.size(), lambda value: hvd.broadcast_object(value, 0))
    place = TensorView(raw.address, raw.address, (1,))
    call = engine.prepare(
        Collective.ALLREDUCE, [place], DType.FLOAT32, Reduction(ReduceOp.SUM), device=hvd.rank()
    )
    stream = call.request.stream = raw.stream.value

    names = [f"benchmark {number}" for number in range(IN_FLIGHT)]

    def alone() -> None:
        for _ in range(CALLS):
            raw.allreduce()

    def one_by_one() -> None:
        for _ in range(CALLS):
            engine.start(call, "benchmark").wait_stream(stream)

    def in_flight() -> None:
        for _ in range(CALLS // IN_FLIGHT):
            for work in [engine.start(call, name) for name in names]:
                work.wait_stream(stream)

    one_by_one()
    hvd.barrier()
    raw.cuda.fake_cuda_idle(1)
    legs = {"raw": alone, "one by one": one_by_one, "in flight": in_flight}
    found: dict[str, list[float]] = {leg: [] for leg in legs}
    for number in range(rounds + 1):
        for leg in sorted(legs, reverse=number % 2 == 1):
            run = legs[leg]
            hvd.barrier()
            began = time.perf_counter()
            run()
            if number > 0:  # the first round warms up
                found[leg].append((time.perf_counter() - began) / CALLS)
    hvd.barrier()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="a file for the raw numbers")
    parser.add_argument("--write", action="store_true", help="keep the table in docs/results/")
    options = parser.parse_args()
    from sparkhvd.runner import run_local

    load = os.getloadavg()[0]
    report = Report(
        f"device_overhead: the host's part, with a stand-in for CUDA and NCCL and no GPU; load {load:.1f} at the start"
    )
    rows: list[list[str | list[Target]]] = []
    for size in (1, 2):
        ranks = run_local(measure, args=(options.rounds,), num_proc=size)
        times = {
            leg: [max(each) for each in zip(*(rank[leg] for rank in ranks), strict=True)]
            for leg in ranks[0]
        }
        report.raw[f"{size} ranks"] = times
        for variant in ("one by one", "in flight"):
            more = [a - b for a, b in zip(times[variant], times["raw"], strict=True)]
            added = statistics.median(more) * 1e6
            target = Target("more", added, MAY_ADD_US, at_least=False, unit="us")
            rows.append(
                [
                    f"{size}, {variant}",
                    median_and_quartiles(times["raw"]),
                    median_and_quartiles(times[variant]),
                    [target] if size == 1 else f"{added:.1f} us more",
                ]
            )
    report.table(["ranks", "raw ncclAllReduce", "engine", "target"], rows)
    report.note(
        f"Means of {CALLS} calls, {options.rounds} rounds. Of two ranks the slower rank counts. The stand-in's devices do no work, "
        "so the table has only times of the host."
    )
    return report.finish(
        "benchmarks/device_overhead.py", write=options.write, json_path=options.json
    )


if __name__ == "__main__":
    main()
