"""Rendezvous of a member of an elastic job: each `connect` is a generation, with the members that the coordinator has decided on."""

from __future__ import annotations

import dataclasses
import hmac
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sparkhvd import topology as rank_context
from sparkhvd.elastic.coordinator import JoinToken, MemberLink
from sparkhvd.elastic.membership import Decision, JoinRequest
from sparkhvd.errors import CollectiveError, NotInitializedError
from sparkhvd.rendezvous import Connections, Job, Listener, SocketRendezvous
from sparkhvd.settings import Settings
from sparkhvd.topology import Topology, horovod_variables, topology


@dataclass
class MemberState:
    """What this member brings to the next generation.

    Attributes:
        has_state: whether it has the training's state.
        version: of its last commit.
        needs_sync: whether it must get the state before it goes on.
        lost: ranks of the last generation that are lost and how, as `CollectiveError.lost` has them.
        why: what ended the last generation.
    """

    has_state: bool = False
    version: int = 0
    needs_sync: bool = True
    lost: Mapping[int, str] | None = None
    why: str = ""


class ElasticRendezvous:
    """Rendezvous whose ranks change from `connect` to `connect`.

    Every member calls `connect` when a generation has ended for it, by a failure or because the members should change. It
    returns when the coordinator has decided who is left, who joins, and all of them have met; if they cannot, because another
    one has died meanwhile, it asks again.

    Args:
        join_token: to the job.
        listener: where other members reach this one; stays open.
        settings: returns the settings, called by every `connect`.
        num_threads: threads that this process may use.
        local_rank: number of its slot on its host.
        gpu: ordinal of this process's GPU; None for none.

    Attributes:
        standing: what this member brings to the next generation; the caller keeps it up to date.
        joins_later: whether the others run already, and this one has not joined them yet.
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
        # Its own, for forks: a child closes what a rendezvous has open.
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
        """The current generation, from 1; 0 before the first."""
        return 0 if self._decision is None else self._decision.generation

    @property
    def members(self) -> tuple[int, ...]:
        """Numbers of the current members, by rank; a number is a process's for as long as the job lives."""
        return () if self._decision is None else self._decision.members

    @property
    def must_sync(self) -> bool:
        """True if all members of the current generation get rank 0's state before they go on."""
        return self._now().sync

    def arrive(self) -> Topology | None:
        """Return the place of this process until it joins a generation that runs already; None if none does.

        The others go on while it prepares: loads data and builds a model. `connect` joins them. The place is the one behind theirs; on its
        host it has the number of its slot. The question is asked once: a later call returns None.

        Raises:
            ElasticError: the job cannot go on, or the coordinator is gone.
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
        """Take part in the next generation; see the class.

        Raises:
            LeftOutError: the others went on without this member.
            ElasticError: the job cannot go on: too few members, too many resets, no state left, or no coordinator.
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
        """Return whether the members should change, and whether nobody would join; does not wait.

        Raises:
            LeftOutError: the others went on without this member.
            ElasticError: the coordinator is gone.
        """
        news = self._link.news()
        return news is not None, news is not None and news.only_removals

    def note_synced(self) -> None:
        """Note that this member has the training's state."""
        if not self.standing.has_state:
            self.standing.has_state = True
            self._link.report("synced", self.generation)
        self.standing.needs_sync = False

    def finish(self) -> None:
        """Tell that this member's function has returned: nobody joins any more."""
        self._has_finished = True
        self._link.report("finished", self.generation)

    def begin(self) -> None:
        """Tell that this member has begun a function, if another one has returned before."""
        if self._has_finished:
            self._has_finished = False
            self._link.report("running", self.generation)

    def close(self) -> None:
        """Leave the job: stop listening, and end the connection to the coordinator."""
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
        """Return the ranks of a generation as a job of its own: nothing that was shown in another one opens it."""
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
        os.environ.update(known)  # noqa: TID251 - for what reads Horovod's, and programs that this one starts
        made = rank_context.RankContext(
            place.rank,
            place.size,
            place.local_rank,
            0,
            self._num_threads,
            self._gpu,
        )
        rank_context.install(made)


# ----------------------------------------------------------------------------------------------------
# Signal to a training loop that the members of its job should change.


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name
    """The set of hosts has changed: raised on every rank by the same commit, with the same attributes.

    Attributes:
        skip_sync: whether the state need not be sent anew, because nobody joins.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts has changed")
        self.skip_sync = skip_sync
