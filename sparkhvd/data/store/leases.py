"""Leases of data directories: a small file in each that its owner renews while it lives."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparkhvd.data.store.store import Store

__all__ = ["LEASE_NAME", "LEASE_S", "Lease", "is_abandoned", "is_owners", "lease_of", "write_lease"]

LEASE_NAME = "_lease.json"
# An owner that has not renewed its lease for a day is gone: a fit renews it every hour.
LEASE_S = 24 * 3600.0


@dataclass(frozen=True)
class Lease:
    """The owner of a data directory, which nobody else may delete before the lease expires.

    Attributes:
        app_id: the application that materialized the data.
        renewed: time of the last renewal, in s since 1970.
        keep: True if the data stay when the application has ended.
    """

    app_id: str
    renewed: float
    keep: bool = False

    def is_expired(self, now: float) -> bool:
        """Return True if the owner must be gone, because it has not renewed the lease for a day."""
        return not self.keep and now - self.renewed > LEASE_S

    @classmethod
    def parse(cls, content: bytes) -> Lease | None:
        """Parse a lease file, ignoring fields of other versions; return None if it is none."""
        try:
            fields = json.loads(content)
            return cls(str(fields["app_id"]), float(fields["renewed"]), bool(fields.get("keep")))
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


def lease_of(store: Store, data_dir: str) -> Lease | None:
    """Return the lease of a data directory, or None if it has none (yet)."""
    try:
        return Lease.parse(store.read_bytes(f"{data_dir}/{LEASE_NAME}"))
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_lease(store: Store, data_dir: str, lease: Lease) -> None:
    """Write the lease of a data directory."""
    store.write_bytes(f"{data_dir}/{LEASE_NAME}", json.dumps(asdict(lease)).encode())


def is_owners(data_dir: str) -> bool:
    """Return True for a directory of one owner, `data/<key>/<owner>`, False for a key that could not be listed."""
    return data_dir.count("/") == 2


def is_abandoned(store: Store, data_dir: str, now: float) -> bool:
    """Return True if the owner of a data directory is gone, or, without a lease, nothing in it changed for a day."""
    lease = lease_of(store, data_dir)
    if lease is not None:
        return lease.is_expired(now)
    changed = store.last_change(data_dir)
    return changed is not None and now - changed > LEASE_S
