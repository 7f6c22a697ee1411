"""Read and write the folder that driver and executors share: a local path, an object store, or any file system of fsspec.

Names: every path is relative to the store and uses "/". `data/` holds materialized data, `runs/` checkpoints and what a
run reports, `models/` weights that are too large for a closure.

Atomicity: a file appears under its name when it is whole, or not at all (`atomic`), on file systems that rename, that
replace, and that only append. Small files that decide something carry a checksum (`checksummed`).

Ownership: a data directory has a lease that its owner renews (`leases`), a run's folder a lock of the fit that writes it
(`run_lock`). Nobody deletes files that another process holds; those without an owner go with `Store.clean()`.

Access: a process that sees the store opens it itself. A Spark Connect client that does not see it reads and writes
through small Spark tasks (`connect`, `remote_store`).

Secrets: storage options and passwords of a URL travel with the store to the ranks and are shown nowhere (`addresses`).

Each module imports only those above it:

    addresses    paths and URLs, their secrets and file systems
    atomic       writing a file whole or not at all
    locks        small files that tell damage from another version
    spark_files  files where Spark resolves a path
    store        `Store`
    moved        a store whose runs are elsewhere
    remote       calls on a store that a Spark task makes
    connect      finds out whether this process sees a store
    temporary    folders that go with their process
"""

from sparkhvd.data.store.connect import open_through
from sparkhvd.data.store.store import Store

__all__ = ["Store"]

Store._opened_through = staticmethod(open_through)
