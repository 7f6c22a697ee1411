"""Elastic training of a function without Spark: on this host, or on several over ssh.

**Threads**: the caller's thread decides. The coordinator, each process (on its host) and each agent (here) have one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TextIO, TypeVar

from sparkhvd.elastic import Coordinator, JoinToken
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.interfaces import loopback, own_address
from sparkhvd.rendezvous import Listener
from sparkhvd.runner import launching
from sparkhvd.runner.elastic.coordinator import ProcessOutcomes, end_of
from sparkhvd.runner.elastic.launcher import ElasticLauncher, Event, MemberRefused
from sparkhvd.runner.elastic.options import Discovered, DiscoveryScript, ElasticOptions, RankRange
from sparkhvd.runner.elastic.processes import (
    ElasticProcesses,
    ElasticProcessesHere,
    ElasticProcessesOnHosts,
)
from sparkhvd.runner.elastic.slots import slots_of
from sparkhvd.runner.host_names import Host, forwarded, merged
from sparkhvd.runner.hosts.agent import FunctionMembers
from sparkhvd.runner.hosts.connection import Reach
from sparkhvd.runner.hosts.launch import bare, loopback_addresses
from sparkhvd.runner.hosts.protocol import StartRequest
from sparkhvd.runner.local import TrainersPlan
from sparkhvd.runner.outcomes import Outcome, OutcomeKind
from sparkhvd.runner.supervisor import HostLost, RankEnded, SignalReceived
from sparkhvd.runner.trainer import INTERRUPT_GRACE_S
from sparkhvd.settings import JobSettings, Settings

R = TypeVar("R")

# How long interrupted ranks may take, beyond their grace, to be killed and reported.
_MARGIN_S = 2.0


@dataclass(frozen=True)
class HostsOfFunction:
    """Hosts for the ranks of a function. The default is this host.

    Attributes:
        given: hosts with slots; None for this host, or those of the script.
        script: program that prints the available hosts; "" without one.
        slots: of this host, or of the script's hosts without a number; None for the largest number of ranks, or an
            error.
        port: of ssh; None for ssh's configuration.
        identity_file: private key; None likewise.
        interfaces: that the ranks use; "" for those of the settings.
    """

    given: Sequence[Host] | None = None
    script: str = ""
    slots: int | None = None
    port: int | None = None
    identity_file: str | None = None
    interfaces: str = ""

    @property
    def is_this_one(self) -> bool:
        """Whether no host is named."""
        return self.given is None and not self.script

    def discovery(self) -> DiscoveryScript | None:
        """Make a runner for the discovery script, or return None if the hosts are fixed.

        Raises:
            InvalidArgumentError: hosts are given, too.
        """
        if not self.script:
            return None
        if self.given is not None:
            raise InvalidArgumentError(
                "host_discovery_script lists the hosts, and so do hosts= and hostfile=. Give one of them."
            )
        return DiscoveryScript(self.script, self.slots, launching.environ())


def launch_elastic_function(
    fn: Callable[..., R],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    ranks: RankRange,
    *,
    hosts: HostsOfFunction,
    start_timeout_s: float | None = None,
    env: Mapping[str, str],
    settings: Settings | None = None,
    verbose: int = 1,
    use_gpu: bool | None = None,
    stream: TextIO | None = None,
) -> list[R]:
    """Call `fn(*args, **kwargs)` as an elastic job without Spark, and return the results by rank.

    Args:
        fn: any picklable function.
        args: positional arguments of `fn`.
        kwargs: keyword arguments of `fn`.
        ranks: numbers of ranks.
        hosts: where they run.
        start_timeout_s: longest wait for the initial ranks.
        env: of `run_local`.
        settings: of `run_local`.
        verbose: of `run_local`.
        use_gpu: of `run_local`.
        stream: receives the ranks' output.

    Raises:
        InvalidArgumentError: an argument is wrong, or `fn` cannot be pickled. Nothing has started.
        PreflightError: the discovery script fails, or this process cannot listen. Nothing has started.
        ElasticError: there were too few ranks for too long, or too many changes.
        RankError: every process has failed.
    """
    ranks.largest()
    program = launching.dump_call(fn, args, kwargs)
    env = launching.check_env(env)
    chosen = launching.choose_settings(settings, env)
    if hosts.interfaces:
        chosen = JobSettings(replace(chosen.values, interfaces=hosts.interfaces), chosen.fixed)
    wait_s = chosen.values.start_timeout_s if start_timeout_s is None else start_timeout_s
    discovery = hosts.discovery()
    reach = Reach(chosen.values.ssh_command, hosts.port, hosts.identity_file)
    known = list(hosts.given or ()) if discovery is None else list(discovery.first())
    if hosts.is_this_one:
        known = [Host(socket.gethostname(), hosts.slots or ranks.largest() or 1)]
    known = merged(known, reach.is_here)
    limits = ranks.options(ranks.first(sum(host.slots for host in known)), wait_s)
    if ranks.most is None and not hosts.is_this_one:
        limits = replace(limits, most=None)  # every slot
    group = HostGroup(tuple(host.name for host in known), reach, chosen, env)
    if group.others:
        group = replace(group, env={**forwarded(launching.environ()), **env})
    log = launching.log_to(stream, verbose=verbose, timestamps=False)
    job = _Job(group, limits, program, use_gpu, log)
    return job.run(known, discovery, say=functools.partial(_log, verbose))


def _log(verbose: int, text: str) -> None:
    if verbose > 0:
        sys.stderr.write(f"sparkhvd: {text}\n")
        sys.stderr.flush()


@dataclass
class _Job:
    """Running job.

    Attributes:
        group: its hosts.
        limits: of its ranks.
        program: pickled call.
        use_gpu: of `run_local`.
        log: receives each line of the ranks' output.
        events: for the launcher.
        outcomes: of processes that have ended, by number.
        results: pickled, likewise.
    """

    group: HostGroup
    limits: ElasticOptions
    program: bytes = field(repr=False)
    use_gpu: bool | None
    log: Callable[[str], None]
    events: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    results: dict[int, bytes] = field(default_factory=dict)

    def run(
        self,
        known: Sequence[Host],
        discovery: DiscoveryScript | None,
        say: Callable[[str], None],
    ) -> list[R]:
        """Run the job to its end. Ctrl-C interrupts the ranks and is raised after their end."""
        settings = self.group.settings.values
        key, job_id = secrets.token_bytes(32), secrets.token_hex(8)
        put, patience_s = self.events.put, settings.elastic_patience_s
        address = self.group.address()
        with contextlib.ExitStack() as stack:
            processes = self._processes(stack, address)
            coordinator = stack.enter_context(
                Coordinator(
                    key,
                    job_id,
                    Listener.bind(address, settings),
                    self.limits.limits(patience_s),
                    on_decided=put,
                    on_formed=put,
                    on_refused=lambda number, refusal: put(MemberRefused(number, refusal)),
                )
            )

            def issue_token(number: int) -> JoinToken:
                return self.limits.join_token(key, job_id, number, coordinator.endpoint, patience_s)

            launcher = ElasticLauncher(
                self.limits,
                slots_of(known),
                processes,
                coordinator,
                issue_token,
                say,
                INTERRUPT_GRACE_S,
            )
            if discovery is not None:
                stack.enter_context(discovery)
                discovery.follow(known, lambda found: put(self.group.checked(found)))
            try:
                job_result = launcher.run(self.events)
            except KeyboardInterrupt:
                put(SignalReceived(signal.SIGINT))
                launcher.run(self.events, INTERRUPT_GRACE_S + _MARGIN_S)
                raise
        ends = ProcessOutcomes(job_result, self.outcomes)
        if not job_result.has_finished:
            raise ends.failure(job_result.problem).error
        return [launching.load_result(self.results[number]) for number in ends.order()]

    def _processes(self, stack: contextlib.ExitStack, address: str) -> ElasticProcesses:
        """Make the processes of the job. They end with the stack."""
        group = self.group
        if group.others:
            return stack.enter_context(
                ElasticProcessesOnHosts(
                    group.reach,
                    lambda host: group.order(host, sys_path=sys.path, use_gpu=self.use_gpu),
                    lambda _, __, line: self.log(line.decode(errors="replace")),
                    self._record_loss,
                    self.program,
                    self._record_end,
                )
            )
        plan = TrainersPlan(group.env, sys.path, os.getcwd(), group.settings, self.use_gpu)
        members = FunctionMembers(
            plan, self.program, address, socket.gethostname(), self.log, self._record_end
        )
        return ElasticProcessesHere(stack.enter_context(members))

    def _record_end(self, outcome: Outcome, result: bytes) -> None:
        assert outcome.rank is not None
        self.outcomes[outcome.rank], self.results[outcome.rank] = outcome, result
        self.events.put(end_of(outcome))

    def _record_loss(self, event: RankEnded | HostLost) -> None:
        if isinstance(event, HostLost):
            for number in event.ranks:
                self.outcomes[number] = Outcome(
                    number,
                    OutcomeKind.LOST,
                    host=event.host,
                    exit="connection lost",
                    message=event.why,
                )
        self.events.put(event)


# ----------------------------------------------------------------------------------------------------
# Hosts of an elastic job without Spark: how to reach them, where its processes listen, and requests to agents.


@dataclass(frozen=True)
class HostGroup:
    """Constant facts of a running job.

    Attributes:
        hosts: names of the initial hosts. If all of them are this host, later ones must be, too.
        reach: how other hosts are reached.
        settings: of the launch.
        env: variables of the ranks: all of them if this is the only host, else additions to those of an ssh login.
    """

    hosts: tuple[str, ...]
    reach: Reach
    settings: JobSettings
    env: Mapping[str, str] = field(repr=False)

    @property
    def others(self) -> list[str]:
        """Hosts other than this one."""
        return [host for host in self.hosts if not self.reach.is_here(host)]

    def address(self) -> str:
        """This host's address for all processes."""
        if not self.others or loopback_addresses(self.hosts, self.reach):
            return loopback()
        return own_address(self.settings.values.interfaces, bare(self.others[0]))

    def order(
        self,
        host: str,
        *,
        command: Sequence[str] | None = None,
        sys_path: Sequence[str] = (),
        use_gpu: bool | None = None,
    ) -> StartRequest:
        """Make the request for the agent of a host. The arguments are fields of `StartRequest`."""
        return StartRequest(
            first=0,
            count=0,
            cwd=os.getcwd(),
            env=dict(self.env),
            settings=self.settings.to_json(),
            address=loopback_addresses(self.hosts, self.reach).get(host, ""),
            towards=bare(self.others[0]),
            command=None if command is None else list(command),
            sys_path=list(sys_path),
            use_gpu=use_gpu,
            is_elastic=True,
        )

    def checked(self, found: Discovered) -> Discovered:
        """Merge the discovered names of this host and return a problem if hosts cannot be used."""
        if found.hosts is not None:
            found = replace(found, hosts=tuple(merged(found.hosts, self.reach.is_here)))
        new = [host.name for host in found.hosts or () if not self.reach.is_here(host.name)]
        if self.others or not new:
            return found
        return Discovered(
            None,
            f"{new[0]} cannot be used: the ranks of this host listen at an address that only this host reaches. Start the job with several hosts.",
        )
