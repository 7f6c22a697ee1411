"""Small files that ranks leave for the driver: read and deleted in one step, because each may cost a Spark task."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence

from sparkhvd.data.store.remote_calls import Answer
from sparkhvd.data.store.remote_store import RemoteStore
from sparkhvd.data.store.store import Store

__all__ = ["collect"]

# Most that one call returns; the rest comes with the next one.
_COLLECT_BYTES = 8 << 20


def collect(store: Store, folder: str, done: Sequence[str]) -> list[tuple[str, bytes]]:
    """Delete files, then return paths and contents of the others of a folder, sorted, as many as 8 MiB hold.

    Args:
        store: that of the ranks.
        folder: in it; deleted with its last file.
        done: paths of files to delete; those that are not there any more do not matter.

    Raises:
        StoreError: the store does not answer.
    """
    if not isinstance(store, RemoteStore):
        return _collect(store, folder, done)
    sizes, content = store.ask(_collect_in_task, folder, json.dumps(list(done)))
    found, at = [], 0
    for path, size in sizes:
        found.append((path, content[at : at + size]))
        at += size
    return found


def _collect(store: Store, folder: str, done: Sequence[str]) -> list[tuple[str, bytes]]:
    for path in done:
        store.delete(path)
    found: list[tuple[str, bytes]] = []
    num_bytes = 0
    for path in store.list(folder):
        data = store.read_bytes(path)
        num_bytes += len(data)
        found.append((path, data))
        if num_bytes >= _COLLECT_BYTES:
            break
    if done and not found:
        with contextlib.suppress(Exception):  # a rank has just written another one
            store.delete_if_empty(folder)
    return found


def _collect_in_task(store: Store, folder: str, done: str) -> Answer:
    found = _collect(store, folder, json.loads(done))
    yield [(path, len(data)) for path, data in found]
    yield from (data for _, data in found)
