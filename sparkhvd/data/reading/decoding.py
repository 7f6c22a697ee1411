"""Decoding of a reader's rows in threads, a chunk of several batches at a time.

Threads: the reading thread begins and takes chunks; threads of the pool decode rows, and share nothing but the chunk's memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkhvd.data.columns.decoders import Decoded, RowFunctions
from sparkhvd.data.columns.ragged import Rows
from sparkhvd.data.columns.schema import Column
from sparkhvd.data.reading.batch import packed

__all__ = ["Chunk", "Decoding"]

# Python's lock is asked for after this time while threads decode. With Python's 5 ms a thread that comes back from a decoder in C
# finds the lock taken again and again by others, which let go of it for the moment of a read alone: two threads then are one.
_SWITCH_S = 0.0005
# Values that decoders have left out and that are printed; the others are counted alone.
_SHOWN = 5


@dataclass(frozen=True)
class Chunk:
    """Rows of several batches, as the user's decoders leave them.

    Attributes:
        columns: by name.
        num_rows: with those that are left out.
        kept: ascending numbers of the rows that are there; None means all.
    """

    columns: dict[str, Any]
    num_rows: int
    kept: Rows | None = None

    def cut(self, start: int, stop: int) -> tuple[dict[str, Any], int]:
        """Return the columns of some rows, and how many of these are there."""
        if self.kept is not None:
            start, stop = (int(n) for n in np.searchsorted(self.kept, (start, stop)))
        return {name: rows[start:stop] for name, rows in self.columns.items()}, stop - start


class Decoding:
    """The user's functions on the columns of a reader, with their threads.

    Attributes:
        num_ahead: chunks to begin before the first is taken, or threads would wait for the reading one after each.
    """

    def __init__(
        self, functions: RowFunctions, columns: Sequence[Column], num_workers: int
    ) -> None:
        """Start the threads, where several are asked for and there is something to decode.

        Args:
            functions: the user's.
            columns: to read, as `with_decoded` described them.
            num_workers: threads; 1 is the reading thread itself.
        """
        self._functions, self._columns = functions, columns
        self._pool: ThreadPoolExecutor | None = None
        if num_workers > 1 and any(column.has_decoder for column in columns):
            self._pool = ThreadPoolExecutor(num_workers, "sparkhvd-decoder")
            sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        self.num_ahead = int(self._pool is not None)
        self._shown: set[str] = set()

    def begin(self, taken: dict[str, Any], num_rows: int, *, packs: bool) -> Callable[[], Chunk]:
        """Begin to decode rows; return what waits for them.

        Args:
            taken: columns as they are stored; they must stay until the end.
            num_rows: their number.
            packs: give the chunk memory of its own.
        """
        has_functions = self._functions.decoders or self._functions.collate
        begin = self._functions.begin if has_functions else _as_they_are
        decoded = begin(self._columns, taken, self._pool)

        def finish() -> Chunk:
            found = decoded()
            self._show(found.broken)
            columns = found.columns
            if packs:
                columns = {name: packed(rows) for name, rows in columns.items()}
            return Chunk(columns, num_rows, found.kept)

        return finish

    def _show(self, broken: Sequence[str]) -> None:
        """Print the first values that decoders have left out."""
        room = max(0, _SHOWN - len(self._shown))
        for text in [each for each in broken if each not in self._shown][:room]:
            self._shown.add(text)
            more = "; further ones are counted alone" if len(self._shown) == _SHOWN else ""
            sys.stderr.write(
                f"sparkhvd: a row is left out, as image(broken='skip') says: {text}{more}\n"
            )

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def _as_they_are(
    columns: Sequence[Column], values: dict[str, Any], pool: object
) -> Callable[[], Decoded]:
    return lambda: Decoded(values)
