"""Who owns a data directory of a store: a small file in it that the owner renews while it lives."""

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
    """Who owns a data directory, and until when nobody else may delete it.

    Attributes:
        app_id: the application that materialized the data.
        renewed: when it last said that it lives, in s since 1970.
        keep: whether the data stay when it has ended.
    """

    app_id: str
    renewed: float
    keep: bool = False

    def is_expired(self, now: float) -> bool:
        """Whether the owner has been silent for so long that it must be gone."""
        return not self.keep and now - self.renewed > LEASE_S

    @classmethod
    def parse(cls, content: bytes) -> Lease | None:
        """The lease in a file; fields of other versions are passed over. None if it is none."""
        try:
            found = json.loads(content)
            return cls(str(found["app_id"]), float(found["renewed"]), bool(found.get("keep")))
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


def lease_of(store: Store, data_dir: str) -> Lease | None:
    """The lease of a data directory, or None if it has none (yet)."""
    try:
        return Lease.parse(store.read_bytes(f"{data_dir}/{LEASE_NAME}"))
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_lease(store: Store, data_dir: str, lease: Lease) -> None:
    """Say who owns a data directory."""
    store.write_bytes(f"{data_dir}/{LEASE_NAME}", json.dumps(asdict(lease)).encode())


def is_owners(data_dir: str) -> bool:
    """Whether a path is the directory of one owner, `data/<key>/<owner>`, and not of a key that could not be listed."""
    return data_dir.count("/") == 2


def is_abandoned(store: Store, data_dir: str, now: float) -> bool:
    """Whether the owner of a data directory is gone; without a lease, whether nothing in it changed for a day."""
    lease = lease_of(store, data_dir)
    if lease is not None:
        return lease.is_expired(now)
    changed = store.last_change(data_dir)
    return changed is not None and now - changed > LEASE_S
