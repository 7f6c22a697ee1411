"""An agent that receives nothing from its launcher."""

from __future__ import annotations

import io
import os
import socket
import struct

import pytest

from sparkhvd.runner.hosts import agent, protocol
from sparkhvd.runner.hosts.protocol import Channel

pytestmark = pytest.mark.pure


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Channel:
    """The launcher's end of a channel. `agent._receive` gets the other end, `launcher.other`."""
    down, up = os.pipe(), os.pipe()
    monkeypatch.setattr(agent, "SILENCE_S", 0.05)
    ours = Channel(up[0], down[1])
    ours.other = Channel(down[0], up[1])  # type: ignore[attr-defined]
    return ours


def came_from(monkeypatch: pytest.MonkeyPatch, address: str, port: int) -> None:
    monkeypatch.setenv("SSH_CONNECTION", f"{address} {port} 10.0.0.2 22")


def test_heartbeats_are_not_returned_as_messages(launcher: Channel) -> None:
    launcher.send("beat")
    launcher.send("signal", number=2)
    message = agent._receive(launcher.other)  # type: ignore[attr-defined]
    assert message is not None
    assert message.values == {"number": 2}


def test_silence_within_a_message_is_checked_like_other_silence(
    launcher: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent waits for a slow launcher whose host answers, and its message arrives whole."""
    whole = io.BytesIO()
    monkeypatch.setattr(protocol, "write_frame", lambda _, frame: whole.write(frame))
    launcher.send("order", b"program")
    frame = struct.pack("!Q", whole.tell()) + whole.getvalue()
    other = launcher.other  # type: ignore[attr-defined]
    os.write(launcher._writer, frame[:-3])
    came_from(monkeypatch, "255.255.255.255", 40000)
    assert agent._receive(other) is None

    def answer() -> bool:
        os.write(launcher._writer, frame[-3:])
        return True

    monkeypatch.setattr(agent, "_is_there", answer)
    message = agent._receive(other)
    assert message is not None
    assert (message.kind, message.data) == ("order", b"program")


def test_silence_ends_an_agent_only_if_the_launcher_host_is_unreachable(
    launcher: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    came_from(monkeypatch, "255.255.255.255", 40000)  # an address that no host has
    assert agent._receive(launcher.other) is None  # type: ignore[attr-defined]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        came_from(monkeypatch, "127.0.0.1", port)
        assert agent._is_there()
    came_from(monkeypatch, "127.0.0.1", port)  # its kernel refuses
    assert agent._is_there()
    monkeypatch.delenv("SSH_CONNECTION")
    assert agent._is_there()
