"""Address space (RLIMIT_AS) that torch and a trainer need."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

from sparkhvd.errors import PreflightError
from sparkhvd.processors import read_text

__all__ = [
    "SPARKS_LIMIT",
    "address_space_limit",
    "address_space_needed",
    "check_worker",
    "mebibytes",
]

# Beyond torch's own libraries. Measured with torch's CPU build (446 MiB of libraries) and one thread: at 800 MiB a
# trainer starts, makes an engine and takes optimizer steps with 4 MB of parameters; at 700 MiB the first step
# cannot allocate, at 600 MiB no thread starts. The rest is Python, numpy, the engine, and malloc's 64 MiB per thread.
_TRAINER_BYTES = 350 << 20
# Importing pyarrow and the estimator's part in a rank, measured in the same process.
_ARROW_BYTES = 250 << 20
SPARKS_LIMIT = (
    "Spark sets this limit to spark.executor.pyspark.memory, divided by spark.executor.cores where that is set: leave "
    "spark.executor.pyspark.memory unset, or set it to"
)
# Need of a worker beyond torch's libraries until it has predicted 4,096 rows; 79 MiB were measured.
_WORKER_BYTES = 160 << 20
_NEEDS_TORCH = frozenset({"torch", "sparkhvd.torch", "sparkhvd.estimator"})
# Libraries from NVIDIA's packages that `import torch` maps in a build with CUDA, also without a GPU: 1.4 to 1.9 GiB with
# torch 2.4, 2.14 and 2.15. Other files of these packages, such as cuDNN's engines, are mapped later or never.
_CUDA_LIBRARIES = (
    "cublas", "cublasLt", "cudart", "cudnn", "cufft", "cufile", "cupti", "curand", "cusolver", "cusparse", "cusparseLt",
    "nccl", "nvJitLink", "nvrtc", "nvshmem_host",
)  # fmt: skip


def address_space_limit() -> int:
    """Return the most address space that this process and its children may have, in bytes; 0 means no limit."""
    try:
        import resource  # absent on Windows, where a Connect client may run
    except ImportError:
        return 0
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return 0 if soft == resource.RLIM_INFINITY else soft


def check_worker() -> None:
    """Refuse to import torch in a Python worker of Spark that has too little address space left for it.

    Known only in a running worker: pyarrow alone reserves 1 GiB where it can.

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
    """Return bytes as MiB, rounded up."""
    return -(-size >> 20)


def address_space_needed(modules: Iterable[str], slots_bytes: int) -> int:
    """Return the least address space in which a trainer with these modules can train, in bytes; 0 if unknown.

    Its model and data come on top, and with a GPU much more: CUDA reserves address space for the whole device.

    Args:
        modules: imports of the trainer, as far as known.
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
    """Return the size of the libraries that `import torch` maps, in bytes; 0 without torch."""
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
