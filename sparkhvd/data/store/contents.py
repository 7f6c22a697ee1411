"""List runs and materialized data of a store with their sizes, and delete those that nobody uses."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from sparkhvd.data.store.checksummed import load_sealed
from sparkhvd.data.store.leases import is_abandoned, is_owners, lease_of
from sparkhvd.data.store.listing import StoredFile
from sparkhvd.data.store.run_lock import HOLDER_NAME, hold, holder_of, is_running
from sparkhvd.errors import InvalidArgumentError, StoreError
from sparkhvd.observe.report.document import HTML_NAME, JSON_NAME

if TYPE_CHECKING:
    from sparkhvd.data.store.store import Store

__all__ = [
    "FINISHED_NAME",
    "POINTER_NAME",
    "TIMELINE_NAME",
    "StoredData",
    "StoredRun",
    "delete_data",
    "delete_run",
    "list_data",
    "list_runs",
]

FINISHED_NAME = "finished.json"
POINTER_NAME = "checkpoints/latest.json"
TIMELINE_NAME = "timeline.json"
_WARM = re.compile(r"warm-(\d+)/")


@dataclass(frozen=True)
class StoredRun:
    """A run in a store.

    Attributes:
        run_id: its name.
        state: "finished", "interrupted", "running" as far as that is known from here, or "report" if a report is all that is left.
        epochs: trained epochs of its newest checkpoint.
        num_bytes: of all its files.
        changed: time of the last change; None if unknown.
        holder: the running fit: "process 12 on host a, since ..."; "" if there is none.
    """

    run_id: str
    state: str
    epochs: int
    num_bytes: int
    changed: datetime | None
    holder: str = ""


@dataclass(frozen=True)
class StoredData:
    """Materialized data in a store.

    Attributes:
        path: its folder, relative to the store.
        state: "kept" until they are deleted, "in use" by the application that made them, or "abandoned".
        num_bytes: of all its files.
        changed: time of the last change; None if unknown.
        application: the Spark application that made them; "" if unknown.
    """

    path: str
    state: str
    num_bytes: int
    changed: datetime | None
    application: str = ""


def list_runs(store: Store) -> tuple[StoredRun, ...]:
    """Return the runs of a store by name."""
    files = _files_by_folder(store, "runs", depth=1)
    return tuple(_run(store, run_id, group) for run_id, group in sorted(files.items()))


def _run(store: Store, run_id: str, files: list[StoredFile]) -> StoredRun:
    names = {f.path for f in files}
    # Each fit with warm_start has a folder of its own in that of the run.
    warm = max((int(m[1]) for name in names if (m := _WARM.match(name))), default=0)
    part = f"warm-{warm}/" if warm else ""
    holder = holder_of(store, run_id) if HOLDER_NAME in names else None
    is_held = holder is not None and is_running(holder)
    state = "finished" if f"{part}{FINISHED_NAME}" in names else "interrupted"
    if names <= {JSON_NAME, HTML_NAME, TIMELINE_NAME}:
        state = "report"
    epochs = 0
    if f"{part}{POINTER_NAME}" in names:
        pointer = load_sealed(store.read_bytes(f"runs/{run_id}/{part}{POINTER_NAME}"))
        epochs = 0 if pointer is None else int(pointer["epoch"])
    return StoredRun(
        run_id,
        "running" if is_held else state,
        epochs,
        sum(f.size for f in files),
        _changed(files),
        str(holder) if is_held else "",
    )


def delete_run(store: Store, run_id: str) -> None:
    """Delete a run with all its files.

    Raises:
        InvalidArgumentError: there is none of this name, or a fit holds it.
        StoreError: it cannot be deleted.
    """
    known = [path.rpartition("/")[2] for path in store.list("runs")]
    if run_id not in known:
        raise InvalidArgumentError(
            f"There is no run {run_id!r} in {store.url}. It has {', '.join(map(repr, known[:20])) or 'none'}."
        )
    hold(store, run_id).release()
    _delete(store, f"runs/{run_id}")


def list_data(store: Store) -> tuple[StoredData, ...]:
    """Return the materialized data of a store by path."""
    entries = []
    now = time.time()
    for folder, files in sorted(_files_by_folder(store, "data", depth=2).items()):
        path = f"data/{folder}"
        lease = lease_of(store, path)
        state = "in use"
        if lease is not None and lease.keep:
            state = "kept"
        elif is_abandoned(store, path, now):
            state = "abandoned"
        size = sum(f.size for f in files)
        app_id = "" if lease is None else lease.app_id
        entries.append(StoredData(path, state, size, _changed(files), app_id))
    return tuple(entries)


def delete_data(store: Store, path: str) -> None:
    """Delete materialized data that are kept or abandoned.

    Raises:
        InvalidArgumentError: `list_data` gives no such path, or the application that made them may use them.
        StoreError: they cannot be deleted.
    """
    if not (path.startswith("data/") and is_owners(path) and store.exists(path)):
        raise InvalidArgumentError(
            f"{path!r} are no materialized data of {store.url}. Give the path of one of Store.data()."
        )
    lease = lease_of(store, path)
    if not (lease is not None and lease.keep) and not is_abandoned(store, path, time.time()):
        owner = "another process" if lease is None else f"the application {lease.app_id}"
        raise InvalidArgumentError(
            f"{store.full_url(path)} belongs to {owner}, which deletes it when it ends. If that is lost, the data count as "
            "abandoned after a day."
        )
    _delete(store, path)


def _delete(store: Store, path: str) -> None:
    store.delete(path)
    if store.exists(path) and store.list(path, recursive=True):
        raise StoreError(
            f"{store.full_url(path)} cannot be deleted wholly. Let its owner delete it, or somebody who may."
        )


def _files_by_folder(store: Store, root: str, *, depth: int) -> dict[str, list[StoredFile]]:
    """Group files by their folder `depth` levels below `root`, with paths relative to that folder."""
    try:
        files = store.below(root).files()
    except FileNotFoundError:
        return {}
    groups: dict[str, list[StoredFile]] = defaultdict(list)
    for file in files:
        parts = file.path.split("/")
        if len(parts) > depth:
            inside = StoredFile("/".join(parts[depth:]), file.size, file.modified_ns)
            groups["/".join(parts[:depth])].append(inside)
    return groups


def _changed(files: Iterable[StoredFile]) -> datetime | None:
    newest = max((f.modified_ns for f in files), default=0)
    return datetime.fromtimestamp(newest / 1e9, timezone.utc) if newest else None
