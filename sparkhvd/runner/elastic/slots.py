"""Which processes to start and to remove, by the hosts that are there. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sparkhvd.runner.host_names import Host

__all__ = ["Slot", "slots_to_fill", "surplus"]


@dataclass(frozen=True)
class Slot:
    """Place for one process: a host and a number there, from 0 on."""

    host: str
    number: int


def slots_to_fill(
    hosts: Sequence[Host], taken: Collection[Slot], most: int, left_out: Collection[str]
) -> list[Slot]:
    """Return free slots, hosts in their order, so that `most` processes are not exceeded.

    Args:
        hosts: those that are there.
        taken: slots of processes that run.
        most: processes that may run.
        left_out: hosts on which nothing is started now.
    """
    free = [
        slot
        for host in hosts
        if host.name not in left_out
        for number in range(host.slots)
        if (slot := Slot(host.name, number)) not in taken
    ]
    return free[: max(0, most - len(taken))]


def surplus(hosts: Sequence[Host], taken: Mapping[int, Slot]) -> list[int]:
    """Return the processes, by number, whose slot is not there any more."""
    slots = {host.name: host.slots for host in hosts}
    return [number for number, slot in taken.items() if slot.number >= slots.get(slot.host, 0)]
