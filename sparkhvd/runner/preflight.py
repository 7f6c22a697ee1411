"""Preflight: detect what is known to fail before ranks start, on the driver and among the ranks.

Checks are pure functions on facts. A check of the ranks returns a message, or "" if all is well, so every rank reaches
the same result from the same facts.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sparkhvd import as_horovod
from sparkhvd.cpus import read_text
from sparkhvd.errors import PreflightError
from sparkhvd.runner.outcomes import OutcomeKind, from_spark_failure
from sparkhvd.runner.slots import is_launched
from sparkhvd.wire import read_json, rebuild

if TYPE_CHECKING:
    from sparkhvd.spark import SparkShim

# Former modules below this name import through `sparkhvd._moved`, which needs a package.
__path__: list[str] = []


# ----------------------------------------------------------------------------------------------------
# Address space (RLIMIT_AS) that torch and a trainer need.

# Beyond torch's own libraries. Measured with torch's CPU build (446 MiB of libraries) and one thread: at 800 MiB a
# trainer starts, creates an engine and takes optimizer steps with 4 MB of parameters; at 700 MiB the first step cannot
# allocate; at 600 MiB no thread starts. The rest is Python, numpy, the engine, and malloc's 64 MiB per thread.
_TRAINER_BYTES = 350 << 20
# Imports of pyarrow and of the estimator's part in a rank, measured in the same process.
_ARROW_BYTES = 250 << 20
SPARKS_LIMIT = (
    "Spark sets this limit to spark.executor.pyspark.memory, divided by spark.executor.cores where that is set: leave "
    "spark.executor.pyspark.memory unset, or set it to"
)
# Address space of a worker besides torch's libraries, until it has predicted 4,096 rows; 79 MiB were measured.
_WORKER_BYTES = 160 << 20
_NEEDS_TORCH = frozenset({"torch", "sparkhvd.torch", "sparkhvd.estimator"})
# Libraries from NVIDIA's packages that `import torch` maps in a build with CUDA, even without a GPU: 1.4 to 1.9 GiB
# with torch 2.4, 2.14 and 2.15. Other files of these packages, such as cuDNN's engines, are mapped later or never.
_CUDA_LIBRARIES = (
    "cublas", "cublasLt", "cudart", "cudnn", "cufft", "cufile", "cupti", "curand", "cusolver", "cusparse", "cusparseLt",
    "nccl", "nvJitLink", "nvrtc", "nvshmem_host",
)  # fmt: skip


def address_space_limit() -> int:
    """Read the limit of this process and its children in bytes. 0 means no limit."""
    try:
        import resource  # absent on Windows, where a Connect client may run
    except ImportError:
        return 0
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return 0 if soft == resource.RLIM_INFINITY else soft


def check_worker() -> None:
    """Reject an import of torch in a Python worker of Spark with too little address space left.

    Only a running worker knows how much is left: pyarrow alone reserves 1 GiB where it can.

    Raises:
        PreflightError: `spark.executor.pyspark.memory` leaves the worker too little.
    """
    limit = address_space_limit()
    if not limit or "torch" in sys.modules:
        return
    used = int((read_text(Path("/proc/self/statm")) or "0").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    needed = used + _torch_libraries_bytes() + _WORKER_BYTES
    if limit < needed:
        raise PreflightError(
            f"The Python workers on host {socket.gethostname()} may have {limit >> 20} MiB of address space each "
            f"(RLIMIT_AS); Spark and pyarrow have {used >> 20} MiB, and with torch it would be {mebibytes(needed)} MiB "
            f"before model and rows. {SPARKS_LIMIT} {mebibytes(needed)}m or more for each of these cores."
        )


def mebibytes(size: int) -> int:
    """Convert bytes to MiB, rounded up."""
    return -(-size >> 20)


def address_space_needed(modules: Iterable[str], slots_bytes: int) -> int:
    """Estimate the least address space of a trainer with these modules in bytes, or 0 if unknown.

    Its model and data are extra. With a GPU it needs much more: CUDA reserves address space for the whole device.

    Args:
        modules: imports of the trainer, as far as known.
        slots_bytes: shared memory that the engines of all ranks of this host map.
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
    """Compute the size of the libraries mapped by `import torch`, or 0 without torch."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return 0
    if spec is None or not spec.origin:
        return 0
    package = Path(spec.origin).parent
    libraries = list(package.glob("lib/*.so*"))
    if any(path.name == "libtorch_cuda.so" for path in libraries):
        for name in _CUDA_LIBRARIES:
            libraries += package.parent.glob(f"nvidia/*/lib/lib{name}.so.*")
    return sum(path.stat().st_size for path in libraries)


# ----------------------------------------------------------------------------------------------------
# Facts of the driver and of each rank that must be compatible.


@dataclass(frozen=True)
class RankFacts:
    """Facts of a rank (or the driver) that decide whether it can join the job.

    Attributes:
        host: its host's name.
        executable: its Python.
        python: "3.11".
        torch: version of torch; "" if not installed.
        sparkhvd: version of this package.
        missing: required modules that its Python lacks.
        error: reason why this rank cannot join; "" if it can.
        limit_bytes: address space limit of its processes (RLIMIT_AS); 0 means no limit.
        needed_bytes: address space that a trainer needs at least; 0 if unknown.
        numpy: version of numpy if required, else "".
        gpus: UUIDs of the GPUs that the rank's process sees, if they were requested.
        gpu_error: reason why they are unknown; "" if they are known.
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

    @property
    def is_short_of_address_space(self) -> bool:
        """True if its processes may have less address space than a trainer needs."""
        return 0 < self.limit_bytes < self.needed_bytes

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def rank_facts(requirements: Sequence[str], error: str = "", *, needed_bytes: int = 0) -> RankFacts:
    """Gather the facts of this process without large imports."""
    return RankFacts(
        limit_bytes=address_space_limit(),
        needed_bytes=needed_bytes,
        # Only a job that requires numpy depends on its random numbers.
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


_VERSION = re.compile(r"^Version:(.*)$", re.MULTILINE)


def _version(name: str) -> str:
    try:
        found = importlib.metadata.distribution(name)
        # `found.version` parses the whole README with it, which takes 5 ms.
        line = _VERSION.search(found.read_text("METADATA") or "")
        return line[1].strip() if line else found.version
    except importlib.metadata.PackageNotFoundError:
        # A checkout on the path has no metadata; sparkhvd itself is imported here.
        return str(getattr(sys.modules.get(name), "__version__", ""))


# Torch's own build writes into its version.py: `cuda: Optional[str] = '13.0'`, or None.
_NO_CUDA = re.compile(r"^cuda\b[^=\n]*= *None *$", re.MULTILINE)


def _cpu_torch() -> str:
    """Version of torch if it is built without CUDA, else "", also if unknown. Does not import it.

    The version alone is not enough: builds from PyPI have CUDA and no tag.
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
    """Find why these ranks cannot run one job together, or return "".

    Depends only on its arguments, so every rank gets the same result.
    """
    for rank, facts in enumerate(ranks):
        # Check this before the error: under such a limit, threads and processes do not start either.
        if facts.is_short_of_address_space:
            return (
                f"The processes of rank {rank} on host {facts.host} {_describe_shortage(facts)}. {SPARKS_LIMIT} "
                f"{mebibytes(facts.needed_bytes)}m or more for each of these cores."
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
                "other numbers. Install the same release on every host."
            )
    return ""


def patch_warning(driver: RankFacts, ranks: Sequence[RankFacts]) -> str:
    """Warning about patch versions: of torch between driver and ranks, of numpy among ranks. "" if they are equal."""
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


def check_address_space(facts: RankFacts) -> None:
    """Reject a process with possibly too little address space for its trainers.

    Raises:
        PreflightError: the limit is below the need of a trainer.
    """
    if facts.is_short_of_address_space:
        raise PreflightError(
            f"Processes that this process starts {_describe_shortage(facts)}. "
            "Raise the limit of this process, for example by 'ulimit -v unlimited' in the shell that starts it."
        )


def _describe_shortage(facts: RankFacts) -> str:
    return (
        f"may have {facts.limit_bytes >> 20} MiB of address space each (RLIMIT_AS), and a trainer with torch "
        f"{facts.torch} needs {mebibytes(facts.needed_bytes)} MiB before its model and data"
    )


# ----------------------------------------------------------------------------------------------------
# Python of Spark's workers, checked by a small job before the launch.
# The launch checks every rank again, on its own host.

# Applications, Pythons and requirements that have passed the check.
_passed: set[tuple[str, str, tuple[str, ...]]] = set()


def enter_worker(*, is_as_horovod: bool) -> None:
    """Prepare a Python worker of Spark for torch and for unpickling. Call it first in the worker.

    Args:
        is_as_horovod: whether the driver provides the name `horovod`.

    Raises:
        PreflightError: the worker has too little address space.
    """
    check_worker()
    if is_as_horovod:
        as_horovod.install()


def check_workers(shim: SparkShim, requirements: Sequence[str], limit_s: float) -> None:
    """Check that a worker's Python has the package and a job's requirements, in compatible versions.

    Runs once per application. Runs no job if a local master's workers run this process's Python.

    Args:
        shim: session whose worker is checked.
        requirements: modules that the job needs.
        limit_s: longest wait for a worker in seconds; time while launches hold the slots does not count.

    Raises:
        PreflightError: the worker lacks something (the message has its Python and the remedy), or no worker started.
    """
    python = shim.worker_python()
    passed = (shim.application(), python, tuple(requirements))
    if passed in _passed or shim.runs_this_python():
        return
    is_held = functools.partial(is_launched, shim.application())
    try:
        found = read_json(shim.call_in_worker(_poll(requirements), limit_s, is_held))
    except TimeoutError as e:
        raise PreflightError(
            f"No Python worker has started in {limit_s:g} s (start_timeout). Free executors on the cluster, or raise start_timeout."
        ) from e
    except Exception as e:
        outcome = from_spark_failure(str(e), python)
        if outcome.kind != OutcomeKind.PREFLIGHT:
            raise
        raise PreflightError(outcome.message) from None
    problem = check_ranks(rank_facts(()), [rebuild(RankFacts, found)])
    if problem:
        raise PreflightError(problem)
    _passed.add(passed)


def _poll(requirements: Sequence[str]) -> Callable[[], str]:
    """Make a function to collect a worker's facts, even without this package there."""

    def poll() -> str:
        if importlib.util.find_spec("sparkhvd") is None:
            facts = {
                "host": socket.gethostname(),
                "executable": sys.executable,
                "missing": ["sparkhvd"],
            }
            return json.dumps({**facts, "gpus": [], "python": "", "torch": "", "sparkhvd": ""})

        return json.dumps(rank_facts(requirements).to_dict())

    return poll


# ----------------------------------------------------------------------------------------------------
# Store of a run, and the check that the driver and every rank reach the same one.


class SharedFiles(Protocol):
    """Picklable files shared by the driver and every rank. Paths are relative to one root."""

    def read_bytes(self, path: str) -> bytes:
        """Read a whole file."""
        ...

    def write_bytes(self, path: str, data: bytes) -> None:
        """Write a file atomically."""
        ...

    def exists(self, path: str) -> bool: ...


def token_path(run_dir: str, attempt: int, rank: int | None) -> str:
    """Make the path of a rank's token, or of the driver's token if `rank` is None."""
    owner = "driver" if rank is None else f"rank-{rank}"
    return f"{run_dir}/attempts/{attempt}/token-{owner}"


def outcome_path(run_dir: str, attempt: int, rank: int) -> str:
    return f"{run_dir}/attempts/{attempt}/rank-{rank}.json"


def write_token(
    shared: SharedFiles, run_dir: str, attempt: int, rank: int | None, job_id: str
) -> str:
    """Write this process's token and return the reason of a failure, or ""."""
    path = token_path(run_dir, attempt, rank)
    try:
        shared.write_bytes(path, _token(job_id, rank))
    except Exception as e:  # noqa: BLE001 - a store may raise anything; all of it means "cannot write"
        return f"cannot write {path} in {describe_shared(shared)}: {type(e).__name__}: {e}"
    return ""


def check_tokens(
    shared: SharedFiles, run_dir: str, attempt: int, job_id: str, hosts: Sequence[str], me: int
) -> str:
    """Find why rank `me` does not share a store with the driver and all ranks, or return ""."""
    owners: Iterable[int | None] = [None, *range(len(hosts))]
    for owner in owners:
        path = token_path(run_dir, attempt, owner)
        try:
            token: bytes | None = shared.read_bytes(path)
            why = "has other contents"
        except Exception as e:  # noqa: BLE001 - as above: all of it means "cannot read"
            token, why = None, f"cannot be read ({type(e).__name__}: {e})"
        if token != _token(job_id, owner):
            who = "the driver" if owner is None else f"rank {owner} on host {hosts[owner]}"
            return (
                f"The store is not shared: {who} wrote {path} in {describe_shared(shared)}, and on host "
                f"{hosts[me]} (rank {me}) it {why}. Use a path that the driver and all executors see."
            )
    return ""


def describe_shared(shared: SharedFiles) -> str:
    """The store's `url`, or else its text."""
    return str(getattr(shared, "url", shared))


def _token(job_id: str, rank: int | None) -> bytes:
    return f"{job_id} {rank}".encode()


# ----------------------------------------------------------------------------------------------------
# Spark configuration under which stages of ranks can run.

_SQL_IDLE = "spark.sql.execution.pyspark.udf.idleTimeoutSeconds"
_SQL_KILL = "spark.sql.execution.pyspark.udf.killOnIdleTimeout"
_CORE_IDLE = "spark.python.worker.idleTimeoutSeconds"
_CORE_KILL = "spark.python.worker.killOnIdleTimeout"
_DYNAMIC = "spark.dynamicAllocation.enabled"

PREFLIGHT_CONF_KEYS = (_DYNAMIC, _SQL_IDLE, _SQL_KILL, _CORE_IDLE, _CORE_KILL)


def is_dynamic(conf: Mapping[str, str]) -> bool:
    """Whether Spark allocates executors dynamically."""
    return conf.get(_DYNAMIC, "").lower() == "true"


def check_conf(conf: Mapping[str, str], *, is_barrier: bool = True) -> None:
    """Reject a Spark configuration under which a stage of ranks fails or is killed.

    Args:
        conf: of Spark.
        is_barrier: whether all of its tasks start together.

    Raises:
        PreflightError: dynamic allocation is on, or Spark kills idle Python workers.
    """
    if is_barrier and is_dynamic(conf):
        raise PreflightError(
            f"{_DYNAMIC} is true, and Spark refuses barrier stages then. "
            f"Start the session with {_DYNAMIC}=false and spark.executor.instances=<number>."
        )
    for idle, kill in ((_SQL_IDLE, _SQL_KILL), (_CORE_IDLE, _CORE_KILL)):
        seconds = _seconds(conf.get(idle, "0"))
        # The SQL keys default to the core keys.
        kills = conf.get(kill) or conf.get(_CORE_KILL, "")
        if seconds > 0 and kills.lower() == "true":
            raise PreflightError(
                f"{idle}={seconds} with {kill}=true: Spark would kill every rank after {seconds} s, "
                f"because a rank sends no rows before it ends. Set {kill}=false."
            )


def _seconds(text: str) -> int:
    digits = text.strip().lower().removesuffix("s")
    return int(digits) if digits.isdigit() else 0


# ----------------------------------------------------------------------------------------------------
# Kinds of Databricks compute on which ranks can run.


def databricks_runtime() -> str:
    """Read the version of Databricks' runtime, or "" elsewhere."""
    return os.environ.get("DATABRICKS_RUNTIME_VERSION", "")  # noqa: TID251 - Databricks' own


def check_databricks(is_connect: bool) -> None:
    """Reject Databricks' standard and serverless compute: both isolate user code from the cluster.

    Both give a program on Databricks a Spark Connect session; dedicated compute gives a classic one. Databricks offers
    neither its runtimes for machine learning nor GPUs on standard compute.

    Args:
        is_connect: whether the session is a Spark Connect session.

    Raises:
        PreflightError: the program runs on such compute.
    """
    runtime = databricks_runtime()
    if runtime and is_connect:
        kind = "serverless" if runtime.startswith("client.") else "in standard access mode"
        raise PreflightError(
            f"This Databricks compute is {kind} (runtime {runtime}), where tasks may not connect to each other. "
            "Attach the notebook or job to a cluster in dedicated access mode, with a fixed number of workers."
        )
