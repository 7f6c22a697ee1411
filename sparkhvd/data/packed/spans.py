"""Neighbouring rows of any length that one read serves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparkhvd.data.columns.ragged import Array
from sparkhvd.data.packed.layout import PREFIX_BYTES

__all__ = ["Span"]


@dataclass(frozen=True)
class Span:
    """Neighbouring rows of a row group that one read serves.

    Attributes:
        group: the row group.
        low: its first row.
        ends: (rows + 1,) elements of the row group before the first row, and up to each row's end.
        wanted: positions of the rows to return; None means all.
    """

    group: int
    low: int
    ends: Array
    wanted: Array | None

    def page_bytes(self, itemsize: int) -> int:
        """Return the bytes of the rows in the page, with the length before each."""
        elements = int(self.ends[-1] - self.ends[0])
        return elements * itemsize + (len(self.ends) - 1) * PREFIX_BYTES

    def row_begins(self, itemsize: int) -> Array:
        """Return (rows,) the offsets of each row's values, in bytes from the first row's length."""
        rows = np.arange(1, len(self.ends), dtype=np.int64)
        begins: Array = (self.ends[:-1] - self.ends[0]) * itemsize + rows * PREFIX_BYTES
        return begins

    def stays(self, itemsize: int) -> bool:
        """Return True if values can stay as they lie in the page."""
        return self.wanted is None and itemsize <= PREFIX_BYTES

    def num_bytes(self, itemsize: int) -> int:
        """Return the bytes of memory that the rows take."""
        if self.stays(itemsize):
            return self.page_bytes(itemsize)
        counts = np.diff(self.ends)
        return int((counts if self.wanted is None else counts[self.wanted]).sum()) * itemsize
