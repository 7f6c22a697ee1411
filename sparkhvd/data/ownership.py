"""Ownership of materialized data: leases, their renewal, and deletion at the end of an application or process.

A data directory `data/<key>/<app>-<pid>-<random>` belongs to one process of one application (clients of one Spark
Connect server are one application), as recorded in its lease file. A lease not renewed for a day is void, and any
process may delete the directory. Unless the user keeps them, the owner deletes its directories when its process or
application ends.

Threads: any; `_owned.lock` guards the lists.
"""

from __future__ import annotations

import atexit
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from sparkhvd.data.store.locks import Lease, is_abandoned, is_owners, lease_of, write_lease
from sparkhvd.data.store.store import Store
from sparkhvd.errors import StoreError

_RENEW_S = 3600.0
_RETRY_S = 60.0
# A Connect client without access to the store cannot renew a lease while its ranks hold every task slot. So it begins
# with a longer lease: these six days plus `LEASE_S` are a week.
_UNSEEN_S = 6 * 24 * 3600.0


@dataclass
class _Owned:
    """Data directories, locks and applications of this process."""

    pid: int = field(default_factory=os.getpid)
    # Distinguishes this process's directories from directories of other processes of the same application.
    token: str = field(default_factory=lambda: os.urandom(4).hex())
    lock: threading.Lock = field(default_factory=threading.Lock)
    # (store, data_dir) -> its lease
    directories: dict[tuple[Store, str], Lease] = field(default_factory=dict)
    # (store, data_dir) -> time of the next try after a failed renewal
    retries: dict[tuple[Store, str], float] = field(default_factory=dict)
    key_locks: dict[tuple[str, str], threading.Lock] = field(default_factory=dict)
    # application -> function that returns True when it has ended
    applications: dict[str, Callable[[], bool]] = field(default_factory=dict)
    is_registered: bool = False


# A global of the process, because the function registered with atexit needs it when the process ends.
_owned = _Owned()


def add_application(app_id: str, is_over: Callable[[], bool]) -> None:
    """Register an application with data of this process. `is_over()` is True after its end."""
    with _owned.lock:
        _owned.applications[app_id] = is_over


def directory_of(name: str, app_id: str) -> str:
    """Name the folder for a key's data, written by this process only."""
    return f"data/{name}/{_safe(app_id)}-{os.getpid()}-{_owned.token}"


def _safe(app_id: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", app_id).strip(".") or "app"


@contextmanager
def key_lock(store: Store, name: str) -> Iterator[None]:
    """Hold the lock of a key, to serialize this process's fits with the same key."""
    with _owned.lock:
        lock = _owned.key_locks.setdefault((store.url, name), threading.Lock())
    with lock:
        yield


def is_kept(store: Store, data_dir: str) -> bool:
    """Whether the user keeps a directory. A directory without a lease is not kept."""
    lease = lease_of(store, data_dir)
    return lease is not None and lease.keep


def new_lease(store: Store, app_id: str, keep: bool) -> Lease:
    """Make a lease for one day, or for a week without direct access to the store."""
    return Lease(app_id, time.time() + (0.0 if store.is_seen else _UNSEEN_S), keep)


def own(store: Store, data_dir: str, lease: Lease) -> None:
    """Write the lease of a directory. The directory is deleted when this process ends, unless the lease keeps it."""
    write_lease(store, data_dir, lease)
    with _owned.lock:
        _owned.directories[store, data_dir] = lease
        if not _owned.is_registered:
            _owned.is_registered = True
            atexit.register(_release_at_exit)


def disown(store: Store, data_dir: str) -> None:
    """Delete a directory owned by this process, and ignore errors of the store."""
    with suppress(StoreError):  # the original error is more useful
        remove(store, data_dir)


def remove(store: Store, data_dir: str) -> None:
    """Delete a data directory, and the key's folder if no other process has data in it.

    This process no longer renews its lease.
    """
    with _owned.lock:
        _owned.directories.pop((store, data_dir), None)
    store.delete(data_dir)
    store.delete_if_empty(data_dir.rpartition("/")[0])


def release_unkept(directories: Iterable[tuple[Store, str]]) -> None:
    """Delete the given directories owned by this process and not kept by the user."""
    if os.getpid() != _owned.pid:  # a forked child inherits the list but owns nothing
        return
    for store, data_dir in directories:
        with _owned.lock:
            lease = _owned.directories.get((store, data_dir))
        if lease is not None and not lease.keep:
            disown(store, data_dir)


def _release_at_exit() -> None:
    # A forked child inherits the list of directories but owns none of them.
    if os.getpid() == _owned.pid:
        release()


def renew_leases(now: float | None = None) -> None:
    """Renew this process's leases, to prove that it is alive. Call it regularly in a long fit.

    Writes only once per hour, so it may be called often. A lease that cannot be written is
    retried after a minute, for up to a day.
    """
    now = time.time() if now is None else now
    with _owned.lock:
        due = [
            (k, lease)
            for k, lease in _owned.directories.items()
            if now - lease.renewed > _RENEW_S and now >= _owned.retries.get(k, 0.0)
        ]
    for (store, data_dir), lease in due:
        try:
            if store.exists(data_dir):
                own(store, data_dir, Lease(lease.owner, now, lease.keep))
        except Exception:  # noqa: BLE001 - file systems raise any class, and the other leases must still be renewed
            with _owned.lock:
                _owned.retries[store, data_dir] = now + _RETRY_S


@contextmanager
def renewing(store: Store) -> Iterator[None]:
    """Renew leases while a job writes to a store.

    Nothing is renewed if a renewal would wait for that job's task slots.
    """
    if not store.is_seen:
        yield
        return
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(_RETRY_S):
            renew_leases()

    thread = threading.Thread(target=renew, name="sparkhvd-leases", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_RETRY_S)  # a hanging store must not delay a finished fit for ever


def release(app_id: str | None = None) -> list[str]:
    """Delete the data owned by this process (of one application, or all), except kept data.

    Runs automatically when the process ends.
    """
    with _owned.lock:
        ending = [
            (store, data_dir)
            for (store, data_dir), lease in _owned.directories.items()
            if not lease.keep and app_id in (None, lease.owner)
        ]
        for key in ending:
            del _owned.directories[key]
    for store, data_dir in ending:
        # If one store fails, the data in other stores must still be deleted.
        with suppress(Exception):
            remove(store, data_dir)
    return [data_dir for _, data_dir in ending]


def release_ended() -> None:
    """Delete this process's data of ended applications."""
    with _owned.lock:
        ended = [app_id for app_id, is_over in _owned.applications.items() if is_over()]
        for app_id in ended:
            del _owned.applications[app_id]
    for app_id in ended:
        release(app_id)


def sweep(store: Store, *, now: float) -> list[str]:
    """Delete data with an expired lease, or without a lease and unchanged for a day, and return their directories.

    Directories that this user may not list, read or delete are kept.
    """
    with _owned.lock:
        owned = {data_dir for owner, data_dir in _owned.directories if owner == store}
    swept = []
    for data_dir in store.data_directories():
        if data_dir in owned or not is_owners(data_dir):
            continue
        # Includes StoreError: a problem with data of other processes must not end this fit.
        with suppress(OSError):
            if is_abandoned(store, data_dir, now):
                remove(store, data_dir)
                if not store.exists(data_dir):
                    swept.append(data_dir)
    return swept
