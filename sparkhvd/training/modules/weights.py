"""The weights of a model as a file: written and read without holding them in memory a second time.

A file of weights is what `torch.save` writes of a dict from names to tensors, so `torch.load(..., weights_only=True)`
reads it. Equal weights give equal bytes, so that the store can name the file by its SHA-256.

Loaded in every Python worker, so it imports nothing of pyspark.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

import torch
from torch import Tensor

from sparkhvd.data.store.store import Store
from sparkhvd.errors import InternalError, InvalidArgumentError

__all__ = ["CLOSURE_BYTES", "Weights", "dump", "load", "store_weights"]

# Larger weights go through the store. Smaller ones travel with the program, which needs no place that all executors
# see; half of what one message of Spark Connect may hold.
CLOSURE_BYTES = 64 << 20
# Larger files are mapped: the workers of a host then share the pages.
MAPPED_BYTES = 64 << 20
COPY_BYTES = 16 << 20
# The record that ends what torch.save writes, a zip archive without a comment.
_ZIP_END, _ZIP_END_BYTES = b"PK\x05\x06", 22


@dataclass(frozen=True)
class Weights:
    """A file of weights: in the store if large, else here.

    Attributes:
        sha256: of the bytes.
        data: the bytes, or None.
        store: where they are if not here.
        name: the file in the store; "" for one that their hash names.
    """

    sha256: str
    data: bytes | None = field(default=None, repr=False)
    store: Store | None = None
    name: str = ""

    @property
    def path(self) -> str:
        """The file in the store."""
        return self.name or f"models/{self.sha256}"

    def load(self) -> dict[str, Tensor]:
        """The tensors by name.

        Raises:
            InvalidArgumentError: the store has no such file here.
            InternalError: the file is not what its name says.
        """
        if self.data is not None:
            return _checked(torch.load(io.BytesIO(self.data), weights_only=True))
        assert self.store is not None
        url = self.store.full_url(self.path)
        try:
            with _local_copy(self.store, self.path) as path:
                if _sha256(path) != self.sha256:
                    raise InternalError(f"{url} is not what its name says.")
                return load(path)
        except FileNotFoundError as e:
            raise InvalidArgumentError(
                f"The weights {url} are not there for this executor. Give a store that all executors share, and "
                "keep it for as long as the model is used."
            ) from e


class _Hashed:
    """A file that hashes what passes; without `sink` nothing is kept."""

    def __init__(self, sink: IO[bytes] | io.RawIOBase | None) -> None:
        self._sink = sink
        self._hash = hashlib.sha256()

    def write(self, data: Any) -> int:
        self._hash.update(data)
        if self._sink is not None:
            self._sink.write(data)
        return len(data)

    def flush(self) -> None:
        """Part of the protocol of a file."""

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


def dump(tensors: Mapping[str, Tensor], sink: IO[bytes] | io.RawIOBase | None = None) -> str:
    """Write tensors to an open file, or only pretend to; return the SHA-256 of the bytes."""
    hashed = _Hashed(sink)
    torch.save(dict(tensors), hashed)  # type: ignore[arg-type]  # torch needs write and flush alone
    return hashed.sha256


def load(path: str) -> dict[str, Tensor]:
    """The tensors of a file. Large ones stay in the file until they are used; it may be deleted meanwhile."""
    if os.path.getsize(path) >= MAPPED_BYTES:
        # Not every file system can map files.
        with contextlib.suppress(OSError, RuntimeError):
            return _checked(torch.load(path, weights_only=True, mmap=True))
    return _checked(torch.load(path, weights_only=True))


def store_weights(tensors: Mapping[str, Tensor], sha256: str, store: Store) -> Weights:
    """Put weights into the store, unless they are there; a whole file is never changed or deleted.

    One that is cut off, which a killed writer leaves on a mount that cannot rename, is written anew.

    Raises:
        InternalError: the bytes have another SHA-256 than `dump` told before.
    """
    weights = Weights(sha256, None, store)
    if not _is_whole(store, weights.path):
        with store.open_output(weights.path) as sink:
            if dump(tensors, sink) != sha256:
                raise InternalError(f"The weights {sha256} changed while they were written.")
    return weights


def _is_whole(store: Store, path: str) -> bool:
    """Whether a file of weights is there up to its end. Cheap: the hash is compared by whoever loads it."""
    if not store.exists(path) or (size := store.num_bytes(path)) < _ZIP_END_BYTES:
        return False
    with store.open_input(path) as file:
        file.seek(size - _ZIP_END_BYTES)
        return bytes(file.read(len(_ZIP_END))) == _ZIP_END


@contextlib.contextmanager
def _local_copy(store: Store, path: str) -> Iterator[str]:
    """A path on this host with the content of a file of the store."""
    here = store.local_path(path)
    if here is not None:
        yield here
        return
    with tempfile.TemporaryDirectory(prefix="sparkhvd-weights-") as folder:
        copy = f"{folder}/weights"
        with store.open_input(path) as source, open(copy, "wb") as sink:
            shutil.copyfileobj(source, sink, COPY_BYTES)
        yield copy


def _sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(COPY_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _checked(loaded: Any) -> dict[str, Tensor]:
    assert isinstance(loaded, dict)
    return loaded
