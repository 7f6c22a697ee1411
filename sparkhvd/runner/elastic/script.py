"""Run the user's command as an elastic job."""

from __future__ import annotations

import contextlib
import queue
import secrets
import sys
from collections.abc import Mapping, Sequence

from sparkhvd.elastic import Coordinator, JoinToken
from sparkhvd.rendezvous import Listener
from sparkhvd.runner.elastic.function_hosts import HostGroup
from sparkhvd.runner.elastic.launcher import ElasticLauncher, Event, JobResult, MemberRefused
from sparkhvd.runner.elastic.options import DiscoveryScript, ElasticOptions
from sparkhvd.runner.elastic.processes import (
    ElasticProcesses,
    ElasticProcessesHere,
    ElasticProcessesOnHosts,
)
from sparkhvd.runner.elastic.slots import slots_of
from sparkhvd.runner.host_names import Host, merged
from sparkhvd.runner.hosts.agent import Members
from sparkhvd.runner.hosts.connection import Reach
from sparkhvd.runner.hosts.protocol import StartRequest
from sparkhvd.runner.local_processes import LocalProcesses
from sparkhvd.runner.supervisor import Output, RankEnded, Screen, first_cause, notify, signals
from sparkhvd.settings import JobSettings, Settings

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
    """Run a command as an elastic job and return the exit status for the shell.

    Args:
        command: program and arguments.
        hosts: initial hosts with slots. If all of them are this host, later ones must be, too.
        discovery: finds later hosts; None if the hosts are fixed.
        options: limits of the job.
        env: variables of the ranks: all of them if this is the only host, else additions to those of an ssh login.
        settings: of the launch.
        reach: how other hosts are reached.
        output: destination of their output.

    Raises:
        PreflightError: this process cannot listen.
    """
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    hosts = merged(hosts, reach.is_here)  # slots of a host need distinct numbers
    names = tuple(host.name for host in hosts)
    group = HostGroup(names, reach, JobSettings(settings), env)
    address = group.address()
    key, job_id = secrets.token_bytes(32), secrets.token_hex(8)
    with contextlib.ExitStack() as stack:
        screen = stack.enter_context(Screen(output, 0))
        processes = _processes(command, group, stack, screen, events, address)
        stack.enter_context(signals(events))
        coordinator = stack.enter_context(
            Coordinator(
                key,
                job_id,
                Listener.bind(address, settings),
                options.limits(settings.elastic_patience_s),
                on_decided=events.put,
                on_formed=events.put,
                on_refused=lambda number, refusal: events.put(MemberRefused(number, refusal)),
            )
        )

        def issue_token(number: int) -> JoinToken:
            screen.add(number)
            return options.join_token(
                key, job_id, number, coordinator.endpoint, settings.elastic_patience_s
            )

        launcher = ElasticLauncher(
            options, slots_of(hosts), processes, coordinator, issue_token, _log
        )
        if discovery is not None:
            stack.enter_context(discovery)
            discovery.follow(hosts, lambda found: events.put(group.checked(found)))
        return _status(launcher.run(events), options, screen)


def _log(text: str) -> None:
    sys.stderr.write(f"sparkhvdrun: {text}\n")
    sys.stderr.flush()


def _status(ended: JobResult, options: ElasticOptions, screen: Screen) -> int:
    """Print why a job has failed and return the exit status."""
    if ended.received:
        return 128 + ended.received
    if ended.has_finished:
        return 0
    problem = ended.problem
    if not ended.has_begun:
        problem = f"no host is available after {options.start_timeout_s:g} s (--elastic-timeout)"
    elif not problem and not ended.failed:
        problem = "no host is left, and the training's state is lost with its ranks"
    if problem:
        _log(f"the elastic job cannot continue: {problem}.")
        return _FAILED
    return notify(first_cause(ended.failed, screen), screen)


def _processes(
    command: Sequence[str],
    group: HostGroup,
    stack: contextlib.ExitStack,
    screen: Screen,
    events: queue.SimpleQueue[Event],
    address: str,
) -> ElasticProcesses:
    """Prepare the processes of one or several hosts. The stack ends them."""
    if group.others:

        def order(host: str) -> StartRequest:
            return group.order(host, command=command)

        return stack.enter_context(
            ElasticProcessesOnHosts(group.reach, order, screen.show, events.put)
        )
    local = LocalProcesses(
        screen.show, lambda number, status: events.put(RankEnded(number, status))
    )
    stack.enter_context(local)
    members = Members(local, command, group.env, group.settings.values, address)
    return ElasticProcessesHere(members)
