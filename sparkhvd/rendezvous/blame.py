"""What a rank raises when the others do not come, and what it tells them about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparkhvd.errors import CollectiveError, CollectiveTimeoutError, PeerLostError
from sparkhvd.rendezvous.endpoints import Endpoint, Job
from sparkhvd.rendezvous.handshake import NEWS_LATE, NEWS_LOST, Notice


class MeetingError(Exception):
    """Carries the error of this rank and what the others are told about it."""

    def __init__(self, cause: CollectiveError, news: int, rank: int) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.news = news
        self.rank = rank


@dataclass(frozen=True)
class Blame:
    """The errors of one rank's meeting: who did not come, where it was expected, and what to do.

    Attributes:
        job: the job as this rank knows it.
        endpoint: where this rank listens.
        timeout_s: how long it waits for the others.
    """

    job: Job
    endpoint: Endpoint
    timeout_s: float

    def reported(self, notice: Notice) -> MeetingError:
        """What this rank raises when another one tells why it failed."""
        teller, about = notice.teller, notice.about
        if notice.what == NEWS_LATE:
            return self.late([about], [f"rank {teller} gave up waiting for rank {about}"])
        if about == self.job.rank:
            return self.lost({teller: "it lost its connection to this rank"})
        return self.lost({about: f"rank {teller} reports it"})

    def lost(self, causes: Mapping[int, object]) -> MeetingError:
        """Ranks are gone; `causes` says by rank what shows it."""
        lines = [
            f"rank {peer} at {self.job.endpoints[peer]} is gone ({cause})"
            for peer, cause in sorted(causes.items())
        ]
        where = "its error in its own log" if len(lines) == 1 else "their errors in their own logs"
        text = (
            f"Rendezvous of rank {self.job.rank} at {self.endpoint}: {', '.join(lines)}. Look for "
            f"{where}; start the job again."
        )
        return MeetingError(PeerLostError(text), NEWS_LOST, min(causes))

    def late(self, ranks: Sequence[int], lines: Sequence[str]) -> MeetingError:
        """Ranks did not come in time; `lines` says so, and the first is the one that the others are told."""
        text = (
            f"Rendezvous of rank {self.job.rank} at {self.endpoint}: not all of "
            f"{self.job.size} ranks came within {self.timeout_s:g} s: {'; '.join(lines)}. Make sure that "
            "every rank calls init() and that the hosts reach each other on these ports "
            "(SPARKHVD_PORT_RANGE), or raise SPARKHVD_CONNECT_TIMEOUT_S."
        )
        return MeetingError(CollectiveTimeoutError(text), NEWS_LATE, ranks[0])
