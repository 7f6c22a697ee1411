"""Training rows on their way into memory before the reader is there.

A rank imports torch for seconds before it can do anything else. Meanwhile a thread of the same process reads its part of the
rows, if they fit in memory, and permutes their numbers for the first epoch. The ranks of a host then put their parts together. `begin` starts the
thread, `begun` finds it again, and a `Reader` takes its rows if they are just those that it would read itself. It is
a head start and nothing else: where reading fails or finds other rows, the reader does it again and says what is wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Protocol

from sparkhvd.data.columns.ragged import Rows
from sparkhvd.data.manifest import PACKED, Manifest
from sparkhvd.data.packed import RowSource
from sparkhvd.data.reading.sampler import permutation
from sparkhvd.data.reading.subset import (
    column_names,
    count_of,
    fits_in_memory,
    read_rows,
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
        self, values: Mapping[str, Any] | None, error: BaseException | None = None
    ) -> dict[str, Any] | None:
        """All parts after one another, on all ranks; None if they cannot be shared. Raises `error`, or another rank's."""


# At most one entry: a trainer process begins once, before it knows its rank.
_begun: list[Loading] = []


class Loading:
    """A thread that reads the rows of a subset, and what it has read."""

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
            store: where the data are.
            data_dir: folder of the materialized data.
            subset: "all" or "train".
            validation: the validation fraction; None if a column tells, or if there is no validation.
            seed: decides the split and the order.
            shuffle: whether the first epoch will need a permutation.
            shuffle_bytes: nothing is read where the rows are more than this.
            part: (number, count) of the part of the rows that this process reads, see `part_of`.
        """
        self.place = store, data_dir
        self.part = part
        self._subset, self._validation, self._seed = subset, validation, seed
        self._shuffle, self._shuffle_bytes = shuffle, shuffle_bytes
        self._names: list[str] = []
        self._rows: Rows | int = 0
        self._order: Rows | None = None
        self._values: dict[str, Any] | None = None
        self._thread = threading.Thread(target=self._run, name="sparkhvd-loading", daemon=True)
        self._thread.start()

    def take(self, names: list[str], rows: Rows | int, timeout_s: float) -> dict[str, Any] | None:
        """The arrays of these columns and rows, once; None if others were read, or none.

        Raises:
            TimeoutError: they are still being read after `timeout_s`.
        """
        self._wait(timeout_s)
        values, self._values = self._values, None
        return values if names == self._names and same_rows(rows, self._rows) else None

    def order(self, num_rows: int, seed: int, timeout_s: float) -> Rows | None:
        """`permutation(num_rows, seed, 0)`, once; None if it was not made.

        Raises:
            TimeoutError: rows are still being read after `timeout_s`.
        """
        self._wait(timeout_s)
        order, self._order = self._order, None
        is_it = order is not None and len(order) == num_rows and seed == self._seed
        return order if is_it else None

    def _wait(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the rows were not in memory after {timeout_s:g} s")

    def _run(self) -> None:
        try:
            store, data_dir = self.place
            manifest = Manifest.load(store, data_dir)
            if manifest.layout != PACKED:
                return
            self._names = column_names(manifest)
            with RowSource(store, manifest) as source:
                self._rows = select_rows(
                    source, manifest, self._subset, validation=self._validation, seed=self._seed
                )
                if fits_in_memory(self._rows, manifest.row_bytes(self._names), self._shuffle_bytes):
                    self._values = read_rows(source, self._names, self._rows, self.part)
                    if self._shuffle:
                        self._order = permutation(count_of(self._rows), self._seed, 0)
        except Exception:  # noqa: BLE001 - the reader meets it too, and knows the rank and the step
            self._values = None


def begin(store: Store, data_dir: str, number: int, count: int, **options: Any) -> None:
    """Begin to read, for `begun` of this process.

    Args:
        store: as for `Loading`.
        data_dir: as for `Loading`.
        number: of this process among those on its host.
        count: how many there are; each reads its part.
        **options: as for `Loading`.
    """
    _begun[:] = [Loading(store, data_dir, part=(number, count), **options)]


def begun(store: Store, data_dir: str) -> Loading | None:
    """What this process has begun to read of these data, once; None if nothing."""
    found = [loading for loading in _begun if loading.place == (store, data_dir)]
    _begun.clear()
    return found[0] if found else None
