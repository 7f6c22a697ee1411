"""A rank or its task dies under `run`: it is named in time, and the next run works."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparkhvd.errors import RankError
from sparkhvd.runner import context, job, run, run_local
from sparkhvd.spark import SparkShim
from tests.harness import faults
from tests.harness.by_value import by_value
from tests.harness.meeting import meet
from tests.harness.processes import wait_for_no_trainers
from tests.harness.soak import soak

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

pytestmark = pytest.mark.spark

travels_by_value = by_value(__name__)

LIMIT_S = 10


@pytest.fixture(autouse=True)
def no_trainer_is_left() -> Iterator[None]:
    yield
    assert wait_for_no_trainers() == set()


def before_init() -> None:
    if os.environ["RANK"] == "1":
        faults.kill_self()
    meet().shutdown()


def in_an_allreduce() -> None:
    import torch

    import sparkhvd.torch as hvd

    hvd.init()
    for step in range(1000):
        if hvd.rank() == 1 and step == 3:
            faults.kill_self()
        hvd.allreduce(torch.ones(1000), name="x")


def at_exit() -> int:
    engine = meet()
    engine.barrier(name="all").wait()
    engine.shutdown()
    if engine.rank == 1:
        faults.kill_at_exit()
    return engine.rank


def in_an_allreduce_that_is_caught() -> None:
    try:
        in_an_allreduce()
    except Exception as e:
        raise RuntimeError("training failed") from e


@pytest.mark.parametrize(
    "fn",
    [
        before_init,
        pytest.param(in_an_allreduce, marks=soak("that it is caught, and without Spark, here")),
        at_exit,
        in_an_allreduce_that_is_caught,
    ],
)
def test_a_killed_rank_is_named_in_time(
    spark: SparkSession, fn: Callable[[], Any], tmp_path: Path
) -> None:
    env = {faults.HAPPENED_AT: str(tmp_path / "killed")}
    with pytest.raises(RankError, match="Rank 1 of 2 .*signal SIGKILL.*probably memory") as e:
        run(fn, num_proc=2, spark=spark, max_retries=0, env=env)
    assert faults.seconds_since(tmp_path / "killed") < LIMIT_S
    assert (e.value.rank, e.value.exit) == (1, "signal SIGKILL")


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(before_init, marks=soak("the same with Spark, here")),
        in_an_allreduce,
        pytest.param(at_exit, marks=soak("the same with Spark, here")),
    ],
)
def test_a_killed_rank_is_named_in_time_without_spark(
    fn: Callable[[], Any], tmp_path: Path
) -> None:
    with pytest.raises(RankError) as e:
        run_local(fn, num_proc=2, env={faults.HAPPENED_AT: str(tmp_path / "killed")})
    assert faults.seconds_since(tmp_path / "killed") < LIMIT_S
    assert (e.value.rank, e.value.exit) == (1, "signal SIGKILL")


def test_error_names_the_original_exception_and_not_its_consequences(spark: SparkSession) -> None:
    def fails_on_one() -> None:
        engine = meet()
        if engine.rank == 1:
            raise ValueError("the cause")
        engine.barrier(name="all").wait()

    with pytest.raises(RankError) as e:
        run(fails_on_one, num_proc=2, spark=spark)
    assert e.value.rank == 1
    assert "raised ValueError: the cause" in str(e.value)


def test_killed_python_worker_counts_as_a_loss_and_ends_its_rank(
    spark: SparkSession, tmp_path: Path
) -> None:
    def kills() -> None:
        if os.environ["RANK"] == "1":
            faults.kill_python_worker()
        time.sleep(60)

    env = {faults.HAPPENED_AT: str(tmp_path / "killed")}
    with pytest.raises(RankError) as e:
        run(kills, num_proc=2, spark=spark, max_retries=0, env=env)
    assert faults.seconds_since(tmp_path / "killed") < LIMIT_S
    assert (e.value.rank, e.value.exit) == (1, "lost")
    assert "was lost together with its Spark task" in str(e.value)


def test_lost_rank_is_relaunched_with_a_printed_notice(
    spark: SparkSession, capfd: pytest.CaptureFixture[str]
) -> None:
    """The results of the second launch exceed Spark's limit."""

    def dies_once() -> tuple[int, bytes]:
        here = context()
        assert here is not None
        if here.attempt == 0 and here.rank == 1:
            faults.kill_self()
        if here.attempt == 0:
            time.sleep(60)
        return here.attempt, bytes([here.rank]) * (5 << 20)

    report = job.launch(SparkShim(spark), dies_once, (), {}, 2, job.LaunchOptions(max_retries=1))
    assert report.results == [(1, b"\0" * (5 << 20)), (1, b"\1" * (5 << 20))]
    assert report.attempts == 2
    said = capfd.readouterr().err
    assert "sparkhvd: Rank 1 of 2 on host 127.0.0.1 ended with signal SIGKILL" in said
    assert "Relaunching (1 of 1)." in said


def test_a_large_result_lost_with_its_executor_is_recomputed(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def large(folder: str) -> bytes:
        with open(os.path.join(folder, "calls"), "a") as calls:
            calls.write("x")
        return b"r" * (5 << 20)

    loses = [True]
    collect = SparkShim.collect

    def loses_once(shim: SparkShim, stage: DataFrame, tag: str, *rest: Any) -> list[Row]:
        if tag.endswith("-results") and loses:
            loses.clear()
            spark.catalog.clearCache()
        return collect(shim, stage, tag, *rest)

    monkeypatch.setattr(SparkShim, "collect", loses_once)
    assert run(large, (str(tmp_path),), num_proc=1, spark=spark, max_retries=1) == [
        b"r" * (5 << 20)
    ]
    assert (tmp_path / "calls").read_text() == "xx"
    loses.append(True)
    with pytest.raises(RankError, match="its result was on an executor that is gone") as e:
        run(large, (str(tmp_path),), num_proc=1, spark=spark, max_retries=0)
    assert (e.value.rank, e.value.exit) == (0, "lost")
    assert (tmp_path / "calls").read_text() == "xxx"


def test_an_exception_is_not_relaunched(spark: SparkSession, tmp_path: Path) -> None:
    def fails(folder: str) -> None:
        with open(os.path.join(folder, "calls"), "a") as calls:
            calls.write("x")
        raise ValueError("always")

    with pytest.raises(RankError, match="always"):
        run(fails, (str(tmp_path),), num_proc=1, spark=spark, max_retries=2)
    assert (tmp_path / "calls").read_text() == "x"


def test_two_losses_without_progress_end_the_job(spark: SparkSession) -> None:
    seen = []

    def progress() -> int:
        seen.append(7)
        return 7

    options = job.LaunchOptions(max_retries=5, progress=progress, verbose=0)
    with pytest.raises(
        RankError, match="Not relaunched: 2 losses without progress in between"
    ) as e:
        job.launch(SparkShim(spark), faults.kill_self, (), {}, 1, options)
    assert seen == [7, 7]
    assert e.value.rank == 0
