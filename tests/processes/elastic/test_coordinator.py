"""The coordinator of an elastic job, and connections that are no member's."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from sparkhvd.elastic import Coordinator, Invitation, Limits
from sparkhvd.elastic.coordinator import Link
from sparkhvd.elastic.membership import Ask
from sparkhvd.errors import ElasticError
from sparkhvd.rendezvous import Listener
from sparkhvd.settings import Settings


@pytest.fixture
def invitation() -> Iterator[Invitation]:
    key = secrets.token_bytes(32)
    listener = Listener.bind("127.0.0.1", Settings())
    with Coordinator(key, "job", listener, Limits(first=1, least=1, most=1)) as coordinator:
        coordinator.expect(0)
        yield Invitation(key, "job", 0, coordinator.endpoint, 5.0, 5.0)


def question(invitation: Invitation) -> Ask:
    return Ask(0, invitation.coordinator)


@pytest.mark.parametrize("garbage", [b"", b"x" * 49, os.urandom(4096), b"GET / HTTP/1.0\r\n\r\n"])
def test_connections_without_the_key_disturb_nobody(invitation: Invitation, garbage: bytes) -> None:
    place = (invitation.coordinator.address, invitation.coordinator.port)
    others = [socket.create_connection(place) for _ in range(70)]
    try:
        for sock in others:
            sock.sendall(garbage)
        link = Link(invitation)
        assert link.ask(question(invitation)).members == (0,)
        link.close()
    finally:
        for sock in others:
            sock.close()


@pytest.mark.parametrize("other", [{"key": bytes(32)}, {"job_id": "another"}, {"number": 1}])
def test_a_member_with_another_key_job_or_number_is_turned_away(
    invitation: Invitation, other: dict[str, object]
) -> None:
    link = Link(replace(invitation, wait_s=1.0, **other))  # type: ignore[arg-type]
    began = time.monotonic()
    with pytest.raises(ElasticError, match="coordinator of the elastic job at .* is gone"):
        link.ask(question(invitation))
    assert time.monotonic() - began < 4
    link.close()


def test_a_member_that_sends_nonsense_takes_no_part_any_more(invitation: Invitation) -> None:
    link = Link(invitation)
    link._connected().sendall(b"\0\0\0\2[]")
    with pytest.raises(ElasticError):
        link.ask(question(invitation))
    link.close()


def test_a_coordinator_that_is_gone_is_named_at_once(invitation: Invitation) -> None:
    with Listener.bind("127.0.0.1", Settings()) as listener:
        gone = listener.endpoint()
    began = time.monotonic()
    with pytest.raises(ElasticError, match="is gone .*refused"):
        Link(replace(invitation, coordinator=gone, wait_s=60.0)).ask(question(invitation))
    assert time.monotonic() - began < 2


def test_an_invitation_does_not_show_its_key(invitation: Invitation) -> None:
    assert invitation.key.hex() not in repr(invitation)
    assert Invitation.from_dict(invitation.to_dict()) == invitation
