"""What can be known to fail before anything long starts, on the driver and among the ranks.

The checks are pure functions on facts; `rank_facts` and the token functions gather facts. A check answers with a
message, or with nothing when all is well, so that every rank can come to the same answer from the same facts.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from sparkhvd.errors import PreflightError

__all__ = [
    "CONF_KEYS",
    "RankFacts",
    "SharedFiles",
    "check_conf",
    "check_ranks",
    "cgroup_quota",
    "rank_facts",
]


class SharedFiles(Protocol):
    """Files that the driver and every rank can reach; picklable. Paths are relative to one root."""

    def read_bytes(self, path: str) -> bytes:
        """Read a whole file."""
        ...

    def write_bytes(self, path: str, data: bytes) -> None:
        """Write a file, whole or not at all."""
        ...

    def exists(self, path: str) -> bool:
        """Tell whether a file is there."""
        ...


# --- on the driver ------------------------------------------------------------------------------------------

_SQL_IDLE = "spark.sql.execution.pyspark.udf.idleTimeoutSeconds"
_SQL_KILL = "spark.sql.execution.pyspark.udf.killOnIdleTimeout"
_CORE_IDLE = "spark.python.worker.idleTimeoutSeconds"
_CORE_KILL = "spark.python.worker.killOnIdleTimeout"
_DYNAMIC = "spark.dynamicAllocation.enabled"

CONF_KEYS = (_DYNAMIC, _SQL_IDLE, _SQL_KILL, _CORE_IDLE, _CORE_KILL)


def check_conf(conf: Mapping[str, str]) -> None:
    """Refuse a Spark configuration under which a barrier stage fails or is killed.

    Raises:
        PreflightError: dynamic allocation is on, or Spark kills Python workers that are silent.
    """
    if conf.get(_DYNAMIC, "").lower() == "true":
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


# --- on a rank ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankFacts:
    """What a rank (or the driver) is, as far as the others must agree with it.

    Attributes:
        host: its host's name.
        executable: its Python.
        python: "3.11".
        torch: version of torch, or "" where it is not installed.
        sparkhvd: version of this package.
        missing: required modules that its Python lacks.
        error: why this rank cannot take part, or "".
    """

    host: str
    executable: str
    python: str
    torch: str
    sparkhvd: str
    missing: tuple[str, ...] = ()
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        """This as JSON-able data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RankFacts:
        """The facts that `to_dict` gave."""
        return cls(**{**data, "missing": tuple(data["missing"])})


def rank_facts(requirements: Sequence[str], error: str = "") -> RankFacts:
    """Gather the facts of this process without importing anything large."""
    return RankFacts(
        host=socket.gethostname(),
        executable=sys.executable,
        python=".".join(platform.python_version_tuple()[:2]),
        torch=_version("torch"),
        sparkhvd=_version("sparkhvd"),
        missing=tuple(name for name in requirements if not _is_importable(name)),
        error=error,
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        # A checkout on the path has no metadata; sparkhvd itself is always importable here.
        return str(getattr(sys.modules.get(name), "__version__", ""))


def _is_importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def check_ranks(driver: RankFacts, ranks: Sequence[RankFacts]) -> str:
    """Why these ranks cannot run one job together, or "".

    The same on every rank, because it depends on nothing but its arguments.
    """
    for rank, facts in enumerate(ranks):
        if facts.error:
            return f"Rank {rank} on host {facts.host} cannot start: {facts.error}"
        if facts.missing:
            return (
                f"The workers run {facts.executable} (rank {rank} on host {facts.host}), which has no "
                f"{' and no '.join(facts.missing)}. Set PYSPARK_PYTHON (spark.pyspark.python) to a Python "
                "that has it, or install it there."
            )
        if facts.python != driver.python:
            return (
                f"The driver runs Python {driver.python}, rank {rank} on host {facts.host} runs Python "
                f"{facts.python} ({facts.executable}). Set PYSPARK_PYTHON to the driver's version."
            )
        if driver.sparkhvd and facts.sparkhvd and facts.sparkhvd != driver.sparkhvd:
            return (
                f"The driver has sparkhvd {driver.sparkhvd}, rank {rank} on host {facts.host} has "
                f"{facts.sparkhvd} ({facts.executable}). Install the same version on both."
            )
        if driver.torch and facts.torch and _minor(facts.torch) != _minor(driver.torch):
            return (
                f"The driver has torch {driver.torch}, rank {rank} on host {facts.host} has {facts.torch} "
                f"({facts.executable}). Install the same release on both."
            )
        if facts.torch != ranks[0].torch:
            return (
                f"Rank 0 on host {ranks[0].host} has torch {ranks[0].torch or '(none)'}, rank {rank} on host "
                f"{facts.host} has {facts.torch or '(none)'}. Install the same build on every host."
            )
    return ""


def patch_warning(driver: RankFacts, ranks: Sequence[RankFacts]) -> str:
    """A warning when driver and ranks differ in the patch version of torch, else ""."""
    for facts in ranks:
        there, here = facts.torch.partition("+")[0], driver.torch.partition("+")[0]
        if there and here and there != here:
            return f"The driver has torch {driver.torch}, the ranks have {facts.torch}; same minor release."
    return ""


def _minor(version: str) -> str:
    return ".".join(version.partition("+")[0].split(".")[:2])


# --- the store is shared ------------------------------------------------------------------------------------


def token_path(run_dir: str, attempt: int, rank: int | None) -> str:
    """Where a rank (None: the driver) writes its token."""
    owner = "driver" if rank is None else f"rank-{rank}"
    return f"{run_dir}/attempts/{attempt}/token-{owner}"


def outcome_path(run_dir: str, attempt: int, rank: int) -> str:
    """Where a rank writes its outcome."""
    return f"{run_dir}/attempts/{attempt}/rank-{rank}.json"


def write_token(
    shared: SharedFiles, run_dir: str, attempt: int, rank: int | None, job_id: str
) -> str:
    """Write this process's token; return why that failed, or ""."""
    path = token_path(run_dir, attempt, rank)
    try:
        shared.write_bytes(path, _token(job_id, rank))
    except Exception as e:  # noqa: BLE001 - a store may raise anything; all of it means "cannot write"
        return f"cannot write {path} in {describe_shared(shared)}: {type(e).__name__}: {e}"
    return ""


def check_tokens(
    shared: SharedFiles, run_dir: str, attempt: int, job_id: str, hosts: Sequence[str], me: int
) -> str:
    """Why the store is not one store for the driver and all ranks as seen from rank `me`, or ""."""
    owners: Iterable[int | None] = [None, *range(len(hosts))]
    for owner in owners:
        path = token_path(run_dir, attempt, owner)
        try:
            found: bytes | None = shared.read_bytes(path)
            why = "has other contents"
        except Exception as e:  # noqa: BLE001 - as above: all of it means "cannot read"
            found, why = None, f"cannot be read ({type(e).__name__}: {e})"
        if found != _token(job_id, owner):
            who = "the driver" if owner is None else f"rank {owner} on host {hosts[owner]}"
            return (
                f"The store is not shared: {who} wrote {path} in {describe_shared(shared)}, and on host "
                f"{hosts[me]} (rank {me}) it {why}. Use a path that the driver and all executors see."
            )
    return ""


def describe_shared(shared: SharedFiles) -> str:
    """The store's address where it has one."""
    return str(getattr(shared, "url", shared))


def _token(job_id: str, rank: int | None) -> bytes:
    return f"{job_id} {rank}".encode()


# --- processors ---------------------------------------------------------------------------------------------


def affinity() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cgroup_quota(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> float | None:
    """Processors' worth of time that this process's control group may use; None when unlimited."""
    try:
        groups = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return None
    quotas = []
    for _, controllers, path in (group for group in groups if len(group) == 3):
        if not controllers:  # version 2; a limit of any group above counts too
            here = root / path.lstrip("/")
            for folder in (here, *here.parents):
                quotas.append(_quota(_read(folder / "cpu.max").split()))
                if folder == root:
                    break
        elif "cpu" in controllers.split(","):
            for folder in (root / "cpu" / path.lstrip("/"), root / "cpu"):
                quota, period = (
                    _read(folder / "cpu.cfs_quota_us"),
                    _read(folder / "cpu.cfs_period_us"),
                )
                quotas.append(_quota([quota, period]))
    known = [quota for quota in quotas if quota is not None]
    return min(known) if known else None


def _quota(words: Sequence[str]) -> float | None:
    """Quota and period in microseconds, as the kernel writes them ("max", "-1" or nothing: unlimited)."""
    if len(words) != 2 or not (words[0].isdigit() and words[1].isdigit()) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
