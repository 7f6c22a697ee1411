"""Horovod's `horovod.spark.conf`: pairs for `SparkConf.setAll()`, required by Horovod's elastic jobs.

Not needed here: a rank that dies is replaced in its task. The names are Spark's since 3.1.
"""

from typing import NoReturn

__all__ = [
    "SPARK_CONF_ALWAYS_RESTART_FAILED_TASK",
    "SPARK_CONF_BLACKLIST_DISABLED",
    "SPARK_CONF_BLACKLIST_ENABLED",
]

SPARK_CONF_ALWAYS_RESTART_FAILED_TASK = ("spark.task.maxFailures", str(2**31 - 1))
SPARK_CONF_BLACKLIST_DISABLED = ("spark.excludeOnFailure.enabled", "false")
SPARK_CONF_BLACKLIST_ENABLED = ("spark.excludeOnFailure.enabled", "true")


def __getattr__(name: str) -> NoReturn:
    if name.startswith(
        "SPARK_CONF_"
    ):  # `from ... import` would drop the message of an AttributeError
        raise ImportError(
            f"horovod.spark.conf.{name} is not in sparkhvd: elastic jobs need no setting of Spark. Leave it out, or give its "
            "name and value to SparkConf.set().",
            name=__name__,
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
