"""Rendezvous of ranks: from the endpoints of a job to authenticated sockets between every two ranks.

Threads: one. `connect()` runs a small event loop on non-blocking sockets in the caller's thread: one
generator per connection, which yields the events that it waits for. Nothing here is shared between threads.

Trust: a listener is reachable by anyone. Before both sides have proved that they know the job's key, only a hello of
fixed size is read from a connection. Unauthenticated connections are closed after 5 s, at most 64 are open (the
oldest is closed first), and nothing that they send disturbs the job. Proofs are HMAC-SHA256 over the
role, both ranks, both fresh nonces, the job, attempt, generation, byte order and versions, so they can be
neither reflected nor replayed. Later data are not encrypted.

Streams: the first connection of every pair carries control frames; the meeting goes on with one turn for each connection for tensors (`Settings.streams`).
A turn is a meeting of its own, with hellos and proofs that carry its number, so nothing shown for one stream
opens another.

Failure: a rank that cannot meet the others tells every one of them why before it leaves, over their link or else
by a notice into their listener, where it waits for ranks that come late. A notice is one message with a proof
over its contents and recipient; replayed, it repeats to the same rank what is true of the generation. So the
reason of a rank arrives before its absence can be seen, and a rank that sees an absence reads its notices first.

Shutdown: `connect()` closes every socket that it does not return, also when it fails. The listener stays
open for the next generation until `Listener.close()` or the end of the process.

Each module imports only those above it:

    event_loop  event loop, and socket operations of its tasks
    handshake   messages before a peer is authenticated: hellos, proofs, notices
    listener    listening sockets of a rank
    meeting     one rank's part in one generation
    rendezvous  the process's own rendezvous
"""

from sparkhvd.rendezvous.handshake import Connections, Endpoint, Job, Rendezvous
from sparkhvd.rendezvous.listener import Listener
from sparkhvd.rendezvous.rendezvous import (
    SingleRendezvous,
    SocketRendezvous,
    current,
    in_process,
    install,
)

__all__ = [
    "Connections",
    "Endpoint",
    "Job",
    "Listener",
    "Rendezvous",
    "SingleRendezvous",
    "SocketRendezvous",
    "current",
    "in_process",
    "install",
]
