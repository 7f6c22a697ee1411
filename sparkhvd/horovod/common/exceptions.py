"""Horovod's `horovod.common.exceptions`."""

from sparkhvd.errors import HorovodInternalError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HostsUpdatedInterrupt(RuntimeError):
    """The set of hosts has changed; nothing in this version raises it.

    Attributes:
        skip_sync: whether the state need not be sent anew.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts has changed")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Versions of two parts differ; nothing raises it, because there is one part."""
