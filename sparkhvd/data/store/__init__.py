"""Read and write the folder shared by driver and executors: a local path, an object store, or any file system of fsspec.

Names: every path is relative to the store and uses "/". `data/` holds materialized data, `runs/` checkpoints and reports of
runs, `models/` weights too large for a closure.

Atomicity: a file appears under its name complete or not at all (`atomic`), on file systems that rename, that
replace, and that only append. Small files that decide something carry a checksum (`locks`).

Ownership: a data directory has a lease that its owner renews, a run's folder a lock of the fit that writes it
(`locks`). No process deletes files owned by another; `Store.clean()` deletes files without an owner.

Access: a process that sees the store opens it itself. A Spark Connect client without access reads and writes
through small Spark tasks (`connect`, `remote`).

Secrets: storage options and passwords of a URL are sent with the store to the ranks and never shown (`addresses`).

Each module imports only those above it:

    addresses    paths and URLs, their secrets and file systems
    atomic       atomic writes of files
    locks        leases, locks, and small files with checksums
    spark_files  files where Spark resolves a path
    store        `Store`
    moved        a store whose runs are elsewhere
    remote       calls on a store by a Spark task
    connect      checks whether this process sees a store
    temporary    folders deleted with their process
"""

from sparkhvd.data.store.connect import open_through
from sparkhvd.data.store.store import Store

__all__ = ["Store"]

Store._opened_through = staticmethod(open_through)
