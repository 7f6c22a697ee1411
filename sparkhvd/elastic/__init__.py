"""Elastic jobs: ranks come and go, and those that stay keep their processes.

The process that starts the ranks has a `Coordinator`, which decides who is in each generation; every rank has an `ElasticRendezvous`, whose
`connect` asks it and then meets the others as ranks of any job do. Why not the ranks among themselves: a rank that was stopped for a while
cannot tell from the others whether they have died, or have gone on without it and finished; the process that has started them can. A question
costs a message each way on one host or network.

Ownership: the coordinator owns its listener and connections; a rank its listener, which stays open over all generations, and one connection
to the coordinator, whose end means that the rank is gone.

Each module imports only those above it:

    messages     questions, decisions, news
    membership   who is in the next generation; pure
    channel      authenticated connections for them
    service      a thread that serves connections
    coordinator  the deciding process's part
    member       a rank's connection to it
    rendezvous   a rank's rendezvous
    interrupt    signal to a training loop that the ranks should change
"""

from sparkhvd.elastic.coordinator import Coordinator, Decided, Formed
from sparkhvd.elastic.member import Invitation
from sparkhvd.elastic.membership import Change, Limits
from sparkhvd.elastic.rendezvous import ElasticRendezvous, Standing
from sparkhvd.elastic.service import Service

__all__ = [
    "Change",
    "Coordinator",
    "Decided",
    "ElasticRendezvous",
    "Formed",
    "Invitation",
    "Limits",
    "Service",
    "Standing",
]
