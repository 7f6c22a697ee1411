"""Processes of an elastic job on the host where this runs: the launcher's own, or an agent's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparkhvd import processors
from sparkhvd.elastic import Invitation
from sparkhvd.rendezvous import Listener
from sparkhvd.runner.crew import Crew
from sparkhvd.runner.script_ranks import hand_over_member
from sparkhvd.settings import Settings

__all__ = ["Members"]


class Members:
    """Processes of the user's command.

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

    def start(self, invitation: Invitation, slot: int, slots: int) -> None:
        """Start a process.

        Args:
            invitation: to the job.
            slot: its number among the slots of this host.
            slots: of this host.

        Raises:
            PreflightError: it cannot listen.
            OSError: it cannot be started.
        """
        listener = Listener.bind(self._address, self._settings)
        threads = max(1, int(processors.allowed() / slots))
        given = hand_over_member(listener, invitation, self._env, slot, threads)
        self._crew.start(given, self._command)

    def send(self, number: int, member: int | None = None) -> None:
        """Send a signal to all processes, or to one."""
        self._crew.send(number, member)
