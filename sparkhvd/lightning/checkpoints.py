"""Lightning's checkpoints in a run: its state in memory, for the run's own, and files of a `ModelCheckpoint` in the run's folder.

Checkpoints of a run are read without trust, so what Lightning and callbacks keep must be plain: tensors, numbers, texts, and dicts and lists
of these.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError, StoreError
from sparkhvd.training.hashing import HashingWriter, sha256_of

__all__ = ["IN_MEMORY", "RunFiles", "checkpoint_io", "plain"]

# In place of a path: the state that the run's own checkpoint has.
IN_MEMORY = "sparkhvd:run"
# Parts that the run has anyway, or that describe the module and not its training.
_LEFT_OUT = (
    "state_dict",
    *("hyper_parameters", "hparams_type"),
    *("datamodule_hyper_parameters", "datamodule_hparams_type"),
)
_PLAIN = (Tensor, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class RunFiles:
    """Files of Lightning in a run's folder of the store: what a `ModelCheckpoint` of the user's writes.

    They may hold what only a trusted file may, so each is read if it is as this run has written it.

    Attributes:
        folder: the path of the folder, for Lightning; of this rank alone where the store is no local folder.
        sums: SHA-256 by name of a file; one elsewhere on this host, where the user's callback writes, is named by its path.
    """

    def __init__(self, store: Store, run_dir: str) -> None:
        self._store, self._prefix = store, f"{run_dir}/lightning"
        self.folder = store.local_path(self._prefix) or f"/sparkhvd/{self._prefix}"
        self.sums: dict[str, str] = {}

    def name_of(self, path: str) -> str:
        """Return the name of a file by its path; "" if it is not in the folder."""
        folder, _, name = os.fspath(path).rpartition("/")
        return name if folder == self.folder else ""

    def note(self, path: str) -> None:
        """Keep the hash of a file that has been written elsewhere on this host."""
        if os.path.isfile(path):
            with open(path, "rb") as file:
                self.sums[os.fspath(path)] = sha256_of(file, os.path.getsize(path))

    def save(self, name: str, checkpoint: Mapping[str, Any]) -> None:
        """Write a file."""
        with self._store.open_output(f"{self._prefix}/{name}") as sink:
            hashing = HashingWriter(sink)
            torch.save(checkpoint, hashing)  # type: ignore[arg-type]  # torch only calls write
            self.sums[name] = hashing.sha256

    def load(self, name: str) -> dict[str, Any]:
        """Read a file.

        Raises:
            StoreError: it is not as this run has written it.
        """
        if os.path.isabs(name):
            where, data = name, Path(name).read_bytes()
        else:
            path = f"{self._prefix}/{name}"
            where, data = self._store.full_url(path), self._store.read_bytes(path)
        if hashlib.sha256(data).hexdigest() != self.sums.get(name):
            raise StoreError(
                f"{where} is not what this run has written. It is damaged, or something else writes to its folder."
            )
        loaded: dict[str, Any] = torch.load(
            io.BytesIO(data), map_location="cpu", weights_only=False
        )
        return loaded

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""
        self._store.delete(f"{self._prefix}/{name}")
        self.sums.pop(name, None)


def checkpoint_io(package: Any, files: RunFiles) -> Any:
    """Return a `CheckpointIO` of a package of Lightning: `IN_MEMORY` as its attribute `state`, files of the run, and others as ever."""

    class RunCheckpointIO(package.plugins.io.TorchCheckpointIO):  # type: ignore[misc]  # of either package
        state: dict[str, Any] | None = None

        def save_checkpoint(
            self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
        ) -> None:
            if path == IN_MEMORY:
                self.state = {n: part for n, part in checkpoint.items() if n not in _LEFT_OUT}
            elif name := files.name_of(path):
                files.save(name, checkpoint)
            else:
                super().save_checkpoint(checkpoint, path, storage_options)
                files.note(path)

        def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
            if path == IN_MEMORY:
                return dict(self.state or {})
            if name := files.name_of(path):
                return files.load(name)
            loaded: dict[str, Any] = super().load_checkpoint(path, *args, **options)
            return loaded

        def remove_checkpoint(self, path: Any) -> None:
            if name := files.name_of(path):
                files.delete(name)
            else:
                super().remove_checkpoint(path)

    return RunCheckpointIO()


def plain(value: Any, name: str = "") -> Any:
    """Return a state with plain containers and numbers.

    Raises:
        InvalidArgumentError: a part can be no part of a checkpoint.
    """
    if isinstance(value, torch.nn.Parameter):
        return value.detach()
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        return torch.from_numpy(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {key: plain(part, f"{name}[{key!r}]") for key, part in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        kind = type(value) if type(value) in (list, tuple, set) else list
        return kind(plain(part, f"{name}[{i}]") for i, part in enumerate(value))
    raise InvalidArgumentError(
        f"Lightning's state holds {type(value).__name__} in {name}, and checkpoints of a run hold tensors, numbers, texts, and dicts and lists of "
        "these. Let state_dict() of that callback or scheduler return such."
    )
