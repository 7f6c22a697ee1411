"""`run_elastic`: elastic training in tasks of Spark."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparkhvd.errors import ElasticError, InvalidArgumentError, PreflightError, RankError
from sparkhvd.horovod import spark as horovod_spark
from sparkhvd.runner import driver_port, run_elastic
from tests.harness.by_value import by_value
from tests.harness.elastic_fn import train
from tests.harness.processes import wait_for_no_trainers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

travels_by_value = by_value(__name__)
pytestmark = [pytest.mark.spark, pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def no_trainer_is_left() -> Iterator[None]:
    yield
    assert wait_for_no_trainers() == set()


def changes(stream: str) -> list[str]:
    return re.findall(r"^sparkhvd: (\d+ (?:ranks?|-> \d+).*)$", stream, re.MULTILINE)


def test_a_killed_trainer_is_replaced_and_no_step_is_lost(
    spark: SparkSession, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    results = run_elastic(
        train, (str(tmp_path), 2), {"fault": "process"}, num_proc=2, min_num_proc=1, spark=spark
    )
    assert [rank for rank, *_ in results] == [0, 1]
    for _, sizes, steps, weight in results:
        assert sizes[-1] == 2
        assert weight == -steps  # each step exactly once
    lines = changes(capfd.readouterr().err)
    # A slot that is still held by an earlier test's task joins a moment later.
    assert re.match(r"(2 ranks|1 rank) in [\d.]+ s: \d on ", lines[0]), lines
    assert re.search(r"process 1 on \S+ ended with signal SIGKILL", " ".join(lines)), lines
    assert re.search(r"process 2 on \S+ joined as rank 1$", lines[-1]), lines


@pytest.mark.usefixtures("spark")
def test_elastic_job_starts_with_the_available_slots(tmp_path: Path) -> None:
    results = horovod_spark.run_elastic(
        train, (str(tmp_path), 2), num_proc=3, min_np=1, max_num_proc=4
    )
    assert [rank for rank, *_ in results] == [0, 1]


def test_exception_before_rendezvous_ends_the_job(spark: SparkSession) -> None:
    def fails() -> None:
        raise ValueError("the cause")

    with pytest.raises(RankError, match=r"raised ValueError: the cause") as caught:
        run_elastic(fails, num_proc=2, min_num_proc=1, spark=spark)
    assert "in fails" in caught.value.traceback


def test_an_exception_on_all_ranks_ends_the_job(spark: SparkSession) -> None:
    def fails() -> None:
        import sparkhvd.torch as hvd

        hvd.init()

        @hvd.elastic.run
        def loop(_: Any) -> None:
            raise ValueError("the cause")

        loop(hvd.elastic.ObjectState(step=0))

    with pytest.raises(RankError, match=r"Rank [01] of 2 .*raised ValueError: the cause"):
        run_elastic(fails, num_proc=2, spark=spark)


def test_ranks_that_change_too_often_end_the_job(spark: SparkSession, tmp_path: Path) -> None:
    given = {"num_proc": 2, "min_num_proc": 1, "reset_limit": 0}
    with pytest.raises(ElasticError, match="reset_limit="):
        run_elastic(train, (str(tmp_path), 2), {"fault": "process"}, spark=spark, **given)


def test_an_unreachable_driver_raises_a_clear_error(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    listen = driver_port.listen
    monkeypatch.setattr(driver_port, "listen", lambda shim: (listen(shim)[0], "127.0.0.2"))
    with pytest.raises(PreflightError, match=r"The tasks cannot reach the driver \(.*refused"):
        run_elastic(print, num_proc=2, spark=spark)


def test_function_without_init_returns_results_and_prints_to_the_stream(
    spark: SparkSession,
) -> None:
    def says() -> int:
        print("a line")
        return 7

    stream = io.StringIO()
    assert run_elastic(says, num_proc=1, stdout=stream, spark=spark) == [7]
    assert stream.getvalue() == "[0] a line\n"


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (
            {"num_proc": 2, "min_num_proc": 3},
            InvalidArgumentError,
            "min_num_proc is 3, num_proc is 2",
        ),
        (
            {"min_num_proc": 2, "max_num_proc": 1},
            InvalidArgumentError,
            "min_num_proc is 2, num_proc is 2 and max_num_proc is 1",
        ),
        ({"min_num_proc": 0}, InvalidArgumentError, "min_num_proc is 0"),
        ({"num_proc": "2"}, InvalidArgumentError, "num_proc is '2'"),
        ({"num_proc": 1, "reset_limit": -1}, InvalidArgumentError, "reset_limit is -1"),
        ({"num_proc": 1, "elastic_timeout": 0.0}, InvalidArgumentError, "elastic_timeout is 0"),
        ({"num_proc": 1, "start_timeout": 0.0}, InvalidArgumentError, "start_timeout is 0"),
        (
            {"num_proc": 1, "store": "/tmp"},
            InvalidArgumentError,
            "store is '/tmp'; it must be a Store",
        ),  # noqa: S108
        ({"num_proc": 4, "min_num_proc": 3}, PreflightError, "min_num_proc is 3.* 2 tasks at once"),
    ],
)
def test_invalid_numbers_of_processes_are_refused(
    spark: SparkSession, given: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        run_elastic(print, spark=spark, **given)
