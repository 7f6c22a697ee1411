"""Rendezvous of ranks: from the endpoints of a job to authenticated sockets between all pairs of ranks.

Threads: one. `connect()` runs a small event loop on non-blocking sockets in the caller's thread, with one
generator per connection, which yields the events that it waits for. Nothing here is shared between threads.

Trust: anyone can reach a listener. Before both sides have proved that they know the job's key, only a hello of
fixed size is read from a connection. Unauthenticated connections are closed after 5 s, at most 64 are open (the
oldest is closed first), and cannot disturb the job. Proofs are HMAC-SHA256 over the
role, both ranks, both fresh nonces, the job, attempt, generation, byte order and versions, so they can be
neither reflected nor replayed. Later data are not encrypted.

Streams: the first connection of every pair carries control frames. Then the ranks connect once more, in a phase of its
own, for each tensor stream (`Settings.streams`). Hellos and proofs carry the phase's number, so a proof for one stream
is invalid for another.

Failure: a rank that cannot connect notifies the others of the reason before it leaves, over their link or else
by a notice to their listener, where it waits for late ranks. A notice is one message with a proof
over its contents and recipient. Replayed, it only repeats a true fact about the generation to the same rank. So the
reason of a rank arrives before its absence is visible, and a rank that sees an absence reads its notices first.

Shutdown: `connect()` closes every socket that it does not return, also when it fails. The listener stays
open for the next generation until `Listener.close()` or the end of the process.

Each module imports only those above it:

    event_loop  event loop and socket operations of its tasks
    handshake   messages before a peer is authenticated: hellos, proofs, notices
    listener    listening sockets of a rank, and the acceptor
    mesh        connects one rank to the others of a generation
    rendezvous  the rendezvous of this process
"""

from sparkhvd.rendezvous.handshake import Connections, Endpoint, Job, Rendezvous
from sparkhvd.rendezvous.listener import Listener
from sparkhvd.rendezvous.rendezvous import (
    SingleRendezvous,
    SocketRendezvous,
    current_rendezvous,
    in_process,
    install_rendezvous,
)

__all__ = [
    "Connections",
    "Endpoint",
    "Job",
    "Listener",
    "Rendezvous",
    "SingleRendezvous",
    "SocketRendezvous",
    "current_rendezvous",
    "in_process",
    "install_rendezvous",
]
