"""The coordinator of an elastic job, and connections that no member makes."""

from __future__ import annotations

import json
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from sparkhvd import wire
from sparkhvd.elastic import Coordinator, JoinToken, Limits, membership
from sparkhvd.elastic.coordinator import MemberLink
from sparkhvd.elastic.membership import Arrival, Decision, JoinRequest, MemberReport, Running
from sparkhvd.errors import ElasticError
from sparkhvd.rendezvous import Endpoint, Listener
from sparkhvd.settings import Settings
from sparkhvd.wire import rebuild
from tests.harness.parsers import mutated

pytestmark = pytest.mark.processes


@pytest.fixture
def join_token() -> Iterator[JoinToken]:
    key = secrets.token_bytes(32)
    listener = Listener.bind("127.0.0.1", Settings())
    with Coordinator(key, "job", listener, Limits(first=1, least=1, most=1)) as coordinator:
        coordinator.expect(0)
        yield JoinToken(key, "job", 0, coordinator.endpoint, 5.0, 5.0)


def question(join_token: JoinToken) -> JoinRequest:
    return JoinRequest(0, join_token.coordinator)


@pytest.mark.parametrize("garbage", [b"", b"x" * 49, os.urandom(4096), b"GET / HTTP/1.0\r\n\r\n"])
def test_coordinator_works_despite_connections_without_the_key(
    join_token: JoinToken, garbage: bytes
) -> None:
    place = (join_token.coordinator.address, join_token.coordinator.port)
    others = [socket.create_connection(place) for _ in range(70)]
    try:
        for sock in others:
            sock.sendall(garbage)
        link = MemberLink(join_token)
        assert link.ask(question(join_token)).members == (0,)
        link.close()
    finally:
        for sock in others:
            sock.close()


def test_members_reconnect_after_newer_connections_displace_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sparkhvd.rendezvous.listener.MAX_UNAUTHENTICATED", 1)
    over = threading.Event()
    key = secrets.token_bytes(32)
    listener = Listener.bind("127.0.0.1", Settings())
    with (
        ThreadPoolExecutor(1) as pool,
        Coordinator(key, "job", listener, Limits(first=20, least=1, most=20)) as coordinator,
    ):
        place = (coordinator.endpoint.address, coordinator.endpoint.port)

        def connect_again_and_again() -> None:
            while not over.is_set():
                socket.create_connection(place).close()
                time.sleep(0.002 * random.random())

        pool.submit(connect_again_and_again)
        try:
            for number in range(20):
                coordinator.expect(number)
                link = MemberLink(JoinToken(key, "job", number, coordinator.endpoint, 20.0, 20.0))
                assert link.arrive() == 0
                link.close()
        finally:
            over.set()


@pytest.mark.parametrize("other", [{"key": bytes(32)}, {"job_id": "another"}, {"number": 1}])
def test_coordinator_refuses_members_with_another_key_job_or_number(
    join_token: JoinToken, other: dict[str, object]
) -> None:
    link = MemberLink(replace(join_token, wait_s=1.0, **other))  # type: ignore[arg-type]
    began = time.monotonic()
    with pytest.raises(ElasticError, match="coordinator of the elastic job at .* is gone"):
        link.ask(question(join_token))
    assert time.monotonic() - began < 4
    link.close()


def test_member_that_sends_an_invalid_message_is_excluded(join_token: JoinToken) -> None:
    link = MemberLink(join_token)
    link._connected().sendall(b"\0\0\0\2[]")
    with pytest.raises(ElasticError):
        link.ask(question(join_token))
    link.close()


def test_unreachable_coordinator_raises_immediately(join_token: JoinToken) -> None:
    with Listener.bind("127.0.0.1", Settings()) as listener:
        gone = listener.endpoint()
    began = time.monotonic()
    with pytest.raises(ElasticError, match="is gone .*refused"):
        MemberLink(replace(join_token, coordinator=gone, wait_s=60.0)).ask(question(join_token))
    assert time.monotonic() - began < 2


def test_join_token_repr_hides_the_key(join_token: JoinToken) -> None:
    assert join_token.key.hex() not in repr(join_token)
    assert rebuild(JoinToken, join_token.to_dict()) == join_token


def hostile_messages() -> list[bytes]:
    """Messages of a process with the key and other code."""
    asked = JoinRequest(0, Endpoint("127.0.0.1", 1, "", ""), dead=(1, 2), why="lost")
    bodies = [
        json.dumps(membership.to_dict(message)).encode()
        for message in (
            asked,
            MemberReport("synced", 1),
            Decision(1, (0,), (asked.endpoint,), True),
        )
    ]
    changed = [text for body in bodies for text in mutated(body, 40)]
    raw = [
        b"",
        b"\xff" * 8,
        b"[" * 200_000,
        b'{"message": "ask", "dead": [Infinity]}',
        b"{",
        b"null",
        b"1",
    ]
    return [*changed, *raw]


def test_malformed_messages_with_the_key_do_not_end_the_coordinator() -> None:
    key, hostile = secrets.token_bytes(32), hostile_messages()
    assert len(hostile) > 100
    listener = Listener.bind("127.0.0.1", Settings())
    with Coordinator(key, "job", listener, Limits(first=10**6, least=10**6, most=10**6)) as service:

        def linked(number: int) -> MemberLink:
            service.expect(number)
            return MemberLink(JoinToken(key, "job", number, service.endpoint, 5.0, 5.0))

        links = [linked(number) for number in range(len(hostile))]
        for number, (link, text) in enumerate(zip(links, hostile, strict=True)):
            link._connected().sendall(wire.frame_of(text))
            if number % 10 == 0 or text in hostile[-7:]:
                good = linked(10_000 + number)
                good._send(Arrival())
                assert good._receive(time.monotonic() + 5) == Running(0), text[:200]
                good.close()
        too_long = linked(20_000)
        too_long._connected().sendall(wire.LENGTH.pack(1 << 62) + b"x" * 100)
        with pytest.raises(ElasticError):
            too_long.arrive()
        assert linked(20_001).arrive() == 0
        for link in (*links, too_long):
            link.close()
