"""Horovod's module of collectives: `from sparkhvd.torch.mpi_ops import allreduce, synchronize`.

The names are those of `sparkhvd.torch`, where new code finds them.
"""

from sparkhvd.torch import *  # noqa: F403 - its `__all__` is the list
from sparkhvd.torch import __all__ as __all__
