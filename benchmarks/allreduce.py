"""Time of an allreduce of two processes, beside Gloo, Open MPI and the limit of the machine.

    .venv/bin/python benchmarks/allreduce.py [--rounds 15] [--pin] [--sizes "4 B,1 MiB"] [--json FILE] [--write]

Both ranks load all libraries and alternate between them, in the same processes, on the same float32 tensors; a round
measures every library once. Each call is timed from its start until this rank has the result, and the slower rank
counts; small tensors come in runs of calls, as in a training loop. Legs:

    registered       `hvd.allreduce_` on tensors in registered memory (`hvd.registered_empty`)
    arbitrary        `hvd.allreduce_` on tensors of torch's own allocator
    C++ registered, C++ arbitrary      the same engine in a C++ loop (native/bench, two processes of its own, each on its CPU)
    Gloo             `torch.distributed`
    Open MPI         mpi4py, in place (`pip install '.[bench]'`; without it the table has no such column)
    bare direct      two processes, memory shared before, each adds up half of both buffers and stores to both
    bare chunked     two processes, private memory, chunks through shared slots, nothing else

Also one training step of `DistributedOptimizer` on an MLP 32-64-1 with batches of 256, next to the same step
without communication.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import Report, Target, median_and_quartiles, native_program, percentile, shown

KIB, MIB = 1 << 10, 1 << 20
SIZES = {
    "4 B": 4,
    "4 KiB": 4 * KIB,
    "64 KiB": 64 * KIB,
    "1 MiB": MIB,
    "4 MiB": 4 * MIB,
    "16 MiB": 16 * MIB,
    "64 MiB": 64 * MIB,
    "256 MiB": 256 * MIB,
}
STEPS = 300
STEP_MAY_ADD_S = 300e-6
# Names of the C++ program's legs, and ours.
NATIVE_LEGS = {
    "registered": "C++ registered",
    "engine": "C++ arbitrary",
    "direct": "bare direct",
    "chunked": "bare chunked",
}
LEGS = ("registered", "arbitrary", *NATIVE_LEGS.values(), "Gloo", "Open MPI")
TIMEOUT_S = 900

Times = dict[str, dict[str, list[float]]]


# --- In the ranks ---


class NativeLoops:
    """C++ program for measurements in two separate processes. For rank 0 only."""

    def __init__(self, program: Path) -> None:
        self._process = subprocess.Popen(
            [str(program), "--serve", "--pin"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._legs = [leg for leg in self._line().split() if leg in NATIVE_LEGS]

    def round(self, num_bytes: int) -> dict[str, list[float]]:
        """Measure the seconds of each call in the slower process, by leg."""
        return {NATIVE_LEGS[leg]: self._times(leg, num_bytes) for leg in self._legs}

    def _times(self, leg: str, num_bytes: int) -> list[float]:
        assert self._process.stdin
        self._process.stdin.write(f"{leg} {num_bytes} {calls_of(num_bytes)}\n")
        self._process.stdin.flush()
        return [float(us) * 1e-6 for us in self._line().split()]

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def _line(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args}: ended with {self._process.wait()}.")
        return line


def calls_of(num_bytes: int) -> int:
    """Choose the number of consecutive calls of a leg in one round."""
    return max(2, min(200, 16 * MIB // num_bytes))


def timed(call: Callable[[Any], Any], tensor: Any, calls: int) -> list[float]:
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        call(tensor)
        times.append(time.perf_counter() - began)
    return times


def measure(plan: Mapping[str, Any], mpi: Any = None) -> Times:
    """Measure the seconds of every call, by size and leg, in a rank after `hvd.init()`."""
    import torch

    import sparkhvd.torch as hvd

    torch.set_num_threads(1)
    if plan["pin"]:
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpus[hvd.rank() % len(cpus)]})
    calls = python_legs(mpi)
    native = NativeLoops(Path(plan["native"])) if plan["native"] and hvd.rank() == 0 else None
    found: Times = {}
    for label, num_bytes in plan["sizes"].items():
        tensors = dict.fromkeys(calls, torch.zeros(num_bytes // 4))
        if "registered" in calls:
            tensors["registered"] = hvd.registered_empty((num_bytes // 4,), torch.float32).zero_()
        found[label] = {}
        for number in range(plan["rounds"] + 1):
            times = {}
            for name, call in calls.items():
                hvd.barrier()
                times[name] = timed(call, tensors[name], calls_of(num_bytes))
            hvd.barrier()
            if native:
                times |= native.round(num_bytes)
            # Rank 1 sleeps here while the C++ program has the machine.
            hvd.barrier()
            for name, seconds in times.items() if number > 0 else ():  # the first round warms up
                found[label].setdefault(name, []).extend(seconds)
    if native:
        native.close()
    found["training step"] = steps()
    return found


def python_legs(mpi: Any) -> dict[str, Callable[[Any], Any]]:
    """Join Gloo's process group, and make the in-place allreduce functions by name."""
    import torch.distributed as dist

    import sparkhvd.torch as hvd

    with tempfile.NamedTemporaryFile() if hvd.rank() == 0 else open(os.devnull) as meeting:
        place = hvd.broadcast_object(meeting.name, 0)
        dist.init_process_group(
            "gloo", init_method=f"file://{place}", rank=hvd.rank(), world_size=hvd.size()
        )
        hvd.barrier()

    def with_sparkhvd(tensor: Any) -> None:
        hvd.allreduce_(tensor, name="x", op=hvd.Sum)

    calls: dict[str, Callable[[Any], Any]] = {"arbitrary": with_sparkhvd, "Gloo": dist.all_reduce}
    if hasattr(hvd, "registered_empty"):
        calls["registered"] = with_sparkhvd
    if mpi is not None:
        calls["Open MPI"] = lambda tensor: mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, tensor.numpy())
    return calls


def steps() -> dict[str, list[float]]:
    """Measure the seconds of training steps with and without the exchange of gradients, in turns."""
    import torch
    from torch import nn

    import sparkhvd.torch as hvd

    torch.manual_seed(0)
    x, y = torch.randn(256, 32), torch.randn(256, 1)
    loops: dict[str, Callable[[], None]] = {}

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def step() -> None:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()

        return step

    for name in ("sparkhvd", "no communication"):
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if name == "sparkhvd":
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        loops[name] = loop(model, optimizer)
    times: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(STEPS + 20):
        for name, step in loops.items():
            if number % 20 == 0:
                hvd.barrier()
            began = time.perf_counter()
            step()
            if number >= 20:
                times[name].append(time.perf_counter() - began)
    return times


def rank_of_local_run(plan: Mapping[str, Any]) -> Times:
    """Measure a rank without Open MPI."""
    import sparkhvd.torch as hvd

    hvd.init()
    return measure(plan)


def rank_under_mpirun(plan: Mapping[str, Any], result: str) -> None:
    """Measure in a rank of Open MPI. The ranks exchange their addresses through MPI."""
    import secrets

    from mpi4py import MPI

    import sparkhvd.torch as hvd
    from sparkhvd.rendezvous import Job, Listener, SocketRendezvous
    from sparkhvd.settings import Settings

    settings, comm = Settings(), MPI.COMM_WORLD
    listener = Listener.bind("127.0.0.1", settings)
    endpoints = tuple(comm.allgather(listener.endpoint()))
    key = comm.bcast(secrets.token_bytes(32))
    job = Job(key, "benchmark", 0, comm.rank, comm.size, endpoints)
    hvd.init(SocketRendezvous(job, listener, settings))
    ranks = comm.gather(measure(plan, MPI))
    hvd.shutdown()
    if comm.rank == 0:
        Path(result).write_text(json.dumps(ranks))


# --- The one who starts them ---


def mpirun() -> str | None:
    """Find Open MPI's launcher, if mpi4py is there too."""
    try:
        import mpi4py  # noqa: F401 - whether it is installed
    except ImportError:
        return None
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def launch(plan: Mapping[str, Any], report: Report) -> list[Times]:
    """Start both ranks and return their times."""
    launcher = mpirun()
    if launcher is None:
        report.note("Without Open MPI: mpi4py or mpirun is missing; pip install '.[bench]'.")
        from sparkhvd.runner import run_local

        return list(run_local(rank_of_local_run, (plan,), num_proc=2))
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "times.json"
        command = [launcher, "--allow-run-as-root", "--bind-to", "none", "-n", "2"]
        rank = [sys.executable, __file__, "--plan", json.dumps(plan), "--result", str(result)]
        subprocess.run([*command, *rank], check=True, timeout=TIMEOUT_S)
        ranks: list[Times] = json.loads(result.read_text())
        return ranks


def slower(ranks: Sequence[Times]) -> Times:
    """Take the longer time of each call.

    Legs measured on rank 0 alone already have the longer time of both.
    """
    return {
        label: {
            leg: [
                max(pair)
                for pair in zip(*(rank[label].get(leg, times) for rank in ranks), strict=True)
            ]
            for leg, times in legs.items()
        }
        for label, legs in ranks[0].items()
    }


def registered_targets(num_bytes: int, median: Mapping[str, float]) -> list[Target]:
    targets: list[Target] = []
    if "registered" in median:
        ours = median["registered"]
        if num_bytes >= 64 * KIB:
            least = 8 if num_bytes > 64 * MIB else 10
            targets.append(Target("Gloo", median["Gloo"] / ours, least, at_least=True))
        if num_bytes >= 4 * MIB and "bare direct" in median:
            targets.append(Target("bare time", ours / median["bare direct"], 1.5, at_least=False))
        if num_bytes >= 64 * MIB and "Open MPI" in median:
            least = 4 if num_bytes > 64 * MIB else 5
            targets.append(Target("Open MPI", median["Open MPI"] / ours, least, at_least=True))
    if "C++ registered" in median and num_bytes >= MIB:
        ratio = median["C++ registered"] / median["bare direct"]
        targets.append(Target("C++ bare time", ratio, 1.5, at_least=False))
    return targets


def arbitrary_targets(num_bytes: int, times: Mapping[str, list[float]]) -> list[Target]:
    median = {leg: statistics.median(values) for leg, values in times.items()}
    ours, targets = median["arbitrary"], []
    if num_bytes == 4:
        targets.append(Target("median", ours * 1e6, 50, at_least=False, unit="us"))
        p99, gloo = percentile(times["arbitrary"], 0.99), median["Gloo"]
        targets.append(
            Target("p99 against Gloo's median", p99 * 1e6, gloo * 1e6, at_least=False, unit="us")
        )
    if num_bytes >= 64 * KIB:
        least = 4 if num_bytes >= 64 * MIB else 5
        targets.append(Target("Gloo", median["Gloo"] / ours, least, at_least=True))
    if "Open MPI" in median:
        theirs = median["Open MPI"]
        if num_bytes >= 64 * MIB:
            targets.append(Target("Open MPI", theirs / ours, 1, at_least=True))
        elif num_bytes >= MIB:
            targets.append(Target("Open MPI's time", ours / theirs, 1.25, at_least=False))
        else:
            more = (ours - theirs) * 1e6
            targets.append(Target("more than Open MPI", more, 15, at_least=False, unit="us"))
    return targets


def fill(report: Report, times: Times) -> None:
    by_size = {label: legs for label, legs in times.items() if label in SIZES}
    legs = [leg for leg in LEGS if any(leg in found for found in by_size.values())]
    report.table(
        ["float32", *legs],
        [
            [label, *(median_and_quartiles(found[leg]) for leg in legs)]
            for label, found in by_size.items()
        ],
    )
    if "registered" not in legs:
        report.note("Without registered buffers: this sparkhvd has no hvd.registered_empty.")
    if "C++ registered" not in legs and "C++ arbitrary" in legs:
        report.note("The C++ program does not measure registered buffers.")
    rows: list[list[str | list[Target]]] = []
    for label, found in by_size.items():
        median = {leg: statistics.median(values) for leg, values in found.items()}
        num_bytes = SIZES[label]
        rows.append(
            [label, registered_targets(num_bytes, median), arbitrary_targets(num_bytes, found)]
        )
    report.table(["targets", "registered", "arbitrary"], rows)
    step = times["training step"]
    with_us, without = (statistics.median(step[name]) for name in ("sparkhvd", "no communication"))
    limit = Target(
        "longer", (with_us - without) * 1e6, STEP_MAY_ADD_S * 1e6, at_least=False, unit="us"
    )
    report.table(
        ["", "sparkhvd", "no communication", "target"],
        [["training step", *(median_and_quartiles(values) for values in step.values()), [limit]]],
    )
    if "4 B" in by_size:
        smallest = by_size["4 B"]
        tail = ", ".join(
            f"{leg} {shown(percentile(values, 0.99))}" for leg, values in smallest.items()
        )
        report.note(f"99th percentiles of 4 B: {tail}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", help="only these, as the table writes them, with commas")
    parser.add_argument(
        "--pin",
        action="store_true",
        help="Python's ranks too have a CPU each, with all their threads",
    )
    parser.add_argument("--json", help="a file for the raw numbers")
    parser.add_argument("--write", action="store_true", help="keep the tables in docs/results/")
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plan:
        return rank_under_mpirun(json.loads(options.plan), options.result)
    load = os.getloadavg()[0]
    pinned = ", each on its CPU" if options.pin else ""
    report = Report(
        f"allreduce: 2 processes of one host{pinned}, float32, load {load:.1f} at the start"
    )
    names = options.sizes.split(",") if options.sizes else SIZES
    plan = {
        "rounds": options.rounds,
        "sizes": {name: SIZES[name] for name in names},
        "native": native_program("allreduce_bench", report),
        "pin": options.pin,
    }
    report.raw = slower(launch(plan, report))
    fill(report, report.raw)
    report.note(
        f"Median (25 % to 75 %) of {options.rounds} rounds. Every round measures each column."
    )
    return report.finish("benchmarks/allreduce.py", write=options.write, json_path=options.json)


if __name__ == "__main__":
    main()
