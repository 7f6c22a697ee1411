"""What survives a lost worker: files in the store, and a pointer that is written last.

    runs/<run_id>/checkpoints/epoch-<k>.pt             after k epochs; torch.load(..., weights_only=True) reads it
    runs/<run_id>/checkpoints/epoch-<k>-step-<s>.pt    after k epochs and s steps of the next
    runs/<run_id>/checkpoints/latest.json              which of them is the newest
    runs/<run_id>/metrics.jsonl                        one JSON line per epoch
    runs/<run_id>/attempts/writer                      who writes them: the last that began

At the end of an epoch all ranks hold the same state, and random numbers are seeded anew from (seed, epoch, rank).
Inside an epoch every rank has generators, sums of the loss and running statistics of its own: a file of a step
holds those of each rank.

A checkpoint ends with the SHA-256 of what is before it, which torch.load passes over. Whoever reads one compares it
first; the newest that is whole counts.
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
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import torch

from sparkhvd.data.store.checksummed import dump_sealed, load_sealed
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError

__all__ = ["FORMAT_VERSION", "Checkpoint", "Checkpoints", "Choice"]

FORMAT_VERSION = 3
# Read at once.
_PIECE_BYTES = 16 << 20
# One of several epochs.
Choice = Callable[[Collection[int]], int]
_NAME = re.compile(r"epoch-(\d+)(?:-step-(\d+))?\.pt")
# The last line of a checkpoint.
_SEAL = re.compile(rb"\nsparkhvd-sha256 ([0-9a-f]{64})\n")
_SEAL_BYTES = len("\nsparkhvd-sha256 \n") + 64
# (epochs, steps) that are done.
Position = tuple[int, int]


class _DamagedError(InvalidArgumentError):
    """A checkpoint is not what was written; the message names the file."""


@dataclass(frozen=True)
class Checkpoint:
    """The state after `epoch` epochs and `step` steps of the next.

    Attributes:
        epoch: epochs that are done.
        model: the model's state dict.
        optimizer: the optimizer's state dict.
        scheduler: the scheduler's state dict, or None.
        history: the records of these epochs.
        fingerprint: what a run must share with this one to go on from here.
        scaler: the loss scaler's state dict, or None.
        callbacks: the states of the user's callbacks and why they stop the training, or None.
        step: steps that are done of the epoch that runs; 0 between epochs.
        buffers: the model's buffers that its state dict leaves out.
        ranks: what each rank has of its own, inside an epoch; empty between epochs, where all ranks are alike.
        compression: what the compression of gradients remembers, see `gather_compression`.
    """

    epoch: int
    model: dict[str, Any] = field(repr=False)
    optimizer: dict[str, Any] = field(repr=False)
    scheduler: dict[str, Any] | None = field(repr=False)
    history: list[dict[str, Any]] = field(repr=False)
    fingerprint: str = field(repr=False)
    scaler: dict[str, Any] | None = field(default=None, repr=False)
    callbacks: dict[str, Any] | None = field(default=None, repr=False)
    step: int = 0
    buffers: dict[str, Any] = field(default_factory=dict, repr=False)
    ranks: list[dict[str, Any]] = field(default_factory=list, repr=False)
    compression: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def position(self) -> tuple[int, int]:
        """(epochs, steps) that are done."""
        return self.epoch, self.step


class _Hashing:
    """A file that hashes what is written to it, so that no second copy of the bytes is needed."""

    def __init__(self, sink: Any) -> None:
        self._sink = sink
        self._hash = hashlib.sha256()

    def write(self, data: Any) -> int:
        self._hash.update(data)
        self._sink.write(data)
        return len(data)

    def flush(self) -> None:
        """Nothing is kept back."""

    def seal(self) -> None:
        """End the file with the hash of what was written."""
        self._sink.write(b"\nsparkhvd-sha256 %s\n" % self._hash.hexdigest().encode())


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, store: Store, run_dir: str) -> None:
        """Nothing is read or written yet."""
        self._store = store
        self._folder = f"{run_dir}/checkpoints"
        self._metrics = f"{run_dir}/metrics.jsonl"
        self._writer = f"{run_dir}/attempts/writer"
        self._token = secrets.token_hex(16).encode()
        # Files in the folder, by position; None until the first is written.
        self._files: set[Position] | None = None
        self._previous: Position | None = None
        # What `latest` gave.
        self._found: Position | None = None
        # What `latest` passed over, and what is repeated therefore; "" if nothing.
        self.warning = ""

    def path(self, epoch: int, step: int = 0) -> str:
        """The file after `epoch` epochs and `step` steps, relative to the store."""
        name = f"epoch-{epoch}-step-{step}" if step else f"epoch-{epoch}"
        return f"{self._folder}/{name}.pt"

    def save(
        self, checkpoint: Checkpoint, *, keep: Choice | None = None, num_epochs: int = 1
    ) -> None:
        """Write a checkpoint, then the pointer to it, then the metrics; older ones but the last go.

        Whoever is killed in here leaves a checkpoint that can be read: this one, or the one before.

        Args:
            checkpoint: what to write.
            keep: of the epochs that are saved, the one whose file stays besides the last two.
            num_epochs: so many epochs' files stay, the last ones.

        Raises:
            InvalidArgumentError: another has begun to write checkpoints of this run: a fit with the same run_id.
        """
        content = {"format_version": FORMAT_VERSION, **vars(checkpoint)}
        if self._files is None:
            self._take_over()
        assert self._files is not None
        self._check_writer()
        with self._store.open_output(self.path(*checkpoint.position)) as sink:
            hashing = _Hashing(sink)
            torch.save(content, hashing)  # type: ignore[arg-type]  # torch only calls write
            hashing.seal()
        self._check_writer()
        self._files.add(checkpoint.position)
        pointer = dump_sealed({"epoch": checkpoint.epoch, "step": checkpoint.step})
        self._store.write_bytes(f"{self._folder}/latest.json", pointer)
        if not checkpoint.step:
            self.write_history(checkpoint.history)
        # Two stay: a reader that has just seen the old pointer must still find its file.
        stay = {checkpoint.position, self._previous}
        if keep is not None:
            stay.add((keep(self.saved_epochs()), 0))
        self._keep({*stay, *self._last(num_epochs)})
        self._previous = checkpoint.position

    def finish(self, epoch: int, num_epochs: int) -> None:
        """Delete all checkpoints but that of `epoch` and of the last `num_epochs`, at least 1; none is written any more."""
        self._files = self._positions()
        self._keep({(epoch, 0), *self._last(num_epochs)})

    def _last(self, num_epochs: int) -> list[Position]:
        return [(epoch, 0) for epoch in sorted(self.saved_epochs())[-num_epochs:]]

    def _keep(self, stay: Collection[Position | None]) -> None:
        assert self._files is not None
        for position in [p for p in self._files if p not in stay]:
            self._store.delete(self.path(*position))
            self._files.remove(position)

    def _take_over(self) -> None:
        """Look at what an attempt before this one has left, and delete what it did not finish.

        The last that takes over writes. One before it, of another fit or on a host that was taken for lost, stops.
        """
        self._store.write_bytes(self._writer, self._token)
        self._store.delete_unfinished(self._folder)
        self._files = self._positions()
        self._previous = self._found or self._pointer() or self._newest_whole()
        # What was written after it, or is damaged, is not what the run goes on from.
        for position in [p for p in self._files if p > (self._previous or (-1, 0))]:
            self._store.delete(self.path(*position))
            self._files.remove(position)

    def saved_epochs(self) -> set[int]:
        """The epochs whose checkpoints are there."""
        files = self._positions() if self._files is None else self._files
        return {epoch for epoch, step in files if not step}

    def _check_writer(self) -> None:
        try:
            found = self._store.read_bytes(self._writer)
        except (FileNotFoundError, NotADirectoryError):  # deleted by hand
            return
        if found != self._token:
            raise InvalidArgumentError(
                f"Another fit with the same run_id has begun to write checkpoints of "
                f"{self._store.full_url(self._folder.rpartition('/')[0])}, so this one ends. Give fits that run at the "
                "same time run_ids of their own."
            )

    def write_history(self, history: Sequence[dict[str, Any]]) -> None:
        """Write the metrics file."""
        lines = "".join(json.dumps(record) + "\n" for record in history)
        self._store.write_bytes(self._metrics, lines.encode())

    def latest_epoch(self) -> int:
        """Return the epochs of the newest checkpoint; 0 if there is none."""
        return self.latest_position()[0]

    def latest_position(self) -> Position:
        """Return (epochs, steps of the next one) of the newest checkpoint; (0, 0) if there is none."""
        return self._pointer() or self._newest_whole() or (0, 0)

    def latest(self) -> Checkpoint | None:
        """Return the newest whole checkpoint, or None where there is none; `warning` says what is repeated if it is older.

        Raises:
            InvalidArgumentError: there are checkpoints, and all are damaged; or they have another format version.
        """
        positions, pointer = self._positions(), self._pointer()
        newest = pointer or max(positions, default=None)
        if newest is None:
            return None
        damaged, gone = [], []
        # Later ones than the pointer's were not finished by their writer.
        for position in sorted({p for p in positions if p <= newest} | {newest}, reverse=True):
            try:
                found = self._load(self.path(*position))
            except FileNotFoundError:
                gone.append(f"{self._store.full_url(self.path(*position))} is not there.")
            except _DamagedError as e:
                damaged.append(str(e))
            else:
                self._found = position
                self._warn([*gone, *damaged], position, newest)
                return found
        # Without a pointer the first one was never finished.
        if damaged and self._store.exists(f"{self._folder}/latest.json"):
            raise InvalidArgumentError(
                f"{' '.join(damaged)} No checkpoint of this run is whole. Restore one from a copy; or delete the damaged "
                "ones, and a fit with this run_id trains from the beginning."
            )
        self._warn([*gone, *damaged], None, newest)
        return None

    def _warn(self, lost: Sequence[str], found: Position | None, newest: Position) -> None:
        if not lost:
            return
        start = "the beginning" if found is None else _words(found)
        self.warning = f"{' '.join(lost)} The run goes on from {start}, and what it did from there to {_words(newest)} is repeated."
        warnings.warn(self.warning, stacklevel=3)

    def load(self, epoch: int, step: int = 0) -> Checkpoint:
        """Return the checkpoint after `epoch` epochs and `step` steps.

        Raises:
            FileNotFoundError: there is none.
            InvalidArgumentError: it is damaged, or has another format version.
        """
        return self._load_or_advise(self.path(epoch, step))

    def load_weights(self, path: str) -> dict[str, Any]:
        """Return the model's state dict in a checkpoint file of any run, relative to the store; raises as `load`.

        Takes the model's size of memory: the optimizer's state, twice that with Adam, stays in the file.
        """
        return self._load_or_advise(path, is_mapped=True).model

    def _load_or_advise(self, path: str, *, is_mapped: bool = False) -> Checkpoint:
        try:
            return self._load(path, is_mapped=is_mapped)
        except _DamagedError as e:
            raise InvalidArgumentError(
                f"{e} Restore it from a copy, or train anew with another run_id."
            ) from None

    def _load(self, path: str, *, is_mapped: bool = False) -> Checkpoint:
        with self._opened(path) as file:
            self._check(path, file)
            values = _mapped(file) if is_mapped else torch.load(file, weights_only=True)
        version = values.pop("format_version")
        if version != FORMAT_VERSION:
            raise InvalidArgumentError(
                f"{self._store.full_url(path)} has format version {version}; this sparkhvd reads "
                f"{FORMAT_VERSION}. Give another run_id."
            )
        return Checkpoint(**values)

    def _check(self, path: str, file: IO[bytes]) -> None:
        """Compare the whole file with its seal, and go back to its beginning."""
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _SEAL_BYTES))
        seal = _SEAL.fullmatch(file.read())
        if seal is None:
            raise _DamagedError(
                f"{self._store.full_url(path)} is damaged: it has {size:,} bytes and does not end with its checksum, as if "
                "it was cut off."
            )
        file.seek(0)
        found = _sha256(file, size - _SEAL_BYTES)
        if found != seal[1].decode():
            raise _DamagedError(
                f"{self._store.full_url(path)} is damaged: its SHA-256 is {found}, and {seal[1].decode()} was written."
            )
        file.seek(0)

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[IO[bytes]]:
        """A file of the store, without its bytes in memory besides the tensors that are made of them."""
        if (local := self._store.local_path(path)) is not None:
            with open(local, "rb") as file:
                yield file
            return
        with tempfile.TemporaryFile(prefix="sparkhvd-checkpoint-") as copy:
            with self._store.open_input(path) as source:
                shutil.copyfileobj(source, copy, _PIECE_BYTES)
            copy.seek(0)
            yield copy

    def history(self) -> list[dict[str, Any]]:
        """The records of the epochs that are done, as the metrics file has them now."""
        try:
            text = self._store.read_bytes(self._metrics).decode()
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [json.loads(line) for line in text.splitlines()]

    def _pointer(self) -> Position | None:
        """Return what the pointer says; None if there is none, or it is damaged.

        Where a rename cannot replace a file, a writer may have been killed between two pointers.
        """
        try:
            pointer = load_sealed(self._store.read_bytes(f"{self._folder}/latest.json"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return None if pointer is None else (pointer["epoch"], pointer["step"])

    def _newest_whole(self) -> Position | None:
        """Return what the pointer would say, from the files alone."""
        for position in sorted(self._positions(), reverse=True):
            path = self.path(*position)
            with contextlib.suppress(FileNotFoundError, _DamagedError), self._opened(path) as file:
                self._check(path, file)
                return position
        return None

    def _positions(self) -> set[Position]:
        found = (_NAME.fullmatch(p.rpartition("/")[2]) for p in self._store.list(self._folder))
        return {(int(m[1]), int(m[2] or 0)) for m in found if m}


def _sha256(file: IO[bytes], size: int) -> str:
    """Hash the next `size` bytes of a file."""
    digest = hashlib.sha256()
    while size and (piece := file.read(min(size, _PIECE_BYTES))):
        digest.update(piece)
        size -= len(piece)
    return digest.hexdigest()


def _mapped(file: IO[bytes]) -> dict[str, Any]:
    """Load a checkpoint whose tensors, but for the model's, stay in the file. It may be deleted afterwards."""
    try:
        values: dict[str, Any] = torch.load(
            f"/proc/self/fd/{file.fileno()}", weights_only=True, mmap=True
        )
    except (
        OSError,
        RuntimeError,
    ):  # not every system has such names, nor every file system mappings
        return dict(torch.load(file, weights_only=True))
    # Out of the mapping, and tied tensors as one: a file that is deleted on NFS takes mapped pages with it.
    values["model"] = copy.deepcopy(values["model"])
    return values


def _words(position: Position) -> str:
    epoch, step = position
    return f"step {step} of epoch {epoch + 1}" if step else f"the end of epoch {epoch}"
