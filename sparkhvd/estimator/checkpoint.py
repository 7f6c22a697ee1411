"""What survives a lost worker: one file per epoch in the store, and a pointer that is written last.

    runs/<run_id>/checkpoints/epoch-<k>.pt    after k epochs; torch.load(..., weights_only=True) reads it
    runs/<run_id>/checkpoints/latest.json     which of them is whole and newest, and its SHA-256
    runs/<run_id>/metrics.jsonl               one JSON line per epoch

Random numbers need no state here: every rank seeds its generators from (seed, epoch, rank) when an epoch starts.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.store import Store

__all__ = ["Checkpoint", "Checkpoints", "FORMAT_VERSION"]

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Checkpoint:
    """The state after `epoch` epochs.

    Attributes:
        epoch: epochs that are done.
        model: the model's state dict.
        optimizer: the optimizer's state dict.
        scheduler: the scheduler's state dict, or None.
        history: the records of these epochs.
        fingerprint: what a run must share with this one to go on from here.
    """

    epoch: int
    model: dict[str, Any] = field(repr=False)
    optimizer: dict[str, Any] = field(repr=False)
    scheduler: dict[str, Any] | None = field(repr=False)
    history: list[dict[str, Any]] = field(repr=False)
    fingerprint: str = field(repr=False)


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, store: Store, run_dir: str) -> None:
        """Nothing is read or written yet."""
        self._store = store
        self._folder = f"{run_dir}/checkpoints"
        self._metrics = f"{run_dir}/metrics.jsonl"
        # Epochs whose files this object wrote and has not deleted.
        self._written: set[int] = set()

    def path(self, epoch: int) -> str:
        """The file after `epoch` epochs, relative to the store."""
        return f"{self._folder}/epoch-{epoch}.pt"

    def save(self, checkpoint: Checkpoint, *, keep: Sequence[int] = ()) -> None:
        """Write a checkpoint, then the pointer to it, then the metrics; older ones but the last go.

        Args:
            checkpoint: what to write.
            keep: epochs whose files stay besides the last two.
        """
        content = {"format_version": FORMAT_VERSION, **vars(checkpoint)}
        buffer = io.BytesIO()
        torch.save(content, buffer)
        data = buffer.getvalue()
        self._store.write_bytes(self.path(checkpoint.epoch), data)
        pointer = {"epoch": checkpoint.epoch, "sha256": hashlib.sha256(data).hexdigest()}
        self._store.write_bytes(f"{self._folder}/latest.json", json.dumps(pointer).encode())
        lines = "".join(json.dumps(record) + "\n" for record in checkpoint.history)
        self._store.write_bytes(self._metrics, lines.encode())
        # Two stay: a reader that has just seen the old pointer must still find its file.
        newest = (checkpoint.epoch, checkpoint.epoch - 1)
        for epoch in self._written - {*newest, *keep}:
            self._store.delete(self.path(epoch))
        self._written = {e for e in {*self._written, checkpoint.epoch} if e in (*newest, *keep)}

    def latest_epoch(self) -> int:
        """Epochs that the newest whole checkpoint has; 0 if there is none."""
        pointer = self._pointer()
        return int(pointer["epoch"]) if pointer else 0

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint, or None.

        Raises:
            InvalidArgumentError: its file is not what was written.
        """
        pointer = self._pointer()
        return self.load(pointer["epoch"], pointer["sha256"]) if pointer else None

    def load(self, epoch: int, sha256: str | None = None) -> Checkpoint:
        """The checkpoint after `epoch` epochs."""
        path = self.path(epoch)
        data = self._store.read_bytes(path)
        if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
            raise InvalidArgumentError(
                f"{self._store.full_url(path)}: the file is not what was written. Delete the run's folder, or "
                "give another run_id."
            )
        values = torch.load(io.BytesIO(data), weights_only=True)
        version = values.pop("format_version")
        if version != FORMAT_VERSION:
            raise InvalidArgumentError(
                f"{self._store.full_url(path)} has format version {version}; this sparkhvd reads "
                f"{FORMAT_VERSION}. Give another run_id."
            )
        return Checkpoint(**values)

    def history(self) -> list[dict[str, Any]]:
        """The records of the epochs that are done, as the metrics file has them now."""
        try:
            text = self._store.read_bytes(self._metrics).decode()
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [json.loads(line) for line in text.splitlines()]

    def _pointer(self) -> Mapping[str, Any] | None:
        try:
            pointer = json.loads(self._store.read_bytes(f"{self._folder}/latest.json"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        assert isinstance(pointer, dict)
        return pointer
