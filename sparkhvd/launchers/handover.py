"""A rank's job on its way to the process that becomes the rank: from `sparkhvdrun` to a script, or to a program that the rank's process starts."""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from sparkhvd import rank_context
from sparkhvd.elastic import ElasticRendezvous, Invitation
from sparkhvd.launchers.meeting import mark
from sparkhvd.rank_settings import JobSettings, RankSettings
from sparkhvd.rendezvous import Endpoint, Job, Listener, Rendezvous, SocketRendezvous, install
from sparkhvd.settings import Settings

__all__ = ["Handover", "is_handover", "take"]

_NAME = "sparkhvd-handover"


@dataclass(frozen=True)
class Handover:
    """Everything that a rank needs. Holds the key, so its repr leaves the job out.

    Attributes:
        job: `Job.to_json()`; of a member of an elastic job its invitation, as JSON.
        endpoint: of the rank's listener, as `Endpoint.to_dict` gives it.
        listener: descriptors of the bound listener (TCP, Unix or -1).
        local_rank: index among this host's ranks.
        num_threads: threads that the rank may use.
        is_elastic: whether the rank is a member of an elastic job.
        settings: `JobSettings.to_json()`; "" for those of the variables at `init()`.
        before: variables of settings that `settings` has already; None for those of now.
        gpu: ordinal of the rank's GPU in its process; None if it has none.
    """

    job: str = field(repr=False)
    endpoint: dict[str, str | int]
    listener: tuple[int, int]
    local_rank: int
    num_threads: int
    is_elastic: bool = False
    settings: str = ""
    before: dict[str, str] | None = None
    gpu: int | None = None

    @property
    def who(self) -> str:
        """Name of the rank in a message."""
        values = json.loads(self.job)
        return f"process {values['number']}" if self.is_elastic else f"rank {values['rank']}"

    def to_descriptor(self) -> int:
        """Return a descriptor of memory from which `take` reads this once."""
        descriptor = os.memfd_create(_NAME)
        os.write(descriptor, json.dumps(vars(self)).encode())
        os.lseek(descriptor, 0, os.SEEK_SET)  # a lock begins there
        return descriptor

    @classmethod
    def from_bytes(cls, content: bytes, listener: tuple[int, int] | None = None) -> Handover:
        """Rebuild a handover from what `take` returns.

        Args:
            content: as in the descriptor.
            listener: descriptors of this process; None if it has inherited them under their numbers.
        """
        made = cls(**json.loads(content))
        return made if listener is None else replace(made, listener=listener)

    def listen(self) -> Listener:
        """Return the rank's listener, which takes the descriptors over."""
        return Listener.from_filenos(*self.listener, Endpoint.from_dict(self.endpoint))

    def enter(self, listener: Listener) -> Rendezvous:
        """Make this process the rank: install its rendezvous and, where it is known, its place."""
        mark()
        # Variables that the user's program sets before init() count.
        ask: Callable[[], Settings] = Settings.resolve
        if self.settings:
            ask = RankSettings(JobSettings.from_json(self.settings), self.before).current
        if self.is_elastic:
            # Its rank is known when it meets the others.
            invitation = Invitation.from_dict(json.loads(self.job))
            member = ElasticRendezvous(
                invitation, listener, ask, self.num_threads, self.local_rank, self.gpu
            )
            install(member)
            atexit.register(member.close)
            return member
        job = Job.from_json(self.job)
        made = SocketRendezvous(job, listener, ask)
        install(made)
        atexit.register(made.close)  # init() may come again before
        rank_context.install(
            rank_context.RankContext(
                job.rank, job.size, self.local_rank, job.attempt, self.num_threads, self.gpu
            )
        )
        return made


def is_handover(descriptor: int) -> bool:
    """Return True if a descriptor of this process has come from `Handover.to_descriptor`."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{_NAME}")
    except OSError:
        return False


def take(descriptor: int) -> bytes | None:
    """Read a handover, which no process reads after this one; None if another has read it, or does now."""
    try:
        os.lockf(descriptor, os.F_TLOCK, 0)
    except OSError:
        return None
    try:
        content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        os.ftruncate(descriptor, 0)
    finally:
        os.lockf(descriptor, os.F_ULOCK, 0)
    return content or None
