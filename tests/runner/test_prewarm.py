"""Zygotes that tasks start before a launch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from sparkhvd import Store, TorchEstimator
from sparkhvd.runner import job
from sparkhvd.runner.options import LaunchOptions
from sparkhvd.spark import SparkShim
from tests.harness.processes import ZYGOTE, find

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def log_parent(ctx: Any) -> None:
    """Run a user's loop that only reports its process's parent."""
    ctx.log({"loss": float(os.getppid())})


def test_fit_forks_ranks_from_zygotes_of_earlier_tasks(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A separate zygote, because no other test's ranks have as many threads.
    monkeypatch.setattr(job, "_fixed_threads", lambda *_: 3)
    before, ready = find(ZYGOTE), set()

    def note_zygotes(*args: Any) -> Any:
        ready.update(find(ZYGOTE) - before)
        return job.launch(*args)

    monkeypatch.setattr("sparkhvd.estimator.estimator.launch", note_zygotes)
    df = spark.range(64).selectExpr("float(id) AS x", "float(id) AS y")
    model = torch.nn.Linear(1, 1)
    fitted = TorchEstimator(
        model=model,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train_fn=log_parent,
        feature_cols=["x"],
        label_cols=["y"],
        num_proc=1,
        store=Store.create(tmp_path),
        verbose=0,
    ).fit(df)
    assert int(fitted.history[-1]["loss"]) in ready


def test_launch_without_zygotes_starts_none_in_advance(
    spark: SparkSession,
) -> None:
    own = {"OMP_STACKSIZE": "7M"}  # no other test's: another zygote
    options = LaunchOptions(env={"SPARKHVD_NURSERY": "0"})
    assert job.prewarm(SparkShim(spark), 1, options) is None
    early = job.prewarm(SparkShim(spark), 1, LaunchOptions(env=own))
    assert early is not None
    before = find(ZYGOTE)

    def start(batches: Iterator[Any], size: int) -> Iterator[Any]:
        from pyspark import TaskContext

        from sparkhvd.runner.zygote_client import of_this_process

        # A zygote of an earlier test in this worker may have threads. The worker would start no other zygote then.
        of_this_process.forget()
        replace(early, size=size)(TaskContext.get())
        yield from batches

    for size in (0, 1):  # a task beyond the number of ranks starts none
        df = spark.range(2, numPartitions=1)
        df.mapInArrow(lambda rows, size=size: start(rows, size), "id bigint").collect()
        assert len(find(ZYGOTE) - before) == size
