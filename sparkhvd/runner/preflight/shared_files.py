"""Store of a run, as the driver and every rank reach it, and the check that it is one store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

__all__ = [
    "SharedFiles",
    "check_tokens",
    "describe_shared",
    "outcome_path",
    "token_path",
    "write_token",
]


class SharedFiles(Protocol):
    """Files that the driver and every rank can reach; picklable. Paths are relative to one root."""

    def read_bytes(self, path: str) -> bytes:
        """Read a whole file."""
        ...

    def write_bytes(self, path: str, data: bytes) -> None:
        """Write a file, whole or not at all."""
        ...

    def exists(self, path: str) -> bool:
        """Return True if the file exists."""
        ...


def token_path(run_dir: str, attempt: int, rank: int | None) -> str:
    """Return the path of the token of a rank (None: of the driver)."""
    owner = "driver" if rank is None else f"rank-{rank}"
    return f"{run_dir}/attempts/{attempt}/token-{owner}"


def outcome_path(run_dir: str, attempt: int, rank: int) -> str:
    """Return the path of the outcome of a rank."""
    return f"{run_dir}/attempts/{attempt}/rank-{rank}.json"


def write_token(
    shared: SharedFiles, run_dir: str, attempt: int, rank: int | None, job_id: str
) -> str:
    """Write this process's token; return the reason of a failure, or ""."""
    path = token_path(run_dir, attempt, rank)
    try:
        shared.write_bytes(path, _token(job_id, rank))
    except Exception as e:  # noqa: BLE001 - a store may raise anything; all of it means "cannot write"
        return f"cannot write {path} in {describe_shared(shared)}: {type(e).__name__}: {e}"
    return ""


def check_tokens(
    shared: SharedFiles, run_dir: str, attempt: int, job_id: str, hosts: Sequence[str], me: int
) -> str:
    """Return the reason why rank `me` cannot see one store shared by the driver and all ranks, or ""."""
    owners: Iterable[int | None] = [None, *range(len(hosts))]
    for owner in owners:
        path = token_path(run_dir, attempt, owner)
        try:
            token: bytes | None = shared.read_bytes(path)
            why = "has other contents"
        except Exception as e:  # noqa: BLE001 - as above: all of it means "cannot read"
            token, why = None, f"cannot be read ({type(e).__name__}: {e})"
        if token != _token(job_id, owner):
            who = "the driver" if owner is None else f"rank {owner} on host {hosts[owner]}"
            return (
                f"The store is not shared: {who} wrote {path} in {describe_shared(shared)}, and on host "
                f"{hosts[me]} (rank {me}) it {why}. Use a path that the driver and all executors see."
            )
    return ""


def describe_shared(shared: SharedFiles) -> str:
    """Return the store's address where it has one."""
    return str(getattr(shared, "url", shared))


def _token(job_id: str, rank: int | None) -> bytes:
    return f"{job_id} {rank}".encode()
