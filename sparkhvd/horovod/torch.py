"""Horovod's `horovod.torch`: the names of `sparkhvd.torch`, whose modules are its modules."""

from sparkhvd.torch import *  # noqa: F403 - its `__all__` is the list
from sparkhvd.torch import __all__ as __all__
