"""Checkpoints of a run in the store: files, a pointer written last, and metrics.

    runs/<run_id>/checkpoints/epoch-<k>.pt             after k epochs
    runs/<run_id>/checkpoints/epoch-<k>-step-<s>.pt    after k epochs and s steps of the next
    runs/<run_id>/checkpoints/frozen-<sha256>.pt       parameters that no step changes, shared by all of these
    runs/<run_id>/checkpoints/latest.json              pointer to the newest checkpoint
    runs/<run_id>/metrics.jsonl                        one JSON line per epoch, also of epochs without a checkpoint
    runs/<run_id>/profile.json                         times of the epochs
    runs/<run_id>/attempts/writer                      the newest attempt, which alone may write

At the end of an epoch all ranks hold the same state, and random numbers are reseeded from (seed, epoch, rank).
Inside an epoch every rank has its own generators, loss sums and running statistics, and the file of a step
holds them for each rank. The newest complete file is used.

Where the metrics file grows by appends, a checkpoint names the part of it that holds the records of its epochs, so that
a checkpoint of epoch 5,000 is as small as one of epoch 5. Object stores and some mounts cannot append. There each
checkpoint contains the records, because the metrics file is replaced while it is the only copy.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Any

from torch import Tensor

from sparkhvd.data.store.addresses import is_sequential
from sparkhvd.data.store.locks import dump_sealed, position_of
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InternalError, InvalidArgumentError
from sparkhvd.training.checkpoints.checkpoint import (
    Checkpoint,
    DamagedError,
    HistoryFile,
    Position,
    check_seal,
    read_checkpoint,
    write_checkpoint,
)
from sparkhvd.training.checkpoints.frozen import Frozen
from sparkhvd.training.modules import weights
from sparkhvd.training.modules.weights import PIECE_BYTES
from sparkhvd.training.types import History, Value
from sparkhvd.wire import read_json, rebuild

# Function that selects one of several epochs.
Choice = Callable[[Collection[int]], int]
_NAME = re.compile(r"epoch-(\d+)(?:-step-(\d+))?\.pt")


class Checkpoints:
    """The checkpoints of a run in its store."""

    def __init__(self, store: Store, run_dir: str) -> None:
        """Refer to the run's folder in the store, without reading or writing."""
        self._store = store
        self._folder = f"{run_dir}/checkpoints"
        self._metrics = f"{run_dir}/metrics.jsonl"
        self._profile = f"{run_dir}/profile.json"
        self._writer = f"{run_dir}/attempts/writer"
        self._token = secrets.token_hex(16).encode()
        # Files in the folder, by position; None until the first write.
        self._files: set[Position] | None = None
        self._previous: Position | None = None
        # Position returned by `latest`.
        self._resumed: Position | None = None
        # Guards the attributes below, because the training loop adds records while a thread writes a checkpoint.
        self._lock = threading.Lock()
        # Number of records in the metrics file; None until the first write, which replaces the file.
        self._num_written: int | None = None
        self._prefixes = _Prefixes()
        # Whether records are appended to the file; object stores and some mounts cannot append.
        self.is_appended = store.local_path(self._metrics) is not None
        # Whether checkpoints may name their records in the metrics file; False until an append has succeeded.
        self._may_refer = False
        # Message about files that `latest` skipped, and about the training that is repeated for this reason; or "".
        self.warning = ""

    def path(self, epoch: int, step: int = 0) -> str:
        """Build the path of a checkpoint in the store, after `epoch` epochs and `step` steps."""
        name = f"epoch-{epoch}-step-{step}" if step else f"epoch-{epoch}"
        return f"{self._folder}/{name}.pt"

    def save(
        self, checkpoint: Checkpoint, *, keep: Choice | None = None, num_epochs: int = 1
    ) -> None:
        """Write new records, then a checkpoint, then the pointer to it, and delete old checkpoints.

        The previous checkpoint stays. If the process is killed meanwhile, this checkpoint or the previous one is
        readable.

        Args:
            checkpoint: the state to write.
            keep: selects a saved epoch whose file is kept in addition to the last two files.
            num_epochs: number of last epochs whose files are kept.

        Raises:
            InvalidArgumentError: another fit with the same run_id has begun to write checkpoints of this run.
        """
        self._begin()
        assert self._files is not None
        if not checkpoint.step and len(checkpoint.history) > (self._num_written or -1):
            self.write_history(checkpoint.history)
        self._check_writer()
        if (part := self._history_file(len(checkpoint.history))) is not None:
            checkpoint = replace(checkpoint, history=[], history_file=part)
        with self._store.open_output(self.path(*checkpoint.position)) as sink:
            write_checkpoint(checkpoint, sink)
        self._check_writer()
        self._files.add(checkpoint.position)
        pointer = dump_sealed({"epoch": checkpoint.epoch, "step": checkpoint.step})
        self._store.write_bytes(f"{self._folder}/latest.json", pointer)
        # Keep the previous file, because a process that has read the old pointer must still find it.
        stay = {checkpoint.position, self._previous}
        if keep is not None:
            stay.add((keep(self.saved_epochs()), 0))
        self._keep({*stay, *self._last(num_epochs)})
        self._previous = checkpoint.position

    def finish(self, epoch: int, num_epochs: int) -> None:
        """Delete the checkpoints except those of `epoch` and of the last `num_epochs` epochs, after the last write.

        `num_epochs` must be at least 1.
        """
        self._files = self._positions()
        self._keep({(epoch, 0), *self._last(num_epochs)})

    def _last(self, num_epochs: int) -> list[Position]:
        return [(epoch, 0) for epoch in sorted(self.saved_epochs())[-num_epochs:]]

    def _keep(self, stay: Collection[Position | None]) -> None:
        assert self._files is not None
        for position in [p for p in self._files if p not in stay]:
            self._store.delete(self.path(*position))
            self._files.remove(position)

    def _begin(self) -> None:
        with self._lock:
            if self._files is None:
                self._take_over()

    def _take_over(self) -> None:
        """Claim the folder from earlier attempts of this run, and delete their unfinished files.

        Only the last attempt that called this writes. An earlier attempt, of another fit or on a host that was
        considered lost, stops at its next write.
        """
        self._store.write_bytes(self._writer, self._token)
        self._store.delete_unfinished(self._folder)
        self._files = self._positions()
        self._previous = self._resumed or self._pointer() or self._newest_whole()
        # Delete later files, because they are unfinished or damaged and the run does not resume from them.
        for position in [p for p in self._files if p > (self._previous or (-1, 0))]:
            self._store.delete(self.path(*position))
            self._files.remove(position)

    def saved_epochs(self) -> set[int]:
        files = self._positions() if self._files is None else self._files
        return {epoch for epoch, step in files if not step}

    def _check_writer(self) -> None:
        try:
            token = self._store.read_bytes(self._writer)
        except (FileNotFoundError, NotADirectoryError):  # deleted by hand
            return
        if token != self._token:
            raise InvalidArgumentError(
                f"Another fit with the same run_id has begun to write checkpoints of "
                f"{self._store.full_url(self._folder.rpartition('/')[0])}, so this fit ends. Give fits that run at the "
                "same time different run_ids."
            )

    def write_frozen(self, tensors: Mapping[str, Tensor]) -> str:
        """Write the frozen parameters, unless their file exists, and return their SHA-256.

        Checkpoints omit these parameters.
        """
        sha256 = weights.dump(tensors)
        # Take over first, because it deletes unfinished files. Another thread may do it at the same time for the
        # history.
        self._begin()
        weights.store_weights(tensors, sha256, self._store, _frozen_path(self._folder, sha256))
        return sha256

    def write_history(self, history: Sequence[Mapping[str, Value]]) -> None:
        """Write the metrics file.

        New records are appended to a local file. In other stores the whole file is written again.

        Raises:
            InvalidArgumentError: another fit with the same run_id has begun to write.
        """
        self._begin()
        self._check_writer()
        with self._lock:
            known, self._num_written = self._num_written, len(history)
            if self.is_appended and known is not None and known < len(history):
                added = _lines(history[known:])
                try:
                    with open(self._store.local_path(self._metrics) or "", "ab") as file:
                        # Otherwise another fit has written to the file.
                        if file.seek(0, os.SEEK_END) == self._prefixes.num_bytes:
                            file.write(b"".join(added))
                            self._prefixes.add(added)
                            self._may_refer = self._may_refer or not is_sequential(file.name)
                            return
                except OSError:
                    # The mount cannot append, or the disk is full; the write below reports a full disk.
                    self.is_appended = self._may_refer = False
                # This process may have been suspended since the last check, while a later fit wrote.
                self._check_writer()
            lines = _lines(history)
            try:
                self._store.write_bytes(self._metrics, b"".join(lines))
            except BaseException:
                self._num_written = None  # the next write replaces the file again
                raise
            self._prefixes = _Prefixes()
            self._prefixes.add(lines)

    def _history_file(self, num_records: int) -> HistoryFile | None:
        """The part of the metrics file with this number of records, or None if a checkpoint must contain them.

        It must contain them on a mount that may replace the metrics file in several steps, such as FUSE, and until an
        append has succeeded.
        """
        with self._lock:
            return self._prefixes.of(num_records) if self._may_refer else None

    def write_profile(self, state: Mapping[str, Any]) -> None:
        """Write the times of the epochs."""
        self._store.write_bytes(self._profile, json.dumps(state).encode())

    def profile(self) -> dict[str, Any]:
        """Read the last written profile, or return {} if it is missing or damaged."""
        try:
            return _profile_of(self._store.read_bytes(self._profile))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return {}

    def latest_epoch(self) -> int:
        """Read the number of epochs in the newest checkpoint, or return 0 without a checkpoint."""
        return self.latest_position()[0]

    def latest_position(self) -> Position:
        """Read the position of the newest checkpoint, or return (0, 0) without a checkpoint.

        The position is the number of completed epochs, and the number of completed steps of the next epoch.
        """
        return self._pointer() or self._newest_whole() or (0, 0)

    def latest(self) -> Checkpoint | None:
        """Load the newest complete checkpoint, or return None. Sets `warning` if it skips damaged checkpoints.

        Raises:
            InvalidArgumentError: all checkpoints are damaged, or have another format version.
        """
        positions, pointer = self._positions(), self._pointer()
        newest = pointer or max(positions, default=None)
        if newest is None:
            return None
        damaged, gone = [], []
        # Skip files later than the pointer, because their writer did not finish.
        for position in sorted({p for p in positions if p <= newest} | {newest}, reverse=True):
            try:
                checkpoint = self._with_history(self._load(self.path(*position)))
            except FileNotFoundError:
                gone.append(f"{self._store.full_url(self.path(*position))} is not there.")
            except DamagedError as e:
                damaged.append(str(e))
            else:
                self._resumed = position
                self._warn([*gone, *damaged], position, newest)
                return checkpoint
        # Raise only if there is a pointer. Without it no checkpoint was ever finished, and the run begins anew.
        if damaged and self._store.exists(f"{self._folder}/latest.json"):
            raise InvalidArgumentError(
                f"{' '.join(damaged)} No checkpoint of this run is intact. Restore the files from a copy. Or delete the "
                "checkpoints; then a fit with this run_id trains from the beginning."
            )
        self._warn([*gone, *damaged], None, newest)
        return None

    def note(self, text: str) -> None:
        """Add a sentence to `warning`, for the driver to show."""
        if text not in self.warning:
            self.warning = f"{self.warning} {text}".strip()

    def _warn(self, lost: Sequence[str], start_at: Position | None, newest: Position) -> None:
        if not lost:
            return
        start = "the beginning" if start_at is None else _words(start_at)
        self.warning = f"{' '.join(lost)} The run resumes from {start} and repeats the training from there to {_words(newest)}."
        warnings.warn(self.warning, stacklevel=3)

    def load(self, epoch: int, step: int = 0) -> Checkpoint:
        """Load the checkpoint after `epoch` epochs and `step` steps.

        Raises:
            FileNotFoundError: it does not exist.
            InvalidArgumentError: it is damaged, or has another format version.
        """
        return self._with_history(self._load_or_advise(self.path(epoch, step)))

    def load_weights(self, path: str) -> dict[str, Any]:
        """Load the model's state dict from a checkpoint of any run. Raises the errors of `load`.

        `path` is relative to the store. Needs only memory for the model, because the optimizer's state stays in the
        file.
        """
        return self._load_or_advise(path, is_mapped=True).result.model

    def load_start(self, path: str) -> Checkpoint:
        """Load a checkpoint of any run, perhaps without its history. Raises the errors of `load`.

        All tensors except the model's stay in the file.
        """
        return self._load_or_advise(path, is_mapped=True)

    def newest_whole(self) -> Checkpoint | None:
        """Load the newest complete checkpoint, or return None without a checkpoint.

        All tensors except the model's stay in the file. If its history is lost, a warning says so.
        """
        position = self._newest_whole()
        if position is None:
            return None
        checkpoint = self._load_or_advise(self.path(*position), is_mapped=True)
        try:
            return self._with_history(checkpoint)
        except DamagedError as e:
            warnings.warn(str(e), stacklevel=5)
            return checkpoint

    def _load_or_advise(self, path: str, *, is_mapped: bool = False) -> Checkpoint:
        try:
            return self._load(path, is_mapped=is_mapped)
        except DamagedError as e:
            raise InvalidArgumentError(
                f"{e} Restore the file from a copy, or train again with another run_id."
            ) from None

    def _load(self, path: str, *, is_mapped: bool = False) -> Checkpoint:
        with self._opened(path) as file:
            checkpoint = read_checkpoint(file, self._store.full_url(path), is_mapped=is_mapped)
        if checkpoint.frozen is None:
            return checkpoint
        return replace(
            checkpoint, model={**checkpoint.model, **self._frozen(path, checkpoint.frozen)}
        )

    def _with_history(self, checkpoint: Checkpoint) -> Checkpoint:
        """Read the history of a checkpoint from the metrics file, unless the checkpoint contains it.

        Raises:
            DamagedError: the metrics file does not begin with the records of the checkpoint.
        """
        if (part := checkpoint.history_file) is None:
            return checkpoint
        lines = b""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            lines = self._store.read_bytes(self._metrics)[: part["bytes"]]
        if hashlib.sha256(lines).hexdigest() != part["sha256"]:
            name = self.path(*checkpoint.position).rpartition("/")[2]
            raise DamagedError(
                f"{self._store.full_url(self._metrics)} does not hold the records of {name}: it was changed or deleted. "
                "TorchModel.from_run(store, run_id) still returns the model, without its history."
            )
        return replace(checkpoint, history=_records(lines), history_file=None)

    def _frozen(self, path: str, frozen: Frozen) -> dict[str, Tensor]:
        """Load the frozen parameters of the checkpoint at `path`."""
        name = _frozen_path(path.rpartition("/")[0], frozen["sha256"])
        try:
            tensors = weights.Weights(frozen["sha256"], None, self._store, name).load()
        except (InvalidArgumentError, InternalError) as e:
            raise DamagedError(
                f"{self._store.full_url(name)}, the file with the frozen parameters of {path.rpartition('/')[2]}, is damaged or missing."
            ) from e
        # Copy the tensors out of the mapping, as `read_checkpoint` does.
        return copy.deepcopy({name: tensors[name] for name in frozen["names"]})

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[IO[bytes]]:
        """Open a file of the store, copied to a local disk if necessary."""
        if (local := self._store.local_path(path)) is not None:
            with open(local, "rb") as file:
                yield file
            return
        with tempfile.TemporaryFile(prefix="sparkhvd-checkpoint-") as copy:
            with self._store.open_input(path) as source:
                shutil.copyfileobj(source, copy, PIECE_BYTES)
            copy.seek(0)
            yield copy

    def keep_records(self, count: int) -> None:
        """Keep only the first `count` records of the metrics file, because a resumed run repeats later epochs."""
        with contextlib.suppress(ValueError):  # the file is damaged, and the run replaces it
            history = self.history()
            if len(history) > count:
                self._store.write_bytes(self._metrics, b"".join(_lines(history[:count])))

    def history(self) -> History:
        """The records of the finished epochs, from the metrics file."""
        return self.reader().after(0)

    def reader(self) -> HistoryReader:
        """Create a reader of the metrics file."""
        return HistoryReader(self._store, self._metrics)

    def _pointer(self) -> Position | None:
        """Read the position from `latest.json`, or return None if the file is missing or damaged.

        It may be missing or damaged if a writer was killed on a file system without atomic rename.
        """
        try:
            return position_of(self._store.read_bytes(f"{self._folder}/latest.json"))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _newest_whole(self) -> Position | None:
        """The position of the newest complete file."""
        for position in sorted(self._positions(), reverse=True):
            path = self.path(*position)
            with contextlib.suppress(FileNotFoundError, DamagedError), self._opened(path) as file:
                check_seal(file, path)
                return position
        return None

    def _positions(self) -> set[Position]:
        matches = (_NAME.fullmatch(p.rpartition("/")[2]) for p in self._store.list(self._folder))
        return {(int(m[1]), int(m[2] or 0)) for m in matches if m}


@dataclass(frozen=True)
class _Profile:
    """Parts of a profile used by its readers. See `sparkhvd.training.profile.Profile.state`."""

    every: int
    epochs: list[dict[str, Any]]
    steps: dict[str, float | list[float]]
    load: list[dict[str, str | list[float | None]]] = field(default_factory=list)
    generations: list[dict[str, int]] = field(default_factory=list)


def _profile_of(content: bytes) -> dict[str, Any]:
    """Parse a run's profile, or raise a ValueError for other content."""
    state = read_json(content)
    if not isinstance(state, dict):
        raise ValueError("the profile is not a JSON object")
    known = rebuild(_Profile, state, is_strict=False)
    is_whole = all(isinstance(each.get("epoch"), int) for each in known.epochs) and all(
        isinstance(each.get("host"), str)
        and isinstance(times := each.get("time"), list)
        and None not in times
        and all(len(values) == len(times) for name, values in each.items() if name != "host")
        for each in known.load
    )
    if not is_whole or known.every < 1:
        raise ValueError("the parts of the profile do not match each other")
    return {**state, **vars(known)}


class HistoryReader:
    """Reader of a growing metrics file. It reads only the records added since its last read.

    Args:
        store: store of the run.
        path: path of the file in the store.
    """

    def __init__(self, store: Store, path: str) -> None:
        self._store, self._path = store, path
        self._read_to = 0

    def after(self, reported: int) -> History:
        """Read the records of later epochs than `reported`.

        Raises:
            ValueError: a line is not a record.
        """
        records = self._added(reported)
        if records is None:  # a resumed run has replaced the file, so read it from its start
            self._read_to = 0
            records = self._added(reported)
        return records or []

    def _added(self, reported: int) -> History | None:
        """Read the new records and return None if the file was replaced."""
        data = self._bytes_from(self._read_to)
        if data is None:
            return None
        try:
            records = [each for each in _records(data) if epoch_of(each) > reported]
        except ValueError:
            if not self._read_to:
                raise
            return None
        if records and self._read_to and epoch_of(records[0]) > reported + 1:
            return None
        self._read_to += data.rfind(b"\n") + 1
        return records

    def _bytes_from(self, start: int) -> bytes | None:
        """Read the file from byte `start`, or return b"" if there is no file and `start` is 0, None if the file is shorter."""
        try:
            if not start or not self._store.is_seen:
                data = self._store.read_bytes(self._path)
                return data[start:] if len(data) >= start else None
            with self._store.open_input(self._path) as file:
                if file.size() < start:
                    return None
                file.seek(start)
                return bytes(file.read())
        except (FileNotFoundError, NotADirectoryError):
            return None if start else b""


def _lines(history: Sequence[Mapping[str, Value]]) -> list[bytes]:
    return [f"{json.dumps(record)}\n".encode() for record in history]


class _Prefixes:
    """Number of bytes and SHA-256 of the metrics file after each record."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._parts: list[HistoryFile] = [{"bytes": 0, "sha256": self._hash.hexdigest()}]

    @property
    def num_bytes(self) -> int:
        return self._parts[-1]["bytes"]

    def add(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            self._hash.update(line)
            num_bytes = self.num_bytes + len(line)
            self._parts.append({"bytes": num_bytes, "sha256": self._hash.hexdigest()})

    def of(self, num_records: int) -> HistoryFile | None:
        """The part with this number of records, or None if the file has fewer."""
        return self._parts[num_records] if num_records < len(self._parts) else None


def _records(lines: bytes) -> History:
    """Parse whole lines. The last one may be incomplete, because a writer adds to the file."""
    whole = lines.rpartition(b"\n")[0]
    records: list[Any] = [read_json(line) for line in whole.splitlines()]
    if not all(isinstance(record, dict) for record in records):
        raise ValueError("a line of the metrics file is not a record")
    return records


def epoch_of(record: Mapping[str, Value]) -> int:
    """Read the epoch of a record, or raise a ValueError for a record without an epoch."""
    epoch: Any = record.get("epoch")
    if not isinstance(epoch, int):
        raise ValueError(f"a record has the epoch {epoch!r:.100}")
    return epoch


def _frozen_path(folder: str, sha256: str) -> str:
    return f"{folder}/frozen-{sha256}.pt"


def _words(position: Position) -> str:
    epoch, step = position
    return f"step {step} of epoch {epoch + 1}" if step else f"the end of epoch {epoch}"
