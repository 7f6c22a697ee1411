"""Sessions of classic Spark and of Spark Connect: checks, keys, and the active one."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any, cast

from sparkhvd.errors import InvalidArgumentError

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession
    from typing_extensions import TypeIs

__all__ = [
    "active_session",
    "check_dataframe",
    "check_session",
    "connect_session",
    "has_died",
    "is_stopped",
    "is_connect",
    "is_dataframe",
    "ml_context",
    "running_tasks",
    "session_key",
]


def check_session(spark: object) -> None:
    """Refuse a value that is not a session, and a session that has been stopped.

    Raises:
        InvalidArgumentError: `spark` is not a SparkSession, or has been stopped.
    """
    if not (type(spark).__module__.startswith("pyspark.") and hasattr(spark, "range")):
        raise InvalidArgumentError(
            f"spark is {spark!r}; it must be a SparkSession, for example df.sparkSession."
        )
    if is_stopped(spark):
        raise InvalidArgumentError(
            "The Spark session has been stopped. Start a new one, and make the DataFrame from it."
        )


def is_stopped(session: Any) -> bool:
    """Return True if a session (on classic: its application) has been stopped."""
    if is_connect(session):
        return bool(getattr(session, "is_stopped", False))
    return session.sparkContext._jsc is None


def check_dataframe(call: str, value: object) -> None:
    """Refuse a value that is not a DataFrame of Spark.

    Args:
        call: or argument that got it, for the message.
        value: given.

    Raises:
        InvalidArgumentError: it is none; the message says how to make one.
    """
    if is_dataframe(value):
        return
    kind = type(value)
    remedy = "spark.createDataFrame(...) makes one"
    if hasattr(value, "to_spark"):  # of pandas on Spark
        remedy = "frame.to_spark() makes one"
    elif kind.__module__.partition(".")[0] == "pandas":
        remedy = "spark.createDataFrame(frame) makes one"
    raise InvalidArgumentError(
        f"{call} got a {kind.__module__.partition('.')[0]}.{kind.__name__}; it takes a DataFrame of Spark: {remedy}."
    )


def is_connect(spark: SparkSession) -> bool:
    """Return True for a session of Spark Connect."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def session_key(spark: SparkSession) -> str:
    """Return the key of a session; two objects of one session have one key."""
    session: Any = spark
    if is_connect(spark):
        return str(session.session_id)
    return str(session._jsparkSession.sessionUUID())


def has_died(spark: SparkSession) -> bool:
    """Return True if a classic driver's JVM no longer answers."""
    from py4j.protocol import Py4JError

    if is_connect(spark):
        return False
    session: Any = spark
    try:
        session._jvm.java.lang.System.nanoTime()
    except (OSError, Py4JError):
        return True
    return False


def running_tasks(spark: SparkSession, tag: str) -> tuple[int, int] | None:
    """Return how many tasks of the jobs with a tag have begun, and how many others of the application run; None where that is unknown."""
    if is_connect(spark):
        return None
    context: Any = spark.sparkContext
    with contextlib.suppress(Exception):  # of another Spark, or the application is over
        tracker = context.statusTracker()
        tagged = context._jsc.sc().statusTracker().getJobIdsForTag(tag)
        jobs = [tracker.getJobInfo(job) for job in tagged]
        mine = {stage for job in jobs if job is not None for stage in job.stageIds}
        own = others = 0
        for number in {*mine, *tracker.getActiveStageIds()}:
            stage = tracker.getStageInfo(number)
            if stage is None:
                continue
            if number in mine:
                own += stage.numActiveTasks + stage.numCompletedTasks + stage.numFailedTasks
            else:
                others += stage.numActiveTasks
        return (own, others) if mine else None
    return None


def ml_context(spark: SparkSession) -> SparkSession | SparkContext:
    """Return the argument of Spark ML's readers and writers of metadata: the session, before pyspark 4 its context."""
    import pyspark

    return spark.sparkContext if pyspark.__version__.startswith("3.") else spark


def active_session() -> SparkSession:
    """Return the active session of this thread, classic or Connect.

    Raises:
        InvalidArgumentError: there is none.
    """
    from pyspark.sql import SparkSession

    session: SparkSession | None = SparkSession.getActiveSession()
    if session is None:  # a thread or connection of its own has only the default session
        with contextlib.suppress(Exception):
            session = SparkSession.active()
    if session is None:
        with contextlib.suppress(ImportError):  # the client's packages may be absent
            from pyspark.sql.connect.session import SparkSession as ConnectSession

            session = cast("SparkSession | None", ConnectSession.getActiveSession())
    if session is None:
        raise InvalidArgumentError(
            "There is no active Spark session. Start one, or give spark=<session>."
        )
    return session


def connect_session() -> SparkSession | None:
    """Return the active session of Spark Connect in this process, or None."""
    module = sys.modules.get("pyspark.sql.connect.session")
    if module is None:
        return None
    kind = module.SparkSession
    for find in (kind.getActiveSession, getattr(kind, "_get_default_session", lambda: None)):
        with contextlib.suppress(NotImplementedError):  # Spark 3.4's client has no active session
            session: SparkSession | None = find()
            if session is not None:
                return session
    return None


def is_dataframe(value: object) -> TypeIs[DataFrame]:
    """Return True for a DataFrame, classic or Connect."""
    return hasattr(value, "sparkSession") and hasattr(value, "schema")
