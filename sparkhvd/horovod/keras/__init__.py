"""Horovod's `horovod.keras`: the names of `sparkhvd.keras`, for Keras 3 on its torch backend.

Each module imports only those above it:

    callbacks  Horovod's callbacks
"""

from sparkhvd.keras import *  # noqa: F403 - its `__all__` is the list
from sparkhvd.keras import __all__ as __all__
