"""Run the corpus: `python -m tests.corpus.run [--only NAME ...]`, which is `make corpus`.

One Spark session serves all cases. Each case adds a line of JSON to `results.jsonl` in the folder of results, and a case with a
line is skipped, so an interrupted run continues. The page is written from these lines.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import sparkhvd
from tests.corpus import page
from tests.corpus.case import BATCH, Case
from tests.corpus.cases import tables
from tests.corpus.ddp import Ddp
from tests.corpus.plain import Trained, train
from tests.harness import jvm
from tests.harness.paths import ROOT

# Limit of one fit on a busy machine.
FIT_TIMEOUT_S = 240
TOLERANCE = 1e-5


class TooLong(BaseException):
    """A check took longer than its limit. No `except Exception` in the code below may catch it."""


@contextlib.contextmanager
def limit(seconds: int) -> Iterator[None]:
    """Raise TooLong in the main thread after some seconds."""

    def end(*_: object) -> None:
        raise TooLong(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# ----------------------------------------------------------------------------------------------------
# Comparisons: the largest relative difference, 0.0 if all bits are equal.


def difference(found: Trained, expected: Trained) -> float:
    """Compare weights, buffers and outputs.

    Raises:
        AssertionError: names or shapes differ.
    """
    assert list(found.state) == list(expected.state), (
        f"names {sorted(set(found.state) ^ set(expected.state))[:4]} are in one state dict only"
    )
    pairs = [(n, found.state[n], v) for n, v in expected.state.items()]
    largest = max((_apart(n, a, b) for n, a, b in pairs), default=0.0)
    return max(largest, rows_apart(found.outputs, expected.outputs))


def _apart(name: str, a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape, f"{name} has shape {tuple(a.shape)}, expected {tuple(b.shape)}"
    assert a.dtype == b.dtype, f"{name} is {a.dtype}, expected {b.dtype}"
    a, b = (
        t.detach().cpu().to_dense() if t.is_sparse or t.is_quantized else t.detach().cpu()
        for t in (a, b)
    )
    if torch.equal(a, b):
        return 0.0
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    return _relative((a - b).abs().numpy(), b.abs().numpy())


def rows_apart(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """Compare outputs on all rows."""
    assert [a.shape for a in found] == [b.shape for b in expected], (
        f"outputs have shapes {[a.shape for a in found]}, expected {[b.shape for b in expected]}"
    )
    return max(
        (
            _relative(np.abs(a - b), np.abs(b))
            for a, b in zip(found, expected, strict=True)
            if not np.array_equal(a, b, equal_nan=True)
        ),
        default=0.0,
    )


def _relative(difference: np.ndarray, size: np.ndarray) -> float:
    """Return the largest difference, relative to numbers above 1."""
    value = float(np.max(difference / np.maximum(1.0, size)))
    return value if value == value else float("inf")


def outcome(value: float, tolerance: float) -> dict[str, Any]:
    return {"difference": value, "ok": value <= tolerance}


# ----------------------------------------------------------------------------------------------------
# The checks of a case.


def depends_on_batches(case: Case) -> str:
    """Return why two ranks may differ from one rank with twice the batch, or ""."""
    if case.apart:
        return case.apart
    for module in case.module().modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return "statistics of batches"
        dropout = (
            getattr(module, "p", 0) if isinstance(module, nn.modules.dropout._DropoutNd) else 0
        )
        dropout = dropout or getattr(module, "dropout", 0)
        if isinstance(dropout, float) and dropout > 0:
            return "dropout"
    return ""


def is_resumed(name: str, case: Case) -> bool:
    """Return True if a rank of the case is killed too: if its table says so, and for one case in sixteen."""
    return case.resumes or zlib.crc32(name.encode()) % 16 == 0


class Checks:
    """Runs the checks of cases on one session."""

    def __init__(self, spark: Any, ddp: Ddp, folder: Path) -> None:
        self.spark, self.ddp, self.folder = spark, ddp, folder

    def run(self, name: str, case: Case) -> dict[str, Any]:
        """Return the record of a case."""
        began = time.monotonic()
        record: dict[str, Any] = {"case": name, "date": f"{datetime.date.today()}", "checks": {}}
        if case.because:
            record["because"] = case.because
        checks = record["checks"]
        self._check(checks, "plain", lambda: {"ok": True, "weights": len(train(case).state)})
        if checks["plain"]["ok"]:
            self.one_rank(case, checks)
            self._two_ranks(name, case, checks)
            if is_resumed(name, case) and checks["one rank"]["ok"]:
                self._check(checks, "resumed", lambda: self._resumed(case))
        record["seconds"] = round(time.monotonic() - began, 1)
        return record

    def _check(
        self, checks: dict[str, Any], name: str, function: Callable[[], dict[str, Any]]
    ) -> None:
        """Run a check and record its outcome, for any exception."""
        from tests.corpus.ddp import DdpFailed

        try:
            with limit(FIT_TIMEOUT_S):
                checks[name] = function()
        except (Exception, TooLong) as e:
            text = f"{type(e).__name__}: {e}"
            checks[name] = {"ok": False, "error": text[:3000]}
            if isinstance(e, DdpFailed):
                checks[name]["reference"] = True

    def _fit(self, case: Case, size: int, **changes: Any) -> Any:
        from tests.corpus.fit import dataframe, estimator

        self.df = dataframe(self.spark, case.data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return estimator(case, size=size, **changes).fit(self.df)

    def one_rank(self, case: Case, checks: dict[str, Any]) -> None:
        """Fit on one rank, transform, save and load."""
        from tests.corpus.fit import result_of, transformed

        self.fitted: Any = None

        def trains() -> dict[str, Any]:
            self.fitted = self._fit(case, 1)
            self.result = result_of(case, self.fitted)
            return outcome(difference(self.result, train(case)), case.tolerance)

        def transforms() -> dict[str, Any]:
            self.columns = transformed(self.fitted, self.df)
            return outcome(rows_apart(self.columns, self.result.outputs), TOLERANCE)

        def saves() -> dict[str, Any]:
            path = str(self.folder / "saved")
            shutil.rmtree(path, ignore_errors=True)
            self.fitted.write().save(path)
            loaded = sparkhvd.TorchModel.load(path, trust=True)
            value = difference(result_of(case, loaded), self.result)
            return outcome(max(value, rows_apart(transformed(loaded, self.df), self.columns)), 0.0)

        self._check(checks, "one rank", trains)
        if self.fitted is not None:
            self._check(checks, "transform", transforms)
            if checks["transform"]["ok"]:
                self._check(checks, "saved", saves)

    def _two_ranks(self, name: str, case: Case, checks: dict[str, Any]) -> None:
        from tests.corpus.fit import result_of

        found: list[Trained] = []

        def trains() -> dict[str, Any]:
            found.append(result_of(case, self._fit(case, 2)))
            if case.no_ddp or case.has_closure:
                return {"ok": True, "no reference": case.no_ddp or CLOSURE}
            value = difference(found[0], self.ddp.train(name))
            return outcome(value, max(case.tolerance, case.ddp_tolerance))

        def twice() -> dict[str, Any]:
            expected = train(case, batch=2 * BATCH)
            value = difference(found[0], expected)
            # Adam turns the rounding error of a zero gradient, such as that of an attention's key bias, into steps of its rate.
            outputs = rows_apart(found[0].outputs, expected.outputs)
            return outcome(min(value, outputs), case.twice_tolerance)

        self._check(checks, "two ranks", trains)
        if found and (why := depends_on_batches(case)):
            checks["twice the batch"] = {"ok": True, "no reference": why}
        elif found:
            self._check(checks, "twice the batch", twice)

    def _resumed(self, case: Case) -> dict[str, Any]:
        from tests.corpus.fit import KillOnce, result_of

        marker = self.folder / "killed"
        marker.unlink(missing_ok=True)
        changes = {
            "callbacks": [KillOnce(str(marker))],
            "max_retries": 1,
            "checkpoint_interval_s": 0.01,
        }
        result = result_of(case, self._fit(case, 1, **changes))
        assert marker.exists(), "the rank was not killed"
        return outcome(difference(result, self.result), 0.0)


CLOSURE = "each rank of DistributedDataParallel would use its own loss for a decision"


# ----------------------------------------------------------------------------------------------------
# The command.


@contextlib.contextmanager
def session() -> Iterator[Any]:
    """Start the session. Its ranks have one thread, like the plain loops."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    for name, value in jvm.environment().items():
        os.environ.setdefault(name, value)
    from pyspark.sql import SparkSession

    from sparkhvd.runner import job

    job._fixed_threads = lambda *_: 1  # type: ignore[assignment]
    builder = SparkSession.builder.master("local[2]").appName("sparkhvd-corpus")
    conf = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "2g",
        "spark.sql.shuffle.partitions": "1",
        "spark.python.daemon.module": "tests.harness.warm_daemon",
    }
    for key, value in conf.items():
        builder = builder.config(key, value)
    with tempfile.TemporaryDirectory() as warehouse:
        spark = builder.config("spark.sql.warehouse.dir", warehouse).getOrCreate()
        spark.sparkContext.setLogLevel("OFF")
        try:
            yield spark
        finally:
            spark.stop()


def by_value() -> None:
    """Pickle the cases by value, like the classes and functions of a user's notebook."""
    import cloudpickle
    from pyspark import cloudpickle as of_spark

    names = [n for n in sys.modules if n.startswith("tests.corpus")]
    for pickler in (cloudpickle, of_spark):
        for name in names:
            pickler.register_pickle_by_value(sys.modules[name])


def libraries() -> list[str]:
    """Return the distributions of the environment of the corpus."""
    lines = (ROOT / "tests" / "corpus" / "requirements.txt").read_text().splitlines()
    names = [re.split(r"[<>=]", line)[0] for line in lines if line and not line.startswith("#")]
    return ["torchvision", *names]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.corpus.run", description=__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="cases or tables to run again, such as torch_layers.Linear or torch_losses",
    )
    parser.add_argument("--failed", action="store_true", help="run the cases again that differed")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "corpus", metavar="FOLDER")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results" / "corpus.md")
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    lines = arguments.results / "results.jsonl"
    done = page.load(lines)
    cases = {f"{table}.{case.name}": case for table, found in tables() for case in found}
    chosen = [
        n
        for n in cases
        if not arguments.only or any(n == o or n.startswith(f"{o}.") for o in arguments.only)
    ]
    if arguments.failed:
        chosen = [n for n in chosen if n in done and not page.is_equal(done[n])]
    elif not arguments.only:
        chosen = [n for n in chosen if n not in done]
    torch.set_num_threads(1)
    if chosen:
        run(chosen, cases, lines)
    arguments.page.write_text(page.text(page.load(lines), list(cases), libraries()))
    return 0


def run(chosen: list[str], cases: dict[str, Case], lines: Path) -> None:
    """Run cases and add their records."""
    with tempfile.TemporaryDirectory() as folder, Ddp() as ddp, session() as spark:
        by_value()
        checks = Checks(spark, ddp, Path(folder))
        for number, name in enumerate(chosen, 1):
            record = checks.run(name, cases[name])
            with lines.open("a") as sink:
                sink.write(json.dumps(record) + "\n")
            print(f"{number}/{len(chosen)} {page.line(record)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
