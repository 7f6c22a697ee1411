"""Runs and prepared data of a store: how they are listed, held by one fit at a time, and deleted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from sparkhvd.data.store import locks
from sparkhvd.data.store.locks import (
    LEASE_S,
    Lease,
    ProcessIdentity,
    acquire,
    dump_sealed,
    load_sealed,
    lock_owner,
    write_lease,
)
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.fitting.runs import Finished, Run
from sparkhvd.training.checkpoints.checkpoint import Checkpoint
from sparkhvd.training.checkpoints.files import Checkpoints
from sparkhvd.wire import rebuild
from tests.harness.waiting import wait_until

pytestmark = [pytest.mark.pure, pytest.mark.timeout(60)]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def save(store: Store, run_dir: str, epochs: int, **options: Any) -> None:
    checkpoints = Checkpoints(store, run_dir)
    for epoch in range(1, epochs + 1):
        history = [{"epoch": e} for e in range(1, epoch + 1)]
        checkpoints.save(Checkpoint(epoch, {}, {}, None, history, "{}"), **options)


def held_elsewhere(store: Store, run_id: str, **changes: Any) -> None:
    """Write that a process of another machine holds a run."""
    process = replace(ProcessIdentity.current(), host="far", machine="another", **changes)
    values = {"token": "x", "since": 0.0, "renewed": time.time(), "process": asdict(process)}
    store.write_bytes(f"runs/{run_id}/holder.json", dump_sealed(values))


# --- listed and deleted ---------------------------------------------------------------------------------------------


def test_runs_are_listed_and_deleted(store: Store) -> None:
    assert store.runs() == ()
    save(store, "runs/stopped", 2)
    save(store, "runs/ended", 3)
    Run(store, "runs/ended").finish(Finished(2), 1)
    save(store, "runs/ended/warm-1", 1)
    held_elsewhere(store, "far")
    with acquire(store, "here"):
        found = {run.run_id: run for run in store.runs()}
        assert {n: (r.state, r.epochs) for n, r in found.items()} == {
            "stopped": ("interrupted", 2),
            "ended": ("interrupted", 1),  # its warm start is
            "far": ("running", 0),
            "here": ("running", 0),
        }
        assert found["here"].holder.startswith(f"process {os.getpid()} on host ")
        size = sum(
            p.stat().st_size for p in Path(store.local_path("runs/ended") or "").rglob("*.*")
        )
        assert 0 < found["ended"].num_bytes <= size + 64  # and the tokens of the writers
        assert found["ended"].changed is not None
        with pytest.raises(
            InvalidArgumentError, match=f"held by another fit: process {os.getpid()}"
        ):
            store.delete_run("here")
    assert store.clean(runs=True) == ["runs/ended", "runs/stopped"]
    assert [run.run_id for run in store.runs()] == ["far"]
    with pytest.raises(InvalidArgumentError, match="There is no run 'ended' in .* It has 'far'"):
        store.delete_run("ended")


def test_finished_run_keeps_the_requested_checkpoints(store: Store) -> None:
    checkpoints = Checkpoints(store, "runs/r")
    save(store, "runs/r", 6, num_epochs=3, keep=lambda epochs: 1)
    assert checkpoints.saved_epochs() == {1, 4, 5, 6}
    Run(store, "runs/r").finish(Finished(1), 2)
    assert Checkpoints(store, "runs/r").saved_epochs() == {1, 5, 6}
    assert Run(store, "runs/r").finished_weights() == checkpoints.path(1)
    Run(store, "runs/r").delete()
    assert store.runs() == ()


def test_data_are_listed_and_deleted_unless_in_use(store: Store) -> None:
    now = time.time()
    leases = {
        "kept": Lease("app-1", now, keep=True),
        "used": Lease("app-2", now),
        "left": Lease("app-3", now - LEASE_S - 60),
    }
    for name, lease in leases.items():
        store.write_bytes(f"data/key/{name}/part", b"12345")
        write_lease(store, f"data/key/{name}", lease)
    found = {d.path: d for d in store.data()}
    assert {(p, d.state, d.application) for p, d in found.items()} == {
        ("data/key/kept", "kept", "app-1"),
        ("data/key/used", "in use", "app-2"),
        ("data/key/left", "abandoned", "app-3"),
    }
    assert all(5 < d.num_bytes < 200 for d in found.values())
    store.delete_data("data/key/kept")
    store.delete_data("data/key/left")
    with pytest.raises(InvalidArgumentError, match="belongs to the application app-2"):
        store.delete_data("data/key/used")
    # A path that a file system shortens would name all data, or the data of a key.
    wrongs = (
        "data//",
        "data/./.",
        "data//used",
        "data/key/",
        "data/key/.",
        "data/key/..",
        "data/../data",
    )
    for wrong in ("data/key", "data/key/none", "runs/r/x", *wrongs):
        with pytest.raises(InvalidArgumentError, match="Give a path that Store.data"):
            store.delete_data(wrong)
    assert [d.path for d in store.data()] == ["data/key/used"]


# --- one fit at a time ----------------------------------------------------------------------------------------------


def test_the_second_fit_of_a_run_is_refused_while_the_first_lives(store: Store) -> None:
    with acquire(store, "r") as held:
        with pytest.raises(InvalidArgumentError) as refused:
            acquire(store, "r")
        assert str(refused.value).startswith(
            f"The run 'r' in {store.url} is held by another fit: process {os.getpid()} on host "
        )
        held.check()
    acquire(store, "r").release()
    assert store.list("runs/r") == []


def test_lock_of_a_killed_local_process_is_taken_immediately(tmp_path: Path, store: Store) -> None:
    code = (
        "import sys; from sparkhvd.data.store.locks import acquire;"
        "from sparkhvd.data.store.store import Store;"
        f"held = acquire(Store({store.url!r}), 'r'); print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(InvalidArgumentError, match=f"held by another fit: process {other.pid}"):
            acquire(store, "r")
        other.kill()
        began = time.monotonic()
        wait_until(
            lambda: not ProcessIdentity.is_alive(holder(store).process), "the holder has ended"
        )
        acquire(store, "r").release()  # though the process is still a zombie
        assert time.monotonic() - began < locks.EXPIRES_S / 2
    finally:
        other.kill()
        other.communicate()


def holder(store: Store) -> locks.Lease:
    found = lock_owner(store, "r")
    assert found is not None
    return found


def test_lock_of_a_remote_process_expires_without_renewal(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(locks, "EXPIRES_S", 0.5)
    monkeypatch.setattr(locks, "_POLL_S", 0.05)
    held_elsewhere(store, "r")
    acquire(store, "r").release()
    assert "waiting up to 0.5 s to see whether that fit is alive" in capsys.readouterr().out

    monkeypatch.setattr(locks, "EXPIRES_S", 30.0)
    held_elsewhere(store, "r")
    renewing = threading.Timer(0.2, held_elsewhere, (store, "r"))
    renewing.start()
    with pytest.raises(InvalidArgumentError, match="on host far"):
        acquire(store, "r", verbose=0)
    renewing.join()


def test_lock_holder_renews_its_lock_and_detects_a_takeover(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "RENEW_S", 0.02)
    with acquire(store, "r") as held:
        first = holder(store).renewed
        wait_until(lambda: holder(store).renewed > first, "the holder has renewed its file")

        def has_stopped() -> bool:
            # Once is not enough: a renewal that read its own file before this one was written would replace it.
            held_elsewhere(store, "r")
            return not held._thread.is_alive()  # type: ignore[union-attr]

        wait_until(has_stopped, "the holder has stopped renewing")
        with pytest.raises(InvalidArgumentError, match="on host far"):
            held.check()
    assert holder(store).process.host == "far"  # not deleted by the one before


def test_a_process_is_distinguished_from_a_later_process_with_its_pid() -> None:
    here = ProcessIdentity.current()
    assert here.is_alive() is True
    assert replace(here, started="1").is_alive() is False
    assert replace(here, machine="another").is_alive() is None
    assert replace(here, machine="").is_alive() is None
    assert rebuild(ProcessIdentity, json.loads(json.dumps(asdict(here)))) == here


# --- checksums ------------------------------------------------------------------------------------------------------


def test_sealed_file_is_read_or_recognized_as_damaged() -> None:
    values = {"epoch": 3, "names": ("a", "b"), "rate": 0.1, "none": None}
    data = dump_sealed(values)
    expected = json.loads(json.dumps(values))
    assert load_sealed(data) == expected
    for position in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            assert load_sealed(bytes(flipped), required=False) in (None, expected) or (
                # Only the name of the checksum has changed, to an entry that no reader looks for.
                expected.items() <= (load_sealed(bytes(flipped), required=False) or {}).items()
            )
        assert load_sealed(data[:position]) is None
