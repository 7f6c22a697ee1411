"""Spark configuration under which stages of ranks can run."""

from __future__ import annotations

from collections.abc import Mapping

from sparkhvd.errors import PreflightError

__all__ = ["CONF_KEYS", "check_conf", "is_dynamic"]

_SQL_IDLE = "spark.sql.execution.pyspark.udf.idleTimeoutSeconds"
_SQL_KILL = "spark.sql.execution.pyspark.udf.killOnIdleTimeout"
_CORE_IDLE = "spark.python.worker.idleTimeoutSeconds"
_CORE_KILL = "spark.python.worker.killOnIdleTimeout"
_DYNAMIC = "spark.dynamicAllocation.enabled"

CONF_KEYS = (_DYNAMIC, _SQL_IDLE, _SQL_KILL, _CORE_IDLE, _CORE_KILL)


def is_dynamic(conf: Mapping[str, str]) -> bool:
    """Return True if executors come and go by themselves."""
    return conf.get(_DYNAMIC, "").lower() == "true"


def check_conf(conf: Mapping[str, str], *, is_barrier: bool = True) -> None:
    """Refuse a Spark configuration under which a stage of ranks fails or is killed.

    Args:
        conf: of Spark.
        is_barrier: whether all of its tasks start together.

    Raises:
        PreflightError: dynamic allocation is on, or Spark kills Python workers that are silent.
    """
    if is_barrier and is_dynamic(conf):
        raise PreflightError(
            f"{_DYNAMIC} is true, and Spark refuses barrier stages then. "
            f"Start the session with {_DYNAMIC}=false and spark.executor.instances=<number>."
        )
    for idle, kill in ((_SQL_IDLE, _SQL_KILL), (_CORE_IDLE, _CORE_KILL)):
        seconds = _seconds(conf.get(idle, "0"))
        # The SQL pair falls back to the core pair where it is not set.
        kills = conf.get(kill) or conf.get(_CORE_KILL, "")
        if seconds > 0 and kills.lower() == "true":
            raise PreflightError(
                f"{idle}={seconds} with {kill}=true: Spark would kill every rank after {seconds} s, "
                f"because a rank sends no rows before it ends. Set {kill}=false."
            )


def _seconds(text: str) -> int:
    digits = text.strip().lower().removesuffix("s")
    return int(digits) if digits.isdigit() else 0
