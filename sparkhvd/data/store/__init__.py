"""Access the shared folder of driver and executors on local paths, object stores or fsspec.

Names: every path is relative to the store and uses "/". `data/` holds materialized data, `runs/` checkpoints and
reports of runs, `models/` weights too large for a closure.

Atomicity: a file appears under its name complete or not at all (`atomic`), on every supported kind of file system.
Small files that decide what a fit does carry a checksum (`locks`).

Ownership: a data directory has a lease that its owner renews, and a run's folder has a lock of the fit that writes it
(`locks`). No process deletes files that another process owns; `Store.clean()` deletes files without an owner.

Access: a process that reaches the store opens it directly. A Spark Connect client without access to the store reads and
writes through small Spark tasks (`connect`, `remote`).

Secrets: storage options and passwords of a URL are sent with the store to the ranks and never shown (`addresses`).

Each module imports only those above it:

    addresses    paths and URLs, their secrets and file systems
    atomic       atomic writes of files
    locks        leases, locks, and small files with checksums
    spark_files  files at a path as Spark resolves it
    store        `Store`
    moved        store with its runs in another folder
    remote       calls on a store in a Spark task
    connect      check whether this process reaches a store
    temporary    folders that are deleted when their process ends
"""

from sparkhvd.data.store.connect import open_through
from sparkhvd.data.store.store import Store

__all__ = ["Store"]

Store._opened_through = staticmethod(open_through)
