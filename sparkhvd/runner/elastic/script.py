"""Run the user's command on ranks that come and go."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from sparkhvd.elastic import Coordinator, Invitation
from sparkhvd.interfaces import LOOPBACK, own_address
from sparkhvd.rank_settings import JobSettings
from sparkhvd.rendezvous import Listener
from sparkhvd.runner.crew import Crew
from sparkhvd.runner.elastic.discovery import Discovered, DiscoveryScript
from sparkhvd.runner.elastic.hosts import Agents, LocalProcesses, Processes
from sparkhvd.runner.elastic.launcher import Event, Launcher, Refused, Verdict
from sparkhvd.runner.elastic.options import ElasticOptions
from sparkhvd.runner.elastic.slots import slots_of
from sparkhvd.runner.guard import Guard
from sparkhvd.runner.host_names import Host, merged
from sparkhvd.runner.hosts.connection import Reach
from sparkhvd.runner.hosts.launch import bare, loopback_addresses
from sparkhvd.runner.hosts.members import Members
from sparkhvd.runner.hosts.order import Order
from sparkhvd.runner.screen import Output, Screen
from sparkhvd.runner.watching import Ended, first_cause, signals, tell
from sparkhvd.settings import Settings

__all__ = ["run_elastic_script"]

_FAILED = 1


def run_elastic_script(
    command: Sequence[str],
    hosts: Sequence[Host],
    discovery: DiscoveryScript | None,
    options: ElasticOptions,
    env: Mapping[str, str],
    settings: Settings,
    reach: Reach,
    output: Output,
) -> int:
    """Run a command on ranks that come and go; return the exit status for the shell.

    Args:
        command: program and arguments.
        hosts: with slots, at the beginning. If all of them are this host, so must those be that come later.
        discovery: tells of others later; None if these stay.
        options: limits of the job.
        env: variables of the ranks: all of them on this host alone, else those on top of what a login by ssh gives.
        settings: of the launch.
        reach: how other hosts are reached.
        output: where their output goes.

    Raises:
        PreflightError: this process cannot listen.
    """
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    hosts = merged(hosts, reach.is_here)  # slots of a host have different numbers
    launch = _Launch(command, env, settings, reach, tuple(host.name for host in hosts))
    address = launch.address()
    key, job_id = secrets.token_bytes(32), secrets.token_hex(8)
    with contextlib.ExitStack() as stack:
        screen = stack.enter_context(Screen(output, 0))
        processes = launch.processes(stack, screen, events, address)
        stack.enter_context(signals(events))
        coordinator = stack.enter_context(
            Coordinator(
                key,
                job_id,
                Listener.bind(address, settings),
                options.limits(settings.elastic_patience_s),
                on_decided=events.put,
                on_formed=events.put,
                on_refused=lambda number, refusal: events.put(Refused(number, refusal)),
            )
        )

        def invite(number: int) -> Invitation:
            screen.add(number)
            return options.invitation(
                key, job_id, number, coordinator.endpoint, settings.elastic_patience_s
            )

        launcher = Launcher(options, slots_of(hosts), processes, coordinator, invite, _say)
        if discovery is not None:
            stack.enter_context(discovery)
            discovery.follow(hosts, lambda found: events.put(launch.checked(found)))
        return _status(launcher.run(events), options, screen)


def _say(text: str) -> None:
    sys.stderr.write(f"sparkhvdrun: {text}\n")
    sys.stderr.flush()


def _status(ended: Verdict, options: ElasticOptions, screen: Screen) -> int:
    """Say why a job has failed; return the exit status."""
    if ended.received:
        return 128 + ended.received
    if ended.has_finished:
        return 0
    problem = ended.problem
    if not ended.has_begun:
        problem = f"no host is there after {options.start_timeout_s:g} s (--elastic-timeout)"
    elif not problem and not ended.failed:
        problem = "no host is left, and with their ranks the training's state is gone"
    if problem:
        _say(f"the elastic job cannot go on: {problem}.")
        return _FAILED
    return tell(first_cause(ended.failed, screen), screen)


@dataclass(frozen=True)
class _Launch:
    """What does not change while the job runs.

    Attributes:
        command: program and arguments.
        env: variables of the ranks.
        settings: of the launch.
        reach: how other hosts are reached.
        hosts: names of those that were there at the beginning.
    """

    command: Sequence[str]
    env: Mapping[str, str] = field(repr=False)
    settings: Settings
    reach: Reach
    hosts: tuple[str, ...]

    @property
    def others(self) -> list[str]:
        """The hosts that are not this one."""
        return [host for host in self.hosts if not self.reach.is_here(host)]

    def address(self) -> str:
        """Return the address of this host at which all processes reach it."""
        if not self.others or loopback_addresses(self.hosts, self.reach):
            return LOOPBACK
        return own_address(self.settings.interfaces, bare(self.others[0]))

    def order(self, host: str) -> Order:
        """Return what the agent of a host is asked for."""
        return Order(
            first=0,
            count=0,
            cwd=os.getcwd(),
            env=dict(self.env),
            settings=JobSettings(self.settings).to_json(),
            address=loopback_addresses(self.hosts, self.reach).get(host, ""),
            towards=bare(self.others[0]),
            command=list(self.command),
            is_elastic=True,
        )

    def processes(
        self,
        stack: contextlib.ExitStack,
        screen: Screen,
        events: queue.SimpleQueue[Event],
        address: str,
    ) -> Processes:
        """Prepare for processes, before this process has threads; they end with the stack."""
        if self.others:
            guard = stack.enter_context(Guard())
            agents = Agents(self.reach, guard, self.order, screen.show, events.put)
            return stack.enter_context(agents)
        crew = Crew(screen.show, lambda number, status: events.put(Ended(number, status)))
        stack.enter_context(crew)
        return LocalProcesses(Members(crew, self.command, self.env, self.settings, address))

    def checked(self, found: Discovered) -> Discovered:
        """Return what was discovered, with names of this host as one, or the problem with it."""
        if found.hosts is not None:
            found = replace(found, hosts=tuple(merged(found.hosts, self.reach.is_here)))
        new = [host.name for host in found.hosts or () if not self.reach.is_here(host.name)]
        if self.others or not new:
            return found
        return Discovered(
            None,
            f"{new[0]} cannot be used: the ranks of this host listen where only this host reaches them. Begin with several hosts.",
        )
