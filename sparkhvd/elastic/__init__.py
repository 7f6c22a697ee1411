"""Elastic jobs: ranks come and go, and those that stay keep their processes.

The process that starts the ranks has a `Coordinator`, which decides who is in each generation; every rank has an `ElasticRendezvous`, whose
`connect` asks it and then meets the others as ranks of any job do. Why not the ranks among themselves: a rank that was stopped for a while
cannot tell from the others whether they have died, or have gone on without it and finished; the process that has started them can. A question
costs a message each way on one host or network.

Ownership: the coordinator owns its listener and connections; a rank its listener, which stays open over all generations, and one connection
to the coordinator, whose end means that the rank is gone.

Each module imports only those above it:

    membership   who is in the next generation; pure
    coordinator  the deciding process's part
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
