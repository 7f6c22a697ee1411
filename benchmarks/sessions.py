"""Time of a session's first and later launches, fits, transforms, and of a cross-validation.

    .venv/bin/python benchmarks/sessions.py [--rounds 3] [--write] [--json PATH]

A round is two new drivers with warm `local[2]` sessions and 2 ranks. One calls `run(fn)` with one allreduce, twice. The other fits
200,000 rows of 32 numbers for 3 epochs three times (data materialized again each time), transforms these rows twice, and cross-validates
20,000 rows with 3 folds x 2 maps of parameters. Rounds with forks of the zygote and with fresh processes (`SPARKHVD_NURSERY=0`) alternate.

Targets, with the zygote: first `run` 2.2 s, later 0.6 s; first fit 5.5 s, later 3.5 s; cross-validation 12 s; a warm transform 1.2 s.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from estimator import CASES, RANKS, network, one_fit, write_input
from launch import one_allreduce

from common import Report, Target, local_session, spread

CASE = CASES[0]
HERE = Path(__file__).parent
TARGETS = {
    "run(fn), first": 2.2,
    "run(fn), later": 0.6,
    "fit, first": 5.5,
    "fit, later": 3.5,
    "transform, later": 1.2,
    "cross-validation": 12.0,
}


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
    """Return a fit's time and its phases (`model.timings`)."""
    phases = {f"fit, {when}: {phase}": fit[phase] for phase in ("materialize", "launch", "train")}
    return {f"fit, {when}": fit["total"], **phases}


def one_session(what: str) -> dict[str, float]:
    """Measure one warm session: its launches, or its fits, transforms and cross-validation."""
    with (
        tempfile.TemporaryDirectory(prefix="sparkhvd-bench-") as folder,
        local_session(RANKS) as spark,
    ):
        if what == "launch":
            from sparkhvd.runner import run

            return {
                f"run(fn), {when}": seconds_of(
                    lambda: run(one_allreduce, num_proc=RANKS, verbose=0)
                )
                for when in ("first", "later")
            }
        path = write_input(spark, folder, CASE.rows)
        small = write_input(spark, folder, 20_000)
        first, *others = (one_fit(spark, path, CASE) for _ in range(3))
        later = min(others, key=lambda fit: fit["total"])
        return {
            **fit_and_phases("first", first),
            **fit_and_phases("later", later),
            "transform, first": first["transform"],
            "transform, later": min(fit["transform"] for fit in others),
            "cross-validation": seconds_of(lambda: cross_validate(spark, small)),
        }


def new_session(what: str, nursery: str) -> dict[str, float]:
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
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="keep the table in docs/results/")
    parser.add_argument("--json", metavar="PATH", help="write the raw numbers there")
    parser.add_argument("--session", choices=("launch", "fit"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.session:
        print(json.dumps(one_session(options.session)))
        return
    report = Report("sessions: first and later launches, fits and transforms, warm local[2]")
    found: dict[str, dict[str, list[float]]] = {"1": {}, "0": {}}
    for number in range(options.rounds):
        for nursery in found:
            for what in ("launch", "fit"):
                seconds = new_session(what, nursery)
                shown = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())
                print(f"round {number + 1}, SPARKHVD_NURSERY={nursery}: {shown}", flush=True)
                for name, value in seconds.items():
                    found[nursery].setdefault(name, []).append(value)
    lines: list[list[Any]] = []
    for name, values in found["1"].items():
        limit = TARGETS.get(name)
        median = sorted(values)[len(values) // 2]
        targets = [Target(name, median, limit, at_least=False, unit="s")] if limit else []
        lines.append([name, spread(values), spread(found["0"][name]), targets])
    report.table(["what", "zygote, s", "fresh processes, s", "targets"], lines)
    report.raw.update(found)
    report.note(
        f"Median (smallest to largest) of {options.rounds} new drivers. fit: 200,000 rows x 32, 3 epochs, 2 ranks, the better of a "
        "session's two later ones; cross-validation: 20,000 rows, 3 folds x 2 maps, and the best one again."
    )
    report.finish("benchmarks/sessions.py", write=options.write, json_path=options.json)


if __name__ == "__main__":
    main()
