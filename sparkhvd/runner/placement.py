"""Slots and threads: pure decisions from configuration, each with its reason.

A slot is room for one barrier task. Spark starts a barrier stage only when all its slots are free at once, and
waits in silence for slots that can never come; so a number that the configuration excludes is an error here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from sparkhvd.errors import InvalidArgumentError, PreflightError

__all__ = [
    "CONF_KEYS",
    "Slots",
    "choose_num_proc",
    "configured_slots",
    "executor_cores",
    "is_local",
    "threads_per_rank",
]

# Keys that the functions below read; the driver fetches only these (one request each over Connect).
CONF_KEYS = (
    "spark.master",
    "spark.task.cpus",
    "spark.executor.cores",
    "spark.executor.instances",
    "spark.cores.max",
    "spark.executor.resource.gpu.amount",
    "spark.task.resource.gpu.amount",
)

_LOCAL = re.compile(r"local(?:\[\s*([0-9]+|\*)\s*(?:,\s*[0-9]+\s*)?\])?$")
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*([0-9]+)\s*,\s*([0-9]+)\s*,\s*([0-9]+)\s*\]$")


@dataclass(frozen=True)
class Slots:
    """Most barrier tasks that a configuration can ever run at once.

    Attributes:
        maximum: that number; None when the configuration does not bound it.
        reason: the arithmetic, in the user's own conf names.
        remedy: setting to change for more.
    """

    maximum: int | None
    reason: str
    remedy: str


def is_local(master: str) -> bool:
    """Return True if a master means one process on the driver's host (`local`, `local[N]`, `local[*]`)."""
    return _LOCAL.match(master.strip()) is not None


def local_slots(master: str, num_cpus: int) -> int | None:
    """Return the task threads of a `local` master; None for any other."""
    match = _LOCAL.match(master.strip())
    if match is None:
        return None
    threads = match.group(1)
    return num_cpus if threads == "*" else int(threads or 1)


def executor_cores(conf: Mapping[str, str]) -> int | None:
    """Return the cores of one executor; None where the configuration does not determine them."""
    master = conf.get("spark.master", "").strip()
    cores = conf.get("spark.executor.cores")
    cluster = _LOCAL_CLUSTER.match(master)
    if cores:
        return int(cores)
    if cluster is not None:
        return int(cluster.group(2))
    return 1 if master == "yarn" or master.startswith("k8s://") else None


def configured_slots(
    conf: Mapping[str, str],
    num_cpus: int,
    task_cpus: int | None = None,
    task_gpus: float | None = None,
) -> Slots:
    """Work out the most slots that a configuration can reach.

    Args:
        conf: Spark configuration; only `CONF_KEYS` are read.
        num_cpus: processors of the driver, for `local[*]`.
        task_cpus: cores per task from a resource profile; None means `spark.task.cpus`.
        task_gpus: GPUs per task from a resource profile; None means `spark.task.resource.gpu.amount`.
    """
    master = conf.get("spark.master", "").strip()
    cpus = task_cpus or int(conf.get("spark.task.cpus") or 1)
    if task_gpus is not None:
        conf = {**conf, "spark.task.resource.gpu.amount": str(task_gpus)}
    threads = local_slots(master, num_cpus)
    if threads is not None:
        return Slots(
            threads // cpus,
            f"master {master!r} has {threads} threads, and a task takes spark.task.cpus={cpus}",
            "use a master such as local[N] with more threads",
        )
    cluster = _LOCAL_CLUSTER.match(master)
    if cluster is not None:
        executors, cores = int(cluster.group(1)), int(cluster.group(2))
        return _of_executors(
            conf, executors, cores, cpus, f"master {master!r}", "use a larger local-cluster"
        )
    if master.startswith("spark://"):
        return _standalone(conf, cpus)
    if master == "yarn" or master.startswith("k8s://"):
        executors = int(conf.get("spark.executor.instances") or 2)
        cores = int(conf.get("spark.executor.cores") or 1)
        source = f"spark.executor.instances={executors}, spark.executor.cores={cores}"
        return _of_executors(conf, executors, cores, cpus, source, "raise spark.executor.instances")
    return Slots(None, f"master {master!r} does not bound the number of tasks", "")


def _standalone(conf: Mapping[str, str], cpus: int) -> Slots:
    remedy = "raise spark.cores.max"
    most = conf.get("spark.cores.max")
    if not most:
        return Slots(None, "spark.cores.max is not set", remedy)
    cores = conf.get("spark.executor.cores")
    if not cores:
        return Slots(int(most) // cpus, f"spark.cores.max={most}, spark.task.cpus={cpus}", remedy)
    executors = int(most) // int(cores)
    source = f"spark.cores.max={most}, spark.executor.cores={cores}"
    return _of_executors(conf, executors, int(cores), cpus, source, remedy)


def _of_executors(
    conf: Mapping[str, str], executors: int, cores: int, cpus: int, source: str, remedy: str
) -> Slots:
    per_executor = cores // cpus
    reason = (
        f"{source}, {cpus} cores per task"
        if cpus != int(conf.get("spark.task.cpus") or 1)
        else f"{source}, spark.task.cpus={cpus}"
    )
    per_task = float(conf.get("spark.task.resource.gpu.amount") or 0)
    if per_task > 0:
        gpus = float(conf.get("spark.executor.resource.gpu.amount") or 0)
        per_executor = min(per_executor, math.floor(gpus / per_task))
        reason += f", {gpus:g} GPUs per executor and {per_task:g} per task"
    return Slots(executors * per_executor, reason, remedy)


def choose_num_proc(num_proc: int | None, slots: Slots) -> int:
    """Return the number of ranks: the one asked for if it can ever run, or by default all configured slots.

    Raises:
        InvalidArgumentError: `num_proc` is not a positive whole number, or is None and nothing bounds the slots.
        PreflightError: the configuration can never run that many tasks at once.
    """
    if num_proc is None:
        if slots.maximum is None:
            raise InvalidArgumentError(
                f"num_proc is not given, and {slots.reason}, so the number of slots is unknown. "
                "Give num_proc."
            )
        if slots.maximum < 1:
            raise PreflightError(
                f"num_proc is not given, and the application can run no task at all ({slots.reason}). "
                f"To run any, {slots.remedy}."
            )
        return slots.maximum
    if isinstance(num_proc, bool) or not isinstance(num_proc, int) or num_proc < 1:
        raise InvalidArgumentError(
            f"num_proc is {num_proc!r}; it must be a whole number of at least 1."
        )
    if slots.maximum is not None and num_proc > slots.maximum:
        raise PreflightError(
            f"num_proc={num_proc}: the application can run {slots.maximum} barrier tasks at once "
            f"({slots.reason}), so a stage of {num_proc} would never start. "
            f"Lower num_proc, or {slots.remedy}."
        )
    return num_proc


def threads_per_rank(task_cpus: int, allowed: float, fixed: int | None = None) -> int:
    """Return the threads of one rank: the cores of its task, bounded by the processors of its process.

    Args:
        task_cpus: cores of the Spark task.
        allowed: processors' worth of time that the process may use.
        fixed: the driver's decision, which replaces `task_cpus` (on `local[N]`: N // num_proc).
    """
    wanted = task_cpus if fixed is None else fixed
    return max(1, min(wanted, math.floor(allowed)))
