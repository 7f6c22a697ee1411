"""`Group`: the process group that torch.distributed calls.

A class of Python replaces torch's whole `ProcessGroup`, so it answers also what torch asks of a group and of its backend.
Methods have torch's names; docs/torch_distributed.md has the table of who calls which, from Python and from C++.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, Store

from sparkhvd.distributed.errors import as_torch
from sparkhvd.distributed.futures import Future
from sparkhvd.distributed.inner import OURS, Inner, Request
from sparkhvd.distributed.launcher import Launcher, Team
from sparkhvd.distributed.routed import Routed
from sparkhvd.distributed.store_meeting import monitored_barrier
from sparkhvd.distributed.teams import Teams, own
from sparkhvd.distributed.works import Work
from sparkhvd.errors import CollectiveError, CollectiveTimeoutError, PeerLostError
from sparkhvd.torch.untraced import leave_untraced

__all__ = ["Group"]

# Torch before 2.14 has no backends in Python.
_DefaultBackend: Any = None
if hasattr(c10d.Backend, "supports_reconfigure"):

    class _DefaultBackend(c10d.Backend):  # type: ignore[no-redef]
        """Backend that torch's C++ finds in a group; collectives are the group's."""

        def getBackendName(self) -> str:  # noqa: N802 - torch's
            return OURS



class Group(Routed):
    """Ranks of torch's group on the engine; tensors that are not on the CPU go to torch's own backends.

    Args:
        teams: makes the engine's side of groups; shared by all groups of the default one.
        team: the engine's side of this one.
        name: torch's.
        store: torch's, for this group alone.
        timeout: of operations that have none of their own.
        options: the user's `pg_options`, for a backend of torch's inside.
    """

    # What torch asks of a group and its backend; each version asks for some.
    supports_abort_hooks = False
    supports_coalescing = False
    supports_completion_hooks = False
    supports_reconfigure = False
    supports_shrinking = False
    supports_splitting = True
    supports_time_estimate = False
    _supports_time_estimate = False
    supports_window = False
    use_pg_for_symm_mem_rendezvous = False

    def __init__(
        self,
        teams: Teams,
        team: Team,
        rank: int,
        name: str,
        store: Store,
        timeout: timedelta,
        options: object = None,
    ) -> None:
        size = len(team.ranks)
        inner = Inner(self, Request(store, rank, size, timeout, name, options))
        super().__init__(rank, size, Launcher(team, name, timeout), inner)
        self._teams = teams
        self._store = store
        self._name = name
        self._description = "undefined"
        if _DefaultBackend is not None:
            # Functions of torch's C++ that look for a default backend raise without it.
            self._default_backend = _DefaultBackend(rank, size)
            kind = c10d.ProcessGroup.BackendType.CUSTOM
            self._register_backend(torch.device("cpu"), kind, self._default_backend)
            self._set_default_backend(kind)

    # Names, which C++ asks for by the names of its own methods

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        """Return the backend's name."""
        return self.inner.backend()

    name = _get_backend_name = getBackendName

    def getGroupName(self) -> str:  # noqa: N802 - torch's
        """Return torch's name of this group, by which compiled code finds it."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's
        """Take torch's name of this group."""
        self._name = name

    _set_group_name = setGroupName

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's
        """Return torch's description of this group."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 - torch's
        """Take torch's description of this group."""
        self._description = description

    _set_group_desc = setGroupDesc

    @property
    def group_name(self) -> str:
        """Torch's name of this group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """Torch's description of this group."""
        return self._description

    # What torch asks of a group and its backend

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(each) for each in self.inner.devices()]

    def _get_backend(self, device: torch.device | str) -> Any:
        place = torch.device(device)
        if place.type not in self.inner.devices():
            raise RuntimeError(f"backend 'sparkhvd' has no collectives for tensors on {device}.")
        group = self.inner.of(place.type)
        return self if group is None else group._get_backend(place)

    get_backend = _get_backend  # since torch 2.14

    @property
    def options(self) -> Any:
        """Torch's options of a backend: its name and the timeout of operations."""
        return c10d.Backend.Options(OURS, timedelta(seconds=self.launcher.timeout_s))

    def get_error(self) -> Any:
        """Return torch's word for the state of the engine."""
        try:
            self.launcher.team.engine.check()
        except CollectiveTimeoutError:
            return c10d.ErrorType.TIMEOUT
        except PeerLostError:
            return c10d.ErrorType.REMOTE_ERROR
        except CollectiveError:
            return c10d.ErrorType.COMM_ERROR
        return c10d.ErrorType.SUCCESS

    def _enable_collectives_timing(self) -> None:
        """Do nothing, as torch's Gloo does: `hvd.start_timeline` times collectives."""

    def register_pre_hook(self, hook_id: int, hook: object) -> None:
        """Refuse a hook, which torch's C++ would never call."""
        raise NotImplementedError(
            f"backend 'sparkhvd': hook {hook_id} ({hook!r}) would never be called, because torch calls hooks of its own backends "
            "only. Wrap the calls of torch.distributed, or look at them with torch.profiler or hvd.start_timeline()."
        )

    register_post_hook = register_pre_hook

    def supports_tensor_alloc(self, _: torch.device) -> bool:
        """Tell torch that it allocates tensors itself."""
        return False

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for every rank; on rank 0 the error names the ranks that did not come.

        The group stays usable after a failure.

        Args:
            timeout: None = the group's.
            wait_all_ranks: name all of them, rather than the first.

        Raises:
            CollectiveTimeoutError: ranks did not come in time.
        """
        if timeout is None:
            timeout = timedelta(seconds=self.launcher.timeout_s)
        group = self.inner.of("cpu")
        if group is not None:
            group.monitored_barrier(timeout, wait_all_ranks)
            return
        store = PrefixStore("monitored_barrier/", self._store)
        try:
            monitored_barrier(store, self._rank, self._size, timeout, wait_all_ranks)
        except CollectiveTimeoutError as error:
            raise as_torch(error) from None

    def get_group_store(self) -> Store:
        """Return this group's store."""
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: collectives are numbered from the start."""

    def _get_sequence_number_for_group(self) -> int:
        return self.launcher.scope.count

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later operations."""
        self.launcher.timeout_s = timeout.total_seconds()
        self.inner.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def new_group(
        self,
        ranks: Sequence[int],
        *,
        timeout: timedelta,
        pg_options: object = None,
        group_name: str,
        group_desc: str | None = None,
        **_: object,
    ) -> Group | None:
        """Make a group of some of this group's ranks; torch (2.13 on) calls it on every rank, in the same order.

        Keywords of newer versions are ignored: `backend` (2.14 on) is read from torch's configuration of the new group.

        Returns:
            The group; None on ranks that are not in it.
        """
        store = PrefixStore(f"{group_name}/", self._store)
        team = self._teams.subset(tuple(ranks), self.rank(), group_name, store, timeout)
        if team is None:
            return None
        rank = ranks.index(self.rank())
        made = Group(self._teams, team, rank, group_name, store, timeout, pg_options)
        made._description = group_desc or made._description
        return made

    def split_group(
        self,
        ranks: Sequence[int],
        *,
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        **_: object,
    ) -> Group | None:
        """Make a group with an engine of its own; `torch.distributed.split_group` (2.14 on) calls it on every rank.

        Args:
            ranks: of the new group, as ranks of this one; other groups are made at the same time.
            timeout: of the new group; None = this one's.
            opts: the user's `pg_options`.
            group_name: torch's, the same on the members alone.
            group_desc: torch's.

        Returns:
            The group; None on ranks that are not in it.
        """
        if self.rank() not in ranks:
            return None
        name = group_name or f"{self._name}.split"
        timeout = timeout or timedelta(seconds=self.launcher.timeout_s)
        store = PrefixStore(f"{name}/", self._store)
        rank, size = ranks.index(self.rank()), len(ranks)
        made = Group(self._teams, own(store, name, rank, size, timeout), rank, name, store, timeout, opts)
        made._description = group_desc or made._description
        return made

    def abort(self) -> None:
        """Fail every operation, here and on the other ranks; those of `hvd`, too, where the engine is shared."""
        self.inner.each(lambda group: group.abort())
        self.launcher.team.engine.abort(f"torch group {self._name} was aborted")

    def shutdown(self) -> None:
        """End the group; a shared engine stays, for `hvd` and other groups."""
        self.inner.each(lambda group: group.shutdown())
        if self.launcher.team.is_own:
            self.launcher.team.engine.shutdown()


_OURS = [kind for kind in Group.__mro__ if kind.__module__.startswith("sparkhvd.")]
leave_untraced(*_OURS, Work, Future)
