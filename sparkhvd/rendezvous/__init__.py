"""How ranks find each other: from the endpoints of a job to authenticated sockets between every two ranks.

Threads: one. `connect()` runs a small event loop on non-blocking sockets in the caller's thread: one
generator per connection, each yields what it waits for. Nothing here is shared between threads.

Trust: a listener is reachable by anyone. Nothing but a hello of fixed size is read from a connection before both
sides have proved that they know the job's key; such a connection lives 5 s at most, 64 at a time (the
oldest goes first), and whatever it sends, it is closed and the job goes on. Proofs are HMAC-SHA256 over the
role, both ranks, both fresh nonces, the job, attempt, generation, byte order and versions, so they can be
neither reflected nor replayed. What follows is not encrypted.

Streams: with `Settings.streams` above 1 the meeting goes on, one turn for each further connection of every pair.
A turn is a meeting of its own, with hellos and proofs that carry its number, so nothing shown for one stream
opens another.

Failure: a rank that cannot meet the others tells every one of them why before it leaves, over their link or else
by a notice into their listener, where it waits for ranks that come late. A notice is one message with a proof
over all it says and to whom; replayed, it repeats to the same rank what is true of the generation. So what a
rank has to say is there before its absence can be seen, and who sees an absence looks for notices first.

Shutdown: `connect()` closes every socket that it does not return, also when it fails. The listener stays
open for the next generation until `Listener.close()` or the end of the process.

Each module imports only those above it:

    connections  what a meeting returns, and the protocol of whoever makes one
    installed    the process's own rendezvous
    endpoints    where a rank listens, and what it must know to meet the others
    listener     the listening sockets of a rank
    loop         the event loop, and what a task may do with a socket
    handshake    hellos, proofs and notices: everything that is said before a peer is believed
    memory       the proof that two processes can map the same memory
    blame        what a rank raises when the others do not come, and what it tells them
    meeting      one rank's part in one generation
    sockets      a process's rendezvous: one meeting per generation
    in_process   ranks that are threads of one process
"""

from sparkhvd.rendezvous.connections import Connections, Rendezvous
from sparkhvd.rendezvous.endpoints import Endpoint, Job
from sparkhvd.rendezvous.in_process import SingleRendezvous, in_process
from sparkhvd.rendezvous.installed import current, install
from sparkhvd.rendezvous.listener import Listener
from sparkhvd.rendezvous.sockets import SocketRendezvous

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
