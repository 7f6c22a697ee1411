"""Which processes to start and to remove, by the slots that are there. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from sparkhvd.runner.host_names import Host


@dataclass(frozen=True)
class Slot:
    """Place for one process: a host and a number there, from 0 on."""

    host: str
    number: int


@dataclass(frozen=True)
class Offer:
    """News of the slots that are there from now on."""

    slots: tuple[Slot, ...]


def slots_of(hosts: Sequence[Host]) -> tuple[Slot, ...]:
    """Return the slots of hosts, in their order."""
    return tuple(Slot(host.name, number) for host in hosts for number in range(host.slots))


def slots_to_fill(
    slots: Sequence[Slot], taken: Collection[Slot], most: int, left_out: Collection[str]
) -> list[Slot]:
    """Return free slots in their order, so that `most` processes are not exceeded.

    Args:
        slots: those that are there.
        taken: slots of processes that run.
        most: processes that may run.
        left_out: hosts on which nothing is started now.
    """
    free = [slot for slot in slots if slot.host not in left_out and slot not in taken]
    return free[: max(0, most - len(taken))]


def surplus(slots: Collection[Slot], taken: Mapping[int, Slot]) -> list[int]:
    """Return the processes, by number, whose slot is not there any more."""
    return [number for number, slot in taken.items() if slot not in slots]


# ----------------------------------------------------------------------------------------------------
# Hosts that are left out after failures, for a time that doubles with each one. Pure: no clock.


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
