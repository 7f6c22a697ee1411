"""Horovod's `horovod.common.util`: questions about what was built, and about numbers of ranks."""

from __future__ import annotations

from sparkhvd import as_horovod
from sparkhvd.horovod.common.exceptions import HorovodVersionMismatchError
from sparkhvd.torch import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    mpi_built,
    nccl_built,
    rocm_built,
)

__all__ = [
    "HorovodVersionMismatchError",
    "ccl_built",
    "check_extension",
    "cuda_built",
    "ddl_built",
    "extension_available",
    "get_average_backwards_compatibility_fun",
    "gloo_built",
    "gpu_available",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "rocm_built",
]

get_average_backwards_compatibility_fun = as_horovod.stub(
    "horovod.common.util.get_average_backwards_compatibility_fun",
    "call allreduce() and its like, which take average=",
)


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return True for the framework that sparkhvd has, "torch", and False for others ("tensorflow", "mxnet")."""
    del verbose
    return ext_base_name == "torch"


def check_extension(
    ext_name: str, ext_env_var: str = "", pkg_path: str = "", *args: object
) -> None:
    """Raise an ImportError unless a framework is there, by its module such as "horovod.torch"."""
    del ext_env_var, pkg_path, args
    framework = ext_name.rpartition(".")[2]
    if not extension_available(framework):
        raise ImportError(f"sparkhvd has no frontend for {framework}. It has one for torch.")


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return True if the framework sees a GPU."""
    if not extension_available(ext_base_name, verbose):
        return False
    import torch

    return torch.cuda.is_available()


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return True for 1, 2, 4, 8, ... ranks, which Adasum needs."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0
