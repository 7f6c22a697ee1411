"""torch.distributed over this engine beside Gloo, two ranks on this host, in turns inside the same two processes.

    python -m benchmarks.backend [--rounds 9] [--json FILE] [--write]

all_reduce by size, also of registered memory and beside a copy of as many bytes on both ranks at once; what the adapter adds to
`hvd.allreduce_`; steps of DDP and FSDP2 beside one without communication, one of DDP whose hook sends nothing and one with our
optimizer; and, where root may make network namespaces, all_reduce between two of them. A round is one turn of each. A cell is
the median over rounds (25 % to 75 %); targets are held against medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sparkhvd.torch as hvd
from benchmarks.common import Report, Target, median_and_quartiles
from sparkhvd.runner import run_local
from tests.harness.netns import two_hosts, why_not
from tests.harness.ranks_on_hosts import ranks_on

SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
# Times Gloo's, by size.
FASTER_THAN_GLOO = {4: 1.5, 64 << 10: 3, 1 << 20: 5, 16 << 20: 5, 64 << 20: 5}
REGISTERED_FROM, FASTER_WHEN_REGISTERED = 1 << 20, 8
ADAPTER_US, ADAPTER_AT = 15, 4 << 10
# Times a step without communication.
STEPS = {"DDP, MLP": 1.15, "DDP, 121 layers": 1.30}
FSDP_FASTER_THAN_GLOO = 1.5
BETWEEN_HOSTS = {1 << 20: None, 64 << 20: 2.0}
HOSTS_S = 300.0

# DDP as it stands, and with gradients that are views of its buckets.
VIEWS = {"": False, ", views": True}

COLUMNS = ("hvd", "sparkhvd", "registered", "Gloo", "copy")  # of all_reduce

Times = dict[str, list[float]]


def in_turns(calls: Mapping[str, Callable[[], object]], repeats: int, rounds: int) -> Times:
    """Measure the seconds of each call in rounds. The first round warms up."""
    times: Times = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            hvd.barrier()
            began = time.perf_counter()
            for _ in range(repeats):
                call()
            if number:
                times[name].append((time.perf_counter() - began) / repeats)
    return times


def mlp() -> nn.Module:
    """Build 18.9 M parameters in few tensors."""
    return nn.Sequential(
        nn.Linear(1024, 3072), nn.ReLU(), nn.Linear(3072, 4096), nn.ReLU(), nn.Linear(4096, 784)
    )


def deep() -> nn.Module:
    """Build 121 small layers."""
    return nn.Sequential(*[nn.Linear(128, 128) for _ in range(121)])


def step(model: Any, width: int, optimizer: Any = None) -> Callable[[], object]:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(64, width)

    def run() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return run


def sends_nothing(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Hand the bucket back: what is left is DDP's own work."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def data_parallel(make: Callable[[], nn.Module], width: int, gloo: Any) -> dict[str, Any]:
    """Make a training step for each kind of data parallelism."""
    import sparkhvd.distributed

    sends_nothing.__annotations__ = sparkhvd.distributed.ddp_hook.__annotations__  # no texts
    own = make()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(own.parameters(), lr=1e-4), own.named_parameters()
    )
    steps = {"none": step(make(), width)}
    for label, hook in (("DDP alone", sends_nothing), ("sparkhvd", None)):
        for views, as_views in VIEWS.items():
            model = DistributedDataParallel(make(), gradient_as_bucket_view=as_views)
            if hook is not None:
                model.register_comm_hook(None, hook)
            steps[label + views] = step(model, width)
    hooked = DistributedDataParallel(make(), gradient_as_bucket_view=True)
    hooked.register_comm_hook(None, sparkhvd.distributed.ddp_hook)
    return steps | {
        "ddp_hook, views": step(hooked, width),
        "Gloo": step(DistributedDataParallel(make(), process_group=gloo), width),
        "hvd optimizer": step(own, width, optimizer),
    }


def sharded(gloo: Any) -> dict[str, Any]:
    """Make a training step with FSDP2 over each backend."""
    steps = {"none": step(mlp(), 1024)}
    for label, group in (("sparkhvd", dist.group.WORLD), ("Gloo", gloo)):
        model = mlp()
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        steps[label] = step(model, 1024)
    return steps


def rank(rounds: int) -> tuple[dict[int, Times], dict[str, Times]]:
    """Measure on both ranks. Only the times of rank 0 count."""
    import sparkhvd.distributed  # noqa: F401 - this function travels by value, without the module's imports

    torch.set_num_threads(1)
    hvd.init()
    dist.init_process_group("sparkhvd")
    gloo = dist.new_group(backend="gloo")
    reduced = {}
    for size in SIZES:
        plain, registered = torch.zeros(size // 4), hvd.registered_empty(size // 4)
        calls: dict[str, Callable[[], object]] = {
            "hvd": lambda t=plain: hvd.allreduce_(t, op=hvd.Sum),  # type: ignore[misc]
            "sparkhvd": lambda t=plain: dist.all_reduce(t),  # type: ignore[misc]
            "registered": lambda t=registered: dist.all_reduce(t),  # type: ignore[misc]
            "Gloo": lambda t=plain: dist.all_reduce(t, group=gloo),  # type: ignore[misc]
        }
        if size >= REGISTERED_FROM:
            source, target = plain.numpy(), np.zeros(size // 4, np.float32)
            calls["copy"] = lambda s=source, t=target: np.copyto(t, s)  # type: ignore[misc]
        reduced[size] = in_turns(calls, max(2, min(300, (32 << 20) // size)), rounds)
    stepped = {
        "DDP, MLP": in_turns(data_parallel(mlp, 1024, gloo), 4, rounds),
        "DDP, 121 layers": in_turns(data_parallel(deep, 128, gloo), 4, rounds),
        "FSDP2, MLP": in_turns(sharded(gloo), 4, rounds),
    }
    return reduced, stepped


def host_rank(rendezvous: Any, talk: Any) -> None:
    """Measure all_reduce of a rank on a host of its own."""
    import sparkhvd.distributed  # noqa: F401 - registers the backend

    torch.set_num_threads(1)
    order = talk.hear()
    os.environ["GLOO_SOCKET_IFNAME"] = order["device"]
    hvd.init(rendezvous)
    dist.init_process_group("sparkhvd", order["url"], rank=hvd.rank(), world_size=hvd.size())
    gloo = dist.new_group(backend="gloo")
    found = {}
    for size in BETWEEN_HOSTS:
        tensor = torch.zeros(size // 4)
        calls: dict[str, Callable[[], object]] = {
            "sparkhvd": lambda t=tensor: dist.all_reduce(t),  # type: ignore[misc]
            "Gloo": lambda t=tensor: dist.all_reduce(t, group=gloo),  # type: ignore[misc]
        }
        found[size] = in_turns(calls, max(2, (16 << 20) // size), order["rounds"])
    talk.say(list(found.items()))
    dist.destroy_process_group()
    hvd.shutdown()


def between_hosts(rounds: int) -> dict[int, Times]:
    """Measure between two network namespaces. Only the times of rank 0 count."""
    with (
        two_hosts() as hosts,
        ranks_on(hosts, "benchmarks.backend:host_rank", with_engine=False) as ranks,
    ):
        url = f"tcp://{hosts[0].address}:29577"
        for rank, host in zip(ranks, hosts, strict=True):
            rank.tell({"device": host.device, "url": url, "rounds": rounds})
        answers = [rank.expect(HOSTS_S) for rank in ranks]
        return dict(answers[0])


def add_between_hosts(report: Report, found: Mapping[int, Times]) -> None:
    """Add the table of all_reduce between two network namespaces."""
    rows: list[list[Any]] = []
    for size, times in found.items():
        middle = {name: statistics.median(each) for name, each in times.items()}
        least, ratio = BETWEEN_HOSTS[size], middle["Gloo"] / middle["sparkhvd"]
        targets = [] if least is None else [Target("Gloo /", ratio, least, at_least=True)]
        rows.append([str(size), *map(median_and_quartiles, times.values()), targets])
    report.table(["all_reduce between two hosts, bytes", "sparkhvd", "Gloo", "targets"], rows)


def add_reductions(report: Report, reduced: Mapping[int, Times]) -> None:
    """Add the table of all_reduce."""
    rows: list[list[Any]] = []
    for size, times in reduced.items():
        middle = {name: statistics.median(each) for name, each in times.items()}
        targets = []
        if size in FASTER_THAN_GLOO:
            ratio = middle["Gloo"] / middle["sparkhvd"]
            targets.append(Target("Gloo /", ratio, FASTER_THAN_GLOO[size], at_least=True))
        if size >= REGISTERED_FROM:
            ratio = middle["Gloo"] / middle["registered"]
            limit = FASTER_WHEN_REGISTERED
            targets.append(Target("registered: Gloo /", ratio, limit, at_least=True))
        if size == ADAPTER_AT:
            added = (middle["sparkhvd"] - middle["hvd"]) * 1e6
            targets.append(Target("adapter", added, ADAPTER_US, at_least=False, unit="us"))
        cells = [median_and_quartiles(times[name]) if name in times else "" for name in COLUMNS]
        rows.append([str(size), *cells, targets])
    names = ["hvd.allreduce_", "sparkhvd", "sparkhvd, registered", "Gloo", "numpy.copyto"]
    report.table(["all_reduce, bytes", *names, "targets"], rows)


def add_steps(report: Report, stepped: Mapping[str, Times]) -> None:
    """Add the table of training steps."""
    columns = list(next(iter(stepped.values())))
    rows: list[list[Any]] = []
    for name, times in stepped.items():
        middle = {each: statistics.median(values) for each, values in times.items()}
        if name in STEPS:
            ratio = middle["sparkhvd"] / middle["none"]
            targets = [Target("sparkhvd / none", ratio, STEPS[name], at_least=False)]
        else:
            ratio = middle["Gloo"] / middle["sparkhvd"]
            targets = [Target("Gloo / sparkhvd", ratio, FSDP_FASTER_THAN_GLOO, at_least=True)]
        cells = [
            f"{median_and_quartiles(times[each])}, {middle[each] / middle['none']:.2f} x"
            if each in times
            else ""
            for each in columns
        ]
        rows.append([name, *cells, targets])
    report.table(["step", *columns, "targets"], rows)


def main() -> None:
    """Print the tables, with the load of the machine before and after."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    report = Report("torch.distributed over the engine, beside Gloo: two ranks on one host")
    before = os.getloadavg()[0]
    reduced, stepped = run_local(rank, args=(options.rounds,), num_proc=2)[0]
    add_reductions(report, reduced)
    add_steps(report, stepped)
    report.raw = {"all_reduce": reduced, "steps": stepped}
    if reason := why_not():
        report.note(f"Not measured between two hosts: {reason}.")
    else:
        report.raw["between hosts"] = between_hosts(options.rounds)
        add_between_hosts(report, report.raw["between hosts"])
    report.note(f"{options.rounds} rounds.")
    report.note("Cells: median (25 % to 75 %), and the ratio to the step without communication.")
    report.note(
        "\n- DDP alone: DDP with a communication hook that sends nothing. This is DDP's own time with any backend.\n"
        "- views: with gradient_as_bucket_view=True.\n"
        "- ddp_hook: with sparkhvd.distributed.ddp_hook.\n"
        "- hosts: network namespaces.\n"
        "- numpy.copyto: each of the two processes copies the same bytes, at the same time.\n"
    )
    report.note(
        f"Load of the machine: {before:.1f} before, {os.getloadavg()[0]:.1f} after (of which 2 are this program)."
    )
    if before > 1:
        report.note("Other programs used the processors. An idle machine gives other figures.")
    report.finish("backend.py", write=options.write, json_path=options.json)


if __name__ == "__main__":
    main()
