"""Elastic jobs: the set of ranks changes, and surviving ranks keep their processes.

The process that starts the ranks has a `Coordinator`, which decides the members of each generation. Every rank has an
`ElasticRendezvous`, whose `connect` asks the coordinator and then connects to the others like a rank of any job. The
ranks cannot decide among themselves: a rank that was stopped for a while cannot find out whether the others have died,
or have continued without it and finished. The process that started them can. A question costs a message each way on one
host or network.

Ownership: the coordinator owns its listener and connections. A rank owns its listener, which stays open over all
generations, and one connection to the coordinator, whose end means that the rank is gone.

Each module imports only those above it:

    membership   decides the members of the next generation; pure
    coordinator  coordinator, and a member's connection to it
    rendezvous   a rank's rendezvous
"""

from sparkhvd.elastic.coordinator import (
    Coordinator,
    CoordinatorThread,
    Decided,
    GenerationFormed,
    JoinToken,
)
from sparkhvd.elastic.membership import Change, Limits
from sparkhvd.elastic.rendezvous import ElasticRendezvous, MemberState

__all__ = [
    "Change",
    "Coordinator",
    "Decided",
    "ElasticRendezvous",
    "GenerationFormed",
    "JoinToken",
    "Limits",
    "CoordinatorThread",
    "MemberState",
]
