"""Hellos, proofs and notices: everything that is said before a peer is believed.

Proofs are HMAC-SHA256 over all that they are for, so they can be neither reflected nor replayed; see
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
from typing import Any

from sparkhvd.rendezvous.endpoints import Job
from sparkhvd.rendezvous.loop import Wait, read, send

# Both are part of every proof. A test compares them with the C header (`engine` may not be imported here).
ABI_VERSION = 4
WIRE_VERSION = 6

NONCE_BYTES = 32
MAC_BYTES = 32

_MAGIC = b"sparkhvd"
HELLO = struct.Struct(f"!8sIIB{NONCE_BYTES}s")  # magic, rank, generation, phase, nonce
_REPLY = struct.Struct(f"!{NONCE_BYTES}s{MAC_BYTES}s")
# A notice: magic, the rank that tells, generation, what, about whom, proof. Longer than a hello.
NOTICE = struct.Struct(f"!8sIIBI{MAC_BYTES}s")
NOTICE_MAGIC = b"sparkhvn"
# Before the row: one of the next three, and the rank it is about; of MET the number of further streams.
NEWS = struct.Struct("!BI")
NEWS_MET = 0
NEWS_LOST = 1
NEWS_LATE = 2
PHASE_MESH = 0
PHASE_TCP = 1  # replaces Unix links inside a host whose ranks turned out not to share memory
PHASE_STREAM = 2  # the first further connection of every pair; the next phases are for the others
# Ends the handshake of a stream, where no later message would show that the proofs were right. The accepting
# side says it first; the connecting side tries again until it has heard it, and repeats it where it stays.
WELCOME = b"\1"


@dataclass(frozen=True, order=True)
class Turn:
    """Which meeting a connection is for; a later one than the listener is at waits for it."""

    generation: int
    phase: int


def proof_of(
    job: Job, role: bytes, *, client: int, server: int, turn: Turn, nonces: bytes
) -> bytes:
    """What the client (b"C") or the server (b"S") must show."""
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
    """Why a generation has failed, as one rank tells another."""

    teller: int
    generation: int
    what: int
    about: int

    def to_bytes(self, job: Job, to: int) -> bytes:
        """The message for rank `to`."""
        proof = self._proof(job, to)
        return NOTICE.pack(NOTICE_MAGIC, self.teller, self.generation, self.what, self.about, proof)

    @classmethod
    def from_bytes(cls, message: bytes, job: Job) -> Notice | None:
        """What the message says to rank `job.rank`; None if its proof is wrong or it makes no sense."""
        _, teller, generation, what, about, proof = NOTICE.unpack(message)
        notice = cls(teller, generation, what, about)
        is_genuine = hmac.compare_digest(proof, notice._proof(job, job.rank))
        return notice if is_genuine and notice.makes_sense(job) else None

    def makes_sense(self, job: Job) -> bool:
        """Whether it tells of a failure and of ranks that there are: also who has the key may be wrong."""
        return self.what in (NEWS_LOST, NEWS_LATE) and max(self.teller, self.about) < job.size

    def _proof(self, job: Job, to: int) -> bytes:
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
            self.what,
            self.about,
            job_id,
        )
        return hmac.digest(job.key, context, "sha256")


def introduce(
    job: Job, peer: int, turn: Turn, sock: socket.socket, until: float
) -> Generator[Wait, None, bool]:
    """The connecting side: whether `peer` has proved itself."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    me = job.rank
    send(sock, HELLO.pack(_MAGIC, me, turn.generation, turn.phase, nonce))
    reply = yield from read(sock, _REPLY.size, until)
    theirs, proof = _REPLY.unpack(reply)
    context: dict[str, Any] = {
        "client": me,
        "server": peer,
        "turn": turn,
        "nonces": nonce + theirs,
    }
    if not hmac.compare_digest(proof, proof_of(job, b"S", **context)):
        return False
    send(sock, proof_of(job, b"C", **context))
    if turn.phase >= PHASE_STREAM:
        yield from read(sock, len(WELCOME), until)
        send(sock, WELCOME)
    return True


def answer(
    job: Job, now: Turn, hello: bytes, sock: socket.socket, until: float
) -> Generator[Wait, None, tuple[Turn, int] | None]:
    """The accepting side: turn and rank of whoever said `hello`, once proved; None = not to be believed."""
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
