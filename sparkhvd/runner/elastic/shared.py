"""Store of a function on ranks that come and go, for a client of Spark Connect that executors may not reach."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.runner.live.files import Mailbox
from sparkhvd.runner.options import LaunchOptions
from sparkhvd.runner.planning import print_line
from sparkhvd.runner.preflight import SharedFiles
from sparkhvd.spark import SparkShim

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["SharedStore", "sharing"]

_POLL_S = 0.25
# How long the deletion of what is left may take, where it is a Spark task.
_DELETE_S = 10.0


class SharedStore(SharedFiles, Protocol):
    """What a `sparkhvd.Store` has."""

    url: str

    @property
    def is_seen(self) -> bool:
        """Whether this process reads and writes it itself."""
        ...

    def seen_by(self, spark: SparkSession) -> SharedStore:
        """Return it as the process of a session reaches it."""
        ...

    def waiting(self, limit_s: float) -> SharedStore:
        """Return it with another longest wait for one access."""
        ...

    def collect(self, folder: str, done: Sequence[str]) -> list[tuple[str, bytes]]:
        """Delete files, then return paths and contents of the others of a folder."""
        ...

    def delete(self, path: str) -> None:
        """Delete a file, or a folder with its content."""
        ...


@contextlib.contextmanager
def sharing(
    options: LaunchOptions, store: SharedStore | None, shim: SparkShim
) -> Iterator[LaunchOptions]:
    """Yield options with a folder of a store, which is deleted at the end; without one as they are, and on classic Spark.

    Raises:
        InvalidArgumentError: it is no store.
    """
    if store is not None and not hasattr(store, "seen_by"):
        raise InvalidArgumentError(
            f"store is {store!r:.100}; it must be a Store, for example sparkhvd.Store.create('/shared/folder')."
        )
    if store is None or not shim.is_connect:
        yield options
        return
    folder, run_dir = store.seen_by(shim.session), f"elastic/{secrets.token_hex(8)}"
    if not folder.is_seen:
        print_line(
            options.verbose,
            f"Lines of ranks are printed when the job ends: this client does not see {folder.url}.",
        )
    mailbox = Mailbox(folder.collect, _POLL_S if folder.is_seen else None)
    try:
        yield replace(options, shared=folder, run_dir=run_dir, mailbox=mailbox)
    finally:
        with contextlib.suppress(Exception):  # Spark or the store may be gone
            folder.waiting(_DELETE_S).delete(run_dir)
