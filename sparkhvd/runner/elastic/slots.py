"""Which processes to start and to remove, by the slots that are there. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sparkhvd.runner.host_names import Host

__all__ = ["Offer", "Slot", "slots_of", "slots_to_fill", "surplus"]


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
