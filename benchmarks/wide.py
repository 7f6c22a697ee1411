"""Tables of many columns of one number each: fit and transform beside Spark's own write of them.

    .venv/bin/python benchmarks/wide.py [--columns 2000] [--write]

2,000 rows of doubles in one Parquet file, a new `local[2]` session with a heap of 6 GB, because with 2 GB Spark cannot write 10,000 columns, in this order: a read by pyarrow in this process, Spark's write of
what it reads (the first one and the next), the first fit of one epoch on one rank, the next fit, two transforms into Spark's `noop`
sink, the fit's report, save and load. Seconds of the clock, and of the CPU of driver and workers. Memory is the largest sum of resident pages, looked at every 0.2 s, of the JVM and of
all Python processes: driver, workers, zygote and rank, which share some pages. Targets: fit up to the first step and transform take at most 1.5 times
Spark's own write and pyarrow's read. Both ratios are printed, to Spark's first write, whose JVM is cold, and to its next.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from materialize import cpu_seconds

from common import Report, Target, local_session

ROWS, BATCH, LIMIT = 2000, 100, 1.5
PERIOD_S = 0.2


class Memory(threading.Thread):
    """Largest resident memory of the JVM and of this process with all Python processes below, since `reset`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.jvm = self.python = 0

    def reset(self) -> None:
        self.jvm = self.python = 0

    def run(self) -> None:
        while True:
            jvm = python = 0
            below: dict[int, list[int]] = {}
            pages: dict[int, int] = {}
            for folder in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):  # it has ended
                    parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                    below.setdefault(int(parent), []).append(int(folder.name))
                    pages[int(folder.name)] = int((folder / "statm").read_text().split()[1])
            waiting = [os.getpid()]
            while waiting:
                pid = waiting.pop()
                waiting += below.get(pid, [])
                name = ""
                with contextlib.suppress(OSError):
                    name = Path(f"/proc/{pid}/comm").read_text().strip()
                if name == "java":
                    jvm += pages.get(pid, 0)
                else:
                    python += pages.get(pid, 0)
            self.jvm, self.python = max(self.jvm, jvm), max(self.python, python)
            time.sleep(PERIOD_S)


def before_first_step(model: Any) -> float:
    """Sum the seconds of the fit's phases before the first step."""
    phases = [(each["name"], each["seconds"]) for each in model.report().document["phases"]]
    names = [name for name, _ in phases]
    return sum(taken for _, taken in phases[: names.index("first step")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--columns", type=int, default=2000)
    parser.add_argument("--write", action="store_true", help="keep the table in docs/results/")
    given = parser.parse_args()

    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch

    from sparkhvd import TorchEstimator, TorchModel

    names = [f"x{i}" for i in range(given.columns)]
    values = np.random.default_rng(0).random((ROWS, given.columns))
    seconds: dict[str, float] = {}
    memory = Memory()
    memory.start()
    rows: list[list[Any]] = []
    with tempfile.TemporaryDirectory() as folder, local_session(2, "6g") as spark:
        path = str(Path(folder, "wide.parquet"))
        pq.write_table(
            pa.table({**{n: values[:, i] for i, n in enumerate(names)}, "y": values[:, 0]}), path
        )
        df = spark.read.parquet(path)

        def target(taken: float) -> list[Target]:
            found = []
            for which in ("first", "next"):
                beside = seconds[f"Spark's write, the {which}"] + seconds["pyarrow's read"]
                found.append(Target(f"of the {which} write and read", taken / beside, LIMIT, False))
            return found

        def timed(name: str, run: Callable[[], Any], *, has_target: bool = False) -> Any:
            memory.reset()
            cpu, began = cpu_seconds(spark) + time.process_time(), time.perf_counter()
            result = run()
            seconds[name] = time.perf_counter() - began
            spent = cpu_seconds(spark) + time.process_time() - cpu
            targets = target(seconds[name]) if has_target else []
            mib = [
                pages * os.sysconf("SC_PAGE_SIZE") / 2**20 for pages in (memory.jvm, memory.python)
            ]
            sizes = [f"{size:,.0f}" if size else "" for size in mib]
            rows.append([name, f"{seconds[name]:.2f}", f"{spent:.2f}", *sizes, targets])
            return result

        def write() -> None:
            df.write.mode("overwrite").parquet(f"{folder}/out")

        estimator = TorchEstimator(
            model=torch.nn.Linear(given.columns, 1),
            optimizer=torch.optim.Adam,
            loss="mse",
            feature_cols=names,
            label_cols=["y"],
            epochs=1,
            batch_size=BATCH,
            num_proc=1,
            verbose=0,
        )
        timed("pyarrow's read", lambda: pq.read_table(path))
        timed("Spark's write, the first", write)
        timed("Spark's write, the next", write)
        model = timed("fit, the first", lambda: estimator.fit(df))
        before = before_first_step(model)
        step = "fit, the first: before its first step"
        rows.append([step, f"{before:.2f}", "", "", "", target(before)])
        timed("fit, the next", lambda: estimator.fit(df))
        for which in ("first", "next"):
            timed(
                f"transform, the {which}",
                lambda: model.transform(df).write.format("noop").mode("overwrite").save(),
                has_target=which == "first",
            )
        timed("report", lambda: model.report().save(f"{folder}/report.html"))
        timed("save", lambda: model.save(f"{folder}/model"))
        loaded = timed("load", lambda: TorchModel.load(f"{folder}/model"))
        assert loaded.history == model.history
    report = Report(f"wide: {ROWS:,} rows of {given.columns:,} columns of one number")
    report.table(
        [
            "step",
            "s",
            "CPU s of driver and workers",
            "JVM, MiB",
            "Python processes, MiB",
            "target",
        ],
        rows,
    )
    report.finish("benchmarks/wide.py", write=given.write, json_path=None)


if __name__ == "__main__":
    main()
