"""Run the user's command on ranks of this host.

The ranks inherit listeners bound here, so no other program can take a port in between.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
from collections.abc import Mapping, Sequence

from sparkhvd.interfaces import loopback
from sparkhvd.rendezvous import Job, Listener
from sparkhvd.runner import launching
from sparkhvd.runner.local_processes import LocalProcesses, hand_over
from sparkhvd.runner.supervisor import Events, Output, RankEnded, Screen, signals, watch
from sparkhvd.settings import Settings


def run_script(
    command: Sequence[str], num_proc: int, env: Mapping[str, str], output: Output
) -> int:
    """Run a command on every rank and return the exit status for the shell, see `watch`.

    Args:
        command: program and arguments.
        num_proc: number of ranks.
        env: all variables of the ranks.
        output: destination of their output.
    """
    events: Events = queue.SimpleQueue()
    settings, here = Settings.resolve(env), loopback()
    with contextlib.ExitStack() as stack:
        screen = stack.enter_context(Screen(output, num_proc))
        processes = stack.enter_context(
            LocalProcesses(screen.show, lambda rank, status: events.put(RankEnded(rank, status)))
        )
        stack.enter_context(signals(events))
        port = stack.enter_context(launching.reserved_port(here))
        listeners = [stack.enter_context(Listener.bind(here, settings)) for _ in range(num_proc)]
        endpoints = tuple(each.endpoint() for each in listeners)
        key = secrets.token_bytes(32)
        job = Job(key, secrets.token_hex(8), 0, 0, num_proc, endpoints)
        for each in hand_over(listeners, job, env, (here, port)):
            processes.start(each, command)
        return watch(events, num_proc, processes.send, screen)
