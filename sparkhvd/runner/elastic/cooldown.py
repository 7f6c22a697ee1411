"""Hosts that are left out after failures, for a time that doubles with each one. Pure: no clock."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Cooldown"]


@dataclass
class Cooldown:
    """Failures of hosts. Every method takes the time.

    Attributes:
        shortest_s: after the first failure.
        longest_s: after many. A host that has had no failure for so long begins anew.
    """

    shortest_s: float
    longest_s: float
    _failures: dict[str, int] = field(default_factory=dict)
    _until: dict[str, float] = field(default_factory=dict)

    def fail(self, host: str, now: float) -> float:
        """Note a failure; return for how many seconds the host is left out. Failures in that time are not counted."""
        until = self._until.get(host, now)
        if now < until:
            return until - now
        if now - until > self.longest_s:
            self._failures.pop(host, None)
        count = self._failures.get(host, 0)
        seconds = min(self.longest_s, self.shortest_s * 2.0 ** min(count, 64))
        self._failures[host] = count + 1
        self._until[host] = now + seconds
        return seconds

    def is_left_out(self, host: str, now: float) -> bool:
        """Return True while nothing is started on a host."""
        return now < self._until.get(host, now)

    def next_end(self, now: float) -> float | None:
        """Return when the next host comes back; None if all are there."""
        return min((until for until in self._until.values() if until > now), default=None)
