"""Errors of a meeting that fails, as this rank raises them and as it reports them to the others."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sparkhvd.errors import CollectiveError, CollectiveTimeoutError, PeerLostError
from sparkhvd.rendezvous.endpoints import Endpoint, Job
from sparkhvd.rendezvous.handshake import NEWS_LATE, NEWS_LOST, Notice


class MeetingError(Exception):
    """Failure of a meeting: the error that this rank raises, and the news of it for the others."""

    def __init__(self, cause: CollectiveError, news: int, rank: int) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.news = news
        self.rank = rank


@dataclass(frozen=True)
class Blame:
    """Errors of one rank's meeting: ranks that did not come, their addresses, and the remedy.

    Attributes:
        job: the job as this rank knows it.
        endpoint: where this rank listens.
        timeout_s: how long it waits for the others.
    """

    job: Job
    endpoint: Endpoint
    timeout_s: float

    def reported(self, notice: Notice) -> MeetingError:
        """Return the error for a failure that another rank has reported."""
        teller, about = notice.teller, notice.about
        if notice.kind == NEWS_LATE:
            return self.late([about], [f"rank {teller} gave up waiting for rank {about}"])
        if about == self.job.rank:
            return self.lost({teller: "it lost its connection to this rank"})
        return self.lost({about: f"rank {teller} reports it"})

    def lost(self, causes: Mapping[int, object]) -> MeetingError:
        """Return the error about ranks that are gone; `causes` holds the evidence by rank."""
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

    def expired(
        self,
        peers: Collection[int],
        rows: Mapping[int, bytes | None],
        last_errors: Mapping[int, object],
    ) -> MeetingError:
        """Return the error about ranks that are missing, or else about those that still wait for others.

        Args:
            peers: all ranks that must come.
            rows: by rank that is connected its row, or None before it has come.
            last_errors: the last error of connecting with a rank.
        """
        missing = [rank for rank in sorted(peers) if rank not in rows]
        waiting = [rank for rank in sorted(rows) if rows[rank] is None]
        lines = [self._missing_line(rank, last_errors.get(rank)) for rank in missing]
        if not missing:
            lines = [f"rank {r} at {self.job.endpoints[r]} still waits for others" for r in waiting]
        return self.late(missing or waiting or sorted(peers), lines)

    def _missing_line(self, rank: int, error: object) -> str:
        who = f"rank {rank} at {self.job.endpoints[rank]}"
        if rank < self.job.rank:
            return f"{who} has not answered ({error or 'no error'})"
        return f"{who} has not connected ({error or 'its port is open'})"

    def late(self, ranks: Sequence[int], lines: Sequence[str]) -> MeetingError:
        """Return the error about ranks that did not come in time, with a line about each; the others are told of the first."""
        text = (
            f"Rendezvous of rank {self.job.rank} at {self.endpoint}: not all of "
            f"{self.job.size} ranks came within {self.timeout_s:g} s: {'; '.join(lines)}. Make sure that "
            "every rank calls init() and that the hosts reach each other on these ports "
            "(SPARKHVD_PORT_RANGE), or raise SPARKHVD_CONNECT_TIMEOUT_S."
        )
        return MeetingError(CollectiveTimeoutError(text), NEWS_LATE, ranks[0])
