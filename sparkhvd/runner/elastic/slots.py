"""Which processes to start and to remove for the available slots, and cooldown of hosts. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from sparkhvd.runner.host_names import Host


@dataclass(frozen=True)
class Slot:
    """Slot for one process: a host and a number there, from 0."""

    host: str
    number: int


@dataclass(frozen=True)
class Offer:
    """Event with the slots available from now on."""

    slots: tuple[Slot, ...]


def slots_of(hosts: Sequence[Host]) -> tuple[Slot, ...]:
    return tuple(Slot(host.name, number) for host in hosts for number in range(host.slots))


def slots_to_fill(
    slots: Sequence[Slot], taken: Collection[Slot], most: int, left_out: Collection[str]
) -> list[Slot]:
    """List the free slots in order, for at most `most` processes in total.

    Args:
        slots: the available ones.
        taken: slots of running processes.
        most: processes that may run.
        left_out: excluded hosts.
    """
    free = [slot for slot in slots if slot.host not in left_out and slot not in taken]
    return free[: max(0, most - len(taken))]


def surplus(slots: Collection[Slot], taken: Mapping[int, Slot]) -> list[int]:
    """List the numbers of the processes on slots no longer available."""
    return [number for number, slot in taken.items() if slot not in slots]


# ----------------------------------------------------------------------------------------------------
# Hosts excluded after failures, for a time that doubles with each failure. Pure: no clock.


@dataclass
class Cooldown:
    """Failures of hosts. Methods take the current time.

    Attributes:
        shortest_s: exclusion after the first failure.
        longest_s: longest exclusion. A host without a failure for this time after its exclusion starts over.
    """

    shortest_s: float
    longest_s: float
    _failures: dict[str, int] = field(default_factory=dict)
    _until: dict[str, float] = field(default_factory=dict)

    def fail(self, host: str, now: float) -> float:
        """Record a failure and return the host's remaining exclusion in seconds. Failures during it do not count."""
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
        return now < self._until.get(host, now)

    def next_end(self, now: float) -> float | None:
        """Find the earliest end of the current exclusions, or None without an exclusion."""
        return min((until for until in self._until.values() if until > now), default=None)
