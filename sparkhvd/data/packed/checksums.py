"""Checksums of a file's blocks, to verify reads of any size.

The checksums are stored between the last row group and the footer, where readers of Parquet do not look: a CRC-32
(little-endian uint32) of every 16 KiB from the start of the file, and a trailer of 16 bytes: the number of covered
bytes (uint64), the CRC-32 of the CRCs and of that number (uint32), and a mark.
"""

from __future__ import annotations

import ctypes
import functools
import io
import itertools
import struct
import zlib
from array import array
from collections.abc import Callable
from typing import IO, TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sparkhvd.engine.library import load
from sparkhvd.errors import EngineUnavailableError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


# Small blocks, because a read is extended to the edges of unverified blocks. The checksums have 1/4096 of the data's
# size.
BLOCK_BYTES = 16 << 10
TRAILER_BYTES = 16
_TRAILER = struct.Struct("<QI4s")
_MARK = b"SHB1"

Crcs = npt.NDArray[np.uint32]


def add_blocks(crcs: Crcs, data: npt.NDArray[np.uint8], at: int) -> None:
    """Continue the CRC-32 of each block over contiguous bytes.

    Args:
        crcs: (blocks,) CRCs so far of the blocks that hold these bytes, 0 for a new block; updated in place.
        data: contiguous bytes.
        at: position of the first byte in its block.
    """
    _native_or_zlib()(crcs, data, at)


@functools.cache
def _native_or_zlib() -> Callable[[Crcs, npt.NDArray[np.uint8], int], None]:
    try:
        continue_blocks = load().crc32_blocks
    except EngineUnavailableError:  # a client without the compiled library may read files
        return _with_zlib

    def with_library(crcs: Crcs, data: npt.NDArray[np.uint8], at: int) -> None:
        # This takes the address several times as fast as numpy's attribute `ctypes`.
        place = ctypes.c_uint32.from_address(crcs.__array_interface__["data"][0])
        address = data.__array_interface__["data"][0]
        continue_blocks(address, data.nbytes, BLOCK_BYTES, at, ctypes.byref(place))

    return with_library


def _with_zlib(crcs: Crcs, data: npt.NDArray[np.uint8], at: int) -> None:
    edges = [0, *range(BLOCK_BYTES - at, len(data), BLOCK_BYTES), len(data)]
    for i, (start, stop) in enumerate(itertools.pairwise(edges)):
        crcs[i] = zlib.crc32(data[start:stop].data, int(crcs[i]))


class SummingSink(io.RawIOBase):
    """Sequential file sink with checksums of the written bytes.

    Attributes:
        table_crc: CRC-32 of the checksums, once they are written.
    """

    def __init__(self, sink: IO[bytes] | io.RawIOBase) -> None:
        self._sink = sink
        self.table_crc = 0
        self._crcs = array("I")
        self._position = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data: ReadableBuffer) -> int:
        """Write all of the data."""
        flat = np.frombuffer(memoryview(data), np.uint8)
        at = self._position % BLOCK_BYTES
        crcs = np.zeros(-(-(at + len(flat)) // BLOCK_BYTES), np.uint32)
        if at:
            crcs[0] = self._crcs.pop()
        add_blocks(crcs, flat, at)
        self._crcs.frombytes(crcs.tobytes())
        self._sink.write(data)
        self._position += len(flat)
        return len(flat)

    def flush(self) -> None:
        if not self.closed:
            self._sink.flush()

    def write_table(self) -> None:
        """Write the checksums of all bytes so far."""
        crcs = np.frombuffer(self._crcs, np.uint32).astype("<u4").tobytes()
        size = self._position
        self.table_crc = zlib.crc32(size.to_bytes(8, "little"), zlib.crc32(crcs))
        self.write(crcs + _TRAILER.pack(size, self.table_crc, _MARK))


def table_bytes(trailer: bytes) -> int | None:
    """Compute a checksum table's size from its trailer, or None if the bytes are no trailer."""
    size, _, mark = _TRAILER.unpack(trailer)
    return -(-size // BLOCK_BYTES) * 4 + TRAILER_BYTES if mark == _MARK else None


def decode(table: bytes) -> tuple[int, Crcs] | None:
    """Decode a checksum table to its number of covered bytes and CRCs, or None if damaged."""
    crcs, trailer = table[:-TRAILER_BYTES], table[-TRAILER_BYTES:]
    size, crc, _ = _TRAILER.unpack(trailer)
    is_whole = len(table) == table_bytes(trailer)
    if not is_whole or zlib.crc32(trailer[:8], zlib.crc32(crcs)) != crc:
        return None
    return size, np.frombuffer(crcs, "<u4").astype(np.uint32)
