"""Delete data and runs that nobody needs any more; a warning names those that must stay."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from sparkhvd.data.store.leases import is_abandoned, is_owners, lease_of
from sparkhvd.data.store.run_lock import holder_of, is_running
from sparkhvd.errors import StoreError

if TYPE_CHECKING:
    from sparkhvd.data.store.store import Store

__all__ = ["Cleaning"]

# Folders that a warning names.
_NAMED = 20


class Cleaning:
    """Deletes data and runs in one walk over a store.

    Args:
        store: to clean.
        now: the moment to compare leases with, in s since 1970.

    Attributes:
        deleted: paths that are gone.
        failed: paths that this user may not list, read or delete.
    """

    def __init__(self, store: Store, now: float) -> None:
        self._store = store
        self._now = now
        self.deleted: list[str] = []
        self.failed: list[str] = []

    def clean_data(self) -> None:
        """Delete kept data, and data whose owner is gone."""
        for directory in self._store.data_directories():
            if is_owners(directory):
                self._delete(directory, self._is_deletable)
            else:
                self.failed.append(directory)

    def clean_runs(self) -> None:
        """Delete the folders of all runs that no fit holds."""
        for folder in ("runs", "keras_runs"):
            for run in self._store.list(folder):
                self._delete(run, self._is_free)

    def warn(self, stacklevel: int) -> None:
        """Warn about folders that stay, if any; `stacklevel` is that of `warnings.warn` from the caller."""
        if not self.failed:
            return
        more = ", ..." if len(self.failed) > _NAMED else ""
        warnings.warn(
            f"Store.clean: {len(self.failed)} folders of {self._store.url} stay, because this user may not list, read or "
            f"delete them: {', '.join(self.failed[:_NAMED])}{more}. Let their owners clean, or somebody who may.",
            stacklevel=stacklevel + 1,
        )

    def _is_deletable(self, directory: str) -> bool:
        lease = lease_of(self._store, directory)
        return (lease is not None and lease.keep) or is_abandoned(self._store, directory, self._now)

    def _is_free(self, run: str) -> bool:
        holder = holder_of(self._store, run.rpartition("/")[2])
        return holder is None or not is_running(holder)

    def _delete(self, path: str, is_wanted: Callable[[str], bool]) -> None:
        try:
            if not is_wanted(path):
                return
            self._store.delete(path)
            (self.failed if self._store.exists(path) else self.deleted).append(path)
        except StoreError:
            self.failed.append(path)
        except OSError:  # its owner is deleting it
            pass
