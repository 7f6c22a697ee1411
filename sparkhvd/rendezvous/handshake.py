"""Messages before a peer is authenticated: hellos, proofs and notices.

Proofs are HMAC-SHA256 over everything that they stand for, so they can be neither reflected nor replayed; see
`sparkhvd.rendezvous`.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import sys
from collections.abc import Generator
from dataclasses import dataclass

from sparkhvd.rendezvous.endpoints import Party
from sparkhvd.rendezvous.loop import Wait, read, send

# Both are part of every proof. A test compares them with the C header (`engine` may not be imported here).
ABI_VERSION = 12
WIRE_VERSION = 14

NONCE_BYTES = 32
MAC_BYTES = 32

_MAGIC = b"sparkhvd"
HELLO = struct.Struct(f"!8sIIB{NONCE_BYTES}s")  # magic, rank, generation, phase, nonce
_REPLY = struct.Struct(f"!{NONCE_BYTES}s{MAC_BYTES}s")
# A notice: magic, the rank that reports, generation, news, the rank it is about, proof. Longer than a hello.
NOTICE = struct.Struct(f"!8sIIBI{MAC_BYTES}s")
NOTICE_MAGIC = b"sparkhvn"
# Before the row: one of the next three, and the rank it is about; of MET `Settings.streams` - 1.
NEWS = struct.Struct("!BI")
NEWS_MET = 0
NEWS_LOST = 1
NEWS_LATE = 2
PHASE_MESH = 0
PHASE_TCP = 1  # replaces Unix links inside a host whose ranks turned out not to share memory
PHASE_STREAM = 2  # the first connection for tensors of every pair; each later phase is one more
# Ends the handshake of a stream, where no later message would show that the proofs were right. The accepting
# side sends it first; the connecting side tries again until it has received it, and sends it back.
WELCOME = b"\1"


@dataclass(frozen=True, order=True)
class Turn:
    """Generation and phase that a connection is for; one of a later turn than the listener's waits."""

    generation: int
    phase: int


def proof_of(
    job: Party, role: bytes, *, client: int, server: int, turn: Turn, nonces: bytes
) -> bytes:
    """Return the proof of the client (b"C") or the server (b"S")."""
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
        turn.generation,
        turn.phase,
        job_id,
    )
    # Every field has a fixed length but the id, which ends where the nonces of fixed length begin.
    return hmac.digest(job.key, context + nonces, "sha256")


@dataclass(frozen=True)
class Notice:
    """Message from one rank to another: why a generation has failed.

    Attributes:
        teller: rank that reports.
        generation: the one that has failed.
        kind: NEWS_LOST or NEWS_LATE.
        about: rank that is gone, or late.
    """

    teller: int
    generation: int
    kind: int
    about: int

    def to_bytes(self, job: Party, to: int) -> bytes:
        """Return the message for rank `to`."""
        proof = self._proof(job, to)
        return NOTICE.pack(NOTICE_MAGIC, self.teller, self.generation, self.kind, self.about, proof)

    @classmethod
    def from_bytes(cls, message: bytes, job: Party) -> Notice | None:
        """Return the notice in a message to rank `job.rank`; None if its proof is wrong or it is not valid."""
        _, teller, generation, kind, about, proof = NOTICE.unpack(message)
        notice = cls(teller, generation, kind, about)
        is_genuine = hmac.compare_digest(proof, notice._proof(job, job.rank))
        return notice if is_genuine and notice.is_valid(job) else None

    def is_valid(self, job: Party) -> bool:
        """Return True if it reports a failure of ranks of the job: a peer with the key may be wrong, too."""
        return self.kind in (NEWS_LOST, NEWS_LATE) and max(self.teller, self.about) < job.size

    def _proof(self, job: Party, to: int) -> bytes:
        job_id = job.job_id.encode()
        context = struct.pack(
            f"!16s1sIIIIIIIBI{len(job_id)}s",
            b"sparkhvd notice1",  # another first field than in the proofs of a handshake
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
    job: Party, peer: int, turn: Turn, sock: socket.socket, until: float
) -> Generator[Wait, None, bool]:
    """Do the connecting side of the handshake; return True if `peer` has proved itself."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    send(sock, HELLO.pack(_MAGIC, job.rank, turn.generation, turn.phase, nonce))
    reply = yield from read(sock, _REPLY.size, until)
    peer_nonce, proof = _REPLY.unpack(reply)
    nonces = nonce + peer_nonce

    def mac(role: bytes) -> bytes:
        return proof_of(job, role, client=job.rank, server=peer, turn=turn, nonces=nonces)

    if not hmac.compare_digest(proof, mac(b"S")):
        return False
    send(sock, mac(b"C"))
    if turn.phase >= PHASE_STREAM:
        yield from read(sock, len(WELCOME), until)
        send(sock, WELCOME)
    return True


def answer(
    job: Party, now: Turn, hello: bytes, sock: socket.socket, until: float
) -> Generator[Wait, None, tuple[Turn, int] | None]:
    """Do the accepting side of the handshake; return turn and rank of the client, or None if it has not proved them."""
    magic, client, generation, phase, nonce = HELLO.unpack(hello)
    turn = Turn(generation, phase)
    is_expected = magic == _MAGIC and job.rank < client < job.size
    if not is_expected or turn < now:
        return None
    nonces = nonce + secrets.token_bytes(NONCE_BYTES)

    def mac(role: bytes) -> bytes:
        return proof_of(job, role, client=client, server=job.rank, turn=turn, nonces=nonces)

    send(sock, _REPLY.pack(nonces[NONCE_BYTES:], mac(b"S")))
    proof = yield from read(sock, MAC_BYTES, until)
    if not hmac.compare_digest(proof, mac(b"C")):
        return None
    if turn.phase >= PHASE_STREAM:
        send(sock, WELCOME)
    return turn, client
