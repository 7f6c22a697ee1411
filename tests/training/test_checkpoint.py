"""Checkpoints in the store: which stay, which are deleted, and the files of a killed writer."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import itertools
import math
import os
import re
import shutil
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkhvd.data.store.store import TEMPORARY, Store
from sparkhvd.errors import InvalidArgumentError, StoreError
from sparkhvd.training.checkpoints.checkpoint import Checkpoint, Position
from sparkhvd.training.checkpoints.files import Checkpoints
from tests.harness.sequential_mount import sequential_mount
from tests.harness.soak import SOAK

pytestmark = pytest.mark.ranks

RUN = "runs/r"
# (epochs, steps), as a run writes them.
POSITIONS = [(0, 7), (0, 12), (1, 0), (1, 5), (2, 0)]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def checkpoint(epoch: int, step: int) -> Checkpoint:
    number = float(100 * epoch + step)
    return Checkpoint(
        epoch=epoch,
        model={"weight": torch.full((300,), number)},
        optimizer={"state": {0: {"step": torch.tensor(number)}}, "param_groups": []},
        scheduler=None,
        history=[{"epoch": e + 1, "loss": 1.0} for e in range(epoch)],
        fingerprint="{}",
        step=step,
        ranks=[{"totals": {"values": torch.ones(3)}}] * 2 if step else [],
    )


def files(store: Store) -> set[str]:
    folder = Path(store.local_path(f"{RUN}/checkpoints") or "")
    return {p.name for p in folder.iterdir()} - {"latest.json"}


def test_only_the_last_two_and_kept_epoch_checkpoints_remain(store: Store) -> None:
    checkpoints = Checkpoints(store, RUN)
    for position in POSITIONS:
        checkpoints.save(checkpoint(*position), keep=lambda epochs: 1)
        assert checkpoints.latest_position() == position
    assert files(store) == {"epoch-1.pt", "epoch-1-step-5.pt", "epoch-2.pt"}
    found = checkpoints.latest()
    assert found is not None
    assert found.position == (2, 0)
    assert [r["epoch"] for r in checkpoints.history()] == [1, 2]
    # Another process resumes with the existing checkpoints.
    again = Checkpoints(store, RUN)
    again.save(checkpoint(2, 9), keep=lambda epochs: 1)
    assert files(store) == {"epoch-1.pt", "epoch-2.pt", "epoch-2-step-9.pt"}


def test_later_writer_of_a_run_replaces_an_earlier_writer(store: Store) -> None:
    first, second = Checkpoints(store, RUN), Checkpoints(store, RUN)
    first.save(checkpoint(1, 0))
    first.save(checkpoint(2, 0))
    second.save(checkpoint(2, 5))
    with pytest.raises(InvalidArgumentError, match="Another fit with the same run_id has begun"):
        first.save(checkpoint(3, 0))
    assert Checkpoints(store, RUN).latest_position() == (2, 5)
    second.save(checkpoint(3, 0))
    found = Checkpoints(store, RUN).latest()
    assert found is not None
    assert found.position == (3, 0)
    assert files(store) == {"epoch-2-step-5.pt", "epoch-3.pt"}


def test_damaged_checkpoint_warns_and_the_previous_is_used(store: Store) -> None:
    for position in POSITIONS:
        Checkpoints(store, RUN).save(checkpoint(*position))
    checkpoints = Checkpoints(store, RUN)
    path = Path(store.local_path(checkpoints.path(2)) or "")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.warns(UserWarning, match="epoch-2.pt is damaged: it has") as warned:
        found = checkpoints.latest()
    assert found is not None
    assert found.position == (1, 5)
    assert torch.equal(found.model["weight"], checkpoint(1, 5).model["weight"])
    assert str(warned[0].message) == checkpoints.warning
    assert checkpoints.warning.endswith(
        "The run resumes from step 5 of epoch 2 and repeats the training from there to the end of epoch 2."
    )
    checkpoints.save(checkpoint(1, 9))
    assert files(store) == {"epoch-1-step-5.pt", "epoch-1-step-9.pt"}


def test_error_names_all_damaged_checkpoints(store: Store) -> None:
    checkpoints = Checkpoints(store, RUN)
    for position in POSITIONS[:2]:
        checkpoints.save(checkpoint(*position))
        path = Path(store.local_path(checkpoints.path(*position)) or "")
        path.write_bytes(b"x" + path.read_bytes()[1:])
    with pytest.raises(InvalidArgumentError) as refused:
        Checkpoints(store, RUN).latest()
    for position in POSITIONS[:2]:
        url = store.full_url(checkpoints.path(*position))
        assert f"{url} is damaged: its SHA-256 is " in str(refused.value)
        store.delete(checkpoints.path(*position))
    assert str(refused.value).endswith(
        "No checkpoint of this run is intact. Restore the files from a copy. Or delete the"
        " checkpoints; then a fit with this run_id trains from the beginning."
    )
    with pytest.warns(UserWarning, match="The run resumes from the beginning"):
        assert Checkpoints(store, RUN).latest() is None


@pytest.mark.parametrize("pointer", [b"", b'{"epo', b"[]", b"3", b'{"epoch": 1}'])
def test_damaged_checkpoint_pointer_is_rebuilt_from_the_files(store: Store, pointer: bytes) -> None:
    for position in POSITIONS[:3]:
        Checkpoints(store, RUN).save(checkpoint(*position))
    store.write_bytes(f"{RUN}/checkpoints/latest.json", pointer)
    assert Checkpoints(store, RUN).latest_position() == (1, 0)
    Path(store.local_path(f"{RUN}/checkpoints/epoch-1.pt") or "").write_bytes(b"cut off")
    assert Checkpoints(store, RUN).latest_position() == (0, 12)


def test_missing_checkpoint_is_replaced_by_the_previous(store: Store) -> None:
    for position in POSITIONS[:3]:
        Checkpoints(store, RUN).save(checkpoint(*position))
    store.delete(f"{RUN}/checkpoints/epoch-1.pt")
    with pytest.warns(UserWarning, match="epoch-1.pt is not there. The run resumes from step 12"):
        found = Checkpoints(store, RUN).latest()
    assert found is not None
    assert found.position == (0, 12)
    assert torch.equal(found.model["weight"], checkpoint(0, 12).model["weight"])
    store.delete(f"{RUN}/checkpoints/epoch-0-step-12.pt")
    with pytest.warns(UserWarning, match="The run resumes from the beginning"):
        assert Checkpoints(store, RUN).latest() is None


def test_transient_store_error_hides_no_checkpoint(tmp_path: Path) -> None:
    class Failing(Store):
        """Fails its first read of a checkpoint."""

        failures = 1

        def local_path(self, path: str) -> str | None:
            return None if path.endswith(".pt") else super().local_path(path)

        def open_input(self, path: str) -> Any:
            if self.failures:
                self.failures -= 1
                raise StoreError("The store cannot be read: timed out.")
            return super().open_input(path)

    store = Failing.create(tmp_path / "failing")
    for position in POSITIONS[:3]:
        Checkpoints(store, RUN).save(checkpoint(*position))
    store.write_bytes(f"{RUN}/checkpoints/latest.json", b"")
    store.failures = 1  # type: ignore[attr-defined]
    with pytest.raises(StoreError, match="timed out"):
        Checkpoints(store, RUN).latest_position()
    assert Checkpoints(store, RUN).latest_position() == (1, 0)


@pytest.mark.parametrize("url", ["{}/large", "memory://large{}"])
def test_checkpoint_is_read_in_parts(tmp_path: Path, url: str) -> None:
    """The bytes of the file are never in memory together with the tensors."""
    store = Store.create(url.format(tmp_path))
    large = replace(checkpoint(1, 0), model={"weight": torch.arange(16 << 20)})
    Checkpoints(store, RUN).save(large)
    tracemalloc.start()
    try:
        found = Checkpoints(store, RUN).latest()
        largest = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found is not None
    assert torch.equal(found.model["weight"], large.model["weight"])
    # Python's own memory; torch's is not traced.
    assert largest < 100 << 20


class WatchedStore(Store):
    """Calls `at_moment` at each of the moments between two changes of the store."""

    at_moment: Callable[[], object]

    @contextlib.contextmanager
    def open_output(self, path: str) -> Iterator[Any]:
        self.at_moment()
        with super().open_output(path) as sink:
            yield _HalfWritten(sink, self.at_moment)
            sink.flush()
            self.at_moment()  # all is written, nothing is renamed
        self.at_moment()

    def delete(self, path: str) -> None:
        super().delete(path)
        self.at_moment()


class _HalfWritten:
    def __init__(self, sink: Any, at_moment: Callable[[], object]) -> None:
        self.sink, self.at_moment, self.is_first = sink, at_moment, True

    def write(self, data: Any) -> None:
        middle = len(data) // 2
        self.sink.write(data[:middle])
        if self.is_first:
            self.sink.flush()
            self.at_moment()
            self.is_first = False
        self.sink.write(data[middle:])


def copy_state(folder: Path, states: Path) -> None:
    """Copy a folder in its present state, as a writer that is killed now leaves it."""
    shutil.copytree(folder, states / f"{len(os.listdir(states)):04d}")


def kill_at(moment: int) -> Callable[[], None]:
    """Make a function that kills its process with SIGKILL at the call after `moment` calls."""
    left = itertools.count(moment, -1)

    def count() -> None:
        if next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return count


def write_all(store: Store, folder: Path) -> None:
    """Write `POSITIONS`, and note each in the folder."""
    checkpoints = Checkpoints(store, RUN)
    for position in POSITIONS:
        checkpoints.save(checkpoint(*position))
        (folder / "done").write_text(repr(position))


def was_killed(store: Store, folder: Path) -> bool:
    """Call `write_all` in its own process, and return True if it was killed."""
    pid = os.fork()
    if pid == 0:
        try:
            write_all(store, folder)
            os._exit(0)
        except BaseException:  # noqa: BLE001 - a fork must not return into pytest
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0
        return False
    assert os.WTERMSIG(status) == signal.SIGKILL
    return True


def contents(folder: Path) -> list[tuple[str, int]]:
    """Return paths and sizes of the files in a folder, without the random part of temporary names."""
    return sorted(
        (
            re.sub(f"({re.escape(TEMPORARY)})[0-9a-f]+", r"\1", str(p.relative_to(folder))),
            p.stat().st_size,
        )
        for p in folder.rglob("*")
        if p.is_file()
    )


def assert_readable(store: Store, done: Path) -> Position:
    """Check that the newest checkpoint is the last noted one or the next one, and return its position."""
    least = eval(done.read_text()) if done.exists() else (0, 0)  # noqa: S307 - written above
    found = Checkpoints(store, RUN).latest()
    position = found.position if found is not None else (0, 0)
    assert position in [least, *[p for p in POSITIONS if p > least][:1]]
    if found is not None:
        expected = checkpoint(*position)
        assert torch.equal(found.model["weight"], expected.model["weight"])
        assert len(found.ranks) == len(expected.ranks)
        assert found.history == expected.history
    return position


# A kill leaves the files that were copied at its moment. Some moments are tried, in `make soak` all.
KILLS_APART = 1 if SOAK else 16


def test_kill_at_any_moment_of_a_write_leaves_a_readable_checkpoint(
    tmp_path: Path,
) -> None:
    whole, states = tmp_path / "whole", tmp_path / "states"
    whole.mkdir()
    states.mkdir()
    store = WatchedStore(whole.as_uri())
    store.at_moment = lambda: copy_state(whole, states)
    write_all(store, whole)
    copied = sorted(states.iterdir())
    assert len(copied) > 40
    for moment in range(0, len(copied), KILLS_APART):
        here = tmp_path / f"{moment}"
        here.mkdir()
        store = WatchedStore(here.as_uri())
        store.at_moment = kill_at(moment)
        assert was_killed(store, here)
        assert contents(here) == contents(copied[moment])
    for folder in [*copied, whole]:
        store = Store(folder.as_uri())
        position = assert_readable(store, folder / "done")
        # The next attempt resumes, and no file of the killed attempt stays.
        checkpoints = Checkpoints(store, RUN)
        for later in [p for p in [*POSITIONS, (2, 3), (3, 0)] if p > position]:
            checkpoints.save(checkpoint(*later))
        assert files(store) == {"epoch-2-step-3.pt", "epoch-3.pt"}


@pytest.mark.parametrize("renames", [True, False])
@pytest.mark.usefixtures("mounts")
def test_kill_at_any_change_of_a_mount_leaves_a_readable_checkpoint(
    tmp_path: Path, renames: bool
) -> None:
    """The writer is killed at each request for a folder, file, write, rename or removal."""
    whole, states, at = tmp_path / "whole", tmp_path / "states", tmp_path / "mount"
    whole.mkdir()
    states.mkdir()
    copy = functools.partial(copy_state, whole, states)
    with sequential_mount(whole / "folder", at, renames=renames, before_change=copy) as place:
        write_all(Store(place.as_uri()), whole)
    copied = sorted(states.iterdir())
    assert len(copied) > 40
    for change in range(0, len(copied), KILLS_APART):
        here = tmp_path / f"{change}"
        here.mkdir()
        with sequential_mount(here / "folder", at, renames=renames, kill_at=change) as place:
            assert was_killed(Store(place.as_uri()), here)
        assert contents(here) == contents(copied[change])
    copy()
    with sequential_mount(states, at, renames=renames) as place:
        for state in sorted(states.iterdir()):
            store = Store((place / state.name / "folder").as_uri())
            assert_readable(store, state / "done")
            Checkpoints(store, RUN).save(checkpoint(3, 0))
            assert Checkpoints(store, RUN).latest_position() == (3, 0)


@pytest.mark.parametrize(("failing", "value"), [(".pt", 1.0), ("latest.json", 2.0)])
def test_checkpoint_stays_readable_while_it_is_replaced(
    tmp_path: Path, failing: str, value: float
) -> None:
    class Killed(Store):
        """Fails the second write of a kind of file."""

        left = 2

        @contextlib.contextmanager
        def open_output(self, path: str) -> Iterator[Any]:
            self.left -= path.endswith(failing)
            with super().open_output(path) as sink:
                yield sink
                if not self.left:
                    raise OSError("killed")

    store = Killed.create(tmp_path)
    checkpoints = Checkpoints(store, "runs/r")
    old, new = (
        Checkpoint(0, {"w": torch.full((3,), number)}, {}, None, [], "{}") for number in (1.0, 2.0)
    )
    checkpoints.save(old)
    with pytest.raises(OSError, match="killed"):
        checkpoints.save(new)
    found = Checkpoints(store, "runs/r").latest()
    assert found is not None
    assert torch.equal(found.model["w"], torch.full((3,), value))


def record(epoch: int, text: str = "") -> dict[str, Any]:
    return {"epoch": epoch, "loss": 0.5, "text": text}


@pytest.mark.parametrize("url", ["{}/store", "memory://records{}"])
def test_epoch_records_are_appended_and_read_once(tmp_path: Path, url: str) -> None:
    store = Store.create(url.format(tmp_path))
    checkpoints = Checkpoints(store, RUN)
    assert checkpoints.is_appended == (not url.startswith("memory"))
    reader, path, seen = checkpoints.reader(), f"{RUN}/metrics.jsonl", []
    history: list[Any] = []
    for epoch in range(1, 8):
        history.append(record(epoch, "x" * epoch))
        checkpoints.write_history(history)
        if epoch % 3:
            seen += reader.after(len(seen))
    seen += reader.after(len(seen))
    assert seen == history == checkpoints.history()
    assert reader.after(7) == []

    whole = store.read_bytes(path)
    store.write_bytes(path, whole + b'{"epoch": 8, "lo')  # a writer is adding it
    assert reader.after(7) == []
    assert checkpoints.history() == history

    # A resumed run repeats epochs, with lines of other lengths.
    other = Checkpoints(store, RUN)
    repeated = [*history[:4], *(record(epoch, "longer" * 9) for epoch in range(5, 10))]
    other.write_history(repeated[:6])
    other.write_history(repeated)
    assert reader.after(7) == repeated[7:]
    assert other.history() == repeated
    other.write_history(repeated[:3])  # ranks were lost
    assert other.history() == repeated[:3]
    with pytest.raises(InvalidArgumentError, match="Another fit with the same run_id"):
        checkpoints.write_history(history)

    for bad in (b"[]\n", b'{"epoch": "1"}\n', b"{}\n", b"nonsense\n"):
        store.write_bytes(path, bad)
        with pytest.raises(ValueError, match="record|Expecting"):
            reader.after(0)


@pytest.mark.parametrize("url", ["{}/store", "memory://histories{}"])
def test_checkpoint_of_a_late_epoch_is_as_small_where_records_are_appended(
    tmp_path: Path, url: str
) -> None:
    store = Store.create(url.format(tmp_path))
    checkpoints, sizes = Checkpoints(store, RUN), {}
    for epoch in range(1, 201):
        checkpoints.save(checkpoint(epoch, 0), num_epochs=200)
        sizes[epoch] = len(store.read_bytes(checkpoints.path(epoch)))
    checkpoints.save(checkpoint(200, 3), num_epochs=200)
    if store.local_path(RUN):
        assert abs(sizes[200] - sizes[5]) < 10  # digits of numbers
    else:
        assert sizes[200] > sizes[5] + 195 * 10
    reader = Checkpoints(store, RUN)
    for position in [(1, 0), (2, 0), (77, 0), (200, 0), (200, 3)]:
        assert reader.load(*position).history == checkpoint(*position).history
    found = reader.latest()
    assert found is not None
    assert (found.position, found.history) == ((200, 3), checkpoint(200, 3).history)


def test_resumed_run_keeps_the_records_of_earlier_checkpoints(store: Store) -> None:
    first = Checkpoints(store, RUN)
    text = "\u00e4\n\U0001f600"
    history = [
        {"epoch": epoch, "loss": loss, "text": text}
        for epoch, loss in enumerate([math.pi, math.nan, math.inf, -1e-300], start=1)
    ]
    for epoch in range(1, 5):
        first.save(replace(checkpoint(epoch, 0), history=history[:epoch]), num_epochs=4)
    damaged = Path(store.local_path(first.path(4)) or "")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    second = Checkpoints(store, RUN)
    with pytest.warns(UserWarning, match="epoch-4.pt is damaged"):
        found = second.latest()
    assert found is not None
    assert repr(found.history) == repr(history[:3])
    again = [*found.history, {"epoch": 4, "loss": 7.0, "text": ""}]
    second.save(replace(checkpoint(4, 0), history=again), num_epochs=4)
    again.append({"epoch": 5, "loss": 8.0, "text": ""})
    second.save(replace(checkpoint(5, 0), history=again), num_epochs=5)
    for epoch in range(2, 6):
        assert repr(Checkpoints(store, RUN).load(epoch).history) == repr(again[:epoch])


def test_lost_records_cost_epochs_or_an_error_but_no_weights(store: Store) -> None:
    checkpoints, path = Checkpoints(store, RUN), f"{RUN}/metrics.jsonl"
    for epoch in range(1, 5):
        checkpoints.save(checkpoint(epoch, 0), num_epochs=4)
    lines = store.read_bytes(path).splitlines(keepends=True)
    store.write_bytes(path, b"".join(lines[:2]) + lines[2].replace(b"1.0", b"1.5") + lines[3])
    with pytest.warns(UserWarning, match="does not hold the records of epoch-4.pt.* epoch-3.pt"):
        found = Checkpoints(store, RUN).latest()
    assert found is not None
    assert (found.position, found.history) == ((2, 0), checkpoint(2, 0).history)

    store.delete(path)
    checkpoints = Checkpoints(store, RUN)
    for epoch in (1, 2):  # the first contains its records
        store.delete(checkpoints.path(epoch))
    with pytest.raises(
        InvalidArgumentError, match="metrics.jsonl does not hold the records"
    ) as lost:
        checkpoints.latest()
    assert "TorchModel.from_run(store, run_id) still returns the model," in str(lost.value)
    with pytest.warns(
        UserWarning, match="epoch-4.pt.* still returns the model, without its history"
    ):
        newest = checkpoints.newest_whole()
    assert newest is not None
    assert newest.history == []
    assert torch.equal(newest.model["weight"], checkpoint(4, 0).model["weight"])
    assert checkpoints.load_weights(checkpoints.path(3)).keys() == {"weight"}


def test_suspended_writer_does_not_replace_the_records_of_a_later_fit(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    suspended, later = Checkpoints(store, RUN), Checkpoints(store, RUN)
    history = [record(epoch, "first") for epoch in range(1, 5)]
    for epoch in range(1, 4):
        suspended.save(replace(checkpoint(epoch, 0), history=history[:epoch]))
    check = suspended._check_writer
    repeated = [*history[:3], *(record(epoch, "later") for epoch in range(4, 7))]

    def stop_after_check() -> None:
        check()
        monkeypatch.setattr(suspended, "_check_writer", check)
        found = later.latest()
        assert found is not None
        for epoch in range(4, 7):
            later.save(replace(checkpoint(epoch, 0), history=repeated[:epoch]))

    monkeypatch.setattr(suspended, "_check_writer", stop_after_check)
    with pytest.raises(InvalidArgumentError, match="Another fit with the same run_id"):
        suspended.write_history(history)
    found = Checkpoints(store, RUN).latest()
    assert found is not None
    assert (found.position, found.history) == ((6, 0), repeated)


def test_records_of_a_failed_write_are_written_by_the_next(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(store, RUN)
    for epoch in (1, 2):
        checkpoints.save(checkpoint(epoch, 0))
    path = Path(store.local_path(f"{RUN}/metrics.jsonl") or "")
    path.write_bytes(path.read_bytes() + b"x")  # so that the next write replaces the file
    with monkeypatch.context() as patch:
        patch.setattr(Store, "write_bytes", lambda *_: (_ for _ in ()).throw(StoreError("full")))
        with pytest.raises(StoreError, match="full"):
            checkpoints.write_history(checkpoint(3, 0).history)
    checkpoints.save(checkpoint(4, 0))
    assert checkpoints.history() == checkpoint(4, 0).history
    assert Checkpoints(store, RUN).load(4).history == checkpoint(4, 0).history


def test_checkpoint_on_a_fuse_mount_contains_its_records(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkhvd.training.checkpoints.files.is_sequential", lambda path: True)
    checkpoints = Checkpoints(store, RUN)
    for epoch in range(1, 5):
        checkpoints.save(checkpoint(epoch, 0))
    assert checkpoints.is_appended
    store.delete(f"{RUN}/metrics.jsonl")
    found = Checkpoints(store, RUN).latest()
    assert found is not None
    assert (found.position, found.history) == ((4, 0), checkpoint(4, 0).history)


def test_checkpoint_of_an_earlier_version_holds_its_records(store: Store) -> None:
    earlier = checkpoint(3, 0)
    values = {name: value for name, value in vars(earlier).items() if name != "history_file"}
    data = io.BytesIO()
    torch.save({"format_version": 6, **values}, data)
    seal = f"\nsparkhvd-sha256 {hashlib.sha256(data.getvalue()).hexdigest()}\n".encode()
    checkpoints = Checkpoints(store, RUN)
    store.write_bytes(checkpoints.path(3), data.getvalue() + seal)
    found = checkpoints.latest()
    assert found is not None
    assert (found.position, found.history) == ((3, 0), earlier.history)


def test_epoch_records_of_a_concurrent_fit_are_replaced(store: Store) -> None:
    checkpoints = Checkpoints(store, RUN)
    checkpoints.write_history([record(1)])
    path = f"{RUN}/metrics.jsonl"
    store.write_bytes(path, store.read_bytes(path) + b'{"epoch": 2, "of": "another"}\n')
    checkpoints.write_history([record(1), record(2)])
    assert checkpoints.history() == [record(1), record(2)]


def test_epoch_records_are_rewritten_on_a_mount_without_append(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str, mode: str) -> Any:
        raise OSError(95, "Operation not supported")

    checkpoints = Checkpoints(store, RUN)
    monkeypatch.setattr("sparkhvd.training.checkpoints.files.open", refuse, raising=False)
    for count in (1, 2, 3):
        checkpoints.write_history([record(epoch + 1) for epoch in range(count)])
    assert [each["epoch"] for each in checkpoints.history()] == [1, 2, 3]
    assert not checkpoints.is_appended
