"""Training of an elastic job, which tests call as a function with and without Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def train(folder: str, wanted: int, fault: str = "") -> tuple[int, list[int], int, float]:
    """Train until a generation of so many ranks has made a few steps, and return rank, sizes of the generations, steps and the weight.

    Args:
        folder: for marks.
        wanted: number of ranks.
        fault: "process" or "executor": the last rank kills it once, and the training ends in a later generation. "coordinator": the rank beside it
            kills its Spark task. "elsewhere": something else makes the mark.
    """
    import os
    import socket
    import time

    import torch

    import sparkhvd.torch as hvd
    from tests.harness import faults

    kill = {
        "process": faults.kill_self,
        "executor": faults.kill_executor,
        "coordinator": faults.kill_python_worker,
    }

    def is_chosen() -> bool:
        if fault == "coordinator":
            return not mark.exists() and faults.serves_elastic_job()
        return hvd.rank() == wanted - 1

    hvd.init()
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), named_parameters=model.named_parameters()
    )
    mark = Path(folder, "killed")

    @hvd.elastic.run
    def loop(state: Any) -> tuple[int, list[int], int, float]:
        state.sizes = [*state.sizes, hvd.size()]
        place = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()]
        names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        assert place == [int(os.environ[f"HOROVOD_{name}"]) for name in names]
        assert os.environ["HOROVOD_HOSTNAME"] == socket.gethostname()
        while state.full < 5:
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            state.step += 1
            is_whole = hvd.size() == wanted
            if fault and state.step >= 5 and is_whole and is_chosen():
                Path(folder, "whole").touch()
                if fault != "elsewhere" and not mark.exists():
                    mark.touch()
                    kill[fault]()
            state.full += is_whole and (mark.exists() or not fault) and state.sizes[-1] == wanted
            time.sleep(0.02)
            state.commit()
        return hvd.rank(), state.sizes, state.step, float(model.weight)

    return loop(hvd.elastic.TorchState(model, optimizer, step=0, full=0, sizes=[]))


def count_rows(rows: int, epochs: int, pause_s: float) -> list[float]:
    """Train a weight for each row, which tells how often its row was trained on, and return the distinct ones."""
    import time

    import torch
    from torch.utils.data import DataLoader

    import sparkhvd.torch as hvd

    hvd.init()
    weight = torch.nn.Parameter(torch.zeros(rows, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), named_parameters=[("weight", weight)], op=hvd.Sum
    )
    sampler = hvd.elastic.ElasticSampler(range(rows))
    batches = sampler.batches(4)
    loader = DataLoader(sampler.dataset, batch_sampler=batches)  # type: ignore[arg-type]
    model = torch.nn.ParameterList([weight])

    @hvd.elastic.run
    def loop(state: Any) -> list[float]:
        while state.epoch < epochs:
            given = iter(loader)
            for step in range(batches.num_steps):
                optimizer.zero_grad()
                if (numbers := next(given, None)) is not None:
                    (-weight[numbers].sum()).backward()
                optimizer.step()
                batches.record(step)
                time.sleep(pause_s)
                state.commit()
            sampler.set_epoch(state.epoch + 1)
            state.epoch += 1
            state.commit()
        return sorted(set(weight.tolist()))

    return loop(hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0))
