"""Questions of Horovod's programs about frontends and numbers of ranks."""

from __future__ import annotations

import torch

__all__ = ["check_extension", "extension_available", "gpu_available", "num_rank_is_power_2"]


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
    return extension_available(ext_base_name, verbose) and torch.cuda.is_available()


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return True for 1, 2, 4, 8, ... ranks, which Adasum needs."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0
