"""Files of a model's weights, written and read without a second copy in memory.

`torch.save` writes a dict from names to tensors, and `torch.load(..., weights_only=True)` reads it. Equal weights give equal
bytes, so that the store can name the file by its SHA-256.

Loaded in every Python worker, so it does not import pyspark.
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
from typing import IO

import torch
from torch import Tensor
from torch.nn import functional as F

from sparkhvd.data.store.store import Store
from sparkhvd.errors import InternalError, InvalidArgumentError

# Larger weights are a file in the store. Smaller weights are part of the program, which does not need a store that all
# executors can read. The limit is half the limit of a Spark Connect message.
CLOSURE_BYTES = 64 << 20
# Files from this size on are mapped, so that the workers of a host share the pages.
MAPPED_BYTES = 64 << 20
# End record of a zip archive without a comment, as torch.save writes it.
_ZIP_END, _ZIP_END_BYTES = b"PK\x05\x06", 22


@dataclass(frozen=True)
class Weights:
    """Content of a file of weights: its bytes, or for large weights its place in the store.

    Attributes:
        sha256: SHA-256 of the bytes.
        data: the bytes, or None for a file in the store.
        store: store of the file if `data` is None.
        name: path of the file in the store; "" for a path from the hash.
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
        """Load the tensors by name.

        Raises:
            InvalidArgumentError: this process does not find the file in the store.
            InternalError: the file has another hash.
        """
        if self.data is not None:
            return _checked(torch.load(io.BytesIO(self.data), weights_only=True))
        assert self.store is not None
        url = self.store.full_url(self.path)
        try:
            with local_copy(self.store, self.path) as path:
                with open(path, "rb") as file:
                    digest = sha256_of(file, os.path.getsize(path))
                if digest != self.sha256:
                    raise InternalError(
                        f"{url} has other content than was written: its SHA-256 differs."
                    )
                return load(path)
        except FileNotFoundError as e:
            raise InvalidArgumentError(
                f"The weights {url} do not exist on this executor. Give a store that all executors share, and "
                "keep it as long as the model is used."
            ) from e


def dump(tensors: Mapping[str, Tensor], sink: IO[bytes] | io.RawIOBase | None = None) -> str:
    """Write tensors to an open file, or nowhere, and return the SHA-256 of the bytes."""
    hashing = HashingWriter(sink)
    torch.save(dict(tensors), hashing)  # type: ignore[arg-type]  # torch needs write and flush alone
    return hashing.sha256


def is_of_machine(error: Exception) -> bool:
    """Whether an error of torch's reader comes from this machine or its torch, and not from a damaged file.

    Callers replace damaged files. They must not replace an intact file because a machine has too little memory.
    """
    text = str(error)
    return (
        isinstance(error, (OSError, MemoryError))
        or (isinstance(error, RuntimeError) and ("memory" in text or "alloc" in text))
        or "Unsupported global" in text
    )


def load(path: str) -> dict[str, Tensor]:
    """Load the tensors of a file. A large file is mapped: its tensors are read when used, and it may be deleted."""
    if os.path.getsize(path) >= MAPPED_BYTES:
        # If the file system cannot map files, read the file below.
        with contextlib.suppress(OSError, RuntimeError):
            return _checked(torch.load(path, weights_only=True, mmap=True))
    return _checked(torch.load(path, weights_only=True))


def store_weights(
    tensors: Mapping[str, Tensor], sha256: str, store: Store, name: str = ""
) -> Weights:
    """Write weights to the store if they are missing. A complete file is never changed or deleted.

    A truncated file, from a writer that was killed on a mount without rename, is written again. Without a `name` the
    file is named by the hash.

    Raises:
        InternalError: the bytes have another SHA-256 than `sha256`.
    """
    weights = Weights(sha256, None, store, name)
    if not _is_whole(store, weights.path):
        with store.open_output(weights.path) as sink:
            if dump(tensors, sink) != sha256:
                raise InternalError(f"The weights {sha256} changed while they were written.")
    return weights


def _is_whole(store: Store, path: str) -> bool:
    """Check whether a file of weights is complete, without checking its hash.

    The hash is compared when the file is loaded.
    """
    if not store.exists(path) or (size := store.num_bytes(path)) < _ZIP_END_BYTES:
        return False
    with store.open_input(path) as file:
        file.seek(size - _ZIP_END_BYTES)
        return bytes(file.read(len(_ZIP_END))) == _ZIP_END


@contextlib.contextmanager
def local_copy(store: Store, path: str) -> Iterator[str]:
    """Provide a local path with the content of a file of the store."""
    here = store.local_path(path)
    if here is not None:
        yield here
        return
    with tempfile.TemporaryDirectory(prefix="sparkhvd-weights-") as folder:
        copy = f"{folder}/weights"
        with store.open_input(path) as source, open(copy, "wb") as sink:
            shutil.copyfileobj(source, sink, PIECE_BYTES)
        yield copy


def _checked(loaded: object) -> dict[str, Tensor]:
    assert isinstance(loaded, dict)
    return loaded


# ----------------------------------------------------------------------------------------------------
# SHA-256 of files, and checksums of tensors.

# Bytes per read.
PIECE_BYTES = 16 << 20
# Bytes of a tensor summed at once, to stay in a cache.
_SUMMED_BYTES = 1 << 20


class HashingWriter:
    """Writable file with a hash of the written bytes, computed without a copy of them."""

    def __init__(self, sink: IO[bytes] | io.RawIOBase | None) -> None:
        """Write to `sink`, or only hash the bytes if it is None."""
        self._sink = sink
        self._hash = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        self._hash.update(data)
        if self._sink is not None:
            self._sink.write(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing. torch.save requires this method."""

    @property
    def sha256(self) -> str:
        """The hash of the bytes so far, in hexadecimal digits."""
        return self._hash.hexdigest()


def sha256_of(file: IO[bytes], num_bytes: int) -> str:
    """Hash the next `num_bytes` of a file."""
    digest = hashlib.sha256()
    while num_bytes and (piece := file.read(min(num_bytes, PIECE_BYTES))):
        digest.update(piece)
        num_bytes -= len(piece)
    return digest.hexdigest()


def checksum(value: Tensor) -> int:
    """Hash a tensor: weighted sums of its 8-byte words, by piece.

    This runs at the speed of memory on every device.
    """
    flat = value.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
    factors = 2 * torch.arange(_SUMMED_BYTES // 8, device=flat.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for piece in flat.split(_SUMMED_BYTES):
        words = F.pad(piece, (0, -len(piece) % 8)).view(torch.int64)
        total = 31 * total + (words * factors[: len(words)]).sum()
    return int(total)
