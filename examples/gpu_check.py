"""Allreduce on every GPU of a cluster: right sums, and bandwidth beside torch.distributed's in the same processes.

    python examples/gpu_check.py [--num-proc N] [--seconds 60]          every GPU of this machine
    spark-submit <your cluster's options> examples/gpu_check.py         every GPU of the cluster

docs/testing.md#validating-on-gpus says what must come out.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

from pyspark.sql import SparkSession

import sparkhvd.runner

SIZES = (1 << 20, 16 << 20, 64 << 20, 256 << 20)  # bytes
ROUNDS = 5


def check(seconds: float) -> dict[str, Any]:
    """Check a rank: compare sums of random numbers with torch.distributed's for a while, then time them."""
    import torch
    import torch.distributed as dist

    import sparkhvd.torch as hvd

    hvd.init()  # makes the rank's GPU the current one
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", device_id=device)
    generator = torch.Generator(device).manual_seed(hvd.rank())
    sums, deadline = 0, time.monotonic() + seconds
    while bool(hvd.allreduce(torch.tensor(time.monotonic() < deadline), op=hvd.Min)):
        ours = torch.randn(1 + 9973 * (sums % 400), generator=generator, device=device)
        theirs = ours.clone()
        hvd.allreduce_(ours, op=hvd.Sum, name="check")
        dist.all_reduce(theirs)
        torch.testing.assert_close(ours, theirs)
        sums += 1
    speeds = {}
    for num_bytes in SIZES:
        tensor = torch.zeros(num_bytes // 4, device=device)
        variants: dict[str, Callable[[], Any]] = {
            "sparkhvd": lambda tensor=tensor: hvd.allreduce_(tensor, op=hvd.Sum, name="speed"),  # type: ignore[misc]
            "torch": lambda tensor=tensor: dist.all_reduce(tensor),  # type: ignore[misc]
        }
        rounds: dict[str, list[float]] = {name: [] for name in variants}
        for number in range(ROUNDS):
            for name in sorted(variants, reverse=number % 2 == 1):  # in turns
                rounds[name].append(bandwidth(variants[name], num_bytes))
        speeds[num_bytes] = {name: statistics.median(values) for name, values in rounds.items()}
    gpu = torch.cuda.get_device_properties(device)
    dist.destroy_process_group()
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "gpu": f"{gpu.name}, {gpu.uuid}",
        "sums": sums,
        "GB/s": speeds,
    }


def bandwidth(run: Callable[[], Any], num_bytes: int) -> float:
    """Return the bus bandwidth in GB/s, as nccl-tests define it: bytes / seconds x 2 (N - 1) / N."""
    import torch

    import sparkhvd.torch as hvd

    for _ in range(3):
        run()
    torch.cuda.synchronize()
    hvd.barrier()
    began = time.perf_counter()
    for _ in range(10):
        run()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / 10
    return num_bytes / seconds * 2 * (hvd.size() - 1) / hvd.size() / 1e9


def gpus_here() -> int:
    """Count the GPUs of this machine; one at least, so that the ranks tell the problem."""
    import torch

    return max(1, torch.cuda.device_count())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--num-proc", type=int, help="ranks; all GPUs by default")
    parser.add_argument("--seconds", type=float, default=60.0, help="of random sums")
    arguments = parser.parse_args()
    spark = SparkSession.builder.appName("sparkhvd-gpu-check").getOrCreate()
    num_proc = arguments.num_proc
    if num_proc is None and spark.conf.get("spark.master", "").startswith("local"):
        num_proc = gpus_here()  # Spark counts cores there
    try:
        reports = sparkhvd.runner.run(
            check, (arguments.seconds,), num_proc=num_proc, use_gpu=True, spark=spark
        )
    finally:
        spark.stop()
    for rank, report in enumerate(reports):
        print(f"rank {rank}: ok, {report['sums']} sums, {report['gpu']} on {report['host']}")
    print("| allreduce of | sparkhvd, GB/s | torch.distributed, GB/s | ratio |\n|---|---|---|---|")
    for num_bytes, speed in reports[0]["GB/s"].items():
        ours, theirs = speed["sparkhvd"], speed["torch"]
        ratio = f"{ours / theirs:.3f}" if theirs else "-"
        print(f"| {num_bytes >> 20} MiB | {ours:.1f} | {theirs:.1f} | {ratio} |")


if __name__ == "__main__":
    main()
