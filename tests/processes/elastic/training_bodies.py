"""Trainings of members of an elastic job; each is called as fn(rendezvous, talk).

The model counts: row i adds 1 to its i-th weight in every epoch, so a weight tells how often its row was trained on.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
from torch.utils.data import DataLoader

import sparkhvd.torch as hvd
from sparkhvd.elastic import ElasticRendezvous
from sparkhvd.torch import elastic
from tests.harness.rank_process import Talk


class Counter(torch.nn.Module):
    """A weight for each row, whose gradient is -1 for each time that the row is in the batch."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(rows, dtype=torch.float64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return -self.weight[rows].sum()


def count_rows(rendezvous: ElasticRendezvous, talk: Talk) -> dict[str, Any]:
    """Train for some epochs; return the distinct weights."""
    plan = {"rows": 101, "epochs": 3, "batch": 4, "commit": 1, "pause": 0.0, **talk.hear()}
    hvd.init(comm=rendezvous)
    model = Counter(plan["rows"])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        named_parameters=model.named_parameters(),
        op=hvd.Sum,
        gradient_as_bucket_view=plan.get("views", False),
    )
    sampler = elastic.ElasticSampler(range(plan["rows"]), repeat=plan.get("repeat", False))
    batches = sampler.batches(plan["batch"])
    loader = DataLoader(sampler.dataset, batch_sampler=batches)  # type: ignore[arg-type]
    state = elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, sizes=[], starts=0)
    state.register_reset_callbacks([lambda: state.sizes.append(-hvd.size())])

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        talk.say({"rank": hvd.rank(), "size": hvd.size(), "generation": rendezvous.generation})
        for state.epoch in range(state.epoch, plan["epochs"]):  # noqa: B020 - an attribute of it
            given = iter(loader)
            for step in range(batches.num_steps):
                fault(plan, state, step)
                optimizer.zero_grad()
                if (rows := next(given, None)) is not None:
                    model(rows).backward()
                optimizer.step()
                if plan.get("by_index"):
                    sampler.record_indices([] if rows is None else reversed(rows.tolist()))
                else:
                    batches.record(step)
                time.sleep(plan["pause"])
                if (step + 1) % plan["commit"] == 0:
                    state.commit()
            sampler.set_epoch(state.epoch + 1)
            state.epoch += 1
            state.commit()

    train(state)
    return {
        "weights": sorted(set(model.weight.tolist())),
        "size": hvd.size(),
        "sizes": state.sizes,
        "same": torch.equal(hvd.allreduce(model.weight.detach(), op=hvd.Max), model.weight),
    }


def fault(plan: dict[str, Any], state: elastic.TorchState, number: int) -> None:
    """Die where the plan says so."""
    at = plan.get("die")
    if at is not None and (state.epoch, number) == tuple(at):
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
