"""Processes of members on this host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from sparkhvd import processors
from sparkhvd.elastic import Invitation
from sparkhvd.rendezvous import Listener
from sparkhvd.runner.crew import Crew
from sparkhvd.runner.elastic.slots import Slot
from sparkhvd.runner.script_ranks import hand_over_member
from sparkhvd.settings import Settings

__all__ = ["LocalProcesses", "Processes"]


class Processes(Protocol):
    """Processes of members, wherever they are."""

    def start(self, slot: Slot, invitation: Invitation, slots: int) -> None:
        """Start a process; its end is told as an event, also if it could not be started.

        Args:
            slot: its place.
            invitation: to the job.
            slots: of that host.
        """

    def send(self, number: int, member: int | None = None) -> None:
        """Send a signal to all processes, or to one."""


class LocalProcesses:
    """Processes on this host.

    Args:
        crew: runs them.
        command: program and arguments.
        env: variables of all of them.
        settings: of the launch.
        address: where they listen.
    """

    def __init__(
        self,
        crew: Crew,
        command: Sequence[str],
        env: Mapping[str, str],
        settings: Settings,
        address: str,
    ) -> None:
        self._crew = crew
        self._command = command
        self._env = env
        self._settings = settings
        self._address = address

    def start(self, slot: Slot, invitation: Invitation, slots: int) -> None:
        """Start a process."""
        listener = Listener.bind(self._address, self._settings)
        threads = max(1, int(processors.allowed() / slots))
        with hand_over_member(listener, invitation, self._env, slot.number, threads) as each:
            self._crew.start(each.rank, self._command, each.variables, each.descriptors)

    def send(self, number: int, member: int | None = None) -> None:
        """Send a signal to all processes, or to one."""
        self._crew.send(number, member)
