"""Memory of the driver with a large model: fit with Adam, transform, save and load, each in a process of its own.

The bound: at most 2 x the model + 300 MB above the process's memory before it, with everything imported, the session running and a small
model fitted, saved and loaded. The module passed to `fit` is one of the two, and so is the existing model before transform and save. The
bound covers the process's own memory (anonymous and shared, polled every 2 ms). The kernel's peak of all resident pages since the call
began also includes mapped files, which the kernel reclaims. JVM and trainer are separate processes, whose peaks are shown beside.

A trainer has weights, gradients, Adam's state and its copy for a checkpoint: 7 x the trained parameters, 2 x the rest. So a third of the
largest model is trained.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import Report, Target, local_session

CALLS = ("fit", "transform", "save", "load")
COLUMNS = [
    "model",
    "call",
    "s",
    "own / model",
    "own beyond 2 x the model in MB",
    "resident / model",
    "JVM in MB",
    "largest other process / model",
    "store at most / model",
    "store afterwards / model",
]
OWN = ("RssAnon", "RssShmem")
RESIDENT = (*OWN, "RssFile")
MAY_ADD = 300e6


def status(pid: int | str) -> dict[str, int]:
    """Read the memory of a process in bytes: RssAnon, RssShmem, RssFile, VmHWM."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = (line.partition(":") for line in lines if line.startswith(("Rss", "VmHWM")))
    return {name: int(value.split()[0]) << 10 for name, _, value in fields}


def of(found: dict[str, int], names: tuple[str, ...]) -> int:
    """Add up some kinds of memory."""
    return sum(found[name] for name in names)


def descendants() -> dict[int, str]:
    """Find the descendants of this process: command by process id."""
    parents, commands = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command, _, rest = (entry / "stat").read_text().rpartition(")")
            parents[int(entry.name)] = int(rest.split()[1])
            commands[int(entry.name)] = command.partition("(")[2]
    found, new = set(), {os.getpid()}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new}
        found |= new
    return {pid: commands[pid] for pid in found}


def used(folder: Path) -> int:
    """Add up the sizes of the files below a folder."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


class Peaks:
    """The most memory of this process, its JVM and the others below it, and of files in the store, inside a block."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._ended = threading.Event()
        (self._jvm,) = (pid for pid, command in descendants().items() if command == "java")
        self._others: set[int] = set()
        self.found = {"others": 0, "store": 0}

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Measure a block, beyond what there is before it."""
        for pid in (os.getpid(), self._jvm):
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the peak
        before = status("self")
        thread = threading.Thread(target=self._look)
        # In a separate process, because a thread waits for the interpreter's lock.
        command = [sys.executable, __file__, "--sample", str(os.getpid())]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as sampler:
            assert sampler.stdout is not None
            sampler.stdout.readline()
            thread.start()
            began = time.monotonic()
            try:
                yield
            finally:
                self.found["milliseconds"] = round(1e3 * (time.monotonic() - began))
                self.found["resident"] = status("self")["VmHWM"] - of(before, RESIDENT)
                self._ended.set()
                thread.join()
                sampler.send_signal(signal.SIGINT)
                self.found["own"] = int(sampler.stdout.readline()) - of(before, OWN)
        self.found |= {"jvm": status(self._jvm)["VmHWM"], "left": used(self._store)}

    def _look(self) -> None:
        while not self._ended.wait(0.05):
            self.found["store"] = max(self.found["store"], used(self._store))
            for pid in descendants().keys() - {self._jvm}:
                with contextlib.suppress(OSError, KeyError):
                    self.found["others"] = max(self.found["others"], of(status(pid), OWN))


def sample(pid: int) -> None:
    """Sample another process's own memory until interrupted, then print the peak."""
    largest = 0
    print("ready", flush=True)
    try:
        while True:
            largest = max(largest, of(status(pid), OWN))
            time.sleep(0.002)
    except KeyboardInterrupt:
        print(largest, flush=True)


@dataclass(frozen=True)
class Case:
    """Model to measure: size in MB (10^6 bytes), and trained part of its three large layers."""

    megabytes: int
    trained: float

    @staticmethod
    def parse(text: str) -> Case:
        """Parse "3000:0.33"."""
        megabytes, _, trained = text.partition(":")
        return Case(int(megabytes), float(trained or 1))

    def __str__(self) -> str:
        part = f", {self.trained:.0%} trained" if self.trained < 1 else ""
        return f"{self.megabytes:,} MB{part}"

    def network(self) -> Any:
        import torch
        from torch import nn

        side = 4096 if self.megabytes > 50 else 64
        wide = max(2, self.megabytes * 10**6 // (12 * side))
        torch.manual_seed(0)
        large = [nn.Linear(side, wide), nn.Linear(wide, side), nn.Linear(side, wide)]
        for layer in large[: 3 - round(3 * self.trained)]:
            layer.requires_grad_(False)
        return nn.Sequential(nn.Linear(2, side), *large, nn.Linear(wide, 1))


def measure(case: Case, call: str, folder: Path) -> dict[str, int]:
    """Measure one call in this process."""
    import torch
    import torch._dynamo
    from torch import nn

    from sparkhvd import Store, TorchEstimator, TorchModel

    def fit(case: Case) -> TorchModel:
        net = case.network()
        optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=1e-6)
        return TorchEstimator(
            model=net, optimizer=optimizer, loss=nn.MSELoss(), feature_cols=["x"], label_cols=["y"], batch_size=8, num_proc=1,
            verbose=0, store=store, max_retries=0,
        ).fit(df)  # fmt: skip

    saved = str(folder / "saved")
    with local_session(2, memory="1g") as spark:
        rows = [([i / 10, 1 - i / 10], i % 2 + 0.5) for i in range(8)]
        df = spark.createDataFrame(rows, "x array<double>, y double")
        store = Store.create(folder / "store")
        # So that everything is imported and has run once.
        small = fit(Case(0, 1))
        small.transform(df).collect()
        small.write().overwrite().save(f"{saved}-small")
        TorchModel.load(f"{saved}-small")
        peaks = Peaks(folder / "store")
        if call == "fit":
            with peaks.measured():
                model = fit(case)
            model.save(saved)
        elif call == "load":
            with peaks.measured():
                model = TorchModel.load(saved)
        else:
            before = status("self")
            model = TorchModel.load(saved, trust=True)  # with its store
            there = status("self")
            with peaks.measured():
                model.transform(df).collect() if call == "transform" else model.save(f"{saved}-2")
            for name, kinds in (("own", OWN), ("resident", RESIDENT)):
                peaks.found[name] += of(there, kinds) - of(before, kinds)
        size = sum(p.nbytes for p in model._fitted.module.parameters())
    return {**peaks.found, "size": size}


def row(case: Case, call: str, found: dict[str, int]) -> list[Any]:
    """Format a line of the table."""
    size = found["size"]
    beyond = (found["own"] - 2 * size) / 1e6
    times = {n: f"{found[n] / size:.2f}" for n in ("own", "resident", "others", "store", "left")}
    return [
        str(case), call, f"{found['milliseconds'] / 1e3:.1f}", times["own"], [Target("beyond", beyond, MAY_ADD / 1e6, False, "MB")],
        times["resident"], f"{found['jvm'] / 1e6:.0f}", times["others"], times["store"], times["left"],
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--models", nargs="+", default=["600", "3000:0.33"], help="MB, and the part that is trained"
    )
    parser.add_argument("--write", action="store_true", help="keep the table in docs/results/")
    parser.add_argument("--json", metavar="FILE", help="write the raw numbers there")
    for name in ("--call", "--folder", "--sample"):  # of the processes that this one starts
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sample:
        sample(int(options.sample))
        return
    if options.call:
        found = measure(Case.parse(options.models[0]), options.call, Path(options.folder))
        print(json.dumps(found))
        return
    report = Report("driver_memory: what a large model needs on the driver")
    lines = []
    for model in options.models:
        with tempfile.TemporaryDirectory(prefix="sparkhvd-bench-") as folder:
            for call in CALLS:
                flags = ["--models", model, "--call", call, "--folder", folder]
                out = subprocess.check_output([sys.executable, __file__, *flags], text=True)
                found = json.loads(out.splitlines()[-1])
                print(model, call, found, flush=True)
                report.raw[f"{model} {call}"] = found
                lines.append(row(Case.parse(model), call, found))
    report.table(COLUMNS, lines)
    flags = " ".join(["--models", *options.models])
    report.finish(
        f"benchmarks/driver_memory.py {flags}", write=options.write, json_path=options.json
    )


if __name__ == "__main__":
    main()
