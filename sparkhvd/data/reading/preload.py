"""Read training rows into memory before the reader exists.

A rank imports torch for seconds before it can do anything else. Meanwhile a thread of the same process reads its part of
the rows, if they fit in memory, and permutes their numbers for the first epoch. The ranks of a host then put their parts
together. `begin` starts the thread, `begun` returns it later, and a `Reader` takes its rows if they are exactly those that
it would read itself. It is a head start only: where reading fails or gives other rows, the reader reads them again and
reports the error.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Protocol

from sparkhvd.data.columns.ragged import Flags, Rows, Values
from sparkhvd.data.manifest import PACKED, Manifest
from sparkhvd.data.packed import RowSource
from sparkhvd.data.reading.sampler import permutation
from sparkhvd.data.reading.subset import (
    Division,
    column_names,
    count_of,
    fits_in_memory,
    flagged,
    is_flagged,
    read_flags,
    same_rows,
    select_rows,
)
from sparkhvd.data.store.store import Store

__all__ = ["Loading", "Sharing", "begin", "begun"]


class Sharing(Protocol):
    """The ranks of a host that hold rows once.

    Attributes:
        part: (number, count) of this rank's part of the rows.
    """

    part: tuple[int, int]

    def gather(
        self, values: Mapping[str, Values] | None, error: BaseException | None = None
    ) -> dict[str, Values] | None:
        """Put the parts of all ranks together, in order, on all ranks; None if they cannot share memory.

        Raises `error`, or another rank's.
        """


# At most one entry: a trainer process begins once, before it knows its rank.
_begun: list[Loading] = []


class Loading:
    """A thread that reads the rows of a subset, and the rows that it has read."""

    def __init__(
        self,
        store: Store,
        data_dir: str,
        *,
        subset: str,
        validation: float | None,
        seed: int,
        shuffle: bool,
        shuffle_bytes: int,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        """Begin to read; the arguments are those of `Reader`.

        Args:
            store: of the data.
            data_dir: folder of the materialized data.
            subset: "all" or "train".
            validation: the validation fraction; None if a column tells, or if there is no validation.
            seed: decides the split and the order.
            shuffle: permute the first epoch.
            shuffle_bytes: larger data are not read.
            part: (number, count) of the part of the rows that this process reads, see `Division`.
        """
        self.place = store, data_dir
        self.part = part
        self._subset, self._validation, self._seed = subset, validation, seed
        self._shuffle, self._shuffle_bytes = shuffle, shuffle_bytes
        self._names: list[str] = []
        # Row numbers of the part.
        self._rows: Rows | int = 0
        self._division = Division()
        self._flags: Flags | None = None
        self._has_flags = threading.Event()  # or never will
        self._order: Rows | None = None
        self._values: dict[str, Values] | None = None
        self._thread = threading.Thread(target=self._run, name="sparkhvd-loading", daemon=True)
        self._thread.start()

    def flags(self, timeout_s: float) -> Flags | None:
        """Return the validation flags of this process's part of all rows; None if they were not read.

        Raises:
            TimeoutError: they are still being read after `timeout_s`.
        """
        if not self._has_flags.wait(timeout_s):
            raise TimeoutError(f"the validation column was not read after {timeout_s:g} s")
        return self._flags

    def take(
        self, names: list[str], rows: Rows | int, timeout_s: float
    ) -> dict[str, Values] | None:
        """Return this part of these columns and rows, once; None if others were read, or none.

        Raises:
            TimeoutError: they are still being read after `timeout_s`.
        """
        self._wait(timeout_s)
        values, self._values = self._values, None
        is_wanted = same_rows(self._division.part(rows, *self.part), self._rows)
        return values if names == self._names and is_wanted else None

    def order(self, num_rows: int, seed: int, timeout_s: float) -> Rows | None:
        """Return `permutation(num_rows, seed, 0)`, once; None if it was not made.

        Raises:
            TimeoutError: rows are still being read after `timeout_s`.
        """
        self._wait(timeout_s)
        order, self._order = self._order, None
        is_wanted = order is not None and len(order) == num_rows and seed == self._seed
        return order if is_wanted else None

    def _wait(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the rows were not in memory after {timeout_s:g} s")

    def _run(self) -> None:
        try:
            store, data_dir = self.place
            manifest = Manifest.load(store, data_dir)
            if manifest.layout == PACKED:
                with RowSource(store, manifest) as source:
                    self._read(source, manifest)
        except Exception:  # noqa: BLE001 - the reader meets it too, and knows the rank and the step
            self._values = None
        finally:
            self._has_flags.set()

    def _read(self, source: RowSource, manifest: Manifest) -> None:
        self._names = column_names(manifest)
        self._division = Division.of(source, manifest, self._subset)
        self._rows, count = self._select(source, manifest)
        self._has_flags.set()
        if fits_in_memory(count, manifest.row_bytes(self._names), self._shuffle_bytes):
            numbers = None if isinstance(self._rows, int) else self._rows
            self._values = source.read(self._names, numbers)
            is_whole = self.part == (0, 1) or not is_flagged(manifest, self._subset)
            if self._shuffle and is_whole:
                self._order = permutation(count, self._seed, 0)

    def _select(self, source: RowSource, manifest: Manifest) -> tuple[Rows | int, int]:
        """Return this part's rows, and the number of rows of all parts, or a bound on it where others read the flags."""
        if not is_flagged(manifest, self._subset):
            rows = select_rows(
                source, manifest, self._subset, validation=self._validation, seed=self._seed
            )
            return self._division.part(rows, *self.part), count_of(rows)
        self._flags = read_flags(source, manifest, part=self.part)
        number, count = self.part
        rows = flagged(self._flags, self._subset) + manifest.num_rows * number // count
        return rows, len(rows) if count == 1 else manifest.num_rows


def begin(store: Store, data_dir: str, number: int, count: int, **options: Any) -> None:
    """Begin to read, for `begun` of this process.

    Args:
        store: as for `Loading`.
        data_dir: as for `Loading`.
        number: of this process among those on its host.
        count: processes on this host; each reads its part.
        **options: as for `Loading`.
    """
    _begun[:] = [Loading(store, data_dir, part=(number, count), **options)]


def begun(store: Store, data_dir: str) -> Loading | None:
    """Return the reading of these data that this process has begun, once; None if there is none."""
    matching = [loading for loading in _begun if loading.place == (store, data_dir)]
    _begun.clear()
    return matching[0] if matching else None
