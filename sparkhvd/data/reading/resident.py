"""Rows of a subset that are held in memory, read once by a rank or by the ranks of a host together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from sparkhvd.data.columns.ragged import Rows, Values
from sparkhvd.data.reading.sampler import permutation
from sparkhvd.data.reading.source import Source
from sparkhvd.data.reading.subset import Division, count_of, read_rows

__all__ = ["ResidentRows", "Sharing"]


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


class ResidentRows:
    """Reads the rows when they are first needed and holds them; used by one thread at a time."""

    def __init__(
        self,
        source: Source,
        names: Sequence[str],
        rows: Rows | int,
        division: Division,
        *,
        sharing: Sharing | None,
    ) -> None:
        """Prepare; reads nothing.

        Args:
            source: of the files; closed when the rows are in memory.
            names: columns to read.
            rows: numbers of the rows, or a count for all from 0 on.
            division: of the rows into parts.
            sharing: the ranks of this host, which read a part each; None reads all rows.
        """
        self._source = source
        self._names = list(names)
        self._rows = rows
        self._division = division
        self._sharing = sharing
        self._values: dict[str, Values] | None = None

    @property
    def is_shared(self) -> bool:
        """True if the ranks of this host read together, which all of them must do then."""
        return self._sharing is not None

    def values(self) -> dict[str, Values]:
        """Return all rows by column, read by the first call. A collective call on the host if it is shared."""
        if self._values is None:
            self._values = self._read_all()
            self._source.close()
        return self._values

    @property
    def is_unread(self) -> bool:
        """True if the rows have yet to be read."""
        return self._values is None

    def permutation(self, seed: int, epoch: int) -> Callable[[], Rows]:
        """Return a function that permutes the rows for an epoch, once, for whichever thread needs them first."""
        lock, made = threading.Lock(), list[Rows]()

        def permute() -> Rows:
            with lock:
                if not made:
                    made.append(permutation(count_of(self._rows), seed, epoch))
            return made[0]

        return permute

    def clear(self) -> None:
        """Release the rows."""
        self._values = None

    def _read_all(self) -> dict[str, Values]:
        if self._sharing is None:
            return self._read_part((0, 1))
        part: dict[str, Values] | None = None
        error: BaseException | None = None
        try:
            part = self._read_part(self._sharing.part)
        except BaseException as e:  # noqa: BLE001 - the others wait: it is raised when they know
            error = e
        values = self._sharing.gather(part, error)
        return self._read_part((0, 1)) if values is None else values

    def _read_part(self, part: tuple[int, int]) -> dict[str, Values]:
        return read_rows(self._source, self._names, self._rows, part, self._division)
