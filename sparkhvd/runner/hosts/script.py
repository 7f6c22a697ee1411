"""Run the user's command on ranks of several hosts."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Mapping, Sequence

from sparkhvd.rank_settings import JobSettings
from sparkhvd.runner.guard import Guard
from sparkhvd.runner.host_names import Place
from sparkhvd.runner.hosts.channel import Message
from sparkhvd.runner.hosts.connection import Reach
from sparkhvd.runner.hosts.launch import Hosts
from sparkhvd.runner.screen import Output, Screen
from sparkhvd.runner.watching import Ended, Events, Lost, signals, watch
from sparkhvd.settings import Settings

__all__ = ["run_script_on_hosts"]


def run_script_on_hosts(
    command: Sequence[str],
    places: Sequence[Place],
    env: Mapping[str, str],
    settings: Settings,
    reach: Reach,
    output: Output,
) -> int:
    """Run a command on every rank; return the exit status for the shell, see `watch`.

    Args:
        command: program and arguments; each host looks for them.
        places: hosts and their ranks.
        env: variables of the ranks, beside those that a login by ssh gives.
        settings: of the launch.
        reach: how the hosts are reached.
        output: where the ranks' output goes.

    Raises:
        PreflightError: some hosts cannot run their ranks. None has started, or all have ended.
    """
    events: Events = queue.SimpleQueue()
    size = sum(place.count for place in places)
    running = {place.host: set(place.ranks) for place in places}
    with contextlib.ExitStack() as stack:
        guard = stack.enter_context(Guard())
        screen = stack.enter_context(Screen(output, size))
        hosts = stack.enter_context(Hosts(places, reach, guard))
        hosts.start(env, JobSettings(settings), command=list(command))

        def receive(place: Place, message: Message) -> None:
            rank = int(message.values["rank"])
            if message.kind == "line":
                screen.show(rank, message.values["stream"], message.data)
            elif message.kind == "ended":
                running[place.host].discard(rank)
                events.put(Ended(rank, int(message.values["status"])))

        def lose(place: Place, why: str) -> None:
            events.put(Lost(place.host, tuple(sorted(running[place.host])), why))

        stack.enter_context(signals(events))
        hosts.listen(receive, lose)
        return watch(events, size, hosts.send, screen)
