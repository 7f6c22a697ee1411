"""Leases of data directories, locks of runs, and small files with checksums."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.runner.processes import stat_of
from sparkhvd.wire import read_json, rebuild

LEASE_NAME = "_lease.json"
# A fit renews its lease every hour, so an owner that has not renewed it for a day is gone.
LEASE_S = 24 * 3600.0
# Upper bound on the times in valid files.
_LATEST_S = 2.5e11


class _Store(Protocol):
    """Operations of a store for leases and locks. Paths are relative to the store."""

    @property
    def url(self) -> str: ...
    @property
    def is_seen(self) -> bool: ...
    def read_bytes(self, path: str) -> bytes: ...
    def write_bytes(self, path: str, data: bytes) -> None: ...
    def last_change(self, path: str) -> float | None: ...
    def delete(self, path: str) -> None: ...
    def delete_if_empty(self, path: str) -> None: ...


# ----------------------------------------------------------------------------------------------------
# Identify the processes that own files, even if pids are reused or a machine reboots.


@dataclass(frozen=True)
class ProcessIdentity:
    """Identity of a process on a machine.

    Attributes:
        host: name of the host.
        pid: pid of the process.
        machine: boot id and pid namespace, which differ for two containers on one host; "" if unknown.
        started: start of the process in clock ticks since boot, which differs for a later process with the same pid.
    """

    host: str
    pid: int
    machine: str
    started: str

    @classmethod
    def current(cls) -> ProcessIdentity:
        return cls(socket.gethostname(), os.getpid(), _machine(), _started(os.getpid()))

    def __post_init__(self) -> None:
        if not 0 < self.pid < 1 << 31:
            raise ValueError("the pid is out of range")

    def is_alive(self) -> bool | None:
        """Whether the process is alive, or None if unknown, for example on another machine."""
        if not self.machine or self.machine != _machine():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:  # the process exists and belongs to another user
            pass
        started = _started(self.pid)
        return started == self.started if started else None

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}"


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Read the start time of a process, or "" if it is not visible, or "ended" for a zombie."""
    stat = stat_of(pid)
    if stat is None:
        return ""
    return "ended" if stat.state in "ZX" else stat.started


# ----------------------------------------------------------------------------------------------------
# Small JSON files with a checksum, which distinguishes a damaged file from a file of another version.

_SEAL = "sha256"


def dump_sealed(values: Mapping[str, object]) -> bytes:
    """Encode a JSON object, and add the SHA-256 of its entries as the entry "sha256"."""
    # A round trip through JSON gives the values that a reader will check (tuples become lists).
    plain = read_json(json.dumps(dict(values)), most_bytes=None)
    return json.dumps({**plain, _SEAL: _digest(plain)}, indent=1).encode()


def load_sealed(data: bytes, *, required: bool = True) -> dict[str, Any] | None:
    """Decode the entries from `dump_sealed`, or return None if the file is damaged.

    Args:
        data: content of the file.
        required: True if a file without a checksum, from an older version, counts as damaged.
    """
    try:
        values = read_json(data, most_bytes=None)
    except ValueError:
        return None
    if not isinstance(values, dict):
        return None
    seal = values.pop(_SEAL, None)
    if seal is None:
        return None if required else values
    return values if seal == _digest(values) else None


def position_of(pointer: bytes) -> tuple[int, int] | None:
    """Read (epochs, steps) from the pointer to a run's newest checkpoint, or None if damaged."""
    values = load_sealed(pointer) or {}
    epoch, step = values.get("epoch"), values.get("step")
    if not (isinstance(epoch, int) and isinstance(step, int) and epoch >= 0 and step >= 0):
        return None
    return epoch, step


def _digest(values: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


# ----------------------------------------------------------------------------------------------------
# Leases of folders.


@dataclass(frozen=True)
class Lease:
    """Claim on a folder of a store, renewed by its owner: data of an application, or the run of a fit.

    Attributes:
        owner: id of the application, or random token of the fit.
        renewed: time of the last renewal, in s since 1970 by the owner's clock.
        keep: True if the data are kept after the application has ended.
        process: driver of the fit; None for data, because data may outlive the process that wrote them.
        since: start of the fit, by the same clock; 0 for data.
    """

    owner: str
    renewed: float
    keep: bool = False
    process: ProcessIdentity | None = None
    since: float = 0.0

    def is_expired(self, now: float) -> bool:
        """True a day after the last renewal: its application must be gone. False for kept data."""
        return not self.keep and now - self.renewed > LEASE_S

    def is_alive(self) -> bool | None:
        """Whether the fit is alive, or None if only the age of its lease can decide."""
        if self.process is None:
            return None
        if self.process == ProcessIdentity.current():
            return self.owner in _held
        return self.process.is_alive()

    def to_bytes(self) -> bytes:
        values = asdict(self)
        if self.process is None:
            del values["process"], values["since"]
        return dump_sealed(values)

    @classmethod
    def parse(cls, content: bytes) -> Lease | None:
        """Parse a lease file, also of versions before 29 November 2026, or return None if it is damaged."""
        values = load_sealed(content, required=False)
        if values is None:
            return None
        for name in values.keys() & {"app_id", "token"}:  # names of the entry in earlier versions
            values.setdefault("owner", values.pop(name))
        try:
            lease = rebuild(cls, values, is_strict=False)
        except ValueError:
            return None
        is_valid = 0 <= lease.since < _LATEST_S and 0 <= lease.renewed < _LATEST_S
        return lease if is_valid else None

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        return f"{self.process}, since {since}"


def _lease_at(store: _Store, path: str) -> Lease | None:
    try:
        return Lease.parse(store.read_bytes(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def lease_of(store: _Store, data_dir: str) -> Lease | None:
    """Read the lease of a data directory, or return None without a lease, or if its file is damaged."""
    return _lease_at(store, f"{data_dir}/{LEASE_NAME}")


def write_lease(store: _Store, data_dir: str, lease: Lease) -> None:
    """Write the lease of a data directory."""
    store.write_bytes(f"{data_dir}/{LEASE_NAME}", lease.to_bytes())


def is_owners(data_dir: str) -> bool:
    """Whether a listed path is a directory `data/<key>/<owner>`, and not an unreadable folder `data/<key>`."""
    parts = data_dir.split("/")
    return len(parts) == 3 and not {"", ".", ".."}.intersection(parts)


def is_abandoned(store: _Store, data_dir: str, now: float) -> bool:
    """Whether the lease has expired, or, without a lease, nothing in the directory changed for a day."""
    lease = lease_of(store, data_dir)
    if lease is not None:
        return lease.is_expired(now)
    changed = store.last_change(data_dir)
    return changed is not None and now - changed > LEASE_S


# ----------------------------------------------------------------------------------------------------
# Lock of a run's folder: one fit at a time writes into it.
#     runs/<run_id>/holder.json    the process, and a time that it renews every `RENEW_S`
# The kernel reports whether a lock owner on this machine is alive. An owner on another machine, or in another
# container, counts as dead if its file does not change for `EXPIRES_S` while this process watches it. So clocks of
# hosts are never compared, and resuming after a crash waits at most that long.
# Threads: one thread per lock renews the file. Ownership: the file belongs to the lock owner. A fit that takes over
# rewrites the file, and the former owner notices that at its next renewal or `check`. Shutdown: `release` ends the
# thread, which deletes the file last. A Connect client without access to the store could renew the lock only through
# tasks, but its ranks hold all task slots. So it checks for other owners and takes no lock.

HOLDER_NAME = "holder.json"
RENEW_S = 10.0
EXPIRES_S = 40.0
_POLL_S = 1.0
# Longest wait for the store when a lock is released.
_LAST_S = 10.0


# Tokens of the runs locked by this process.
_held: set[str] = set()


class RunLock:
    """Lock of a run, owned by this process and released at the end of its `with` block."""

    def __init__(self, store: _Store, run_id: str) -> None:
        """Lock the run, after `acquire` has checked that no other fit holds its lock."""
        self._store = store
        self._run_id = run_id
        self._path = _path(run_id)
        self._token = secrets.token_hex(16)
        self._since = time.time()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if store.is_seen:
            _held.add(self._token)
            self._write()
            self._thread = threading.Thread(target=self._renew, name="sparkhvd-holder", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Check that no other fit has taken over the run.

        Raises:
            InvalidArgumentError: another fit has taken over; the message names it.
        """
        if self._thread is not None:
            holder = lock_owner(self._store, self._run_id)
            if holder is not None and holder.owner != self._token:
                raise _refusal(self._store, self._run_id, holder)

    def release(self) -> None:
        """Release the run."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_LAST_S)  # a hanging store must not delay a finished fit for ever
            _held.discard(self._token)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _is_own(self) -> bool:
        holder = lock_owner(self._store, self._run_id)
        return holder is not None and holder.owner == self._token

    def _renew(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._ended.wait(RENEW_S)
            with suppress(OSError):  # a temporary error of the store
                if not self._is_own():
                    return
                if not is_over:
                    self._write()
                else:
                    self._store.delete(self._path)
                    self._store.delete_if_empty(self._path.rpartition("/")[0])

    def _write(self) -> None:
        process = ProcessIdentity.current()
        lease = Lease(self._token, time.time(), process=process, since=self._since)
        self._store.write_bytes(self._path, lease.to_bytes())


def acquire(store: _Store, run_id: str, *, verbose: int = 1) -> RunLock:
    """Lock a run, unless another fit holds its lock.

    Args:
        store: of the run.
        run_id: its name.
        verbose: 0 prints no line while checking whether another owner is alive.

    Raises:
        InvalidArgumentError: a live fit owns the lock; the message names its host, process and start.
    """
    holder = lock_owner(store, run_id)
    if holder is not None:
        alive = holder.is_alive()
        if alive or (alive is None and _changes(store, run_id, holder, verbose)):
            raise _refusal(store, run_id, holder)
        store.delete(_path(run_id))
    return RunLock(store, run_id)


def lock_owner(store: _Store, run_id: str) -> Lease | None:
    """Read a run's lease, or None if missing or damaged. The lease's fit may be dead."""
    return _lease_at(store, _path(run_id))


def is_running(holder: Lease) -> bool:
    """Whether a fit is alive, without waiting. On another machine the time in its file decides."""
    alive = holder.is_alive()
    return abs(time.time() - holder.renewed) < EXPIRES_S if alive is None else alive


def _path(run_id: str) -> str:
    return f"runs/{run_id}/{HOLDER_NAME}"


def _changes(store: _Store, run_id: str, holder: Lease, verbose: int) -> bool:
    """Watch a lock owner on another machine and return True if it renews its file."""
    if verbose:
        sys.stdout.write(
            f"The run {run_id!r} was held by {holder}: waiting up to {EXPIRES_S:g} s to see whether that fit is alive.\n"
        )
        sys.stdout.flush()
    deadline = time.monotonic() + EXPIRES_S
    while time.monotonic() < deadline:
        now = lock_owner(store, run_id)
        if now is None:
            return False
        if now != holder:
            return True
        time.sleep(_POLL_S)
    return False


def _refusal(store: _Store, run_id: str, holder: Lease) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"The run {run_id!r} in {store.url} is held by another fit: {holder}. Wait until it has ended, or end it; or give "
        "this fit another run_id."
    )
