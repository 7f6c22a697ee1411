"""SHA-256 of files, while they are written and afterwards."""

from __future__ import annotations

import hashlib
import io
from typing import IO

__all__ = ["PIECE_BYTES", "HashingWriter", "sha256_of"]

# Read at once.
PIECE_BYTES = 16 << 20


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
