"""A rank's job on its way from `sparkhvdrun` to the script that it starts."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field

from sparkhvd import rank_context
from sparkhvd.elastic import ElasticRendezvous, Invitation
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.launchers.meeting import mark
from sparkhvd.rendezvous import Endpoint, Job, Listener, Rendezvous, SocketRendezvous, install
from sparkhvd.settings import Settings

__all__ = ["VARIABLE", "Handover", "receive"]

VARIABLE = "SPARKHVD_LAUNCHER_FD"
_NAME = "sparkhvd-handover"


@dataclass(frozen=True)
class Handover:
    """Everything that a rank needs. Holds the key, so its repr leaves the job out.

    Attributes:
        job: `Job.to_json()`; of a member of an elastic job its invitation, as JSON.
        endpoint: of the rank's listener, as `Endpoint.to_dict` gives it.
        listener: inherited descriptors of the bound listener (TCP, Unix or -1).
        local_rank: index among this host's ranks.
        num_threads: threads that the rank may use.
        is_elastic: whether the rank is a member of an elastic job.
    """

    job: str = field(repr=False)
    endpoint: dict[str, str | int]
    listener: tuple[int, int]
    local_rank: int
    num_threads: int
    is_elastic: bool = False

    def to_descriptor(self) -> int:
        """Return a descriptor of memory from which `receive` reads this once."""
        descriptor = os.memfd_create(_NAME, 0)  # inherited
        os.write(descriptor, json.dumps(vars(self)).encode())
        return descriptor


def receive() -> Rendezvous | None:
    """Install the job that `sparkhvdrun` has handed to this process; None if it has not.

    Raises:
        InvalidArgumentError: this process inherited the variable from a rank, without the descriptor.
    """
    # A rank's children are no ranks: they do not inherit it.
    text = os.environ.pop(VARIABLE, None)  # noqa: TID251 - the launcher's own
    if text is None:
        return None
    try:
        descriptor = int(text)
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{_NAME}"):
            raise ValueError("another file")
        content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        values = json.loads(content)
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"init(): {VARIABLE}={text!r} is set, but that descriptor has no job ({error}). This process is a child of a "
            f"rank that sparkhvdrun has started, and no rank itself: start it without {VARIABLE}, or let the rank communicate."
        ) from error
    os.ftruncate(descriptor, 0)  # also for others that have inherited it
    os.close(descriptor)
    mark()
    handover = Handover(**values)
    endpoint = Endpoint.from_dict(handover.endpoint)
    listener = Listener.from_filenos(*handover.listener, endpoint)
    if handover.is_elastic:
        invitation = Invitation.from_dict(json.loads(handover.job))
        # Its rank is known when it meets the others.
        member = ElasticRendezvous(
            invitation, listener, Settings.resolve, handover.num_threads, handover.local_rank
        )
        install(member)
        return member
    job = Job.from_json(handover.job)
    # Variables that the script sets before init() count.
    made = SocketRendezvous(job, listener, Settings.resolve)
    install(made)
    place = rank_context.RankContext(
        job.rank, job.size, handover.local_rank, job.attempt, handover.num_threads
    )
    rank_context.install(place)
    return made
