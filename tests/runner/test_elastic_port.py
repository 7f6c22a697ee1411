"""The driver's port for tasks of an elastic job. The tasks are connections of this process."""

from __future__ import annotations

import contextlib
import functools
import json
import queue
import select
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from sparkhvd import wire
from sparkhvd.elastic import JoinToken
from sparkhvd.rendezvous import Endpoint
from sparkhvd.runner import preflight
from sparkhvd.runner.driver_port import connect, proof_between
from sparkhvd.runner.elastic.coordinator import Tasks
from sparkhvd.runner.elastic.slots import Offer, Slot
from sparkhvd.runner.elastic.task import PURPOSE
from sparkhvd.runner.hosts.protocol import Channel
from sparkhvd.runner.outcomes import Outcome, OutcomeKind
from sparkhvd.runner.supervisor import RankEnded
from tests.harness.parsers import mutated
from tests.harness.waiting import wait_until

KEY, JOB = "ab" * 32, "job"
FACTS = preflight.rank_facts(())
pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]


class Port:
    """Tasks, and their reports."""

    def __init__(self, wanted: int) -> None:
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.refused: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.said: queue.SimpleQueue[str] = queue.SimpleQueue()
        listening = socket.create_server(("127.0.0.1", 0))
        listening.setblocking(False)
        self.address = ("127.0.0.1", int(listening.getsockname()[1]))
        proof = proof_between(PURPOSE, KEY, JOB, 0, 0, 2)
        self.replaced: queue.SimpleQueue[None] = queue.SimpleQueue()
        replace = functools.partial(self.replaced.put, None)
        put = (self.events.put, self.refused.put, replace, self.said.put)
        self.tasks = Tasks(listening, proof, FACTS, wanted, *put)
        self._socks: list[socket.socket] = []

    def connect(self, key: str = KEY, executor: str = "", **facts: Any) -> Channel:
        sock = connect(self.address, proof_between(PURPOSE, key, JOB, 0, 1, 2), 10)
        self._socks.append(sock)
        channel = Channel(sock.fileno(), sock.fileno())
        channel.send("hello", facts=replace(FACTS, **facts).to_dict(), executor=executor)
        return channel

    def lose(self, number: int) -> None:
        self._socks.pop(number).close()

    def next(self) -> Any:
        return self.events.get(timeout=10)

    def start(self, slot: Slot, number: int) -> None:
        endpoint = Endpoint("127.0.0.1", 1, "", "")
        self.tasks.start(slot, JoinToken(bytes(32), JOB, number, endpoint, 1.0, 1.0), 1)

    def close(self) -> None:
        for sock in self._socks:
            sock.close()


@contextlib.contextmanager
def port(wanted: int = 1) -> Iterator[Port]:
    made = Port(wanted)
    with made.tasks:
        try:
            yield made
        finally:
            made.close()


def slots(*numbers: int) -> Offer:
    return Offer(tuple(Slot(FACTS.host, number) for number in numbers))


def test_every_task_is_a_slot_and_a_lost_task_ends_its_process() -> None:
    with port(wanted=2) as made:
        tasks = [made.connect(), made.connect()]
        assert made.next() == slots(0, 1)  # not before so many are there
        made.start(Slot(FACTS.host, 0), 7)
        (chosen,), _, _ = select.select([task._reader for task in tasks], [], [], 10)
        first = next(number for number in (0, 1) if tasks[number]._reader == chosen)
        message = tasks[first].receive(10)
        assert message is not None
        assert (message.kind, message.values["slot"]) == ("start", 0)
        made.connect()  # as of a copy that Spark starts of a task
        assert made.next() == slots(0, 1, 2)
        made.lose(first)
        assert made.next() == RankEnded(7, 1, "was lost with its Spark task")
        assert made.next() == slots(1, 2)
        made.connect()
        assert made.next() == slots(1, 2, 0)
        made.start(Slot(FACTS.host, 5), 8)  # it has just gone
        assert made.next() == RankEnded(8, 1, "was lost with its Spark task")


def test_results_arrive_in_parts_before_the_outcome() -> None:
    with port() as made:
        task = made.connect()
        made.next()
        made.start(Slot(FACTS.host, 0), 0)
        task.receive(10)
        task.send("result", b"one", member=0)
        task.send("result", b"two", member=0)
        task.send("ended", Outcome(0, OutcomeKind.OK, exit="ok").to_json().encode(), member=0)
        assert made.next() == RankEnded(0, 0, "ended with ok")
        assert made.tasks.results == {0: b"onetwo"}
        made.start(Slot(FACTS.host, 0), 1)
        made.tasks.send(9, 1)
        assert [message.kind for _ in range(2) if (message := task.receive(10))] == [
            "start",
            "signal",
        ]
        failed = Outcome(1, OutcomeKind.EXCEPTION, error="ValueError", message="why\nmore")
        task.send("ended", failed.to_json().encode(), member=1)
        assert made.next() == RankEnded(1, 1, "raised ValueError: why", is_final=True)


def test_incompatible_task_gets_no_slot() -> None:
    with port() as made:
        made.connect(python="2.7")
        assert "runs Python 2.7" in made.refused.get(timeout=10)
        made.connect()
        assert made.next() == slots(0)
        made.connect(sparkhvd="0.0.1")
        assert "A task cannot join. The driver has sparkhvd" in made.said.get(timeout=10)
        made.connect()
        assert made.next() == slots(0, 1)


def test_connections_without_the_key_or_a_valid_message_are_dropped() -> None:
    with port() as made:
        with pytest.raises(ConnectionRefusedError):
            made.connect(key="cd" * 32)
        task = made.connect()
        assert made.next() == slots(0)
        task.send("ended", b"{}", member=3)  # of no process
        assert made.next() == slots()
        made.connect()
        assert made.next() == slots(0)


def test_process_leaves_before_its_executor_is_removed() -> None:
    with port() as made:
        task = made.connect(executor="1")
        made.next()
        made.connect(executor="2")
        assert made.next() == slots(0, 1)
        made.start(Slot(FACTS.host, 0), 0)
        assert (message := task.receive(10)) is not None
        assert message.kind == "start"
        assert made.tasks.executors() == {"1", "2"}
        made.tasks.retire(["1"])
        assert made.next() == slots(1)
        made.replaced.get(timeout=10)
        assert made.tasks.executors() == {"2"}
        task.send("ended", Outcome(0, OutcomeKind.OK, exit="ok").to_json().encode(), member=0)
        assert made.next() == RankEnded(0, 0, "ended with ok")
        assert (message := task.receive(10)) is not None
        assert message.kind == "leave"
        made.tasks.retire(["2", "1"])
        assert made.next() == slots()
        made.replaced.get(timeout=10)
        assert made.replaced.empty()


def test_every_task_leaves_after_the_end_of_the_job() -> None:
    with port() as made:
        tasks = [made.connect()]
        made.next()
        made.tasks.dismiss()
        tasks.append(made.connect())
        for task in tasks:
            message = task.receive(10)
            assert message is not None
            assert message.kind == "leave"


def hostile_messages() -> list[bytes]:
    """Messages of a task with the key and other code, before and after its hello."""
    hello = json.dumps({"facts": FACTS.to_dict(), "executor": "1"}).encode()
    ended = Outcome(0, OutcomeKind.OK, exit="ok", log_tail=("a",), unsent=((1, "x", 1, False),))
    outcomes = list(mutated(ended.to_json().encode(), 40))
    return [
        *(b'["hello", ' + text + b"]\n" for text in mutated(hello, 40)),
        *(b'["ended", {"member": 0}]\n' + text for text in outcomes),
        *(
            b'["ended", {"member": ' + text + b"}]\n{}"
            for text in (b"1e400", b"NaN", b"null", b"[]", b"9" * 400)
        ),
        *(
            b"",
            b"[]",
            b'["ended", {}]\n',
            b'["result", {"member": "0"}]\n',
            b"[[], {}]\n",
            b"[" * 200_000,
            b"\xff",
        ),
    ]


def test_malformed_messages_with_the_key_do_not_end_the_port() -> None:
    hostile = hostile_messages()
    assert len(hostile) > 80
    with port() as made:
        proof, tasks = proof_between(PURPOSE, KEY, JOB, 0, 1, 2), made.tasks
        for payload in hostile:
            for greets in (False, True):
                sock = connect(made.address, proof, 10)
                made._socks.append(sock)
                if greets:
                    channel = Channel(sock.fileno(), sock.fileno())
                    channel.send("hello", facts=FACTS.to_dict(), executor="")
                    wait_until(lambda: len(tasks._tasks) == 1, "the task is a slot", every_s=0.001)
                    made.start(tasks._tasks[0].slot, 0)
                    assert channel.receive(10) is not None
                with contextlib.suppress(OSError):
                    sock.sendall(wire.frame_of(payload))
                made.lose(-1)
                wait_until(
                    lambda: not tasks._tasks and not tasks._idle,
                    f"the connection that sent {payload[:200]!r} has ended",
                    every_s=0.001,
                )
        good = made.connect(executor="good")
        wait_until(lambda: tasks.executors() == {"good"}, "a task joins", every_s=0.001)
        tasks.dismiss()
        message = good.receive(10)
        assert message is not None
        assert message.kind == "leave"
