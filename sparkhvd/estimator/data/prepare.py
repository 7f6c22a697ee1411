"""When materialized data can be used again, who owns them, and when they go.

A data directory `data/<key>/<app>` belongs to one application. Its lease file says so; whoever sees a lease that
has not been renewed for a day may delete the directory. The owner deletes its directories when its process ends,
unless the user asked to keep them.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sparkhvd.estimator.data.manifest import FORMAT_VERSION, MANIFEST_NAME, Manifest
from sparkhvd.estimator.data.materialize import materialize
from sparkhvd.estimator.data.plan import plan_facts
from sparkhvd.estimator.data.schema import DataSchema
from sparkhvd.estimator.data.store import Lease, Store

__all__ = ["PreparedData", "prepare", "release", "renew_leases"]

_RENEW_S = 3600.0


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


@dataclass
class _Owned:
    """What this process has to look after."""

    pid: int = field(default_factory=os.getpid)
    lock: threading.Lock = field(default_factory=threading.Lock)
    # (store, data_dir) -> its lease
    directories: dict[tuple[Store, str], Lease] = field(default_factory=dict)
    key_locks: dict[tuple[str, str], threading.Lock] = field(default_factory=dict)
    is_registered: bool = False


# One per process, because "until the process ends" is about the process: atexit has no other owner.
_owned = _Owned()


def prepare(
    df: Any,
    schema: DataSchema,
    store: Store,
    *,
    app_id: str,
    data_key: str | None = None,
    keep_data: bool = False,
    num_partitions: int | None = None,
) -> PreparedData:
    """Materialize `df`, or reuse what the same plan over the same files gave before.

    Data are reused if every leaf of the plan is a file scan, local data or `range`, and plan, source files (path,
    size, time of change), columns, dtypes, format version and session time zone are the same; or if the user gave
    the same `data_key` for the same columns. Fits of one process with one key wait for each other.

    Args:
        df: the DataFrame, classic or Connect. (What a Connect plan reads is not visible to the client, so there
            only `data_key` reuses.)
        schema: what `check_schema` returned.
        store: where the data live.
        app_id: the Spark application; its data are deleted when this process ends.
        data_key: the user's word that data of this key are the same; None lets the plan decide.
        keep_data: leave the data in the store until `Store.clean()`.
        num_partitions: see `materialize`.

    Raises:
        InvalidArgumentError: the data cannot be used; see `materialize`.
    """
    started = time.monotonic()
    sweep(store, now=time.time())
    key, reason = plan_key(df, schema, data_key)
    unique = f"once-{os.urandom(8).hex()}"
    name = key if key is not None else unique
    own = f"data/{name}/{_safe(app_id)}"
    with _key_lock(store, name):
        found = _find(store, name, own) if key is not None else None
        if found is not None:
            data_dir, manifest = found
            if data_dir == own:
                _own(store, own, Lease(app_id, time.time(), keep_data or _is_kept(store, own)))
            return PreparedData(manifest, data_dir, True, time.monotonic() - started, reason)
        lease = Lease(app_id, time.time(), keep_data)
        _own(store, own, lease)
        try:
            manifest = materialize(df, schema, store, own, num_partitions=num_partitions)
        except BaseException:
            _disown(store, own)
            raise
    why = "no earlier data of this key" if key is not None else reason
    return PreparedData(manifest, own, False, time.monotonic() - started, why)


def renew_leases(now: float | None = None) -> None:
    """Tell other applications that this one still lives; call it now and then during a long fit.

    Writes only if an hour has passed since the last time, so it may be called often.
    """
    now = time.time() if now is None else now
    with _owned.lock:
        due = [
            (k, lease) for k, lease in _owned.directories.items() if now - lease.renewed > _RENEW_S
        ]
    for (store, data_dir), lease in due:
        if store.exists(data_dir):
            _own(store, data_dir, Lease(lease.app_id, now, lease.keep))


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
        _remove(store, data_dir)
    return [data_dir for _, data_dir in going]


def sweep(store: Store, *, now: float) -> list[str]:
    """Delete the data of owners that have been silent for a day; return their directories."""
    with _owned.lock:
        mine = {data_dir for owner, data_dir in _owned.directories if owner == store}
    swept = []
    for data_dir in store.data_directories():
        if data_dir in mine:
            continue
        lease = store.lease(data_dir)
        if lease is not None and lease.is_expired(now):
            _remove(store, data_dir)
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
    """This application's data of a key, else kept data of another one."""
    for data_dir in [own, *store.list(f"data/{name}")]:
        if not store.exists(f"{data_dir}/{MANIFEST_NAME}"):
            continue
        if data_dir != own and not _is_kept(store, data_dir):
            continue
        manifest = Manifest.load(store, data_dir)
        seen = set(store.list(data_dir))
        if all(f.path in seen for f in manifest.files):
            return data_dir, manifest
    return None


def _is_kept(store: Store, data_dir: str) -> bool:
    lease = store.lease(data_dir)
    return lease is not None and lease.keep


def _own(store: Store, data_dir: str, lease: Lease) -> None:
    store.write_lease(data_dir, lease)
    with _owned.lock:
        _owned.directories[store, data_dir] = lease
        if not _owned.is_registered:
            _owned.is_registered = True
            atexit.register(_release_at_exit)


def _disown(store: Store, data_dir: str) -> None:
    with _owned.lock:
        _owned.directories.pop((store, data_dir), None)
    _remove(store, data_dir)


def _remove(store: Store, data_dir: str) -> None:
    """Delete a data directory, and its key's folder if that is now empty."""
    store.delete(data_dir)
    key = data_dir.rpartition("/")[0]
    if not store.list(key):
        store.delete(key)


def _release_at_exit() -> None:
    # A forked child inherits the list but owns nothing.
    if os.getpid() == _owned.pid:
        release()
