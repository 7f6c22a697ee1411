"""Records on a connection from a task to the driver."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from sparkhvd import wire

# The driver refuses longer records.
MAX_RECORD_BYTES = 1 << 20
# Purpose of the proof at the driver's port. There rank r is number r + 1, because the driver is 0.
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
    """Format the number of lines left out of a rank's output. `elsewhere` is their place, or ""."""
    where = f"; {elsewhere}" if elsewhere else ""
    return f"[{rank}] ({lines:,} line{'s' * (lines != 1)} left out here{where})"


def pack(records: Iterable[Record]) -> bytes:
    return b"".join(
        wire.frame_of(
            wire.pack(
                "metrics" if record.is_metrics else "output",
                record.text.encode(errors="replace"),
                {"number": record.number},
            )
        )
        for record in records
    )


def record_of(payload: bytes) -> Record:
    """Parse a payload.

    Raises:
        ValueError: it is invalid.
    """
    message = wire.unpack(payload)
    if message.kind not in ("metrics", "output"):
        raise ValueError(f"a record of kind {message.kind!r}")
    text = message.data.decode(errors="replace")
    return Record(_number(message), text, is_metrics=message.kind == "metrics")


def unpack(data: bytes) -> Iterator[Record]:
    """Yield the records in bytes of `pack`."""
    came = bytearray(data)
    while (payload := wire.take_frame(came)) is not None:
        yield record_of(payload)


def shown(number: int) -> bytes:
    """Make the driver's acknowledgement of the shown records, up to a number."""
    return wire.frame_of(wire.pack("shown", b"", {"number": number}))


def take_shown(came: bytearray) -> int | None:
    """Remove the first message of `shown` from received bytes, or return None if it is incomplete.

    Raises:
        ValueError: it is invalid.
    """
    payload = wire.take_frame(came, MAX_RECORD_BYTES)
    return None if payload is None else _number(wire.unpack(payload))


def _number(message: wire.Message) -> int:
    number = message.values.get("number")
    if not isinstance(number, int):
        raise ValueError(f"a message with the number {number!r}")
    return number
