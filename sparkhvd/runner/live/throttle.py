"""Limits of how much of a rank's output goes to the driver."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LINES", "MESSAGES", "Bucket", "Rate"]


@dataclass(frozen=True)
class Rate:
    """Rate that a rank may keep up.

    Attributes:
        per_s: items per second.
        bytes_per_s: bytes per second.
        burst_s: seconds of both that may come at once.
    """

    per_s: float
    bytes_per_s: float
    burst_s: float


LINES = Rate(2000.0, float(1 << 20), 2.0)
# Of `log_to_driver`.
MESSAGES = Rate(100.0, float(1 << 20), 2.0)


class Bucket:
    """Token bucket that, once empty, stays closed until it is half full: what is left out, is left out in one piece."""

    def __init__(self, rate: Rate, now: float) -> None:
        self._rate = rate
        self._items = rate.per_s * rate.burst_s
        self._bytes = rate.bytes_per_s * rate.burst_s
        self._at = now
        self._is_closed = False

    def admits(self, num_bytes: int, now: float) -> bool:
        """Return True, and count it, if an item may pass at a time in seconds."""
        rate, passed = self._rate, now - self._at
        self._at = now
        most_items, most_bytes = rate.per_s * rate.burst_s, rate.bytes_per_s * rate.burst_s
        self._items = min(most_items, self._items + passed * rate.per_s)
        self._bytes = min(most_bytes, self._bytes + passed * rate.bytes_per_s)
        if self._is_closed and min(self._items / most_items, self._bytes / most_bytes) < 0.5:
            return False
        self._is_closed = self._items < 1 or self._bytes < num_bytes
        if self._is_closed:
            return False
        self._items -= 1
        self._bytes -= num_bytes
        return True
