"""Horovod's `horovod.torch`: the names of `sparkhvd.torch`, and its modules `mpi_ops`, `functions`, `optimizer`, `compression`."""

from sparkhvd.torch import *  # noqa: F403 - its `__all__` is the list
from sparkhvd.torch import __all__ as __all__

# `horovod.torch.mpi_ops` and its like: `as_horovod` finds them in sparkhvd.torch.
__path__: list[str] = []
