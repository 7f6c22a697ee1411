"""A checkpoint, and the format of its file.

`torch.load(..., weights_only=True)` reads the file. It ends with the SHA-256 of the bytes before, which torch.load passes
over; `read_checkpoint` compares it first.
"""

from __future__ import annotations

import copy
import io
import os
import re
from dataclasses import dataclass, field, replace
from typing import IO, Any

import torch
from torch import Tensor

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.training.checkpoints.frozen import Frozen
from sparkhvd.training.checkpoints.rank_state import RankState
from sparkhvd.training.hashing import HashingWriter, sha256_of
from sparkhvd.training.types import History, State

__all__ = [
    "FORMAT_VERSION",
    "Checkpoint",
    "DamagedError",
    "Position",
    "check_seal",
    "read_checkpoint",
    "write_checkpoint",
]

FORMAT_VERSION = 6
# Version 3 had all parameters in it, version 4 nothing of `final`, `others` and `changes`; 5 was in no release.
_READ_VERSIONS = (3, 4, FORMAT_VERSION)
# The last line of a checkpoint.
_SEAL = re.compile(rb"\nsparkhvd-sha256 ([0-9a-f]{64})\n")
_SEAL_BYTES = len("\nsparkhvd-sha256 \n") + 64
# (epochs, steps) that are done.
Position = tuple[int, int]


class DamagedError(InvalidArgumentError):
    """A checkpoint has other bytes than were written; the message names the file."""


@dataclass(frozen=True)
class Checkpoint:
    """The state after `epoch` epochs and `step` steps of the next.

    Attributes:
        epoch: epochs that are done.
        model: the model's state dict, in its file without what `frozen` names.
        optimizer: the optimizer's state dict.
        scheduler: the scheduler's state dict, or None.
        history: the records of these epochs.
        fingerprint: of the run; a run that resumes from here must share it.
        scaler: the loss scaler's state dict, or None.
        callbacks: the states of the user's callbacks and why they stop the training, or None.
        step: steps that are done of the epoch that runs; 0 between epochs.
        buffers: the model's buffers that its state dict leaves out.
        ranks: each rank's own state inside an epoch, see `gather_rank_states`; empty between epochs, where all ranks are alike.
        compression: the state of the compression of gradients, see `gather_compression`.
        kept: states of the objects that a `train_fn` keeps, by name.
        frozen: the parameters that are in a file of their own, see `FrozenParameters`; None if there are none.
        final: what `on_train_end` has changed: entries of "model" and "others", all "buffers" and "changes"; a run that resumes calls it again.
        others: state of losses and metrics, see `Others`.
        changes: of model and optimizer since they were built, see `Changes`; {} if it is not known.
    """

    epoch: int
    model: dict[str, Any] = field(repr=False)
    optimizer: dict[str, Any] = field(repr=False)
    scheduler: dict[str, Any] | None = field(repr=False)
    history: History = field(repr=False)
    fingerprint: str = field(repr=False)
    scaler: dict[str, Any] | None = field(default=None, repr=False)
    callbacks: State | None = field(default=None, repr=False)
    step: int = 0
    buffers: dict[str, Tensor] = field(default_factory=dict, repr=False)
    ranks: list[RankState] = field(default_factory=list, repr=False)
    compression: State = field(default_factory=dict, repr=False)
    kept: State = field(default_factory=dict, repr=False)
    frozen: Frozen | None = None
    final: dict[str, Any] = field(default_factory=dict, repr=False)
    others: State = field(default_factory=dict, repr=False)
    changes: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def position(self) -> Position:
        """(epochs, steps) that are done."""
        return self.epoch, self.step

    @property
    def result(self) -> Checkpoint:
        """The checkpoint for the model of the run, after `on_train_end`."""
        if not self.final:
            return self
        model = {**self.model, **self.final["model"]}
        return replace(self, **{**self.final, "model": model}, final={})


def write_checkpoint(checkpoint: Checkpoint, sink: IO[bytes] | io.RawIOBase) -> None:
    """Write a checkpoint and its hash to an open file."""
    content = {"format_version": FORMAT_VERSION, **vars(checkpoint)}
    hashing = HashingWriter(sink)
    torch.save(content, hashing)  # type: ignore[arg-type]  # torch only calls write
    sink.write(f"\nsparkhvd-sha256 {hashing.sha256}\n".encode())


def read_checkpoint(file: IO[bytes], url: str, *, is_mapped: bool = False) -> Checkpoint:
    """Read a checkpoint from an open file, after its hash was compared.

    Args:
        file: seekable.
        url: of the file, for errors.
        is_mapped: leave all tensors but the model's in the file, which may be deleted afterwards.

    Raises:
        DamagedError: it has other bytes than were written.
        InvalidArgumentError: it has another format version.
    """
    check_seal(file, url)
    values = _mapped(file) if is_mapped else torch.load(file, weights_only=True)
    version = values.pop("format_version")
    if version not in _READ_VERSIONS:
        raise InvalidArgumentError(
            f"{url} has format version {version}; this sparkhvd reads {FORMAT_VERSION}. Give another run_id."
        )
    return Checkpoint(**values)


def check_seal(file: IO[bytes], url: str) -> None:
    """Compare the whole file with its hash, and go back to its beginning.

    Raises:
        DamagedError: it has other bytes than were written.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _SEAL_BYTES))
    seal = _SEAL.fullmatch(file.read())
    if seal is None:
        raise DamagedError(
            f"{url} is damaged: it has {size:,} bytes and does not end with its checksum, as if it was cut off."
        )
    file.seek(0)
    digest = sha256_of(file, size - _SEAL_BYTES)
    if digest != seal[1].decode():
        raise DamagedError(
            f"{url} is damaged: its SHA-256 is {digest}, and {seal[1].decode()} was written."
        )
    file.seek(0)


def _mapped(file: IO[bytes]) -> dict[str, Any]:
    """Load a checkpoint whose tensors, but for the model's, stay in the file."""
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
    for name in {"model", "final", "buffers", "changes"} & values.keys():
        values[name] = copy.deepcopy(values[name])
    return values
