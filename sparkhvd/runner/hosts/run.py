"""Run a function, or the user's command, on ranks of several hosts."""

from __future__ import annotations

import contextlib
import queue
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TextIO, TypeVar

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.runner import launching
from sparkhvd.runner.gpu import agreement, decide
from sparkhvd.runner.host_names import (
    Host,
    HostSlots,
    forwarded,
    merged,
    parse_hosts,
    place_ranks,
    read_hostfile,
)
from sparkhvd.runner.hosts.connection import Reach
from sparkhvd.runner.hosts.launch import Hosts
from sparkhvd.runner.local import check_num_proc, collect, results_of
from sparkhvd.runner.outcomes import Outcome, OutcomeKind
from sparkhvd.runner.supervisor import Events, HostLost, Output, RankEnded, Screen, signals, watch
from sparkhvd.runner.trainer import INTERRUPT_GRACE_S
from sparkhvd.settings import JobSettings, Settings, check_seconds
from sparkhvd.wire import Message

R = TypeVar("R")

# How long the hosts may take to start their agents, without `start_timeout`.
_START_S = 30.0
# Longest time to kill and report interrupted ranks, after their time to save.
_MARGIN_S = 1.0


@dataclass(frozen=True)
class HostsOptions:
    """Options of `run_hosts`, under its names.

    `metrics` takes ranks and their entries of `log_metrics`, as JSON.
    """

    hosts: str | None
    hostfile: str | None
    env: Mapping[str, str]
    settings: Settings | None
    verbose: int
    use_gpu: bool | None
    interfaces: str
    ssh_port: int | None
    ssh_identity_file: str | None
    start_timeout_s: float | None
    stream: TextIO | None
    timestamps: bool
    metrics: Callable[[int, str], None] | None = None

    def hosts_given(self) -> list[Host]:
        """Read `hosts` or `hostfile`.

        Raises:
            InvalidArgumentError: neither or both are given.
        """
        if (self.hosts is None) == (self.hostfile is None):
            raise InvalidArgumentError(
                f"hosts is {self.hosts!r} and hostfile {self.hostfile!r}; give one of them, such as hosts='a:4,b:4'."
            )
        if self.hosts is not None:
            return parse_hosts(self.hosts)
        return read_hostfile(self.hostfile or "")


def launch_on_hosts(
    fn: Callable[..., R],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    num_proc: int | None,
    options: HostsOptions,
) -> list[R]:
    """Launch ranks on hosts, for `sparkhvd.runner.run_hosts`."""
    hosts = options.hosts_given()
    size = sum(host.slots for host in hosts) if num_proc is None else num_proc
    check_num_proc(size)
    place_ranks(hosts, size)  # raises before anything is pickled
    program = launching.dump_call(fn, args, kwargs)
    given = launching.check_env(options.env)
    chosen = launching.choose_settings(options.settings, given)
    if options.interfaces:
        chosen = JobSettings(replace(chosen.values, interfaces=options.interfaces), chosen.fixed)
    start_timeout_s = _START_S if options.start_timeout_s is None else options.start_timeout_s
    check_seconds("start_timeout", start_timeout_s, 30)
    reach = Reach(
        chosen.values.ssh_command,
        options.ssh_port,
        options.ssh_identity_file,
        start_timeout_s,
    )
    places = place_ranks(merged(hosts, reach.is_here), size)
    plan = decide.decide({"spark.master": "local"}, options.use_gpu)

    def check(notified: Sequence[Mapping[str, Any]]) -> str:
        gpus = [
            agreement.RankGpus(**{**each, "uuids": tuple(each["uuids"])})
            for one in notified
            for each in one["gpus"]
        ]
        return agreement.check_gpus(plan.mode, gpus, is_required=plan.is_required)

    with Hosts(places, reach) as started:
        started.start(
            {**forwarded(launching.environ()), **given},
            chosen,
            program,
            check,
            sys_path=list(sys.path),
            use_gpu=options.use_gpu,
        )
        log = launching.log_to(
            options.stream, verbose=options.verbose, timestamps=options.timestamps
        )
        answers = _Answers(places, log, options.metrics)
        started.listen(answers.receive, answers.lose)
        try:
            outcomes = collect(answers.take, size)
        except KeyboardInterrupt:
            started.send(signal.SIGINT)
            answers.wait(INTERRUPT_GRACE_S + _MARGIN_S)
            raise
    return results_of(outcomes, [answers.results.get(rank, b"") for rank in range(size)])


class _Answers:
    """Outcomes and output of ranks, as the hosts send them."""

    def __init__(
        self,
        places: Sequence[HostSlots],
        log: Callable[[str], None],
        metrics: Callable[[int, str], None] | None,
    ) -> None:
        self.results: dict[int, bytes] = {}
        self._log, self._metrics = log, metrics
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._running = {place.host: set(place.ranks) for place in places}

    def receive(self, place: HostSlots, message: Message) -> None:
        if message.kind == "line":
            self._log(message.data.decode(errors="replace"))
        elif message.kind == "metrics":
            entry = message.data.decode(errors="replace")
            rank = int(message.values["rank"])
            if self._metrics is None:
                self._log(f"[{rank}] metrics {entry}")
            else:
                self._metrics(rank, entry)
        elif message.kind == "outcome":
            outcome = Outcome.from_json(message.values["outcome"])
            rank = outcome.rank or 0
            self.results[rank] = message.data
            self._running[place.host].discard(rank)
            self._outcomes.put(replace(outcome, host=place.host))

    def lose(self, place: HostSlots, why: str) -> None:
        for rank in sorted(self._running[place.host]):
            self._outcomes.put(
                Outcome(
                    rank, OutcomeKind.LOST, host=place.host, exit="connection lost", message=why
                )
            )

    def take(self, timeout_s: float) -> Outcome:
        return self._outcomes.get(timeout=timeout_s)

    def wait(self, timeout_s: float) -> None:
        """Wait for the running ranks."""
        deadline = time.monotonic() + timeout_s
        while any(self._running.values()) and time.monotonic() < deadline:
            time.sleep(0.02)


# ----------------------------------------------------------------------------------------------------
# Run the user's command on ranks of several hosts.


def run_script_on_hosts(
    command: Sequence[str],
    places: Sequence[HostSlots],
    env: Mapping[str, str],
    settings: Settings,
    reach: Reach,
    output: Output,
) -> int:
    """Run a command on every rank and return the exit status for the shell, see `watch`.

    Args:
        command: program and arguments, resolved on each host.
        places: hosts and their ranks.
        env: variables of the ranks, in addition to those of an ssh login.
        settings: of the launch.
        reach: how the hosts are reached.
        output: destination of the ranks' output.

    Raises:
        PreflightError: some hosts cannot run their ranks. No rank has started, or all have ended.
    """
    events: Events = queue.SimpleQueue()
    size = sum(place.count for place in places)
    running = {place.host: set(place.ranks) for place in places}
    with contextlib.ExitStack() as stack:
        screen = stack.enter_context(Screen(output, size))
        hosts = stack.enter_context(Hosts(places, reach))
        hosts.start(env, JobSettings(settings), command=list(command))

        def receive(place: HostSlots, message: Message) -> None:
            rank = int(message.values["rank"])
            if message.kind == "line":
                screen.show(rank, message.values["stream"], message.data)
            elif message.kind == "ended":
                running[place.host].discard(rank)
                events.put(RankEnded(rank, int(message.values["status"])))

        def lose(place: HostSlots, why: str) -> None:
            events.put(HostLost(place.host, tuple(sorted(running[place.host])), why))

        stack.enter_context(signals(events))
        hosts.listen(receive, lose)
        return watch(events, size, hosts.send, screen)
