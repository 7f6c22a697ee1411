"""Signal to a training loop that the members of its job should change."""

from __future__ import annotations

__all__ = ["HostsUpdatedInterrupt"]


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name
    """The set of hosts has changed: raised on every rank by the same commit, with the same attributes.

    Attributes:
        skip_sync: whether the state need not be sent anew, because nobody joins.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts has changed")
        self.skip_sync = skip_sync
