"""Horovod's `horovod.common.exceptions`."""

from sparkhvd.elastic.rendezvous import HostsUpdatedInterrupt
from sparkhvd.errors import HorovodInternalError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HorovodVersionMismatchError(ImportError):
    """Horovod's error for parts of different versions. Never raised, because sparkhvd has only one part."""
