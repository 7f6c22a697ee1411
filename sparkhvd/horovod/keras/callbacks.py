"""Horovod's `horovod.keras.callbacks`, which are sparkhvd's."""

from sparkhvd.keras.callbacks import *  # noqa: F403 - its `__all__` is the list
