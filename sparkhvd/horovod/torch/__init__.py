"""Horovod's `horovod.torch`: the names of `sparkhvd.torch`, and its modules `mpi_ops`, `functions`, `optimizer`, `compression`.

Each module imports only those above it:

    elastic  names of a training whose ranks change, which is not in this version
"""

from sparkhvd.horovod.torch import elastic as elastic
from sparkhvd.torch import *  # noqa: F403 - its `__all__` is the list
from sparkhvd.torch import __all__ as __all__
