"""Groups with changing ranks: `reconfigure` of torch.distributed (torch 2.14 on).

Every rank of the new group calls it with the same number and the same handles. The ranks find each other through the
group's store, under this number, and connect a new engine. A rank leaves its former engine only then. So if the new
ranks cannot connect, the group keeps its former ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import threading
from collections.abc import Collection, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from torch._C._distributed_c10d import PrefixStore, Store

from sparkhvd.distributed.engines import own
from sparkhvd.distributed.launch import EngineGroup
from sparkhvd.distributed.work import as_torch
from sparkhvd.errors import CollectiveError, InvalidArgumentError

if TYPE_CHECKING:
    from sparkhvd.engine.engine import Engine

_HANDLE = re.compile(r"sparkhvd:\d{6,}:[0-9a-f]{32}")


class UnconnectedGroup(EngineGroup):
    """Ranks of a group before its first `reconfigure`, without an engine.

    Args:
        size: number of ranks that `init_process_group` was called with.
    """

    def __init__(self, size: int) -> None:
        fields = {"process_set": 0, "ranks": tuple(range(size)), "is_own": True}
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @property
    def engine(self) -> Engine:
        """Raise a CollectiveError, because there is no engine."""
        raise as_torch(
            CollectiveError(
                "the group is not connected: after init_process_group('sparkhvd', enable_reconfigure=True) the first reconfigure "
                "connects it. Call torch.distributed._reconfigure(uuid, handles) on every rank first."
            )
        )


class Membership(NamedTuple):
    """Result of a reconfigure.

    Attributes:
        team: engine group of the connected ranks.
        rank: rank of this process.
        name: name of the new set of ranks, for the names of operations.
        store: store for these ranks only.
    """

    team: EngineGroup
    rank: int
    name: str
    store: Store


class Reconfiguration:
    """Changes the ranks of one group.

    Args:
        rank: rank at the start.
        name: torch's name of the group.
        store: torch's store for this group only. It must exist longer than every rank, and each number is used only
            once.

    Attributes:
        handle: text that identifies this process in the group. A set of handles is sorted by text, so by the rank at
            the start.
    """

    def __init__(self, rank: int, name: str, store: Store) -> None:
        self.handle = f"sparkhvd:{rank:06d}:{secrets.token_hex(16)}"
        self._name = name
        self._store = store
        self._used: set[int] = set()
        self._lock = threading.Lock()

    def meet(self, number: int, handles: Collection[str], timeout: timedelta) -> Membership:
        """Connect the ranks with these handles. Each of them must call this.

        Args:
            number: number of this call, the same on all these ranks and never used before.
            handles: a list in the order of the new ranks; a set is sorted.
            timeout: longest time until all ranks are connected.

        Raises:
            InvalidArgumentError: the handles are wrong.
            CollectiveError: the number has been used before.
            CollectiveTimeoutError: some ranks were too late; the message names them.
            PeerLostError: a rank ended meanwhile.
        """
        ordered = sorted(handles) if isinstance(handles, (set, frozenset)) else [*handles]
        what = f"reconfigure(uuid={number}) of group {self._name}"
        rank = _position(what, self.handle, ordered)
        name = f"{self._name}.{number}"
        store = PrefixStore(f"reconfigure/{number}", self._store)
        with self._alone(what):
            try:
                self._claim(what, number, ordered, store)
                with _reported(store, rank):
                    team = own(store, name, rank, len(ordered), timeout)
            except CollectiveError as error:
                raise as_torch(error) from None
        return Membership(team, rank, name, store)

    @contextlib.contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise InvalidArgumentError(
                f"{what}: another thread of this process reconfigures the group. Wait for its end."
            )
        try:
            yield
        finally:
            self._lock.release()

    def _claim(self, what: str, number: int, ordered: list[str], store: Store) -> None:
        """Register the number for these handles on every rank, so that each rank refuses a used number."""
        digest = hashlib.sha256(" ".join(ordered).encode()).hexdigest()
        found = store.compare_set("claim", "", digest).decode()
        is_used = number in self._used or found != digest
        self._used.add(number)
        if is_used or store.check(["failed"]):
            said = "" if is_used else store.get("failed").decode(errors="replace")[:1000]
            failed = f" It failed on rank {said}." if said else ""
            raise CollectiveError(
                f"{what}: the uuid was already used.{failed} Call reconfigure again on the remaining ranks, with "
                "the same new uuid and the handles of these ranks."
            )


@contextlib.contextmanager
def _reported(store: Store, rank: int) -> Iterator[None]:
    """Record a failure of the block in the store, for ranks that arrive later."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(RuntimeError):  # the store may be gone too
            store.set("failed", f"{rank}: {type(error).__name__}: {error}"[:1000])
        raise


def _position(what: str, own_handle: str, ordered: list[str]) -> int:
    """Check the handles, and return this process's position among them."""
    strange = [each for each in ordered if not _HANDLE.fullmatch(each)]
    if strange:
        raise InvalidArgumentError(
            f"{what}: {strange[0][:80]!r} is not a handle of backend 'sparkhvd'. Give the results of "
            "torch.distributed._get_reconfigure_handle() on the ranks of the new group."
        )
    if len(set(ordered)) < len(ordered):
        raise InvalidArgumentError(
            f"{what}: only {len(set(ordered))} of the {len(ordered)} handles are different. Give each rank's handle once."
        )
    if own_handle not in ordered:
        raise InvalidArgumentError(
            f"{what}: this process's handle is not among the {len(ordered)} given. Add the result of "
            "torch.distributed._get_reconfigure_handle() on this process, or do not call reconfigure on it."
        )
    return ordered.index(own_handle)
