"""When materialized data can be used again, who owns them, and when they go.

A data directory `data/<key>/<app>-<pid>-<random>` belongs to one process of one application (clients of one Spark
Connect server are one application). Its lease file says so; whoever sees a lease that
has not been renewed for a day may delete the directory. Unless the user asked to keep them, the owner deletes its
directories when its process ends, or finds that the application has; those that nothing can name again (no plan
tells what they hold, and no `data_key`) go with the `Scope` of the fit, or of the fits of one fold, that made them.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from sparkhvd.data.columns.schema import DataSchema
from sparkhvd.data.manifest import (
    DAMAGED_NAME,
    FORMAT_VERSION,
    MANIFEST_NAME,
    Manifest,
)
from sparkhvd.data.materialize import materialize
from sparkhvd.data.spark_plan import OTHER_VALUES, plan_facts
from sparkhvd.data.store.leases import Lease, is_abandoned, is_owners, lease_of, write_lease
from sparkhvd.data.store.store import Store
from sparkhvd.errors import StoreError
from sparkhvd.spark import SparkShim

__all__ = ["PreparedData", "Scope", "prepare", "release", "renew_leases"]

_RENEW_S = 3600.0
_RETRY_S = 60.0
# A client that does not see the store cannot renew a lease while its ranks hold every task slot, so it takes a longer
# one in advance: together with `LEASE_S` a week.
_UNSEEN_S = 6 * 24 * 3600.0


@dataclass(frozen=True)
class PreparedData:
    """Data that ranks can read.

    Attributes:
        manifest: the files, the row count and the schema with shapes.
        data_dir: where they are, relative to the store.
        reused: whether an earlier materialization served.
        seconds: how long it took to have them.
        reason: why they were or were not reused, for the user.
        files: the store that the files of the manifest are in; None means the one that `data_dir` is in.
    """

    manifest: Manifest
    data_dir: str
    reused: bool
    seconds: float
    reason: str = ""
    files: Store | None = None

    @property
    def is_other_each_time(self) -> bool:
        """Whether they were computed for this fit, by a plan that is known to give other values each time."""
        return not self.reused and OTHER_VALUES in self.reason


@dataclass
class _Owned:
    """What this process has to look after."""

    pid: int = field(default_factory=os.getpid)
    # Tells this process's directories from those of others of the same application.
    token: str = field(default_factory=lambda: os.urandom(4).hex())
    lock: threading.Lock = field(default_factory=threading.Lock)
    # (store, data_dir) -> its lease
    directories: dict[tuple[Store, str], Lease] = field(default_factory=dict)
    # (store, data_dir) -> when a renewal that failed is tried again
    retries: dict[tuple[Store, str], float] = field(default_factory=dict)
    key_locks: dict[tuple[str, str], threading.Lock] = field(default_factory=dict)
    # application -> whether it has ended
    applications: dict[str, Callable[[], bool]] = field(default_factory=dict)
    is_registered: bool = False


# One per process, because "until the process ends" is about the process: atexit has no other owner.
_owned = _Owned()


class Scope:
    """Fits that share data which nothing could name again: one fit, or those of one `fitMultiple`.

    A context manager; when it is closed, the data go, except those that the user keeps. Any thread may close it.
    """

    def __init__(self) -> None:
        """Nothing is written before data are prepared in it."""
        self._name = f"once-{os.urandom(8).hex()}"
        self._lock = threading.Lock()
        self._frames: list[Any] = []
        self._directories: set[tuple[Store, str]] = set()

    def key(self, df: Any, schema: DataSchema) -> str:
        """The key of data of one DataFrame and these columns, inside this scope only."""
        with self._lock:
            # Kept alive, so that no other DataFrame takes its place in memory.
            if not any(df is frame for frame in self._frames):
                self._frames.append(df)
            number = next(i for i, frame in enumerate(self._frames) if df is frame)
        return f"{self._name}-{_digest({'frame': number, 'columns': schema.to_dict()})[:8]}"

    def add(self, store: Store, data_dir: str) -> None:
        """Take care of a data directory."""
        with self._lock:
            self._directories.add((store, data_dir))

    def close(self) -> None:
        """Delete what was made in it; nothing of it may be in use."""
        if os.getpid() != _owned.pid:  # a forked child inherits the scope but owns nothing
            return
        with self._lock:
            going, self._directories = self._directories, set()
            self._frames.clear()
        for store, data_dir in going:
            with _owned.lock:
                lease = _owned.directories.get((store, data_dir))
            if lease is not None and not lease.keep:
                _disown(store, data_dir)

    def __enter__(self) -> Scope:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def prepare(
    df: Any,
    schema: DataSchema,
    store: Store,
    *,
    app_id: str | None = None,
    data_key: str | None = None,
    keep_data: bool = False,
    num_partitions: int | None = None,
    scope: Scope | None = None,
) -> PreparedData:
    """Materialize `df`, or reuse what the same plan over the same files gave before.

    Data are reused if every leaf of the plan is a file scan or `range`, and plan, source files (path,
    size, time of change), columns, dtypes, format version, session time zone and confs of Spark SQL that may decide
    rows are the same; or if the user gave the same `data_key` for the same columns; or, of anything else, inside one
    `scope`. Fits of one process with one key
    wait for each other.

    Args:
        df: the DataFrame, classic or Connect. (What a Connect plan reads is not visible to the client, so there
            only `data_key` reuses.)
        schema: what `check_schema` returned.
        store: where the data live.
        app_id: the application that owns the data; None means the DataFrame's. They are deleted when this process ends.
        data_key: the user's word that data of this key are the same; None lets the plan decide.
        keep_data: leave the data in the store until `Store.clean()`.
        num_partitions: see `materialize`.
        scope: the fits among which data are shared that neither their plan nor a `data_key` names; such data go
            with it. None means that they are not shared, and stay until this process ends.

    Raises:
        InvalidArgumentError: the data cannot be used; see `materialize`.
    """
    started = time.monotonic()
    shim = SparkShim(df.sparkSession)
    if app_id is None:
        app_id = shim.application()
    with _owned.lock:
        _owned.applications[app_id] = shim.is_over
    _release_ended()
    sweep(store, now=time.time())
    key, reason = plan_key(df, schema, data_key)
    is_scoped = key is None and scope is not None
    if scope is not None and key is None:
        key = scope.key(df, schema)
    name = key if key is not None else f"once-{os.urandom(8).hex()}"
    own = f"data/{name}/{_safe(app_id)}-{os.getpid()}-{_owned.token}"
    with _key_lock(store, name):
        if is_scoped and scope is not None:
            scope.add(store, own)
        found = _find(store, name, own) if key is not None else None
        if found is not None:
            data_dir, manifest = found
            if data_dir == own:
                _own(store, own, _new_lease(store, app_id, keep_data or _is_kept(store, own)))
            why = f"the same DataFrame of one fold ({reason})" if is_scoped else reason
            return PreparedData(manifest, data_dir, True, time.monotonic() - started, why)
        if store.exists(f"{own}/{DAMAGED_NAME}"):
            store.delete(own)
        lease = _new_lease(store, app_id, keep_data)
        _own(store, own, lease)
        try:
            with _renewing(store):
                manifest = materialize(df, schema, store, own, num_partitions=num_partitions)
        except BaseException:
            _disown(store, own)
            raise
    why = reason if key is None or is_scoped else "no earlier data of this key"
    return PreparedData(manifest, own, False, time.monotonic() - started, why)


def renew_leases(now: float | None = None) -> None:
    """Tell other applications that this one still lives; call it now and then during a long fit.

    Writes only if an hour has passed since the last time, so it may be called often. A lease that cannot be written is
    tried again a minute later; a day of such minutes is left.
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
                _own(store, data_dir, Lease(lease.app_id, now, lease.keep))
        except Exception:  # noqa: BLE001 - whatever its file system raises: the other leases must not suffer
            with _owned.lock:
                _owned.retries[store, data_dir] = now + _RETRY_S


@contextmanager
def _renewing(store: Store) -> Iterator[None]:
    """Renew leases while a job writes to a store, unless a renewal would wait for that job's task slots."""
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
        thread.join(_RETRY_S)  # a store that hangs must not hold what has ended


def release(app_id: str | None = None) -> list[str]:
    """Delete the data that this process owns (of one application, or all), except kept data.

    Runs by itself when the process ends.
    """
    with _owned.lock:
        going = [
            (store, data_dir)
            for (store, data_dir), lease in _owned.directories.items()
            if not lease.keep and app_id in (None, lease.app_id)
        ]
        for key in going:
            del _owned.directories[key]
    for store, data_dir in going:
        with suppress(
            Exception
        ):  # one store that fails, however: the data in others go all the same
            _remove(store, data_dir)
    return [data_dir for _, data_dir in going]


def _release_ended() -> None:
    """Delete the data of this process's applications that have been stopped."""
    with _owned.lock:
        ended = [app_id for app_id, is_over in _owned.applications.items() if is_over()]
        for app_id in ended:
            del _owned.applications[app_id]
    for app_id in ended:
        release(app_id)


def sweep(store: Store, *, now: float) -> list[str]:
    """Delete the data of owners that have been silent for a day (without a lease: unchanged); return their directories.

    What this user may not list, read or delete stays, for whoever may.
    """
    with _owned.lock:
        mine = {data_dir for owner, data_dir in _owned.directories if owner == store}
    swept = []
    for data_dir in store.data_directories():
        if data_dir in mine or not is_owners(data_dir):
            continue
        with suppress(OSError):  # StoreError, too: another one's data must not end this fit
            if is_abandoned(store, data_dir, now):
                _remove(store, data_dir)
                if not store.exists(data_dir):
                    swept.append(data_dir)
    return swept


# -- the key -----------------------------------------------------------------------------------------


def plan_key(df: Any, schema: DataSchema, data_key: str | None) -> tuple[str | None, str]:
    """(key, why): equal keys mean equal data; None means that nothing can tell."""
    parts: dict[str, Any] = {
        "columns": schema.to_dict(),
        "format_version": FORMAT_VERSION,
        "time_zone": df.sparkSession.conf.get("spark.sql.session.timeZone"),
    }
    if data_key is not None:
        parts["data_key"] = data_key
        return _digest(parts), f"data_key={data_key!r}"
    facts = plan_facts(df)
    if facts.obstacle:
        return None, f"{facts.obstacle}; data_key= would tell that data are the same"
    parts["plan"] = facts.plan
    parts["files"] = facts.files
    return _digest(parts), "same plan, files and columns"


def _digest(parts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


# -- owning ------------------------------------------------------------------------------------------


def _safe(app_id: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", app_id).strip(".") or "app"


@contextmanager
def _key_lock(store: Store, name: str) -> Iterator[None]:
    with _owned.lock:
        lock = _owned.key_locks.setdefault((store.url, name), threading.Lock())
    with lock:
        yield


def _find(store: Store, name: str, own: str) -> tuple[str, Manifest] | None:
    """This process's data of a key, else kept data of another one."""
    for data_dir in [own, *store.list(f"data/{name}")]:
        try:
            if not store.exists(f"{data_dir}/{MANIFEST_NAME}"):
                continue
            if store.exists(f"{data_dir}/{DAMAGED_NAME}"):
                continue
            if data_dir != own and not _is_kept(store, data_dir):
                continue
            manifest = Manifest.load(store, data_dir)
            seen = set(store.list(data_dir))
        except ValueError:  # of another version, or cut off by a kill
            continue
        except OSError:  # StoreError, too
            if data_dir == own:
                raise
            continue  # deleted meanwhile, or of a user who shows it to nobody
        if all(f.path in seen for f in manifest.files):
            return data_dir, manifest
    return None


def _is_kept(store: Store, data_dir: str) -> bool:
    lease = lease_of(store, data_dir)
    return lease is not None and lease.keep


def _new_lease(store: Store, app_id: str, keep: bool) -> Lease:
    return Lease(app_id, time.time() + (0.0 if store.is_seen else _UNSEEN_S), keep)


def _own(store: Store, data_dir: str, lease: Lease) -> None:
    write_lease(store, data_dir, lease)
    with _owned.lock:
        _owned.directories[store, data_dir] = lease
        if not _owned.is_registered:
            _owned.is_registered = True
            atexit.register(_release_at_exit)


def _disown(store: Store, data_dir: str) -> None:
    with _owned.lock:
        _owned.directories.pop((store, data_dir), None)
    with suppress(StoreError):  # what failed before it says more
        _remove(store, data_dir)


def _remove(store: Store, data_dir: str) -> None:
    """Delete a data directory, and its key's folder if that is now empty: others may begin in it at any moment."""
    store.delete(data_dir)
    store.delete_if_empty(data_dir.rpartition("/")[0])


def _release_at_exit() -> None:
    # A forked child inherits the list but owns nothing.
    if os.getpid() == _owned.pid:
        release()
