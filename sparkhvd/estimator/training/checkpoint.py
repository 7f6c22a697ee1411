"""What survives a lost worker: files in the store, and a pointer that is written last.

    runs/<run_id>/checkpoints/epoch-<k>.pt             after k epochs; torch.load(..., weights_only=True) reads it
    runs/<run_id>/checkpoints/epoch-<k>-step-<s>.pt    after k epochs and s steps of the next
    runs/<run_id>/checkpoints/latest.json              which of them is whole and newest, and its SHA-256
    runs/<run_id>/metrics.jsonl                        one JSON line per epoch
    runs/<run_id>/attempts/writer                      who writes them: the last that began

At the end of an epoch all ranks hold the same state, and random numbers are seeded anew from (seed, epoch, rank).
Inside an epoch every rank has generators, sums of the loss and running statistics of its own: a file of a step
holds those of each rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import torch

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.data.store import Store

__all__ = ["FORMAT_VERSION", "Checkpoint", "Checkpoints", "Choice"]

FORMAT_VERSION = 2
# Read at once.
_PIECE_BYTES = 16 << 20
# One of several epochs.
Choice = Callable[[Collection[int]], int]
_NAME = re.compile(r"epoch-(\d+)(?:-step-(\d+))?\.pt")


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

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


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
        self._files: set[tuple[int, int]] | None = None
        self._previous: tuple[int, int] | None = None

    def path(self, epoch: int, step: int = 0) -> str:
        """The file after `epoch` epochs and `step` steps, relative to the store."""
        name = f"epoch-{epoch}-step-{step}" if step else f"epoch-{epoch}"
        return f"{self._folder}/{name}.pt"

    def save(self, checkpoint: Checkpoint, *, keep: Choice | None = None) -> None:
        """Write a checkpoint, then the pointer to it, then the metrics; older ones but the last go.

        Whoever is killed in here leaves a checkpoint that can be read: this one, or the one before.

        Args:
            checkpoint: what to write.
            keep: of the epochs that are saved, the one whose file stays besides the last two.

        Raises:
            InvalidArgumentError: another has begun to write checkpoints of this run: a fit with the same run_id.
        """
        content = {"format_version": FORMAT_VERSION, **vars(checkpoint)}
        if self._files is None:
            self._take_over()
        assert self._files is not None
        self._check_writer()
        pointer: dict[str, Any] = {"epoch": checkpoint.epoch, "step": checkpoint.step}
        if checkpoint.position == self._previous:
            # A loop of the user's own may save twice without a new record. Then the pointer names the file before
            # and after it is replaced; both are whole, but only the first is what was hashed.
            self._point({**pointer, "sha256": None})
        with self._store.open_output(self.path(*checkpoint.position)) as sink:
            hashing = _Hashing(sink)
            torch.save(content, hashing)  # type: ignore[arg-type]  # torch only calls write
        self._check_writer()
        self._files.add(checkpoint.position)
        self._point({**pointer, "sha256": hashing.hexdigest()})
        if not checkpoint.step:
            self.write_history(checkpoint.history)
        # Two stay: a reader that has just seen the old pointer must still find its file.
        stay = {checkpoint.position, self._previous}
        if keep is not None:
            stay.add((keep(self.saved_epochs()), 0))
        for position in self._files - stay:
            self._store.delete(self.path(*position))
        self._files &= stay
        self._previous = checkpoint.position

    def _take_over(self) -> None:
        """Look at what an attempt before this one has left, and delete what it did not finish.

        The last that takes over writes. One before it, of another fit or on a host that was taken for lost, stops.
        """
        self._store.write_bytes(self._writer, self._token)
        self._store.delete_unfinished(self._folder)
        self._files = self._positions()
        self._previous = self.latest_position() if self._pointer() else None
        # What was written after it is not what the run goes on from.
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
        """Epochs that the newest whole checkpoint has; 0 if there is none."""
        return self.latest_position()[0]

    def latest_position(self) -> tuple[int, int]:
        """(epochs, steps of the next one) that the newest whole checkpoint has; (0, 0) if there is none."""
        pointer = self._pointer()
        return (pointer["epoch"], pointer["step"]) if pointer else (0, 0)

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint, or None.

        Raises:
            InvalidArgumentError: its file is not what was written.
        """
        pointer = self._pointer()
        if pointer is None:
            return None
        try:
            return self.load(pointer["epoch"], pointer["step"], sha256=pointer["sha256"])
        except FileNotFoundError:  # deleted by hand: the one before is still there
            older = self._newest_whole()
            return self.load(older["epoch"], older["step"]) if older else None

    def load(self, epoch: int, step: int = 0, *, sha256: str | None = None) -> Checkpoint:
        """The checkpoint after `epoch` epochs and `step` steps."""
        path = self.path(epoch, step)
        with self._opened(path) as file:
            if sha256 is not None and _sha256(file) != sha256:
                raise InvalidArgumentError(
                    f"{self._store.full_url(path)}: the file is not what was written. Delete the run's folder, or "
                    "give another run_id."
                )
            return self._parse(path, file)

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

    def _parse(self, path: str, source: Any) -> Checkpoint:
        values = torch.load(source, weights_only=True)
        version = values.pop("format_version")
        if version != FORMAT_VERSION:
            raise InvalidArgumentError(
                f"{self._store.full_url(path)} has format version {version}; this sparkhvd reads "
                f"{FORMAT_VERSION}. Give another run_id."
            )
        return Checkpoint(**values)

    def load_weights(self, path: str) -> dict[str, Any]:
        """The model's state dict in a checkpoint file of any run, relative to the store."""
        with self._opened(path) as file:
            return self._parse(path, file).model

    def history(self) -> list[dict[str, Any]]:
        """The records of the epochs that are done, as the metrics file has them now."""
        try:
            text = self._store.read_bytes(self._metrics).decode()
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [json.loads(line) for line in text.splitlines()]

    def _point(self, pointer: dict[str, Any]) -> None:
        self._store.write_bytes(f"{self._folder}/latest.json", json.dumps(pointer).encode())

    def _pointer(self) -> dict[str, Any] | None:
        try:
            pointer = json.loads(self._store.read_bytes(f"{self._folder}/latest.json"))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            pointer = None
        # Where a rename cannot replace a file, or there is none, a writer may have been killed between the two.
        if not isinstance(pointer, dict) or not {"epoch", "sha256"} <= pointer.keys():
            return self._newest_whole()
        return {"step": 0, **pointer}

    def _newest_whole(self) -> dict[str, Any] | None:
        """What the pointer would say, from the files alone."""
        for epoch, step in sorted(self._positions(), reverse=True):
            try:
                self.load(epoch, step)
            except FileNotFoundError:
                continue
            except OSError:  # a store that cannot be read now says nothing about its files
                raise
            except Exception:  # noqa: BLE001 - torch raises many kinds for a file that is cut off
                continue
            return {"epoch": epoch, "step": step, "sha256": None}
        return None

    def _positions(self) -> set[tuple[int, int]]:
        found = (_NAME.fullmatch(p.rpartition("/")[2]) for p in self._store.list(self._folder))
        return {(int(m[1]), int(m[2] or 0)) for m in found if m}


def _sha256(file: IO[bytes]) -> str:
    """Of a whole file, which is then at its beginning again."""
    digest = hashlib.sha256()
    while piece := file.read(_PIECE_BYTES):
        digest.update(piece)
    file.seek(0)
    return digest.hexdigest()
