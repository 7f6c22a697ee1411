"""Records on a connection from a task to the driver, and the proof of both ends."""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from sparkhvd.rendezvous import Endpoint, Job
from sparkhvd.rendezvous.handshake import Turn

__all__ = ["ACK", "FIRST", "HEADER", "MAX_RECORD_BYTES", "Record", "pack", "pair", "unpack"]

# Number of the record and bytes of its text, which follows.
HEADER = struct.Struct("!QI")
# Number of the last record that is shown.
ACK = struct.Struct("!Q")
# The driver refuses longer ones.
MAX_RECORD_BYTES = 1 << 20
FIRST = Turn(0, 0)


class Record(NamedTuple):
    """Text of a rank for the driver.

    Attributes:
        number: 1, 2, ... for each rank of an attempt; 0 of progress, which may be lost.
        text: whole lines, without the end of the last.
    """

    number: int
    text: str


def pair(key: str, job_id: str, attempt: int, size: int, rank: int | None) -> Job:
    """Return a job in which the driver is rank 0, and each rank the next one, to prove to each other that they know the attempt's key.

    Args:
        key: of the attempt, in hex.
        job_id: of the attempt.
        attempt: 0 for the first launch.
        size: number of ranks.
        rank: this process's; None for the driver.
    """
    # A key of its own: no proof between ranks is one here.
    pair_key = hmac.digest(bytes.fromhex(key), b"sparkhvd live output", "sha256")
    own = 0 if rank is None else rank + 1
    return Job(pair_key, job_id, attempt, own, size + 1, (Endpoint("", 0, "", ""),) * (size + 1))


def pack(records: Iterable[Record]) -> bytes:
    """Return the bytes of records on a connection."""
    parts = []
    for record in records:
        data = record.text.encode(errors="replace")
        parts += [HEADER.pack(record.number, len(data)), data]
    return b"".join(parts)


def unpack(data: bytes) -> Iterator[Record]:
    """Yield the records of `pack`."""
    at = 0
    while at < len(data):
        number, num_bytes = HEADER.unpack_from(data, at)
        at += HEADER.size
        yield Record(number, data[at : at + num_bytes].decode(errors="replace"))
        at += num_bytes
