"""Horovod's `horovod.keras.callbacks`, re-exported from sparkhvd."""

from sparkhvd.keras.callbacks import *  # noqa: F403 - its `__all__` is the list
