"""Time of a session's first and later launches, fits, transforms, and of a cross-validation.

    .venv/bin/python benchmarks/sessions.py [--rounds 3] [--write] [--json PATH]

A round is two new drivers with warm `local[2]` sessions and 2 ranks. One calls `run(fn)` with one allreduce, twice. The other fits
200,000 rows of 32 numbers for 3 epochs three times (data materialized again each time), transforms these rows twice, and cross-validates
20,000 rows with 3 folds x 2 maps of parameters. Rounds with forks of the zygote and with fresh processes (`SPARKHVD_NURSERY=0`) alternate.

Each round also imports torch in a new interpreter: targets are ratios to it where imports dominate. CPU seconds are of all processes of the first
fit, by a control group (needs root). The waterfall shows these processes: the time from the first to the last sight of each, and its CPU. In the same
rounds TorchDistributor trains the same rows with DDP.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkouts import cpu_seconds, group
from estimator import CASES, RANKS, network, one_fit, one_peer, write_input
from launch import one_allreduce

from common import Report, Target, local_session, spread

CASE = CASES[0]
HERE = Path(__file__).parent
IMPORT = "import torch"
# Longest time: so many imports of torch of the same run, and so many seconds.
TARGETS = {
    "run(fn), first": (1.25, 0.6),
    "run(fn), later": (0.0, 0.6),
    "fit, first": (2.6, 0.0),
    "fit, later": (0.0, 1.8),
    "transform, first": (1.6, 0.0),
    "transform, later": (0.0, 0.6),
    "cross-validation": (0.0, 8.0),
}
# MiB of the idle zygote after the fits.
RESIDENT, PRIVATE = "zygote, resident", "zygote, private"
# Between two looks at the processes.
PERIOD_S = 0.02
BAR = 60


class Processes(threading.Thread):
    """Watch the processes of a control group: when each was seen, and its CPU."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self._path = path
        self._ended = threading.Event()
        self.began = time.monotonic()
        # By pid: label, first and last moment, CPU at both.
        self.seen: dict[int, list[Any]] = {}

    def run(self) -> None:
        while not self._ended.wait(PERIOD_S):
            self.look()

    def look(self) -> None:
        """Note the processes of the group."""
        now = time.monotonic() - self.began
        for pid in map(int, (self._path / "cgroup.procs").read_text().split()):
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                known = self.seen.setdefault(pid, ["", now, now, cpu, cpu])
                known[0] = label(words, name)
                known[2], known[4] = now, cpu

    def stop(self) -> list[tuple[str, float, float, float]]:
        """Stop, and list each busy process: label, first and last moment, CPU seconds."""
        self._ended.set()
        self.join()
        self.look()
        found = [
            (n, first, last, after - before) for n, first, last, before, after in self.seen.values()
        ]
        return sorted((each for each in found if each[3] >= 0.05), key=lambda each: each[1:3])


def label(words: str, name: str) -> str:
    """Name a process by its command line."""
    if name == "sparkhvd-rank":
        return "rank"
    for part, meaning in (
        ("SparkSubmit", "JVM"),
        ("sparkhvd.runner.zygote", "zygote"),
        ("pyspark.daemon", "Python worker"),
        ("sessions.py", "driver"),
    ):
        if part in words:
            return meaning
    return name


def zygote_mib(path: Path) -> tuple[float, float]:
    """Read the resident and private memory of the zygote in a control group, in MiB; 0 without a zygote."""
    for pid in map(int, (path / "cgroup.procs").read_text().split()):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")
            comm = Path(f"/proc/{pid}/comm").read_text().strip()
            if label(words, comm) != "zygote":
                continue
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
            kib = {name: int(size.split()[0]) for name, size in (x.split(":") for x in lines)}
            return kib["Rss"] / 1024, (kib["Private_Clean"] + kib["Private_Dirty"]) / 1024
    return 0.0, 0.0


def bar(first: float, last: float, whole: float) -> str:
    begin = round(BAR * first / whole)
    return "." * begin + "#" * max(1, round(BAR * last / whole) - begin)


def import_torch() -> float:
    """Import torch in a new interpreter."""
    return seconds_of(lambda: subprocess.run([sys.executable, "-c", "import torch"], check=True))


def seconds_of(fn: Callable[[], Any]) -> float:
    """Measure the time of a call."""
    began = time.monotonic()
    fn()
    return time.monotonic() - began


def cross_validate(spark: Any, path: str) -> None:
    """Fit 3 folds x 2 learning rates, and the best one again on all rows."""
    import torch
    from pyspark.ml.evaluation import RegressionEvaluator
    from pyspark.ml.tuning import CrossValidator, ParamGridBuilder

    from sparkhvd import Store, TorchEstimator

    with tempfile.TemporaryDirectory(prefix="sparkhvd-bench-") as folder:
        model = network()
        estimator = TorchEstimator(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
            loss=torch.nn.MSELoss(),
            feature_cols=["features"],
            label_cols=["label"],
            batch_size=256,
            num_proc=RANKS,
            store=Store.create(folder),
            random_seed=0,
            verbose=0,
        )
        grid = ParamGridBuilder().addGrid(estimator.epochs, [1, 2]).build()
        evaluator = RegressionEvaluator(predictionCol="prediction", labelCol="label")
        CrossValidator(
            estimator=estimator, estimatorParamMaps=grid, evaluator=evaluator, numFolds=3, seed=0
        ).fit(spark.read.parquet(path))


def fit_and_phases(when: str, fit: dict[str, float]) -> dict[str, float]:
    """Label a fit's total time and its phases (`model.timings`) with `when`."""
    phases = {f"fit, {when}: {phase}": fit[phase] for phase in ("materialize", "launch", "train")}
    return {f"fit, {when}": fit["total"], **phases}


def one_session(what: str) -> tuple[dict[str, float], list[Any]]:
    """Measure one warm session: its launches, or its fits, transforms and cross-validation.

    Returns also the processes of the first fit.
    """
    path_of_group = group()
    (path_of_group / "cgroup.procs").write_text(str(os.getpid()))
    with (
        tempfile.TemporaryDirectory(prefix="sparkhvd-bench-") as folder,
        local_session(RANKS) as spark,
    ):
        if what == "launch":
            from sparkhvd.runner import run

            found = {
                f"run(fn), {when}": seconds_of(
                    lambda: run(one_allreduce, num_proc=RANKS, verbose=0)
                )
                for when in ("first", "later")
            }
            return found, []
        path = write_input(spark, folder, CASE.rows)
        if what == "peer":
            return {"TorchDistributor + DDP": one_peer(spark, path, CASE)["total"]}, []
        small = write_input(spark, folder, 20_000)
        processes = Processes(path_of_group)
        before = cpu_seconds(path_of_group)
        processes.start()
        first = one_fit(spark, path, CASE)
        cpu_s = cpu_seconds(path_of_group) - before
        waterfall = processes.stop()
        others = [one_fit(spark, path, CASE) for _ in range(2)]
        later = min(others, key=lambda fit: fit["total"])
        found = {
            "first fit and its transform: CPU of all processes": cpu_s,
            **fit_and_phases("first", first),
            **fit_and_phases("later", later),
            "transform, first": first["transform"],
            "transform, later": min(fit["transform"] for fit in others),
            "cross-validation": seconds_of(lambda: cross_validate(spark, small)),
        }
        resident, private = zygote_mib(path_of_group)
        return {**found, RESIDENT: resident, PRIVATE: private}, waterfall


def new_session(what: str, nursery: str) -> tuple[dict[str, float], list[Any]]:
    """Measure a session in a new driver."""
    done = subprocess.run(
        [sys.executable, __file__, "--session", what],
        # Ranks import the measured functions from here.
        env={**os.environ, "SPARKHVD_NURSERY": nursery, "PYTHONPATH": str(HERE)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    seconds, waterfall = json.loads(done.stdout.splitlines()[-1])
    return seconds, waterfall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="keep the table in docs/results/")
    parser.add_argument("--json", metavar="PATH", help="write the raw numbers there")
    parser.add_argument("--session", choices=("launch", "fit", "peer"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.session:
        print(json.dumps(one_session(options.session)))
        return
    report = Report("sessions: first and later launches, fits and transforms, warm local[2]")
    found: dict[str, dict[str, list[float]]] = {"1": {}, "0": {}}
    waterfalls = []
    for number in range(options.rounds):
        found["1"].setdefault(IMPORT, []).append(import_torch())
        for nursery, what in (
            ("1", "launch"),
            ("1", "fit"),
            ("0", "launch"),
            ("0", "fit"),
            ("1", "peer"),
        ):
            seconds, waterfall = new_session(what, nursery)
            shown = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())
            print(f"round {number + 1}, SPARKHVD_NURSERY={nursery}: {shown}", flush=True)
            for name, value in seconds.items():
                found[nursery].setdefault(name, []).append(value)
            if nursery == "1" and waterfall:
                waterfalls.append((seconds["fit, first"], waterfall))
    memory = [statistics.median(found["1"].pop(name)) for name in (RESIDENT, PRIVATE)]
    imported = statistics.median(found["1"][IMPORT])
    lines: list[list[Any]] = []
    for name, values in found["1"].items():
        targets = []
        if limit := TARGETS.get(name):
            longest = limit[0] * imported + limit[1]
            targets = [Target(name, statistics.median(values), longest, at_least=False, unit="s")]
        fresh = found["0"].get(name)
        lines.append([name, spread(values), spread(fresh) if fresh else "", targets])
    report.table(["what", "zygote, s", "fresh processes, s", "targets"], lines)
    _, waterfall = sorted(waterfalls, key=lambda each: each[0])[len(waterfalls) // 2]
    whole = max(last for _, _, last, _ in waterfall)
    report.table(
        [
            "process of a first fit and its transform",
            "from, s",
            "to, s",
            "CPU, s",
            f"seen, 0 to {whole:.1f} s",
        ],
        [
            [name, f"{first:.2f}", f"{last:.2f}", f"{cpu:.2f}", f"`{bar(first, last, whole)}`"]
            for name, first, last, cpu in waterfall
        ],
    )
    report.raw.update(found)
    report.note(
        f"Median (smallest to largest) of {options.rounds} new drivers. fit: 200,000 rows x 32, 3 epochs, 2 ranks, the better of a "
        "session's two later ones; cross-validation: 20,000 rows, 3 folds x 2 maps, and the best one again. "
        "A bar is the time from the first to the last sight of a process, also while it waits. "
        f"The idle zygote has {memory[0]:,.0f} MiB resident, of which {memory[1]:,.0f} are private."
    )
    report.finish("benchmarks/sessions.py", write=options.write, json_path=options.json)


if __name__ == "__main__":
    main()
