"""Time to start a script on ranks of this host: `sparkhvdrun` beside `torchrun`, over what importing torch takes anyway.

    .venv/bin/python benchmarks/start.py [--rounds 9] [--many 20] [--patience 900] [--write] [--json FILE]

By turns: two `python -c 'import torch'` that are started together; `sparkhvdrun -np 2` of a script that imports torch, does one
allreduce and ends; `torchrun` of the same script. One thread per process, compiled bytecode. A round begins when the machine is quiet, and
does not count where other programs used more than a tenth of its CPUs meanwhile, while patience lasts. Then 64 ranks of a script that
imports the engine alone, meets, and ends. Targets: at most 0.4 s over the two imports of the same round, and 15 s for each start of 64
ranks.
"""

from __future__ import annotations

import argparse
import compileall
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from common import ROOT, Report, Target, median_and_quartiles

RANKS, MANY = 2, 64
LIMIT_S, MANY_LIMIT_S = 0.4, 15.0
QUIET = 0.1  # of the CPUs, for other programs

ALLREDUCE = """
import torch
import sparkhvd.torch as hvd

hvd.init()
total = hvd.allreduce(torch.ones(1), op=hvd.Sum)
assert total.item() == hvd.size() == 2
hvd.shutdown()
"""
# What `sparkhvd.torch.init()` does, without torch.
BARRIER = """
from sparkhvd import launchers
from sparkhvd.engine.engine import Engine

rendezvous = launchers.find()
with Engine(rendezvous.connect(), rendezvous.settings) as engine:
    engine.barrier().wait()
    assert engine.size == 64
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--many", type=int, default=20, help="starts of 64 ranks")
    parser.add_argument("--patience", type=float, default=900, help="seconds for rounds in quiet")
    parser.add_argument("--write", action="store_true", help="keep the tables in docs/results/")
    parser.add_argument("--json", metavar="FILE", help="every single time")
    options = parser.parse_args()
    compileall.compile_dir(str(ROOT / "sparkhvd"), quiet=1)
    report = Report("start: from the command to its end, on this host")
    with tempfile.TemporaryDirectory() as folder:
        _two_ranks(report, Path(folder), options.rounds, time.monotonic() + options.patience)
        if options.many:
            _many_ranks(report, Path(folder), options.many)
    command = f"benchmarks/start.py --rounds {options.rounds} --many {options.many}"
    report.finish(command, write=options.write, json_path=options.json)


def _two_ranks(report: Report, folder: Path, rounds: int, until: float) -> None:
    script = folder / "one_allreduce.py"
    script.write_text(ALLREDUCE)
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--master-port", "0")
    ways: dict[str, Callable[[], None]] = {
        "two imports of torch": lambda: _together([["-c", "import torch"]] * RANKS),
        "sparkhvdrun": lambda: _together([_launched(RANKS, script)]),
        "torchrun": lambda: _together([[*torchrun, str(script)]]),
    }
    walls: dict[str, list[float]] = {name: [] for name in ways}
    cpus: dict[str, list[float]] = {name: [] for name in ways}
    base = walls["two imports of torch"]
    left_out: list[float] = []
    disturbed = 0
    for way in ways.values():  # warms the page cache
        way()
    while len(base) < rounds:
        _wait_for_quiet(until)
        before = _busy()
        times = {name: _timed(way) for name, way in ways.items()}
        others = _busy() - before - sum(cpu for _, cpu in times.values())
        share = others / sum(wall for wall, _ in times.values()) / (os.cpu_count() or 1)
        counts = share <= QUIET or time.monotonic() > until
        for name, (wall, cpu) in times.items():
            print(f"{name}: {wall:.2f} s, {cpu:.2f} s of CPU, others {share:.0%}", flush=True)
            if counts:
                disturbed += share > QUIET and name == "sparkhvdrun"
                walls[name].append(wall)
                cpus[name].append(cpu)
        if not counts or share > QUIET:
            left_out.append(share)
    report.raw["others"] = left_out
    if time.monotonic() > until:
        report.note(
            "Patience ended: rounds count in which other programs used more than a tenth of the CPUs."
        )
    shares = (
        f" (they used {min(left_out):.0%} to {max(left_out):.0%} of the CPUs)" if left_out else ""
    )
    report.note(f"Rounds that other programs disturbed: {len(left_out)}{shares}.")
    rows: list[Sequence[str | Sequence[Target]]] = []
    for name in ways:
        over = [wall - other for wall, other in zip(walls[name], base, strict=True)]
        median = statistics.median(over)
        targets = [Target("over", median, LIMIT_S, at_least=False, unit="s")]
        rows.append(
            [
                name,
                median_and_quartiles(walls[name]),
                "" if walls[name] is base else _signed(over),
                median_and_quartiles(cpus[name]),
                ("not judged: disturbed" if disturbed else targets)
                if name == "sparkhvdrun"
                else "",
            ]
        )
    columns = ["2 ranks", "wall", "over the imports of its round", "CPU of all processes", "target"]
    report.table(columns, rows)
    report.raw |= {"wall": walls, "cpu": cpus}


def _many_ranks(report: Report, folder: Path, starts: int) -> None:
    script = folder / "barrier.py"
    script.write_text(BARRIER)
    walls, cpus = [], []
    for _ in range(starts):
        wall, cpu = _timed(lambda: _together([_launched(MANY, script)]))
        walls.append(wall)
        cpus.append(cpu)
        print(f"{MANY} ranks: {wall:.2f} s, {cpu:.2f} s of CPU", flush=True)
    target = [Target("slowest", max(walls), MANY_LIMIT_S, at_least=False, unit="s")]
    row = [f"{starts} starts", median_and_quartiles(walls), f"{max(walls):.2f} s"]
    columns = [f"{MANY} ranks without torch", "wall", "slowest", "CPU of all processes", "target"]
    report.table(columns, [[*row, median_and_quartiles(cpus), target]])
    report.raw |= {"many wall": walls, "many cpu": cpus}


def _launched(ranks: int, script: Path) -> list[str]:
    return ["-m", "sparkhvd.runner.command", "-np", str(ranks), sys.executable, str(script)]


def _together(commands: Sequence[Sequence[str]]) -> None:
    """Start commands of this Python at once, and wait for all of them."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    started = [
        subprocess.Popen([sys.executable, *words], env=env, stderr=subprocess.PIPE, text=True)
        for words in commands
    ]
    for process in started:
        _, errors = process.communicate(timeout=300)
        if process.returncode != 0:
            raise RuntimeError(errors)


def _timed(way: Callable[[], None]) -> tuple[float, float]:
    """Measure the wall seconds of a call, and the CPU seconds of its processes."""
    began, cpu = time.monotonic(), _cpu_of_children()
    way()
    return time.monotonic() - began, _cpu_of_children() - cpu


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _wait_for_quiet(until: float) -> None:
    """Wait until other programs leave the CPUs idle, at most until the deadline."""
    share = 1.0
    while share > QUIET and time.monotonic() < until:
        before = _busy()
        time.sleep(2)
        share = (_busy() - before) / 2 / (os.cpu_count() or 1)


def _busy() -> float:
    """Read the busy CPU seconds of this machine since boot."""
    user, nice, system, _, _, irq, soft = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def _signed(seconds: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(seconds, n=4)
    return f"{middle:+.2f} s ({low:+.2f} to {high:+.2f})"


if __name__ == "__main__":
    main()
