"""Reuse of materialized data by the key of a DataFrame's plan, or inside a scope of fits.

Data have no reusable key if neither the plan nor a `data_key` identifies their content. Such data are deleted when the
`ReuseScope` of their fit, or of all fits of one fold, is closed; `ownership` describes when other data are deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sparkhvd.data.columns.schema import DataSchema
from sparkhvd.data.manifest import (
    DAMAGED_NAME,
    FORMAT_VERSION,
    MANIFEST_NAME,
    Manifest,
    TableVersion,
)
from sparkhvd.data.materialize import materialize
from sparkhvd.data.ownership import (
    add_application,
    directory_of,
    disown,
    is_kept,
    key_lock,
    new_lease,
    own,
    release_ended,
    release_unkept,
    renewing,
    sweep,
)
from sparkhvd.data.store.store import Store
from sparkhvd.data.tables import OTHER_VALUES, plan_facts, warn_of_tables
from sparkhvd.spark import SparkShim

if TYPE_CHECKING:
    from pyspark import TaskContext
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class PreparedData:
    """Data readable by ranks.

    Attributes:
        manifest: the files, the row count and the schema with shapes.
        data_dir: folder of the data or of their manifest, relative to the store.
        reused: True if nothing was written for this fit.
        seconds: time spent preparing the data.
        reason: why the data were or were not reused, for the user.
        files: store of the manifest's files; None means the store of `data_dir`.
    """

    manifest: Manifest
    data_dir: str
    reused: bool
    seconds: float
    reason: str = ""
    files: Store | None = None

    @property
    def is_other_each_time(self) -> bool:
        """True if another fit would compute other values, because the DataFrame's plan is nondeterministic.

        False for reused data, which this fit did not compute.
        """
        return not self.reused and OTHER_VALUES in self.reason


class ReuseScope:
    """Lifetime of materialized data without a reusable key: one fit, or the fits of one `fitMultiple`.

    Closing this context manager deletes the data, except kept data. Any thread may close it.
    """

    def __init__(self) -> None:
        """Start without data."""
        self._name = f"once-{os.urandom(8).hex()}"
        self._lock = threading.Lock()
        self._frames: list[DataFrame] = []
        self._directories: set[tuple[Store, str]] = set()

    def key(self, df: DataFrame, schema: DataSchema) -> str:
        """Make a key, equal for equal columns of one DataFrame object, for this scope only."""
        with self._lock:
            # Kept alive, so that no other DataFrame reuses its address.
            if not any(df is frame for frame in self._frames):
                self._frames.append(df)
            number = next(i for i, frame in enumerate(self._frames) if df is frame)
        return f"{self._name}-{_digest({'frame': number, 'columns': schema.to_dict()})[:8]}"

    def add(self, store: Store, data_dir: str) -> None:
        """Delete a data directory when the scope is closed."""
        with self._lock:
            self._directories.add((store, data_dir))

    def close(self) -> None:
        """Delete the scope's data. No reader may use them any more."""
        with self._lock:
            ending, self._directories = self._directories, set()
            self._frames.clear()
        release_unkept(ending)

    def __enter__(self) -> ReuseScope:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def prepare(
    df: DataFrame,
    schema: DataSchema,
    store: Store,
    *,
    app_id: str | None = None,
    data_key: str | None = None,
    keep_data: bool = False,
    num_partitions: int | None = None,
    scope: ReuseScope | None = None,
    on_task_start: Callable[[TaskContext], None] | None = None,
) -> PreparedData:
    """Materialize `df`, or reuse the data of the same plan over the same files.

    Data are reused if every leaf of the plan is a file scan, a scan of a Delta or Iceberg table or `range`, and plan,
    source files (path, size, time of change), versions of tables, columns, dtypes, format version, session time zone
    and row-changing confs of Spark SQL are equal; or if the user gave the same `data_key` for the same columns; or, for
    any other DataFrame, inside one `scope`. Fits of one process with the same key wait for each other.

    Args:
        df: the DataFrame, classic or Connect. (A client cannot see the sources of a Connect plan, so there
            only `data_key` reuses.)
        schema: as `check_schema` returned it.
        store: of the data.
        app_id: application that owns the data; None means the DataFrame's. The data are deleted when this process ends.
        data_key: the user's promise that data with this key are equal; None lets the plan decide.
        keep_data: keep the data in the store until `Store.clean()`.
        num_partitions: see `materialize`.
        scope: fits that share data without a plan key or a `data_key`; closing it deletes these data. With None the
            data are not shared, and are deleted when this process ends.
        on_task_start: see `materialize`.

    Raises:
        InvalidArgumentError: the data cannot be used; see `materialize`.
    """
    started = time.monotonic()
    warn_of_tables(df, store)
    shim = SparkShim(df.sparkSession)
    if app_id is None:
        app_id = shim.application()
    add_application(app_id, shim.is_over)
    release_ended()
    sweep(store, now=time.time())
    key, reason, tables = _key_of(df, schema, data_key)
    is_scoped = key is None and scope is not None
    if scope is not None and key is None:
        key = scope.key(df, schema)
    name = key if key is not None else f"once-{os.urandom(8).hex()}"
    directory = directory_of(name, app_id)
    with key_lock(store, name):
        if is_scoped and scope is not None:
            scope.add(store, directory)
        earlier = _find(store, name, directory) if key is not None else None
        if earlier is not None:
            data_dir, manifest = earlier
            if data_dir == directory:
                keep = keep_data or is_kept(store, directory)
                own(store, directory, new_lease(store, app_id, keep))
            why = f"the same DataFrame of one fold ({reason})" if is_scoped else reason
            return PreparedData(manifest, data_dir, True, time.monotonic() - started, why)
        if store.exists(f"{directory}/{DAMAGED_NAME}"):
            store.delete(directory)
        own(store, directory, new_lease(store, app_id, keep_data))
        changed = ""
        try:
            with renewing(store):
                manifest = materialize(
                    df,
                    schema,
                    store,
                    directory,
                    num_partitions=num_partitions,
                    on_task_start=on_task_start,
                    tables=tables,
                )
            # The job reads the newest version of a table at its start, which may be newer than the version in the key.
            if tables and _key_of(df, schema, data_key)[2] != tables:
                store.write_bytes(f"{directory}/{DAMAGED_NAME}", b"")
                manifest = replace(manifest, tables=())
                changed = "a table has got a newer version while it was written"
                manifest.save(store, directory)
        except BaseException:
            disown(store, directory)
            raise
    why = changed or (reason if key is None or is_scoped else "no earlier data of this key")
    return PreparedData(manifest, directory, False, time.monotonic() - started, why)


# -- the key -----------------------------------------------------------------------------------------


def plan_key(df: DataFrame, schema: DataSchema, data_key: str | None) -> tuple[str | None, str]:
    """Make the key of the data (None if unknown) and its reason. Equal keys mean equal data."""
    return _key_of(df, schema, data_key)[:2]


def _key_of(
    df: DataFrame, schema: DataSchema, data_key: str | None
) -> tuple[str | None, str, tuple[TableVersion, ...]]:
    """Make the results of `plan_key`, and the versions of the plan's tables, if known."""
    parts: dict[str, object] = {
        "columns": schema.to_dict(),
        "format_version": FORMAT_VERSION,
        "time_zone": df.sparkSession.conf.get("spark.sql.session.timeZone"),
    }
    if data_key is not None:
        parts["data_key"] = data_key
        return _digest(parts), f"data_key={data_key!r}", ()
    facts = plan_facts(df)
    if facts.obstacle:
        return None, f"{facts.obstacle}; data_key= would tell that data are the same", ()
    parts["plan"] = facts.plan
    parts["files"] = facts.files
    if facts.tables:
        versions = ", ".join(table.text for table in facts.tables)
        return _digest(parts), f"same plan and columns of {versions}", facts.tables
    return _digest(parts), "same plan, files and columns", ()


def _digest(parts: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _find(store: Store, name: str, own_dir: str) -> tuple[str, Manifest] | None:
    """Find this process's data of a key, else kept data of another process."""
    for data_dir in [own_dir, *store.list(f"data/{name}")]:
        try:
            if not store.exists(f"{data_dir}/{MANIFEST_NAME}"):
                continue
            if store.exists(f"{data_dir}/{DAMAGED_NAME}"):
                continue
            if data_dir != own_dir and not is_kept(store, data_dir):
                continue
            manifest = Manifest.load(store, data_dir)
            files = set(store.list(data_dir))
        except ValueError:  # written by another version, or truncated by a kill
            continue
        except OSError:  # includes StoreError
            if data_dir == own_dir:
                raise
            continue  # deleted meanwhile, or private to another user
        if all(f.path in files for f in manifest.files):
            return data_dir, manifest
    return None
