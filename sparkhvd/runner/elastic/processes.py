"""Processes of an elastic job: on this host, or on several through an agent per host, started with its first process.

**Threads** with several hosts: one per agent, which starts it and reads its messages, and one that sends them
heartbeats.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from sparkhvd.elastic import JoinToken
from sparkhvd.runner.elastic.slots import Slot
from sparkhvd.runner.host_names import HostSlots
from sparkhvd.runner.hosts.agent import BEAT_S, FunctionMembers, Members
from sparkhvd.runner.hosts.connection import END_S, HostConnection, HostError, Reach
from sparkhvd.runner.hosts.protocol import StartRequest
from sparkhvd.runner.orphans import OrphanReaper
from sparkhvd.runner.outcomes import Outcome
from sparkhvd.runner.supervisor import HostLost, RankEnded
from sparkhvd.wire import Message


class ElasticProcesses(Protocol):
    """Processes of members, on any hosts."""

    def start(self, slot: Slot, join_token: JoinToken, slots: int) -> None:
        """Start a process. Its end is reported as an event.

        Args:
            slot: its slot.
            join_token: to the job.
            slots: of that host.
        """

    def send(self, number: int, member: int | None = None) -> None:
        """Send a signal to all processes, or to one."""


@dataclass(frozen=True)
class ElasticProcessesHere:
    """Processes on this host."""

    members: Members | FunctionMembers

    def start(self, slot: Slot, join_token: JoinToken, slots: int) -> None:
        self.members.start(join_token, slot.number, slots)

    def send(self, number: int, member: int | None = None) -> None:
        """Send a signal to all processes, or to one."""
        self.members.send(number, member)


class ElasticProcessesOnHosts:
    """Processes on several hosts. The context manager kills the remaining processes at its end.

    Args:
        reach: how hosts are reached.
        order: the request for an agent, by its host.
        show: called with a process's number, stream and line.
        notify: called with its end, or the loss of its host.
        program: pickled call of a function, sent with the order; b"" for a script.
        on_outcome: called with the outcome of a function's process and its pickled result, instead of `notify` with its
            end.
    """

    def __init__(
        self,
        reach: Reach,
        order: Callable[[str], StartRequest],
        show: Callable[[int, str, bytes], None],
        notify: Callable[[RankEnded | HostLost], None],
        program: bytes = b"",
        on_outcome: Callable[[Outcome, bytes], None] = lambda _, __: None,
    ) -> None:
        self._reach = reach
        self._reaper = OrphanReaper()
        self._order = order
        self._show = show
        self._notify = notify
        self._program = program
        self._on_outcome = on_outcome
        self._lock = threading.Lock()
        self._agents: dict[str, _Agent] = {}
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._beat, daemon=True)]
        self._threads[0].start()

    def start(self, slot: Slot, join_token: JoinToken, slots: int) -> None:
        """Start a process through its host's agent. The agent is started on demand."""
        with self._lock:
            agent = self._agents.get(slot.host)
            if agent is None:
                agent = self._agents[slot.host] = _Agent(slot.host)
                thread = threading.Thread(target=self._serve, args=(agent,), daemon=True)
                self._threads.append(thread)
                thread.start()
            agent.members.add(join_token.number)
            values = {"slot": slot.number, "slots": slots, "join_token": join_token.to_dict()}
            agent.ask("start", **values)

    def send(self, number: int, member: int | None = None) -> None:
        """Send a signal to all processes, or to one."""
        with self._lock:
            for agent in self._agents.values():
                if member is None or member in agent.members:
                    agent.ask("signal", number=number, member=member)

    def _serve(self, agent: _Agent) -> None:
        """Start an agent, and handle its messages until the agent ends."""
        why = ""
        try:
            connection = HostConnection(HostSlots(agent.host, 0, 0), self._reach, self._reaper)
            try:
                connection.greet(self._reach.start_timeout_s)
                connection.send("order", self._program, **vars(self._order(agent.host)))
                connection.expect("ready", self._reach.start_timeout_s)
                with self._lock:
                    agent.connect(connection)
                while (message := connection.receive()) and not why:
                    why = self._take(agent, message)
                why = why or connection.said()
            finally:
                connection.end()
                connection.kill(time.monotonic() + END_S)
                connection.close()
        except HostError as error:
            why = str(error)
        with self._lock:
            del self._agents[agent.host]
        if not self._closing.is_set():
            self._notify(HostLost(agent.host, tuple(sorted(agent.members)), why))

    def _take(self, agent: _Agent, message: Message) -> str:
        """Handle a message and return why the agent has failed, or ""."""
        if message.kind == "failed":
            return str(message.values["text"])
        number = int(message.values["rank"])
        if message.kind == "line":
            self._show(number, message.values["stream"], message.data)
        else:
            with self._lock:
                agent.members.discard(number)
            if message.kind == "outcome":
                outcome = Outcome.from_json(str(message.values["outcome"]))
                self._on_outcome(replace(outcome, host=agent.host), message.data)
            else:
                self._notify(RankEnded(number, int(message.values["status"])))
        return ""

    def _beat(self) -> None:
        while not self._closing.wait(BEAT_S):
            with self._lock:
                for agent in self._agents.values():
                    agent.ask("beat")

    def __enter__(self) -> ElasticProcessesOnHosts:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        with self._lock:
            for agent in self._agents.values():
                agent.end()
        for thread in self._threads:
            thread.join()
        self._reaper.__exit__()


class _Agent:
    """A host's agent. Messages to it wait until it is connected. Guarded by the lock of `ElasticProcessesOnHosts`."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.members: set[int] = set()
        self._connection: HostConnection | None = None
        self._waiting: list[tuple[str, dict[str, Any]]] = []
        self._has_ended = False

    def connect(self, connection: HostConnection) -> None:
        """Send the waiting messages."""
        self._connection = connection
        for kind, values in self._waiting:
            connection.send(kind, **values)
        if self._has_ended:
            connection.end()

    def ask(self, kind: str, **values: Any) -> None:
        """Send a message, now or when the agent is connected."""
        if self._connection is None:
            self._waiting.append((kind, values))
        else:
            self._connection.send(kind, **values)

    def end(self) -> None:
        """End the connection, now or when it is established."""
        self._has_ended = True
        if self._connection is not None:
            self._connection.end()
