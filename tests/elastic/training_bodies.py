"""Trainings of members of an elastic job. Each is called as fn(rendezvous, talk).

The model counts: row i adds 1 to its i-th weight in every epoch, so a weight tells how often its row was used for training.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from typing import Any

import torch
from torch.utils.data import DataLoader

import sparkhvd
import sparkhvd.torch as hvd
from sparkhvd.elastic import ElasticRendezvous
from sparkhvd.rendezvous import SocketRendezvous, install_rendezvous
from sparkhvd.torch import elastic
from tests.harness.paths import ROOT
from tests.harness.rank_process import Talk


class Counter(torch.nn.Module):
    """A weight per row. Its gradient is -1 for each occurrence of the row in the batch."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(rows, dtype=torch.float64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return -self.weight[rows].sum()


def count_rows(rendezvous: ElasticRendezvous, talk: Talk) -> dict[str, Any]:
    """Train for some epochs, and return the distinct weights."""
    plan = {"rows": 101, "epochs": 3, "batch": 4, "commit": 1, "pause": 0.0, **talk.hear()}
    hvd.init(comm=rendezvous, process_sets=plan.get("sets"))
    model = Counter(plan["rows"])
    sharded = plan.get("sharded", False)
    # Adagrad's state counts like the weights of SGD: the square of a gradient of -1 is 1.
    plain = torch.optim.Adagrad if sharded else torch.optim.SGD
    optimizer = hvd.DistributedOptimizer(
        plain(model.parameters(), lr=1.0),
        named_parameters=model.named_parameters(),
        op=hvd.Sum,
        gradient_as_bucket_view=plan.get("views", False),
        sharded=sharded,
    )
    sampler = elastic.ElasticSampler(range(plan["rows"]), repeat=plan.get("repeat", False))
    batches = sampler.batches(plan["batch"])
    loader = DataLoader(sampler.dataset, batch_sampler=batches)  # type: ignore[arg-type]
    state = Faulty(model, optimizer, sampler=sampler, epoch=0, sizes=[], taken=0)
    state.plan, state.rendezvous = plan, rendezvous
    state.register_reset_callbacks([lambda: state.sizes.append(-hvd.size())])
    state.register_reset_callbacks([lambda: state.die("reset")])

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        talk.say({"rank": hvd.rank(), "size": hvd.size(), "generation": rendezvous.generation})
        for state.epoch in range(state.epoch, plan["epochs"]):  # noqa: B020 - an attribute of it
            while state.epoch == plan.get("waits_in") and hvd.size() < plan["size"]:
                time.sleep(plan["pause"])
                state.commit()  # where a new rank joins, however slowly it starts
            given = iter(loader)
            for step in range(batches.num_steps):
                fault(plan, state, step)
                optimizer.zero_grad()
                if (rows := next(given, None)) is not None:
                    model(rows).backward()
                optimizer.step()
                state.taken += 1
                if plan.get("by_index"):
                    sampler.record_indices([] if rows is None else reversed(rows.tolist()))
                else:
                    batches.record(step)
                time.sleep(plan["pause"])
                if (step + 1) % plan["commit"] == 0:
                    state.commit()
                elif plan.get("checks"):
                    state.check_host_updates()
            sampler.set_epoch(state.epoch + 1)
            state.epoch += 1
            state.commit()
            if "until" in plan:
                is_over = torch.tensor(float(os.path.exists(plan["until"])))
                if hvd.allreduce(is_over, op=hvd.Max, name="until"):
                    break

    train(state)
    kept = optimizer.state_dict()["state"][0] if sharded else {"sum": torch.zeros(1), "step": 0}
    return {
        "counted": sorted(set(kept["sum"].tolist())),
        "steps": int(kept["step"]),
        "taken": state.taken,
        "epochs": state.epoch,
        "weights": sorted(set(model.weight.tolist())),
        "size": hvd.size(),
        "sizes": state.sizes,
        "same": torch.equal(hvd.allreduce(model.weight.detach(), op=hvd.Max), model.weight),
    }


def prepare(rendezvous: ElasticRendezvous, talk: Talk) -> dict[str, Any]:
    """Join a running job, and train when the test says so."""
    hvd.init(comm=rendezvous)
    try:
        hvd.allreduce(torch.ones(1))
    except sparkhvd.NotInitializedError as error:
        talk.say({"rank": hvd.rank(), "size": hvd.size(), "error": str(error)})
    return count_rows(rendezvous, talk)


def reduce_for_ever(rendezvous: SocketRendezvous, talk: Talk) -> None:
    """Reduce in a job whose ranks cannot change, until it fails."""
    hvd.init(comm=rendezvous)

    @elastic.run
    def train(state: elastic.ObjectState) -> None:
        talk.say("reduces")
        while True:
            hvd.allreduce(torch.ones(1))
            state.commit()

    train(elastic.ObjectState(step=0))


def run_twice(rendezvous: ElasticRendezvous, talk: Talk) -> dict[str, Any]:
    """Run a finished function once more. Rank 0 dies in the second run."""
    hvd.init(comm=rendezvous)

    @elastic.run
    def train(state: elastic.ObjectState, *, dies: bool) -> int:
        while state.step < 20:
            state.step += 1
            if dies and state.step == 10 and hvd.size() == 3 and hvd.rank() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.allreduce(torch.ones(1))
            state.commit()
        return hvd.size()

    first = train(elastic.ObjectState(step=0), dies=False)
    second = train(elastic.ObjectState(step=0), dies=True)
    del talk
    return {"sizes": [first, second]}


def normalize(rendezvous: ElasticRendezvous, talk: Talk) -> dict[str, Any]:
    """Normalize with the statistics of all ranks, before the death of rank 0 and after it."""
    hvd.init(comm=rendezvous)
    layer = hvd.SyncBatchNorm(2)

    @elastic.run
    def train(state: elastic.TorchState) -> tuple[int, bool]:
        while True:
            rows = torch.randn(5, 2) * (1 + hvd.rank())
            expected = torch.nn.BatchNorm1d(2)(hvd.allgather(rows))[5 * hvd.rank() :][:5]
            is_right = torch.allclose(layer(rows), expected, atol=1e-5)
            state.step += 1
            if state.step == 3 and hvd.rank() == 0 and hvd.size() == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            if not is_right or (state.step > 5 and hvd.size() == 2):
                return hvd.size(), is_right
            state.commit()

    del talk
    size, is_right = train(elastic.TorchState(layer, None, step=0))
    return {"size": size, "is_right": is_right}


def change_often(rendezvous: ElasticRendezvous, talk: Talk) -> list[int]:
    """Meet repeatedly without a garbage collection, and return the number of descriptors each time."""
    hvd.init(comm=rendezvous)
    gc.disable()
    model = torch.nn.Linear(100, 100)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    found = []

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        while state.step < 6:
            model(torch.ones(2, 100)).sum().backward()
            optimizer.step()
            state.step += 1
            found.append(len(os.listdir("/proc/self/fd")))
            state.on_hosts_updated()
            state.commit()

    del talk
    train(elastic.TorchState(model, optimizer, step=0))
    return found


class Faulty(elastic.TorchState):
    """State of a rank that dies in a method, in a generation, as its plan says: `{"die_in": ("sync", 2)}`."""

    plan: dict[str, Any]
    rendezvous: ElasticRendezvous

    def die(self, where: str) -> None:
        if tuple(self.plan.get("die_in", ())) == (where, self.rendezvous.generation):
            os.kill(os.getpid(), signal.SIGKILL)

    def sync(self) -> None:
        self.die("sync")
        super().sync()
        self.die("synced")

    def check_host_updates(self) -> None:
        self.die("commit")
        super().check_host_updates()


def fault(plan: dict[str, Any], state: elastic.TorchState, number: int) -> None:
    """Die where the plan says so."""
    here = [state.epoch, number]
    if plan.get("leave") == here:
        sys.exit(0)
    if "update" in plan and here == [1, 2] and hvd.size() == 3:
        state.on_hosts_updated(update_res=plan["update"])
    at = plan.get("die")
    if at is not None and (state.epoch, number) == tuple(at):
        sys.stdout.flush()
        if "with" in plan:
            os.kill(plan["with"], signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def run_page(rendezvous: ElasticRendezvous, talk: Talk) -> dict[str, Any]:
    """Run the script of docs/elastic.md, in which rank 1 of 3 dies in the second epoch."""
    page = (ROOT / "docs" / "elastic.md").read_text()
    install_rendezvous(rendezvous)
    script = page.partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {"__name__": "train"}
    steps = []

    def record(batches: elastic.ElasticBatches, step: int) -> None:
        original(batches, step)
        steps.append(step)
        if len(steps) == 7 and hvd.rank() == 1 and hvd.size() == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    original, elastic.ElasticBatches.record = elastic.ElasticBatches.record, record  # type: ignore[method-assign]
    exec(compile(script, "docs/elastic.md", "exec"), names)  # noqa: S102 - ours
    del talk
    return {"size": hvd.size(), "weights": names["model"].weight.tolist()}


def run_horovod_script(rendezvous: ElasticRendezvous, talk: Talk) -> dict[str, Any]:
    """Train as Horovod's examples do, with its own names. Rank 0 of 3 dies."""
    sparkhvd.install_as_horovod()
    install_rendezvous(rendezvous)
    import horovod.torch as horovod

    horovod.init()
    rows = torch.arange(50)
    sampler = horovod.elastic.ElasticSampler(rows, shuffle=False)
    loader = DataLoader(rows, batch_size=4, sampler=sampler)  # type: ignore[arg-type]
    model = Counter(50)
    optimizer = horovod.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), op=horovod.Sum
    )
    lengths = []

    @horovod.elastic.run  # type: ignore[untyped-decorator]
    def train(state: Any) -> None:
        while state.epoch < 3:
            lengths.append((len(sampler), sampler.total_size))
            for number, batch in enumerate(loader):
                if state.epoch == 1 and number == 2 and horovod.rank() == 0 and horovod.size() == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                state.model(batch).backward()
                state.optimizer.step()
                state.sampler.record_batch(number, 4)
                if number % 2 == 0:
                    state.commit()
                else:
                    state.check_host_updates()
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
            state.commit()

    train(horovod.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0))
    del talk
    return {"size": horovod.size(), "lengths": lengths, "weights": sorted(model.weight.tolist())}
