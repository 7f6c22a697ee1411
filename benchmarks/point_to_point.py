"""Round trips of a message between two ranks of this host: this engine beside Gloo, in turns.

    python -m benchmarks.point_to_point

Both run in the same two processes; a round is one turn of each, and the table has the medians over rounds and the
spread between the quartiles.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import sparkhvd.torch as hvd
from sparkhvd.runner import run_local

SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 64 << 20)
ROUNDS = 15


def measure(exchange: Callable[[], None], repeats: int) -> float:
    """Return the time of one exchange in us."""
    began = time.perf_counter()
    for _ in range(repeats):
        exchange()
    return (time.perf_counter() - began) / repeats * 1e6


def ping_pong(port: int) -> list[tuple[int, list[float], list[float]]]:
    """Measure on both ranks; rank 0's times count."""
    hvd.init()
    rank, other = hvd.rank(), 1 - hvd.rank()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    rows = []
    for size in SIZES:
        tensor = torch.ones(size, dtype=torch.uint8)

        def ours(tensor: torch.Tensor = tensor) -> None:
            if rank == 0:
                hvd.send(tensor, other)
                hvd.recv(tensor, other)
            else:
                hvd.recv(tensor, other)
                hvd.send(tensor, other)

        def gloos(tensor: torch.Tensor = tensor) -> None:
            if rank == 0:
                dist.send(tensor, other)
                dist.recv(tensor, other)
            else:
                dist.recv(tensor, other)
                dist.send(tensor, other)

        repeats = max(2, min(300, (32 << 20) // size))
        times: tuple[list[float], list[float]] = ([], [])
        for round_number in range(ROUNDS + 1):
            for exchange, kept in zip((ours, gloos), times, strict=True):
                hvd.barrier()
                taken = measure(exchange, repeats)
                if round_number > 0:
                    kept.append(taken)
        rows.append((size, *times))
    dist.destroy_process_group()
    return rows


def shown(times: list[float]) -> str:
    """Write a median and its quartiles."""
    low, middle, high = statistics.quantiles(times, n=4)
    return f"{middle:.0f} ({low:.0f} to {high:.0f})"


def main() -> None:
    """Print the table."""
    rows = run_local(ping_pong, args=(29611,), num_proc=2)[0]
    print("| bytes | sparkhvd, us | Gloo, us | Gloo / sparkhvd |\n|---|---|---|---|")
    for size, ours, gloos in rows:
        ratio = statistics.median(gloos) / statistics.median(ours)
        print(f"| {size} | {shown(ours)} | {shown(gloos)} | {ratio:.1f} |")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
