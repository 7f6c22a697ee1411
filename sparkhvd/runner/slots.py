"""Slots and threads: pure decisions from the configuration, each with its reason.

A slot is room for one barrier task. Spark starts a barrier stage only when all its slots are free at once, and
waits silently for slots that can never exist. So a number that the configuration excludes is an error here.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass

from sparkhvd.errors import InvalidArgumentError, PreflightError

# Keys that the functions below read. The driver fetches only these, with one request each over Connect.
SLOT_CONF_KEYS = (
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
    """Upper bound of concurrent barrier tasks under a configuration.

    Attributes:
        maximum: the bound; None if the configuration has no bound.
        reason: the arithmetic, in the user's own conf names.
        remedy: setting to change for more.
    """

    maximum: int | None
    reason: str
    remedy: str


def is_local(master: str) -> bool:
    """Whether a master is one process on the driver's host: `local`, `local[N]`, `local[*]`."""
    return _LOCAL.match(master.strip()) is not None


def local_slots(master: str, num_cpus: int) -> int | None:
    """Count the task threads of a `local` master, or return None for other masters."""
    match = _LOCAL.match(master.strip())
    if match is None:
        return None
    threads = match.group(1)
    return num_cpus if threads == "*" else int(threads or 1)


def executor_cores(conf: Mapping[str, str]) -> int | None:
    """Read an executor's cores, or return None if the configuration does not determine them."""
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
    """Compute the maximum number of slots under a configuration.

    Args:
        conf: Spark configuration; only `SLOT_CONF_KEYS` are read.
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
    """Check the number of ranks, or choose all configured slots by default.

    Raises:
        InvalidArgumentError: `num_proc` is not a positive whole number, or is None while the slots have no bound.
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
                f"To run tasks, {slots.remedy}."
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
    """Limit the cores of the rank's task to the processors of its process, but at least to 1.

    Args:
        task_cpus: cores of the Spark task.
        allowed: processors' worth of time that the process may use.
        fixed: the driver's decision, which replaces `task_cpus` (on `local[N]`: N // num_proc).
    """
    wanted = task_cpus if fixed is None else fixed
    return max(1, min(wanted, math.floor(allowed)))


# ----------------------------------------------------------------------------------------------------
# Admission: launches take the task slots of their application in call order. Spark starts a barrier stage when all its
# slots are free in one round of offers and never reserves some of them, so stages cannot deadlock. But small stages may
# starve a large one, so launches take slots here, before Spark sees them. Where the number of slots is unknown, Spark
# decides alone.
#
# **Threads**: any; one condition guards the list of launches. **Shutdown**: a launch leaves the list at the end of its
# block.

# A wait ends this often, also to let Ctrl-C through.
_POLL_S = 0.5
# A wait for executors is printed after this time, and again at this interval.
_SAY_EVERY_S = 5.0


@dataclass(eq=False)
class LaunchTicket:
    """Position of a launch in the queue of its application.

    Attributes:
        application: id of the application.
        kind: resources per task. Launches of one kind compete for the same slots; between kinds Spark decides.
        size: slots that it needs.
        is_alone: whether its ranks find GPUs by local rank, so that two such launches would share them.
        holds: slots that it holds; 0 while it waits, also between two attempts.
        most: slots that it takes if they are free, beyond those that it needs; 0 for no more.
    """

    application: str
    kind: Hashable
    size: int
    is_alone: bool = False
    holds: int = 0
    most: int = 0

    @contextlib.contextmanager
    def slots(
        self, count: Callable[[], int | None], limit_s: float, log: Callable[[str], None]
    ) -> Iterator[None]:
        """Wait for the slots of all ranks, and hold them inside the block.

        Args:
            count: returns the slots of all registered executors, used or not; None if unknown.
            limit_s: longest time in seconds with fewer slots than ranks. Waiting for other launches does not count.
            log: prints a line.

        Raises:
            PreflightError: there were too few slots for too long.
        """
        try:
            self._wait(count, limit_s, log)
            yield
        finally:
            with _changed:
                self.holds = 0
                _changed.notify_all()

    def _wait(
        self, count: Callable[[], int | None], limit_s: float, log: Callable[[str], None]
    ) -> None:
        lacked_s, said_at, is_notified = 0.0, time.monotonic(), False
        while True:
            asked_at = time.monotonic()
            slots = count()
            with _changed:
                if not (reason := self._take(slots)):
                    return
            is_lacking = slots is not None and slots < self.size
            if not is_lacking and not is_notified:
                is_notified = True
                log(reason)
            with _changed:
                _changed.wait(_POLL_S)
            if not is_lacking:
                continue
            lacked_s += time.monotonic() - asked_at
            if lacked_s > limit_s:
                raise PreflightError(
                    f"num_proc={self.size}: after {limit_s:g} s the application has {slots} task slots, so the "
                    "barrier stage cannot start. Free executors on the cluster, lower num_proc, or raise start_timeout."
                )
            if time.monotonic() - said_at >= _SAY_EVERY_S:
                said_at = time.monotonic()
                log(reason)

    def _take(self, slots: int | None) -> str:
        """Take the slots unless an earlier launch needs them and return "", or the reason to wait."""
        if slots is not None and slots < self.size:
            return f"Waiting for task slots: {slots} of {self.size} registered."
        others = [
            other for other in _turns if other is not self and other.application == self.application
        ]
        running = [other for other in others if other.holds]
        before = _turns[: _turns.index(self)]
        earlier = [other for other in before if other in others and not other.holds]
        if slots is not None:
            peers = [other for other in running if other.kind == self.kind]
            # A launch that is too large even alone waits for executors and does not block smaller ones.
            ahead = [other for other in earlier if other.kind == self.kind and other.size <= slots]
            if ahead or sum(other.holds for other in peers) + self.size > slots:
                return (
                    f"Waiting for {self.size} of {slots} task slots: {len(peers)} launches of this application "
                    f"run, and {len(ahead)} earlier launches wait."
                )
        if self.is_alone and any(other.is_alone for other in (*running, *earlier)):
            return (
                "Waiting for the GPUs: another launch of this application, whose ranks also find GPUs by local "
                "rank, came earlier."
            )
        free = self.size if slots is None else slots - sum(other.holds for other in running)
        self.holds = max(self.size, min(self.most, free))
        return ""


# Launches of this process that have not ended, in call order.
_turns: list[LaunchTicket] = []
_changed = threading.Condition()


@contextlib.contextmanager
def launch_ticket(
    application: str, kind: Hashable, size: int, *, is_alone: bool = False, most: int = 0
) -> Iterator[LaunchTicket]:
    """Queue a launch of the application for the duration of the block. See `LaunchTicket`."""
    place = LaunchTicket(application, kind, size, is_alone, most=most)
    with _changed:
        _turns.append(place)
    try:
        yield place
    finally:
        with _changed:
            _turns.remove(place)
            _changed.notify_all()


def is_launched(application: str) -> bool:
    """Whether a job of this process holds or awaits slots of the application."""
    with _changed:
        return any(launch.application == application for launch in _turns)
