"""Horovod's `horovod.torch`: the names of `sparkhvd.torch`, and its modules `mpi_ops`, `functions`, `optimizer`, `compression`."""

from sparkhvd.torch import *  # noqa: F403 - its `__all__` is the list
from sparkhvd.torch import __all__ as __all__
