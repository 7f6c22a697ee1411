"""Read rows of a data set by row number, for any format of its files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sparkhvd.data.columns.ragged import Rows, Values
from sparkhvd.data.files import Empty, fresh
from sparkhvd.data.manifest import PACKED, Manifest
from sparkhvd.data.packed import RowSource
from sparkhvd.data.store.store import Store


class Source(Protocol):
    """Reader of rows by number, verified by checksums if available. It is not thread-safe.

    Attributes:
        block_edges: row numbers at which pieces begin that are best read as a whole, ending with the number of rows;
            None if any row can be read alone.
    """

    @property
    def block_edges(self) -> Rows | None: ...

    def read(
        self, names: Sequence[str], rows: Rows | None = None, empty: Empty = fresh
    ) -> dict[str, Values]:
        """Read columns as arrays (rows, *shape), or as `Ragged` or `SparseRows`.

        `Ragged` and `SparseRows` hold rows of different lengths.

        Args:
            names: columns to read.
            rows: ascending row numbers; None means all.
            empty: allocates the arrays.
        """

    def examples(self, count: int) -> Rows:
        """Numbers of the first `count` usable rows, or of all if fewer."""

    def close(self) -> None: ...

    def __enter__(self) -> Source: ...

    def __exit__(self, *error: object) -> None: ...


def open_source(store: Store, manifest: Manifest) -> Source:
    """Open a reader of the rows of a manifest.

    Args:
        store: of the files.
        manifest: names them.
    """
    if manifest.layout == PACKED:
        return RowSource(store, manifest)
    from sparkhvd.data.parquet.source import ParquetSource

    return ParquetSource(store, manifest)
