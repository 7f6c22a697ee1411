"""What can be known to fail before anything long starts, on the driver and among the ranks.

The checks are pure functions on facts; `rank_facts` and the token functions gather facts. A check answers with a
message, or with nothing when all is well, so that every rank can come to the same answer from the same facts.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
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
    "address_space_limit",
    "address_space_needed",
    "cgroup_quota",
    "check_address_space",
    "check_conf",
    "check_ranks",
    "check_worker",
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
        limit_bytes: the most address space that its processes may have (RLIMIT_AS); 0 means no limit.
        needed_bytes: address space that a trainer needs at least; 0 where nothing is known.
        numpy: version of numpy if it is required, else "".
        gpus: UUIDs of the GPUs that the rank's process sees, where that was asked.
        gpu_error: why they are not known, or "".
        visible: CUDA_VISIBLE_DEVICES of the rank's process, or None.
        cpu_torch: version of torch if it is required and built without CUDA, else "".
    """

    host: str
    executable: str
    python: str
    torch: str
    sparkhvd: str
    missing: tuple[str, ...] = ()
    error: str = ""
    limit_bytes: int = 0
    needed_bytes: int = 0
    numpy: str = ""
    gpus: tuple[str, ...] = ()
    gpu_error: str = ""
    visible: str | None = None
    cpu_torch: str = ""

    def to_dict(self) -> dict[str, Any]:
        """This as JSON-able data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RankFacts:
        """The facts that `to_dict` gave."""
        lists = {name: tuple(data[name]) for name in ("missing", "gpus")}
        return cls(**{**data, **lists})


def rank_facts(requirements: Sequence[str], error: str = "", *, needed_bytes: int = 0) -> RankFacts:
    """Gather the facts of this process without importing anything large."""
    return RankFacts(
        limit_bytes=address_space_limit(),
        needed_bytes=needed_bytes,
        # Only a job that asks for it depends on its random numbers.
        numpy=_version("numpy") if "numpy" in requirements else "",
        host=socket.gethostname(),
        executable=sys.executable,
        python=".".join(platform.python_version_tuple()[:2]),
        torch=_version("torch"),
        cpu_torch=_cpu_torch() if "torch" in requirements else "",
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


# What torch's own build writes into its version.py: `cuda: Optional[str] = '13.0'`, or None.
_NO_CUDA = re.compile(r"^cuda\b[^=\n]*= *None *$", re.MULTILINE)


def _cpu_torch() -> str:
    """The version of torch if it is built without CUDA, else ""; without importing it, and "" where that is not known.

    The version itself does not say: builds from PyPI have CUDA and no tag.
    """
    try:
        spec = importlib.util.find_spec("torch")
        text = Path(spec.origin or "").with_name("version.py").read_text() if spec else ""
    except (ImportError, ValueError, OSError):
        return ""
    return _version("torch") if _NO_CUDA.search(text) else ""


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
        # Before its error: under such a limit, threads and processes do not start either.
        if _is_short_of_address_space(facts):
            return (
                f"The processes of rank {rank} on host {facts.host} {_limit_and_need(facts)}. {_SPARKS_LIMIT} "
                f"{_mebibytes(facts.needed_bytes)}m or more for each of these cores."
            )
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
        if _minor(facts.numpy) != _minor(ranks[0].numpy):
            return (
                f"Rank 0 on host {ranks[0].host} has numpy {ranks[0].numpy}, rank {rank} on host {facts.host} has "
                f"{facts.numpy}; every rank draws the same random numbers, and minor releases of numpy may draw "
                "others. Install the same release on every host."
            )
    return ""


def patch_warning(driver: RankFacts, ranks: Sequence[RankFacts]) -> str:
    """A warning when driver and ranks differ in the patch version of torch, or ranks in that of numpy, else ""."""
    for rank, facts in enumerate(ranks):
        if facts.numpy != ranks[0].numpy:
            return (
                f"Rank 0 on host {ranks[0].host} has numpy {ranks[0].numpy}, rank {rank} on host {facts.host} has "
                f"{facts.numpy}; same minor release."
            )
        there, here = facts.torch.partition("+")[0], driver.torch.partition("+")[0]
        if there and here and there != here:
            return f"The driver has torch {driver.torch}, the ranks have {facts.torch}; same minor release."
    return ""


def _minor(version: str) -> str:
    return ".".join(version.partition("+")[0].split(".")[:2])


# --- address space ------------------------------------------------------------------------------------------

# Beyond torch's own libraries. Measured with torch's CPU build (446 MiB of libraries) and one thread: at 800 MiB a
# trainer starts, makes an engine and takes optimizer steps with 4 MB of parameters; at 700 MiB the first step
# cannot allocate, at 600 MiB no thread starts. The rest is Python, numpy, the engine, and malloc's 64 MiB per thread.
_TRAINER_BYTES = 350 << 20
# Importing pyarrow and the estimator's part in a rank, measured in the same process.
_ARROW_BYTES = 250 << 20
_SPARKS_LIMIT = (
    "Spark sets this limit to spark.executor.pyspark.memory, divided by spark.executor.cores where that is set: leave "
    "spark.executor.pyspark.memory unset, or set it to"
)
# What a worker takes beyond torch's libraries until it has predicted 4,096 rows; 79 MiB were measured.
_WORKER_BYTES = 160 << 20
_NEEDS_TORCH = frozenset({"torch", "sparkhvd.torch", "sparkhvd.estimator"})


def address_space_limit() -> int:
    """The most address space that this process and its children may have, in bytes; 0 means no limit."""
    try:
        import resource  # absent on Windows, where a Connect client may run
    except ImportError:
        return 0
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return 0 if soft == resource.RLIM_INFINITY else soft


def check_address_space(facts: RankFacts) -> None:
    """Refuse to start trainers below a process that may have too little address space for them.

    Raises:
        PreflightError: the limit is lower than what a trainer needs.
    """
    if _is_short_of_address_space(facts):
        raise PreflightError(
            f"The processes of this one {_limit_and_need(facts)}. "
            "Raise the limit of this process, for example by 'ulimit -v unlimited' in the shell that starts it."
        )


def check_worker() -> None:
    """Refuse to import torch in a Python worker of Spark that has too little address space left for it.

    What is left cannot be known before there is a worker: pyarrow alone reserves 1 GiB where it can.

    Raises:
        PreflightError: `spark.executor.pyspark.memory` leaves the worker too little.
    """
    limit = address_space_limit()
    if not limit or "torch" in sys.modules:
        return
    used = int((_read(Path("/proc/self/statm")) or "0").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    needed = used + _torch_libraries_bytes() + _WORKER_BYTES
    if limit < needed:
        raise PreflightError(
            f"The Python workers on host {socket.gethostname()} may have {limit >> 20} MiB of address space each "
            f"(RLIMIT_AS); Spark and pyarrow have {used >> 20} MiB, and with torch it would be {_mebibytes(needed)} MiB "
            f"before model and rows. {_SPARKS_LIMIT} {_mebibytes(needed)}m or more for each of these cores."
        )


def _is_short_of_address_space(facts: RankFacts) -> bool:
    return 0 < facts.limit_bytes < facts.needed_bytes


def _limit_and_need(facts: RankFacts) -> str:
    return (
        f"may have {facts.limit_bytes >> 20} MiB of address space each (RLIMIT_AS), and a trainer with torch "
        f"{facts.torch} needs {_mebibytes(facts.needed_bytes)} MiB before its model and data"
    )


def _mebibytes(size: int) -> int:
    """Rounded up, so that it is enough."""
    return -(-size >> 20)


def address_space_needed(modules: Iterable[str], slots_bytes: int) -> int:
    """The least address space in which a trainer with these modules can train, in bytes; 0 if unknown.

    Its model and data come on top, and with a GPU much more: CUDA reserves address space for the whole device.

    Args:
        modules: what the trainer imports, as far as known.
        slots_bytes: the shared memory that the engines of all ranks of this host map.
    """
    names = set(modules)
    libraries = _torch_libraries_bytes()
    if not libraries or not any(
        name in _NEEDS_TORCH or name.startswith("sparkhvd.estimator.") for name in names
    ):
        return 0
    arrow = _ARROW_BYTES if "pyarrow" in names else 0
    return libraries + _TRAINER_BYTES + arrow + slots_bytes


def _torch_libraries_bytes() -> int:
    """How much of torch is mapped when it is imported: the size of its libraries; 0 where there are none."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return 0
    if spec is None or not spec.origin:
        return 0
    return sum(path.stat().st_size for path in Path(spec.origin).parent.glob("lib/*.so*"))


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
