"""Authenticated connections between members and their coordinator, and messages on them.

A connection begins with the handshake of ranks (`rendezvous.handshake`), under a key of its own that both derive from the job's.
Then each message is a JSON object behind its length.
"""

from __future__ import annotations

import hmac
import json
import socket
import struct
from collections.abc import Generator
from dataclasses import dataclass, field

from sparkhvd.elastic.messages import Message, from_dict, to_dict
from sparkhvd.rendezvous import Endpoint
from sparkhvd.rendezvous.handshake import Turn, introduce
from sparkhvd.rendezvous.listener import host_key, tcp_place, unix_address
from sparkhvd.rendezvous.loop import Wait, is_same_user, open_connection

__all__ = ["FIRST_TURN", "Party", "dial", "pack", "party", "take"]

FIRST_TURN = Turn(0, 0)
_LENGTH = struct.Struct("!I")
# A decision names every member: 64 MiB are enough for a hundred thousand.
_MOST_BYTES = 64 << 20
# Above any member's number; the handshake wants one.
_SIZE = 1 << 31


@dataclass(frozen=True)
class Party:
    """One side of the handshake, as `rendezvous.handshake` takes it: the coordinator is 0, member n is n + 1."""

    key: bytes = field(repr=False)
    job_id: str
    rank: int
    attempt: int = 0
    size: int = _SIZE


def party(key: bytes, job_id: str, number: int | None) -> Party:
    """Return the coordinator's side (None), or a member's.

    Args:
        key: of the job.
        job_id: of the job.
        number: of the member.
    """
    own = hmac.digest(key, b"elastic coordinator", "sha256")
    return Party(own, f"{job_id} elastic", 0 if number is None else number + 1)


def dial(
    endpoint: Endpoint, side: Party, until: float
) -> Generator[Wait, None, socket.socket | None]:
    """Connect to the coordinator and prove this member; return the connection, or None if the proof was wrong.

    Raises:
        OSError: it does not listen, or does not answer in time.
    """
    if endpoint.unix_name and endpoint.host_key == host_key() != "":
        sock = yield from open_connection(socket.AF_UNIX, unix_address(endpoint.unix_name), until)
        if not is_same_user(sock):
            sock.close()
            raise PermissionError("the coordinator's socket belongs to another user")
    else:
        sock = yield from open_connection(*tcp_place(endpoint), until)
    try:
        if (yield from introduce(side, 0, FIRST_TURN, sock, until)):
            return sock
    except BaseException:
        sock.close()
        raise
    sock.close()
    return None


def pack(message: Message) -> bytes:
    """Return the bytes of a message."""
    text = json.dumps(to_dict(message)).encode()
    return _LENGTH.pack(len(text)) + text


def take(came: bytearray) -> Message | None:
    """Take the first message out of bytes that have come; None if it is not complete.

    Raises:
        ValueError: they are no message.
    """
    if len(came) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack_from(came)
    if size > _MOST_BYTES:
        raise ValueError(f"a message of {size} bytes")
    end = _LENGTH.size + size
    if len(came) < end:
        return None
    text = bytes(came[_LENGTH.size : end])
    del came[:end]
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError("a message that is no object")
    return from_dict(values)
