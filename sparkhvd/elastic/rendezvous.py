"""Rendezvous of a member of an elastic job: each `connect` joins a generation decided by the coordinator."""

from __future__ import annotations

import dataclasses
import hmac
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sparkhvd.elastic.coordinator import JoinToken, MemberLink
from sparkhvd.elastic.membership import Decision, JoinRequest
from sparkhvd.errors import CollectiveError, NotInitializedError
from sparkhvd.rendezvous import Connections, Job, Listener, SocketRendezvous
from sparkhvd.settings import Settings
from sparkhvd.topology import (
    RankContext,
    Topology,
    horovod_variables,
    install_rank_context,
    topology,
)


@dataclass
class MemberState:
    """A member's state for the next generation.

    Attributes:
        has_state: whether it has the training's state.
        version: of its last commit.
        needs_sync: whether it must get the state before it continues.
        lost: lost ranks of the last generation and how, as `CollectiveError.lost` has them.
        why: what ended the last generation.
    """

    has_state: bool = False
    version: int = 0
    needs_sync: bool = True
    lost: Mapping[int, str] | None = None
    why: str = ""


class ElasticRendezvous:
    """Rendezvous of an elastic job: each `connect` may have other ranks.

    Every member calls `connect` when a generation has ended for it, by a failure or because the members should change.
    It returns when the coordinator has decided the members and all of them have connected. If they cannot, because
    another one has died meanwhile, it asks again.

    Args:
        join_token: to the job.
        listener: where other members reach this one; stays open.
        settings: returns the settings; called by every `connect`.
        num_threads: threads that this process may use.
        local_rank: number of its slot on its host.
        gpu: ordinal of this process's GPU; None without one.

    Attributes:
        standing: this member's state for the next generation; the caller updates it.
        joins_later: whether the others run already, and this member has not joined them yet.
    """

    def __init__(
        self,
        join_token: JoinToken,
        listener: Listener,
        settings: Callable[[], Settings],
        num_threads: int = 1,
        local_rank: int = 0,
        gpu: int | None = None,
    ) -> None:
        self.standing = MemberState()
        self.joins_later = False
        self._ask_settings = settings
        self._meet_s = join_token.meet_s
        self.settings = self._resolve()
        self._join_token = join_token
        self._listener = listener
        self._num_threads = num_threads
        self._local_rank = local_rank
        self._gpu = gpu
        self._link = MemberLink(join_token)
        self._decision: Decision | None = None
        self._has_finished = False
        # Kept for forks: a child process closes the sockets of the last rendezvous.
        self._sockets: SocketRendezvous | None = None

    @property
    def rank(self) -> int:
        """This member's rank in the current generation."""
        return self._now().members.index(self._join_token.number)

    @property
    def size(self) -> int:
        """Number of members of the current generation."""
        return len(self._now().members)

    @property
    def generation(self) -> int:
        """The current generation, from 1, or 0 before the first."""
        return 0 if self._decision is None else self._decision.generation

    @property
    def members(self) -> tuple[int, ...]:
        """Numbers of the current members, by rank. A number belongs to one process for the whole job."""
        return () if self._decision is None else self._decision.members

    @property
    def must_sync(self) -> bool:
        """True if all members of the current generation get rank 0's state before they continue."""
        return self._now().sync

    def arrive(self) -> Topology | None:
        """Get a provisional topology for use until this process joins a running generation.

        None without a running generation. The others continue while it loads data and builds a model; `connect` joins
        them. Its provisional rank follows theirs, and its local rank is its slot. Only the first call asks; later calls
        return None.

        Raises:
            ElasticError: the job cannot continue, or the coordinator is gone.
            SystemExit: this process is not needed: the others have finished, or it should leave.
        """
        if self.joins_later or self._decision is not None or not (size := self._link.arrive()):
            return None
        self.joins_later = True
        local_size = self._local_rank + 1
        place = Topology(
            size, size + 1, self._local_rank, local_size, 0, 1, hosts=(0,) * (size + 1)
        )
        self._install(place)
        return place

    def connect(self) -> Connections:
        """Join the next generation. See the class.

        Raises:
            LeftOutError: the others continued without this member.
            ElasticError: the job cannot continue: too few members, too many resets, no state left, or no coordinator.
            SystemExit: this member should leave, or the others have finished.
        """
        self.settings = self._resolve()
        while True:
            decision = self._link.ask(self._question())
            self._decision, self.joins_later = decision, False
            self.standing.lost, self.standing.why = None, ""
            self._sockets = SocketRendezvous(self._job(decision), self._listener, self.settings)
            try:
                connections = self._sockets.connect()
            except CollectiveError as error:
                self.standing.why = str(error)
                continue
            self._install(topology(self.rank, connections.hosts))
            self._link.report("formed", decision.generation)
            return connections

    def should_change(self) -> tuple[bool, bool]:
        """Check without waiting whether the members should change, and whether only by removals.

        Raises:
            LeftOutError: the others continued without this member.
            ElasticError: the coordinator is gone.
        """
        news = self._link.news()
        return news is not None, news is not None and news.only_removals

    def note_synced(self) -> None:
        """Record that this member has the training's state."""
        if not self.standing.has_state:
            self.standing.has_state = True
            self._link.report("synced", self.generation)
        self.standing.needs_sync = False

    def finish(self) -> None:
        """Report that this member's function has returned. No further process joins."""
        self._has_finished = True
        self._link.report("finished", self.generation)

    def begin(self) -> None:
        """Report that this member has started another function, if one has returned before."""
        if self._has_finished:
            self._has_finished = False
            self._link.report("running", self.generation)

    def close(self) -> None:
        """Leave the job: close the listener and the connection to the coordinator."""
        self._link.close()
        self._listener.close()

    def _resolve(self) -> Settings:
        settings = self._ask_settings()
        wait_s = min(settings.connect_timeout_s, self._meet_s)
        return dataclasses.replace(settings, connect_timeout_s=wait_s)

    def _now(self) -> Decision:
        if self._decision is None:
            raise NotInitializedError("The elastic job has no generation yet; use hvd.init().")
        return self._decision

    def _question(self) -> JoinRequest:
        standing = self.standing
        lost = standing.lost or {}
        dead = [
            self.members[rank]
            for rank, kind in lost.items()
            if kind == "dead" and rank < len(self.members)
        ]
        return JoinRequest(
            generation=self.generation,
            endpoint=self._listener.endpoint(),
            has_state=standing.has_state,
            version=standing.version,
            needs_sync=standing.needs_sync,
            dead=tuple(sorted(dead)),
            why=standing.why,
        )

    def _job(self, decision: Decision) -> Job:
        """Each generation has its own key, so proofs of another generation are invalid in it."""
        name = f"{self._join_token.job_id} generation {decision.generation}"
        members = ",".join(map(str, decision.members))
        return Job(
            key=hmac.digest(self._join_token.key, f"{name} of {members}".encode(), "sha256"),
            job_id=name,
            attempt=0,
            rank=decision.members.index(self._join_token.number),
            size=len(decision.members),
            endpoints=decision.endpoints,
        )

    def _install(self, place: Topology) -> None:
        known = horovod_variables(place, socket.gethostname())
        os.environ.update(known)  # noqa: TID251 - for readers of Horovod's variables, and child processes
        made = RankContext(
            place.rank,
            place.size,
            place.local_rank,
            0,
            self._num_threads,
            self._gpu,
        )
        install_rank_context(made)


# ----------------------------------------------------------------------------------------------------
# Signal to a training loop that the members of its job should change.


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name
    """The set of hosts has changed: raised on every rank by the same commit, with the same attributes.

    Attributes:
        skip_sync: whether the state need not be sent again, because no member joins.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts has changed")
        self.skip_sync = skip_sync
