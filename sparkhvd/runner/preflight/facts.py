"""Facts of the driver and of each rank in which they must agree."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparkhvd.errors import PreflightError
from sparkhvd.runner.preflight.address_space import SPARKS_LIMIT, address_space_limit, mebibytes

__all__ = ["RankFacts", "check_address_space", "check_ranks", "patch_warning", "rank_facts"]


@dataclass(frozen=True)
class RankFacts:
    """Facts of a rank (or the driver) that decide whether it can take part in the job.

    Attributes:
        host: its host's name.
        executable: its Python.
        python: "3.11".
        torch: version of torch, or "" where it is not installed.
        sparkhvd: version of this package.
        missing: required modules that its Python lacks.
        error: reason why this rank cannot take part, or "".
        limit_bytes: the most address space that its processes may have (RLIMIT_AS); 0 means no limit.
        needed_bytes: address space that a trainer needs at least; 0 if unknown.
        numpy: version of numpy if it is required, else "".
        gpus: UUIDs of the GPUs that the rank's process sees, where it was asked.
        gpu_error: reason why they are unknown, or "".
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
        """Return the facts as JSON-able data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RankFacts:
        """Rebuild facts from `to_dict`."""
        lists = {name: tuple(data[name]) for name in ("missing", "gpus")}
        return cls(**{**data, **lists})


def rank_facts(requirements: Sequence[str], error: str = "", *, needed_bytes: int = 0) -> RankFacts:
    """Gather the facts of this process without importing anything large."""
    return RankFacts(
        limit_bytes=address_space_limit(),
        needed_bytes=needed_bytes,
        # Only a job that requires it depends on its random numbers.
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


# Torch's own build writes into its version.py: `cuda: Optional[str] = '13.0'`, or None.
_NO_CUDA = re.compile(r"^cuda\b[^=\n]*= *None *$", re.MULTILINE)


def _cpu_torch() -> str:
    """Return the version of torch if it is built without CUDA, else "" (also where that is unknown); without importing it.

    The version does not tell: builds from PyPI have CUDA and no tag.
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
    """Return the reason why these ranks cannot run one job together, or "".

    The same on every rank, because it depends on nothing but its arguments.
    """
    for rank, facts in enumerate(ranks):
        # Before its error: under such a limit, threads and processes do not start either.
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
                "others. Install the same release on every host."
            )
    return ""


def patch_warning(driver: RankFacts, ranks: Sequence[RankFacts]) -> str:
    """Return a warning if driver and ranks differ in the patch version of torch, or ranks in that of numpy, else ""."""
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
    """Refuse to start trainers below a process that may have too little address space for them.

    Raises:
        PreflightError: the limit is lower than the need of a trainer.
    """
    if facts.is_short_of_address_space:
        raise PreflightError(
            f"The processes of this one {_describe_shortage(facts)}. "
            "Raise the limit of this process, for example by 'ulimit -v unlimited' in the shell that starts it."
        )


def _describe_shortage(facts: RankFacts) -> str:
    return (
        f"may have {facts.limit_bytes >> 20} MiB of address space each (RLIMIT_AS), and a trainer with torch "
        f"{facts.torch} needs {mebibytes(facts.needed_bytes)} MiB before its model and data"
    )
