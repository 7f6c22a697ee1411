"""Start of ranks on all hosts in parallel, step by step."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from sparkhvd.errors import PreflightError
from sparkhvd.interfaces import is_loopback, loopback
from sparkhvd.launchers import gather
from sparkhvd.rendezvous import Endpoint, Job
from sparkhvd.runner.host_names import HostSlots
from sparkhvd.runner.hosts.agent import BEAT_S, REACH_S
from sparkhvd.runner.hosts.connection import END_S, HostConnection, HostError, Reach
from sparkhvd.runner.hosts.protocol import StartRequest
from sparkhvd.runner.orphans import OrphanReaper
from sparkhvd.settings import JobSettings
from sparkhvd.wire import Message, rebuild

T = TypeVar("T")


class Hosts:
    """Agents on all hosts. The context manager ends all their processes.

    Args:
        places: hosts and their ranks.
        reach: how the hosts are reached.

    Raises:
        PreflightError: some hosts do not answer in time, or run other versions; all of them are listed.
    """

    def __init__(self, places: Sequence[HostSlots], reach: Reach) -> None:
        self.places = places
        self._reach = reach
        self._all: list[HostConnection] = []
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()
        self._reaper = OrphanReaper()
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            try:
                for place in places:
                    self._all.append(HostConnection(place, reach, self._reaper))
            except HostError as error:
                raise PreflightError(str(error)) from error
            self._each(lambda each: each.greet(reach.start_timeout_s))
            self._start(self._beat)
            stack.pop_all()

    def start(
        self,
        env: Mapping[str, str],
        settings: JobSettings,
        program: bytes = b"",
        check: Callable[[Sequence[Mapping[str, Any]]], str] = lambda _: "",
        **ordered: object,
    ) -> None:
        """Start the ranks.

        Args:
            env: variables of the ranks.
            settings: of the launch.
            program: pickled call of a function.
            check: receives each host's answer, and returns the reason why ranks cannot start, or "".
            **ordered: further fields of `StartRequest`.

        Raises:
            PreflightError: some hosts cannot run their ranks, or hosts do not reach each other; all of them are listed.
        """
        timeout_s = self._reach.start_timeout_s
        loopback = loopback_addresses([place.host for place in self.places], self._reach)

        def bind(each: HostConnection) -> dict[str, Any]:
            others = [place.host for place in self.places if place.host != each.host]
            order = StartRequest(
                first=each.place.first,
                count=each.place.count,
                cwd=os.getcwd(),
                env=dict(env),
                settings=settings.to_json(),
                address=loopback.get(each.host, ""),
                towards=bare(others[0] if others else each.host),
                **ordered,  # type: ignore[arg-type]
            )
            each.send("order", program, **vars(order))
            return each.expect("bound", timeout_s).values

        notified = self._each(bind)
        by_host = [[rebuild(Endpoint, values) for values in one["endpoints"]] for one in notified]
        endpoints = tuple(endpoint for one in by_host for endpoint in one)
        if not gather.is_one_host(endpoints):
            gather.check_addresses(endpoints, f"{len(endpoints)} ranks")
        if problem := check(notified):
            raise PreflightError(problem)
        firsts = [
            (place.host, one[0].to_dict()) for place, one in zip(self.places, by_host, strict=True)
        ]
        self._each(lambda each: _check_reach(each, firsts))
        key, job_id = secrets.token_bytes(32), secrets.token_hex(8)
        master = (endpoints[0].address, notified[0]["port"])

        def begin(each: HostConnection) -> None:
            job = Job(key, job_id, 0, each.place.first, len(endpoints), endpoints)
            each.send("job", job=job.to_json(), master=master)

        self._each(begin)

    def listen(
        self,
        on_message: Callable[[HostSlots, Message], None],
        on_loss: Callable[[HostSlots, str], None],
    ) -> None:
        """Receive messages from now on, in a thread per host.

        Args:
            on_message: called with each message.
            on_loss: called with the last error lines of ssh when a connection has ended.
        """

        def read(each: HostConnection) -> None:
            while message := each.receive():
                if message.kind == "failed":  # the ranks could not be started
                    on_loss(each.place, str(message.values["text"]))
                    return
                on_message(each.place, message)
            on_loss(each.place, each.said())

        for each in self._all:
            self._start(read, each)

    def send(self, number: int) -> None:
        """Send a signal to all running ranks."""
        for each in self._all:
            each.send("signal", number=number)

    def close(self) -> None:
        """End all agents, and with them the remaining ranks."""
        self._closing.set()
        for each in self._all:
            each.end()
        deadline = time.monotonic() + END_S
        for each in self._all:
            each.kill(deadline)
        for thread in self._threads:
            thread.join(END_S)
        for each in self._all:
            each.close()
        self._all.clear()
        self._reaper.__exit__()

    def _beat(self) -> None:
        """Send heartbeats to the agents."""
        while not self._closing.wait(BEAT_S):
            for each in self._all:
                each.send("beat")

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _each(self, step: Callable[[HostConnection], T]) -> list[T]:
        """Run a step for all hosts in parallel and return their results, in order."""
        done: queue.SimpleQueue[tuple[int, T | None, str]] = queue.SimpleQueue()

        def run(number: int, each: HostConnection) -> None:
            try:
                done.put((number, step(each), ""))
            except Exception as error:  # noqa: BLE001 - the launcher waits for every result
                is_known = isinstance(error, HostError)
                done.put((number, None, str(error) if is_known else repr(error)))

        for number, each in enumerate(self._all):
            self._start(run, number, each)
        results: dict[int, Any] = {}
        problems: dict[int, str] = {}
        for _ in self._all:
            number, result, problem = done.get()
            results[number] = result
            if problem:
                problems[number] = f"\n  {self._all[number].host}: {problem}"
        if problems:
            listed = "".join(problems[number] for number in sorted(problems))
            raise PreflightError(
                f"{len(problems)} of {len(self._all)} hosts cannot run their ranks:{listed}"
            )
        return [results[number] for number in range(len(self._all))]

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        thread.start()
        self._threads.append(thread)


def loopback_addresses(hosts: Sequence[str], reach: Reach) -> dict[str, str]:
    """Map all hosts to loopback addresses. Empty unless all hosts are names of this machine."""
    found = {}
    for host in hosts:
        if reach.is_here(host):
            found[host] = loopback()
            continue
        with contextlib.suppress(OSError):  # a name that only ssh resolves
            address = str(socket.getaddrinfo(bare(host), None)[0][4][0])
            if is_loopback(address):
                found[host] = address
    return found if len(found) == len(hosts) else {}


def bare(host: str) -> str:
    """Remove the user for ssh, as in user@host."""
    return host.rpartition("@")[2]


def _check_reach(each: HostConnection, firsts: Sequence[tuple[str, dict[str, str | int]]]) -> None:
    """Have a host connect to a rank of every other host.

    Raises:
        HostError: it does not reach some of them.
    """
    each.send("reach", peers=[first for first in firsts if first[0] != each.host])
    problems = each.expect("reached", 2 * REACH_S).values["problems"]
    if problems:
        raise HostError(
            f"{'; '.join(problems)}. Choose interfaces that all hosts share (--network-interfaces, SPARKHVD_INTERFACES), or open "
            "the ports between them (SPARKHVD_PORT_RANGE)."
        )
