"""Horovod's `horovod.torch`: the names and modules of `sparkhvd.torch`, and some of `horovod.common.util`."""

from sparkhvd.torch import *  # noqa: F403 - its `__all__` is the list
from sparkhvd.torch import __all__ as _names
from sparkhvd.torch.startup import check_extension, gpu_available, num_rank_is_power_2

__all__ = [*_names, "check_extension", "gpu_available", "num_rank_is_power_2"]
