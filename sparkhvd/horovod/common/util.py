"""Horovod's `horovod.common.util`: checks of built features, extension and number of ranks."""

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
from sparkhvd.torch.startup import (
    check_extension,
    extension_available,
    gpu_available,
    num_rank_is_power_2,
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
