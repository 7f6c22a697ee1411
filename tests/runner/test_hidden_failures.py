"""The log of the driver's JVM hides failures of ranks that the launch raises itself."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from sparkhvd.errors import RankError
from sparkhvd.runner import run
from sparkhvd.runner.live_output import hidden_failures
from sparkhvd.spark import SparkShim
from tests.harness.by_value import by_value
from tests.harness.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

travels_by_value = by_value(__name__)


class Log:
    """Messages of the JVM since the start of this object."""

    def __init__(self, spark: SparkSession) -> None:
        jvm: Any = spark._jvm  # type: ignore[attr-defined]  # classic
        self._tracker = spark.sparkContext._jsc.sc().statusTracker()  # type: ignore[union-attr]
        core = jvm.org.apache.logging.log4j.core
        self._config = jvm.org.apache.logging.log4j.LogManager.getContext(False).getConfiguration()
        self._written = jvm.java.io.StringWriter()
        layout = core.layout.PatternLayout.newBuilder().withPattern("%c %m%n%ex").build()
        self._appender = core.appender.WriterAppender.createAppender(
            layout, None, self._written, "test", False, True
        )
        self._appender.start()
        self._config.getRootLogger().addAppender(self._appender, None, None)

    def close(self) -> None:
        self._config.getRootLogger().removeAppender("test")

    def text(self, *awaited: str) -> str:
        """Return the messages when no task runs, no filter is left and these texts have appeared."""

        def is_over() -> bool:
            running = [e.numRunningTasks() for e in self._tracker.getExecutorInfos()]
            written = str(self._written.toString())
            is_there = all(text in written for text in awaited)
            return is_there and not any(running) and self._config.getFilter() is None

        wait_until(is_over, f"{awaited} logged, and filters gone", within_s=20)
        return str(self._written.toString())


@pytest.fixture
def log(spark: SparkSession) -> Iterator[Log]:
    spark.sparkContext.setLogLevel("WARN")
    opened = Log(spark)
    yield opened
    opened.close()
    spark.sparkContext.setLogLevel("ERROR")  # of the shared session


def fails() -> None:
    raise ValueError(f"on {os.environ['RANK']}")


def test_failures_of_ranks_are_hidden_from_the_spark_log(spark: SparkSession, log: Log) -> None:
    with pytest.raises(RankError, match=r"ValueError: on [01]"):
        run(fails, num_proc=2, spark=spark)
    # Tasks of the job that `test_run` cancels by this tag end, and log that, when Spark kills their Python worker.
    text = "\n".join(line for line in log.text().splitlines() if "tags interrupted" not in line)
    assert "sparkhvd" not in text
    assert "Exception in task" not in text
    assert "Lost task" not in text


def test_verbose_2_shows_failures_of_ranks_in_the_spark_log(spark: SparkSession, log: Log) -> None:
    with pytest.raises(RankError, match=r"ValueError: on [01]"):
        run(fails, num_proc=2, spark=spark, verbose=2)
    log.text("org.apache.spark.executor.Executor Exception in task", "TaskSetManager Lost task")
    assert "[sparkhvd-outcome:" in log.text()


def test_failures_of_other_jobs_stay_in_the_spark_log(spark: SparkSession, log: Log) -> None:
    raised: list[Exception] = []

    def bad(batches: Any) -> Iterator[Any]:
        raise RuntimeError("the user's own")
        yield from batches

    def other() -> None:
        try:
            spark.range(1).mapInArrow(bad, "id long").collect()
        except Exception as e:  # noqa: BLE001 - of Spark's own kind
            raised.append(e)

    thread = threading.Thread(target=other)
    with hidden_failures(SparkShim(spark), "ab12"):
        thread.start()
        thread.join()
    assert len(raised) == 1
    log.text("org.apache.spark.executor.Executor Exception in task", "TaskSetManager Lost task")
    assert "the user's own" in log.text()
    assert spark.sparkContext.getLocalProperty("mdc.sparkhvd") is None
