"""Check whether this process reaches a store, and choose direct access or Spark tasks.

Executors and ranks see the store. The client of a Spark Connect session may not see it, for example a notebook with a
remote Spark. For the check a task writes a token, and the client looks for it. A folder of the same name on the
client's own disk would not have the token.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import uuid
import warnings
from typing import TYPE_CHECKING

from sparkhvd.data.store import remote as remote_calls
from sparkhvd.data.store.remote import RemoteStore
from sparkhvd.data.store.store import TEMPORARY, Store
from sparkhvd.spark import is_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def as_seen_by(spark: SparkSession, store: Store, *, make: bool = False) -> Store:
    """Choose how this process reaches the store: directly, or through tasks of a Connect session.

    A Connect session is checked once per store: an executor writes a token into it.

    Args:
        spark: the session.
        store: the store.
        make: let the executor make the folder. The executor also does so if `Store.create` ran before the session
            began.

    Raises:
        InvalidArgumentError: the folder cannot be made or written.
        StoreError: the folder does not exist, or cannot be written.
    """
    direct = store.direct
    if not is_connect(spark):
        return direct
    key = (str(getattr(spark, "session_id")), direct)  # noqa: B009 - an attribute of Connect's sessions only
    with _reach.lock:
        if key not in _reach.known:
            _reach.known[key] = _is_seen(spark, direct, make or direct._is_created)
        return direct if _reach.known[key] else RemoteStore(direct, spark)


def open_through(spark: SparkSession, store: Store) -> Store:
    """Open a new store through a Connect session. An executor makes its folder."""
    return as_seen_by(spark, store, make=True)


def make_private(spark: SparkSession, folder: str) -> None:
    """Make a folder on the executors' file system, private to this user."""
    RemoteStore(Store(folder), spark).ask(remote_calls.make_private)


class _Reach:
    """Cache of the checks whether this process sees a store, by session and store."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.known: dict[tuple[str, Store], bool] = {}


_reach = _Reach()


def _is_seen(spark: SparkSession, store: Store, make: bool) -> bool:
    remote = RemoteStore(store, spark)
    token = f"{TEMPORARY}sight-{uuid.uuid4().hex}"
    content = token.encode()
    remote.ask(remote_calls.prove, token, content, make)
    try:
        seen = store.read_bytes(token)
    except Exception:  # noqa: BLE001 - a client without credentials or network may get any error
        seen = b""
    if seen == content:
        store.delete(token)
        return True
    remote.delete(token)
    _forget_own_folder(store)
    return False


def _forget_own_folder(store: Store) -> None:
    """Remove the empty folder that `Store.create` made on this machine before the session began, and warn."""
    made, store._made = store._made, ""
    if not made or store.local_path("") is None:
        return
    folder = store.local_path("") or made
    with contextlib.suppress(OSError):  # a folder that is no longer empty stays
        os.rmdir(folder)
        while folder != made:
            folder = os.path.dirname(folder)
            os.rmdir(folder)
    if store.local_path("x") and not made.startswith(tempfile.gettempdir() + "/sparkhvd-store-"):
        warnings.warn(
            f"Store.create was called before the Spark Connect session began, and made {made} on this machine, which Spark's "
            f"executors do not see. The fit uses {store.url} on the executors, and the empty folder on this machine is removed.",
            stacklevel=3,
        )
