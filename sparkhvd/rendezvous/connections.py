"""Result of a meeting: sockets to every peer; and the protocol of a rendezvous."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sparkhvd.settings import Settings


@dataclass
class Connections:
    """Connected, authenticated sockets, one per peer for control frames and one per peer and stream, as `Engine` takes them.

    Attributes:
        rank: this rank.
        size: number of ranks.
        hosts: index of the host of each rank; equal on all ranks. Ranks with the same index share memory.
        sockets: descriptor per peer, -1 for this rank, for control frames; not inheritable. Owned by the holder
            of this object.
        stream_sockets: the connections for tensors, `streams * size` descriptors, stream after stream, each
            as `sockets`.
    """

    rank: int
    size: int
    hosts: tuple[int, ...]
    sockets: list[int]
    stream_sockets: list[int] = field(default_factory=list)

    def close(self) -> None:
        """Close every descriptor that was not taken."""
        for descriptors in (self.sockets, self.stream_sockets):
            for place, descriptor in enumerate(descriptors):
                if descriptor >= 0:
                    os.close(descriptor)
                descriptors[place] = -1


class Rendezvous(Protocol):
    """Way for the ranks of one job to connect with each other."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def settings(self) -> Settings:
        """The settings of the job; equal on every rank."""

    def connect(self) -> Connections:
        """Meet every other rank; each call is the next generation, so init after shutdown works.

        Every rank must call this. Raises CollectiveTimeoutError (a rank did not come within
        `Settings.connect_timeout_s`) or PeerLostError (a rank is gone), which name the rank.
        """


def joined(rows: Sequence[list[int]]) -> list[int]:
    """Return the rows as one list, row after row."""
    return [descriptor for row in rows for descriptor in row]
