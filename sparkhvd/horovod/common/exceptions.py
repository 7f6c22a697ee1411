"""Horovod's `horovod.common.exceptions`."""

from sparkhvd.elastic.rendezvous import HostsUpdatedInterrupt
from sparkhvd.errors import HorovodInternalError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HorovodVersionMismatchError(ImportError):
    """Versions of two parts differ; nothing raises it, because there is one part."""
