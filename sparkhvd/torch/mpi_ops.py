"""Horovod's `mpi_ops` module, for imports of collectives from it.

New code imports the names from `sparkhvd.torch`. Three query functions of Horovod exist only here.
"""

from sparkhvd.torch import *  # noqa: F403 - its `__all__` is the list
from sparkhvd.torch import __all__ as _names
from sparkhvd.torch.startup import check_extension, gpu_available, num_rank_is_power_2

__all__ = [*_names, "check_extension", "gpu_available", "num_rank_is_power_2"]
