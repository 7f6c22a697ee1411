"""Messages before a peer is authenticated: hellos, proofs and notices.

Proofs are HMAC-SHA256 over everything that they assert, so they can be neither reflected nor replayed; see
`sparkhvd.rendezvous`.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import secrets
import socket
import struct
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.rendezvous.event_loop import Wait, read, send
from sparkhvd.settings import Settings
from sparkhvd.wire import read_json, rebuild

# Both are part of every proof. A test compares them with the C header (`engine` may not be imported here).
ABI_VERSION = 12
WIRE_VERSION = 15

NONCE_BYTES = 32
MAC_BYTES = 32

_MAGIC = b"sparkhvd"
HELLO = struct.Struct(f"!8sIIB{NONCE_BYTES}s")  # magic, rank, generation, phase, nonce
_REPLY = struct.Struct(f"!{NONCE_BYTES}s{MAC_BYTES}s")
# A notice: magic, the rank that reports, generation, news, the rank it is about, proof. Longer than a hello.
NOTICE = struct.Struct(f"!8sIIBI{MAC_BYTES}s")
NOTICE_MAGIC = b"sparkhvn"
# Header of a rank's message: u8 kind (below), u32 value. The value is the reported rank. For NEWS_MET it is
# `Settings.streams` - 1. The sender's row follows.
NEWS = struct.Struct("!BI")
NEWS_MET = 0
NEWS_LOST = 1
NEWS_LATE = 2
PHASE_MESH = 0
PHASE_TCP = 1  # replaces Unix links inside a host whose ranks do not share memory after all
PHASE_STREAM = 2  # first tensor connection of every pair; each later phase adds a connection
PHASE_SERVICE = 255  # a connection to a coordinator or driver, which is no mesh of ranks
# The accepting side sends it once it has read the proof. Until then it may close the connection to make room for
# others, and the connecting side tries again. On a stream the connecting side sends it back, because no later message
# would show that it has arrived.
WELCOME = b"\1"


@dataclass(frozen=True, order=True)
class ConnectionPhase:
    """Generation and phase of a connection. A connection waits if its phase is later than the listener's."""

    generation: int
    phase: int


SERVICE_STAGE = ConnectionPhase(0, PHASE_SERVICE)


def proof_of(
    job: HandshakeSide,
    role: bytes,
    *,
    client: int,
    server: int,
    stage: ConnectionPhase,
    nonces: bytes,
) -> bytes:
    """Proof of one side of a handshake: the client (`role` is b"C") or the server (b"S")."""
    job_id = job.job_id.encode()
    context = struct.pack(
        f"!16s1s1sIIIIIIIB{len(job_id)}s",
        b"sparkhvd proof 1",
        role,
        sys.byteorder[:1].encode(),
        WIRE_VERSION,
        ABI_VERSION,
        job.attempt,
        job.size,
        client,
        server,
        stage.generation,
        stage.phase,
        job_id,
    )
    # Every field has a fixed length but the id, which ends where the nonces of fixed length begin.
    return hmac.digest(job.key, context + nonces, "sha256")


@dataclass(frozen=True)
class Notice:
    """Message from one rank to another: why a generation has failed.

    Attributes:
        teller: rank that reports.
        generation: the failed one.
        kind: NEWS_LOST or NEWS_LATE.
        about: lost or late rank.
    """

    teller: int
    generation: int
    kind: int
    about: int

    def to_bytes(self, job: HandshakeSide, to: int) -> bytes:
        """Pack the notice, with a proof for rank `to`."""
        proof = self._proof(job, to)
        return NOTICE.pack(NOTICE_MAGIC, self.teller, self.generation, self.kind, self.about, proof)

    @classmethod
    def from_bytes(cls, message: bytes, job: HandshakeSide) -> Notice | None:
        """Parse a message to rank `job.rank`, or return None if its proof or content is invalid."""
        _, teller, generation, kind, about, proof = NOTICE.unpack(message)
        notice = cls(teller, generation, kind, about)
        is_genuine = hmac.compare_digest(proof, notice._proof(job, job.rank))
        return notice if is_genuine and notice.is_valid(job) else None

    def is_valid(self, job: HandshakeSide) -> bool:
        """Whether it reports a failure of ranks of the job: even a peer with the key may send wrong numbers."""
        return self.kind in (NEWS_LOST, NEWS_LATE) and max(self.teller, self.about) < job.size

    def _proof(self, job: HandshakeSide, to: int) -> bytes:
        job_id = job.job_id.encode()
        context = struct.pack(
            f"!16s1sIIIIIIIBI{len(job_id)}s",
            b"sparkhvd notice1",  # differs from the first field of handshake proofs
            sys.byteorder[:1].encode(),
            WIRE_VERSION,
            ABI_VERSION,
            job.attempt,
            job.size,
            self.teller,
            to,
            self.generation,
            self.kind,
            self.about,
            job_id,
        )
        return hmac.digest(job.key, context, "sha256")


def introduce(
    job: HandshakeSide, peer: int, stage: ConnectionPhase, sock: socket.socket, until: float
) -> Generator[Wait, None, bool]:
    """Run the connecting side of the handshake and return True if `peer` has authenticated."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    send(sock, HELLO.pack(_MAGIC, job.rank, stage.generation, stage.phase, nonce))
    reply = yield from read(sock, _REPLY.size, until)
    peer_nonce, proof = _REPLY.unpack(reply)
    nonces = nonce + peer_nonce

    def mac(role: bytes) -> bytes:
        return proof_of(job, role, client=job.rank, server=peer, stage=stage, nonces=nonces)

    if not hmac.compare_digest(proof, mac(b"S")):
        return False
    send(sock, mac(b"C"))
    if stage.phase >= PHASE_STREAM:
        yield from read(sock, len(WELCOME), until)
        if stage.phase != PHASE_SERVICE:
            send(sock, WELCOME)
    return True


def answer(
    job: HandshakeSide, now: ConnectionPhase, hello: bytes, sock: socket.socket, until: float
) -> Generator[Wait, None, tuple[ConnectionPhase, int] | None]:
    """Run the accepting side of the handshake and return the client's phase and rank, or None without a valid proof."""
    magic, client, generation, phase, nonce = HELLO.unpack(hello)
    stage = ConnectionPhase(generation, phase)
    is_expected = magic == _MAGIC and job.rank < client < job.size
    if not is_expected or stage < now:
        return None
    nonces = nonce + secrets.token_bytes(NONCE_BYTES)

    def mac(role: bytes) -> bytes:
        return proof_of(job, role, client=client, server=job.rank, stage=stage, nonces=nonces)

    send(sock, _REPLY.pack(nonces[NONCE_BYTES:], mac(b"S")))
    proof = yield from read(sock, MAC_BYTES, until)
    if not hmac.compare_digest(proof, mac(b"C")):
        return None
    if stage.phase >= PHASE_STREAM:
        send(sock, WELCOME)
    return stage, client


# ----------------------------------------------------------------------------------------------------
# Listening addresses of ranks, and the key and ranks of a job.

KEY_BYTES = 32


@dataclass(frozen=True)
class Endpoint:
    """Listening address of a rank.

    Attributes:
        address: IPv4 or IPv6 address of one interface.
        port: TCP port.
        host_key: equal for processes that can reach each other's abstract Unix sockets; "" if unknown.
        unix_name: name of the abstract Unix socket in hex; "" without one.
    """

    address: str
    port: int
    host_key: str
    unix_name: str

    def to_dict(self) -> dict[str, str | int]:
        return dict(vars(self))

    def __post_init__(self) -> None:
        # Other processes send endpoints, and for wrong values sockets would raise errors of many classes.
        if self.address:
            ipaddress.ip_address(self.address.partition("%")[0])
        if not 0 <= self.port < 1 << 16:
            raise ValueError("a port out of range")
        self.unix_name.encode()

    def __str__(self) -> str:
        return (
            f"[{self.address}]:{self.port}"
            if ":" in self.address
            else f"{self.address}:{self.port}"
        )


class HandshakeSide(Protocol):
    """One side of a handshake: a rank of a job, or a process that serves or uses a service with a key."""

    @property
    def key(self) -> bytes:
        """Key of 32 bytes, shared by both sides."""

    @property
    def job_id(self) -> str:
        """Name, the same on both sides."""

    @property
    def attempt(self) -> int:
        """Number of the launch attempt."""

    @property
    def rank(self) -> int:
        """Number of this side."""

    @property
    def size(self) -> int:
        """Number of sides, or a larger number. Every `rank` is below it."""


@dataclass(frozen=True)
class Job:
    """Ranks and key of one attempt, for connecting and authenticating.

    Attributes:
        key: 32 random bytes that only the ranks of this attempt know.
        job_id: any name, the same on every rank.
        attempt: counts the launches of the job.
        rank: this rank.
        size: number of ranks.
        endpoints: listening address of each rank, by rank.
    """

    key: bytes = field(repr=False)
    job_id: str
    attempt: int
    rank: int
    size: int
    endpoints: tuple[Endpoint, ...]

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES:
            raise InvalidArgumentError(
                f"Job.key has {len(self.key)} bytes; it must have {KEY_BYTES}, from secrets.token_bytes()."
            )
        if not 0 <= self.rank < self.size or len(self.endpoints) != self.size:
            raise InvalidArgumentError(
                f"Job(rank={self.rank}, size={self.size}) with {len(self.endpoints)} endpoints; it needs one "
                "endpoint per rank and a rank below size."
            )

    def to_json(self) -> str:
        """The text includes the key: pass it by pipe, never in argv, the environment or a log."""
        values = {**vars(self), "key": self.key.hex()}
        values["endpoints"] = [endpoint.to_dict() for endpoint in self.endpoints]
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Rebuild a job from `to_json`. Any other text raises ValueError."""
        return rebuild(cls, read_json(text))


# ----------------------------------------------------------------------------------------------------
# Result of a rendezvous, sockets to every peer, and the protocol of a rendezvous.


@dataclass
class Connections:
    """Connected, authenticated sockets for `Engine`: one per peer for control frames, and one per peer and stream.

    Attributes:
        rank: this rank.
        size: number of ranks.
        hosts: index of the host of each rank; equal on all ranks. Ranks with the same index share memory.
        sockets: descriptor per peer, -1 for this rank, for control frames; not inheritable. Owned by the holder of this
            object.
        stream_sockets: the connections for tensors, `streams * size` descriptors, stream after stream, each like
            `sockets`.
    """

    rank: int
    size: int
    hosts: tuple[int, ...]
    sockets: list[int]
    stream_sockets: list[int] = field(default_factory=list)

    def close(self) -> None:
        """Close every descriptor not taken over."""
        for descriptors in (self.sockets, self.stream_sockets):
            for place, descriptor in enumerate(descriptors):
                if descriptor >= 0:
                    os.close(descriptor)
                descriptors[place] = -1


class Rendezvous(Protocol):
    """Connects the ranks of one job."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def settings(self) -> Settings:
        """The settings of the job, equal on every rank."""

    def connect(self) -> Connections:
        """Connect to every other rank. Each call is the next generation, so init after shutdown works.

        Every rank must call this. Raises CollectiveTimeoutError (a rank did not connect within
        `Settings.connect_timeout_s`) or PeerLostError (a rank is gone), which name the rank.
        """


def joined(rows: Sequence[list[int]]) -> list[int]:
    """Concatenate the rows."""
    return [descriptor for row in rows for descriptor in row]
