"""SHA-256 of files, while they are written and afterwards, and checksums of tensors."""

from __future__ import annotations

import hashlib
import io
from typing import IO

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["PIECE_BYTES", "HashingWriter", "checksum", "sha256_of"]

# Read at once.
PIECE_BYTES = 16 << 20
# Bytes of a tensor that are summed at once, and so stay in a cache.
_SUMMED_BYTES = 1 << 20


class HashingWriter:
    """A file that hashes the bytes written to it, so that no second copy of them is needed."""

    def __init__(self, sink: IO[bytes] | io.RawIOBase | None) -> None:
        """Without `sink` the bytes are hashed only."""
        self._sink = sink
        self._hash = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        """Write and hash."""
        self._hash.update(data)
        if self._sink is not None:
            self._sink.write(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: torch.save asks for it."""

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
    """Sum the words of 8 bytes, each times an odd number by its place: at the speed of memory, on any device."""
    flat = value.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
    factors = 2 * torch.arange(_SUMMED_BYTES // 8, device=flat.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for piece in flat.split(_SUMMED_BYTES):
        words = F.pad(piece, (0, -len(piece) % 8)).view(torch.int64)
        total = 31 * total + (words * factors[: len(words)]).sum()
    return int(total)
