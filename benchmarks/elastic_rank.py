"""A rank of benchmarks/elastic.py, with a log line for each finished allreduce and step.

    python benchmarks/elastic_rank.py {sparkhvd,torchrun} FOLDER

It trains until FOLDER/end exists.
Lines of FOLDER/PID: `time event size step`, with the time of `time.monotonic()`, which processes of a host share.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

LAYERS, WIDTH = 6, 2048  # 100 MB of parameters
BROADCASTS = 5


class Log:
    """Line-buffered log of this process."""

    def __init__(self, folder: Path) -> None:
        self._file = open(folder / str(os.getpid()), "w", buffering=1)  # noqa: SIM115 - as long as the process

    def write(self, event: str, size: int, step: int) -> None:
        self._file.write(f"{time.monotonic()} {event} {size} {step}\n")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def differentiate(model: nn.Module) -> None:
    model(torch.ones(1, WIDTH)).square().mean().backward()


def run_sparkhvd(folder: Path, log: Log) -> None:
    """Train with `hvd.elastic`, a commit each step."""
    import sparkhvd.torch as hvd

    hvd.init()
    model = make_model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    @hvd.elastic.run
    def train(state: Any) -> None:
        hvd.allreduce(torch.ones(1), name="again")
        log.write("allreduce", hvd.size(), state.step)
        is_end = torch.zeros(1)
        while not is_end:
            optimizer.zero_grad()
            differentiate(model)
            optimizer.step()
            is_end = hvd.allreduce(
                torch.tensor([float((folder / "end").exists())]), op=hvd.Max, name="end"
            )
            state.step += 1
            log.write("step", hvd.size(), state.step)
            state.commit()
        for _ in range(BROADCASTS):
            began = time.monotonic()
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            log.write(f"broadcast:{time.monotonic() - began}", hvd.size(), state.step)

    train(hvd.elastic.TorchState(model, optimizer, step=0))


def run_torchrun(folder: Path, log: Log) -> None:
    """Train with DDP over Gloo and a checkpoint each step. torchrun restarts all ranks."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    path, step = folder / "checkpoint.pt", 0
    if path.exists():
        saved = torch.load(path, mmap=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    ddp = DistributedDataParallel(model)
    dist.all_reduce(torch.ones(1))
    log.write("allreduce", dist.get_world_size(), step)
    is_end = torch.zeros(1)
    while not is_end:
        optimizer.zero_grad()
        differentiate(ddp)
        optimizer.step()
        is_end = torch.tensor([float((folder / "end").exists())])
        dist.all_reduce(is_end, op=dist.ReduceOp.MAX)
        step += 1
        log.write("step", dist.get_world_size(), step)
        if dist.get_rank() == 0:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step,
            }
            torch.save(state, path.with_suffix(".new"))
            path.with_suffix(".new").rename(path)
    dist.destroy_process_group()


RUNS = {"sparkhvd": run_sparkhvd, "torchrun": run_torchrun}


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[2])
    RUNS[sys.argv[1]](folder, Log(folder))


if __name__ == "__main__":
    main()
