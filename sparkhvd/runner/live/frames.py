"""Records on a connection from a task to the driver."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

# Number of the record, whether it is an entry of `log_metrics`, and bytes of its text, which follows.
HEADER = struct.Struct("!Q?I")
# Number of the last shown record.
ACK = struct.Struct("!Q")
# The driver refuses longer texts.
MAX_RECORD_BYTES = 1 << 20
# Of the driver's port, where rank r is number r + 1, as the driver is 0.
PURPOSE = "live output"


class Record(NamedTuple):
    """Text of a rank for the driver.

    Attributes:
        number: 1, 2, ... for each rank of an attempt; 0 for progress, which may be lost.
        text: whole lines, without the last newline; "" for a lost record.
        lines: lines of the rank that it represents: its own, and lines that it counts as left out.
        is_metrics: whether the text is an entry of `log_metrics`, as JSON.
    """

    number: int
    text: str
    lines: int = 0
    is_metrics: bool = False


def left_out(rank: int, lines: int, elsewhere: str) -> str:
    """Return the line that counts lines of a rank that are not shown, with their place; "" for no place."""
    where = f"; {elsewhere}" if elsewhere else ""
    return f"[{rank}] ({lines:,} line{'s' * (lines != 1)} left out here{where})"


def pack(records: Iterable[Record]) -> bytes:
    """Return the bytes of records on a connection."""
    parts = []
    for record in records:
        data = record.text.encode(errors="replace")
        parts += [HEADER.pack(record.number, record.is_metrics, len(data)), data]
    return b"".join(parts)


def unpack(data: bytes) -> Iterator[Record]:
    """Yield the records of `pack`."""
    at = 0
    while at < len(data):
        number, is_metrics, num_bytes = HEADER.unpack_from(data, at)
        at += HEADER.size
        text = data[at : at + num_bytes].decode(errors="replace")
        yield Record(number, text, is_metrics=is_metrics)
        at += num_bytes
