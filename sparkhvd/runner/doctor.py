"""Report what this machine supports: `python -m sparkhvd doctor`, `sparkhvdrun --check-build`.

Imports nothing slow and runs no user code. Each finding has a remedy if something is missing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sparkhvd import __version__, cpus
from sparkhvd.engine.engine import isa_available
from sparkhvd.errors import SparkhvdError
from sparkhvd.interfaces import loopback
from sparkhvd.rendezvous import Listener
from sparkhvd.rendezvous.listener import most_ranks
from sparkhvd.runner.gpu.probe import count_beside
from sparkhvd.settings import ISAS, Settings

_JAVA_MINIMUM = 17
# How long `java -version` may take.
_JAVA_S = 20.0
_MIB = 1 << 20
# Shared memory per rank: its pipeline, and some room.
_SHARED_MIB = 64


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: of the item.
        found: what exists.
        remedy: what to do; "" if nothing is missing.
        is_needed: whether nothing works without it.
    """

    name: str
    found: str
    remedy: str = ""
    is_needed: bool = False


def examine(open_store: Callable[[], object] | None = None) -> int:
    """Print what this machine supports and lacks, on one screen, and return 1 if something essential is missing.

    Args:
        open_store: opens the user's store and checks that it is writable; None checks the default store of a fit.
    """
    try:
        Settings.resolve()
    except SparkhvdError as error:
        findings = [Finding("settings", "cannot be read", str(error), is_needed=True)]
    else:
        findings = list(_findings(open_store))
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        mark = "ok  " if not finding.remedy else "LACK" if finding.is_needed else "-   "
        sys.stdout.write(f"{mark} {finding.name:<{width}}  {finding.found}\n")
        if finding.remedy:
            sys.stdout.write(f"     {'':<{width}}  {finding.remedy}\n")
    sys.stdout.flush()
    return int(any(finding.remedy and finding.is_needed for finding in findings))


def _findings(open_store: Callable[[], object] | None) -> Iterator[Finding]:
    system = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield Finding("sparkhvd", f"{__version__} on {system}")
    yield _engine()
    yield _package("torch", "Install it for your CUDA, or its build for CPUs.", is_needed=True)
    yield _gpus()
    yield _nccl()
    yield _pyspark()
    yield _java()
    yield _package("pyarrow", "For TorchEstimator: pip install pyarrow.")
    yield _store(open_store)
    yield _mpi()
    yield _cpus()
    yield _memory()
    yield _ports()
    yield _descriptors()


def _engine() -> Finding:
    name = "compiled engine"
    try:
        found = [isa for isa in ISAS if isa != "auto" and isa_available(isa)]
    except SparkhvdError as error:
        return Finding(name, "does not load", str(error), is_needed=True)
    return Finding(name, f"loads; kernels for {', '.join(found)}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package(name: str, remedy: str, *, is_needed: bool = False) -> Finding:
    version = _version(name)
    if version is None:
        return Finding(name, "is not installed", remedy, is_needed)
    return Finding(name, version)


def _pyspark() -> Finding:
    # Each of these distributions has the package; a runtime may have the package without a distribution.
    names = ("pyspark", "pyspark-client", "databricks-connect")
    found = [f"{version} ({name})" for name in names if (version := _version(name))]
    if found or importlib.util.find_spec("pyspark") is not None:
        return Finding("pyspark", ", ".join(found) or "of this runtime")
    remedy = (
        "For sparkhvd.run and TorchEstimator: pip install 'sparkhvd[spark]', or for Spark Connect pyspark-client or "
        "databricks-connect."
    )
    return Finding("pyspark", "is not installed", remedy)


def _gpus() -> Finding:
    try:
        count = count_beside(Settings.resolve().cuda_library, dict(os.environ))  # noqa: TID251 - CUDA's own variable
    except (SparkhvdError, OSError) as error:
        return Finding("GPUs", "CUDA's driver shows no GPU", f"For training on GPUs: {error}")
    if count == 0:
        return Finding("GPUs", "no GPU; ranks use CPUs", "For training on GPUs: CUDA's driver.")
    return Finding("GPUs", str(count))


def _nccl() -> Finding:
    packages = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
    versions = [version for name in packages if (version := _version(name))]
    if versions:
        return Finding("NCCL", versions[0])
    return Finding("NCCL", "no package of it", "For GPUs: it comes with torch's CUDA builds.")


def _java() -> Finding:
    home = os.environ.get("JAVA_HOME")  # noqa: TID251 - Java's own variable
    program = str(Path(home, "bin", "java")) if home else shutil.which("java")
    remedy = f"For Spark without Connect: install Java {_JAVA_MINIMUM} or newer, and set JAVA_HOME."
    if program is None:
        return Finding("Java", "not on PATH, and JAVA_HOME is not set", remedy)
    try:
        ended = subprocess.run(
            [program, "-version"], capture_output=True, text=True, timeout=_JAVA_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("Java", f"{program} does not run: {error}", remedy)
    match = re.search(r'version "(?:1\.)?(\d+)[^"]*"', ended.stderr)
    if match is None or int(match[1]) < _JAVA_MINIMUM:
        return Finding("Java", f"{program} is {match[0] if match else 'no Java'}", remedy)
    return Finding("Java", f"{match[1]} ({program})")


def _store(open_store: Callable[[], object] | None) -> Finding:
    name = "store"
    if open_store is not None:
        try:
            return Finding(name, f"{open_store()} can be written")
        except SparkhvdError as error:
            return Finding(name, "cannot be used", str(error))
    try:
        folder = tempfile.gettempdir()  # this call writes a file there
    except FileNotFoundError as error:
        return Finding(name, str(error), "For TorchEstimator: set TMPDIR, or give a store.")
    found = f"on a local master in {folder}, {shutil.disk_usage(folder).free >> 30} GiB are free"
    if (version := _version("fsspec")) is None:
        return Finding(name, f"{found}; no fsspec", "For stores by URL: pip install fsspec.")
    return Finding(name, f"{found}; fsspec {version} for others (doctor --store URL)")


def _mpi() -> Finding:
    program = shutil.which("mpirun")
    if program is None:
        return Finding(
            "MPI", "no mpirun", "Only for `mpirun python train.py`; sparkhvdrun needs no MPI."
        )
    return Finding("MPI", program)


def _cpus() -> Finding:
    return Finding("CPUs", f"{cpus.allowed():g} that this process may use, of {os.cpu_count()}")


def _memory() -> Finding:
    text = Path("/proc/meminfo").read_text()
    match = re.search(r"MemAvailable:\s+(\d+) kB", text)
    free = int(match[1]) // 1024 if match else 0
    try:
        descriptor = os.memfd_create("sparkhvd-doctor")
        os.posix_fallocate(descriptor, 0, _SHARED_MIB * _MIB)
        os.close(descriptor)
    except OSError as error:
        remedy = "Ranks of this host use sockets instead, which is slower. Give the container more memory."
        return Finding("shared memory", f"{_SHARED_MIB} MiB cannot be allocated: {error}", remedy)
    return Finding("shared memory", f"works without /dev/shm; {free} MiB are free")


def _ports() -> Finding:
    settings = Settings.resolve()
    try:
        with Listener.bind(loopback(), settings):
            return Finding("ports", f"a port is free ({settings.port_range or 'any number'})")
    except SparkhvdError as error:
        return Finding("ports", "no port is free", str(error), is_needed=True)


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return Finding("open files", "no limit")
    ranks = most_ranks(hard, Settings.resolve().streams)
    return Finding("open files", f"{soft} now, {hard} at most: enough for {ranks} ranks in a job")
