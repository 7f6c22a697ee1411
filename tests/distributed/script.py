"""Scripts that start themselves, as users do.

python -m tests.distributed.script FOLDER               starts two ranks and writes their output to FOLDER
torchrun ... -m tests.distributed.script
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import sparkhvd
import sparkhvd.distributed
import sparkhvd.torch as hvd


def say(*words: object) -> None:
    print(*words, flush=True)


def start(rank: int, method: str, size: int = 2) -> None:
    dist.init_process_group("sparkhvd", init_method=method, rank=rank, world_size=size)


def meet(rank: int, method: str) -> None:
    """Meet through a store several times. `hvd` has the same engine before, between and after."""
    start(rank, method)
    total = torch.ones(1)
    dist.all_reduce(total)
    hvd.init()
    say("sum", total.item(), "hvd", hvd.size())
    dist.destroy_process_group()
    hvd.shutdown()
    hvd.init()
    say("again", hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
    start(rank, f"{method}.2")
    dist.all_reduce(total)
    say("then", total.item())
    dist.destroy_process_group()
    hvd.shutdown()
    store = dist.FileStore(f"{method.removeprefix('file://')}.3", 2)
    for _ in range(2):  # torchrun's store lasts for several groups, too
        dist.init_process_group("sparkhvd", store=store, rank=rank, world_size=2)
        dist.all_reduce(total)
        dist.destroy_process_group()
        hvd.shutdown()
    say("same store", total.item())


def die(_: torch.Tensor) -> None:
    """Die long after the other rank has begun its backward pass."""
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def lose(rank: int, method: str) -> None:
    """Rank 1 dies inside backward(), and the other ranks learn it. The survivors make a new group."""
    start(rank, f"{method}.4")
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
    start(0, f"{method}.5", 1)
    dist.barrier()
    say("new group", dist.get_world_size())


class Pause(torch.autograd.Function):
    """Calls a function in the backward pass, before any gradient exists."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, act: Any) -> torch.Tensor:
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.act()
        return gradient, None


def impatience(rank: int) -> None:
    """Ctrl-C in backward() while rank 1 is late. Then rank 1 is stopped, and backward() raises a timeout."""
    first, second = (
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64)) for _ in range(2)
    )
    second.register_comm_hook(None, sparkhvd.distributed.ddp_hook)
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    loss = first(torch.ones(2, 64)).sum()
    began = time.monotonic()
    if rank == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            loss.backward()
        except KeyboardInterrupt:
            say("interrupted", time.monotonic() - began < 1.5)
    else:
        Pause.apply(loss, lambda: time.sleep(2)).backward()
    dist.group.WORLD.set_timeout(timedelta(seconds=0.7))  # type: ignore[union-attr]
    loss = second(torch.ones(2, 64)).sum()
    try:
        if rank == 1:
            Pause.apply(loss, lambda: os.kill(os.getpid(), signal.SIGSTOP)).backward()
        else:
            time.sleep(max(0.0, began + 2.5 - time.monotonic()))  # rank 1's first pass is over
            began = time.monotonic()
            loss.backward()
    except dist.DistBackendError as error:
        is_timeout = isinstance(error, sparkhvd.CollectiveTimeoutError)
        if rank == 0:
            say("timeout", is_timeout, "rank 1" in str(error), time.monotonic() - began < 2.7)
        else:
            say("resumed", isinstance(error, sparkhvd.CollectiveError))
    finally:
        os.kill(pids[1], signal.SIGCONT)
    dist.destroy_process_group()


def launched() -> None:
    """Run in a process of torchrun."""
    torch.set_num_threads(1)
    dist.init_process_group("sparkhvd")
    impatience(dist.get_rank())


def main() -> None:
    """Fork the ranks from a process that has imported the compiler, which each rank would import for DDP, and print their exit statuses."""
    import torch._dynamo

    folder = sys.argv[1]
    pids = []
    for rank in range(2):
        if pid := os.fork():
            pids.append(pid)
            continue
        output = os.open(f"{folder}/{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        torch.set_num_threads(1)
        meet(rank, f"file://{folder}/store")
        lose(rank, f"file://{folder}/store")
        return
    say(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids))


if __name__ == "__main__":
    launched() if "RANK" in os.environ else main()
