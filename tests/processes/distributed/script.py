"""Scripts that start themselves, as users do: rank, number of ranks and init_method are arguments.

python -m tests.processes.distributed.script BODY RANK SIZE INIT_METHOD
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import sparkhvd
import sparkhvd.distributed
import sparkhvd.torch as hvd


def say(*words: object) -> None:
    print(*words, flush=True)


def meet(rank: int) -> None:
    """Meet through a store, twice; `hvd` has the same engine before, between and after."""
    total = torch.ones(1)
    dist.all_reduce(total)
    hvd.init()
    say("sum", total.item(), "hvd", hvd.size())
    dist.destroy_process_group()
    hvd.shutdown()
    hvd.init()
    say("again", hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
    dist.init_process_group("sparkhvd", init_method=sys.argv[4] + ".2", rank=rank, world_size=2)
    dist.all_reduce(total)
    say("then", total.item())
    dist.destroy_process_group()
    hvd.shutdown()
    store = dist.FileStore(sys.argv[4][7:] + ".3", 2)
    for _ in range(2):  # torchrun's store lasts for several groups, too
        dist.init_process_group("sparkhvd", store=store, rank=rank, world_size=2)
        dist.all_reduce(total)
        dist.destroy_process_group()
        hvd.shutdown()
    say("same store", total.item())


def die(_: torch.Tensor) -> None:
    """Die when the other rank has long been in its backward pass."""
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def lose(rank: int) -> None:
    """Rank 1 dies inside backward(), as the others learn; those that are left make a new group."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    for _ in range(3):
        model(torch.ones(2, 64)).sum().backward()
    output = model(torch.ones(2, 64)).sum()
    if rank == 1:
        output.register_hook(die)
    dist.barrier()
    began = time.monotonic()
    try:
        output.backward()
    except dist.DistBackendError as error:
        is_ours = isinstance(error, sparkhvd.PeerLostError)
        say("lost", "rank 1" in str(error), is_ours, time.monotonic() - began < 0.5 + 2)
    dist.destroy_process_group()
    dist.init_process_group("sparkhvd", init_method=sys.argv[4] + ".2", rank=0, world_size=1)
    dist.barrier()
    say("new group", dist.get_world_size())


def late(rank: int) -> None:
    """Rank 1 does not come to a collective."""
    dist.barrier()
    dist.group.WORLD.set_timeout(timedelta(seconds=0.5))  # type: ignore[union-attr]
    if rank == 1:
        time.sleep(1.5)
        return
    try:
        dist.all_reduce(torch.ones(1))
    except sparkhvd.CollectiveTimeoutError as error:
        say("timeout", "rank 1" in str(error), isinstance(error, dist.DistBackendError))


def main() -> None:
    body, rank, size, method = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group(
        "sparkhvd",
        init_method=method,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    {"meet": meet, "lose": lose, "late": late}[body](rank)


if __name__ == "__main__":
    main()
