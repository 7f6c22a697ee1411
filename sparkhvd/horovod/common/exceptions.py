"""Horovod's `horovod.common.exceptions`."""

from sparkhvd.elastic.rendezvous import HostsUpdatedInterrupt
from sparkhvd.errors import HorovodInternalError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HorovodVersionMismatchError(ImportError):
    """Error for two parts of different versions; never raised, because there is only one part."""
