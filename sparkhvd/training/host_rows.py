"""Rows that the ranks of a host read together and hold once.

Each rank reads a part of the rows into memory of its own and copies it into memory that the engine shares among the ranks
of the host; then all of them have all rows. That memory has no name: it is gone with the last process that maps it.
"""

from __future__ import annotations

import contextvars
import ctypes
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import sparkhvd.torch as hvd
from sparkhvd.data.columns.ragged import Ragged, SparseRows, Values
from sparkhvd.engine.engine import Buffer
from sparkhvd.errors import InvalidArgumentError, StoreError
from sparkhvd.torch.context import context

__all__ = ["HostRows"]

Array = npt.NDArray[Any]

# Each array begins at a cache line of its own.
_ALIGNMENT = 64
# At the end of the memory each rank leaves one, so that it is known who shares it.
_MARK = np.dtype(np.uint8)


@dataclass(frozen=True)
class _Said:
    """What a rank tells the others before anything is shared.

    Attributes:
        leaves: (shape, dtype) of each of its arrays.
        error: why it has none; "" if it has.
    """

    leaves: list[tuple[tuple[int, ...], str]]
    error: str = ""


class HostRows:
    """The ranks of this host, as one reader's rows are shared among them.

    Attributes:
        part: (number, count) of this rank's part of the rows.
    """

    def __init__(self, label: str) -> None:
        """Ask who is on this host.

        Args:
            label: in the names of what the ranks do together; another one for each reader.
        """
        self._label = label
        self._engine = context().engine
        self._here = contextvars.copy_context()  # a reader gathers in a thread of its own
        place = self._engine.topology
        self._rank, self._hosts = place.rank, place.hosts
        self.part = place.local_rank, place.local_size

    @property
    def is_shared(self) -> bool:
        """Whether any host has several ranks; the same on all ranks."""
        return len(set(self._hosts)) < len(self._hosts)

    def gather(
        self, values: Mapping[str, Values] | None, error: BaseException | None = None
    ) -> dict[str, Values] | None:
        """The rows of all ranks of the host, part after part, in shared memory. All ranks must call it.

        Args:
            values: this rank's part; None if it could not be read.
            error: why.

        Returns:
            All rows; None, on all ranks of a host, if they cannot share memory.

        Raises:
            StoreError: another rank could not read its part.
            CollectiveTimeoutError, PeerLostError: as for any operation.
        """
        said = _Said([], f"{type(error).__name__}: {error}")
        if values is not None:
            said = _Said([(leaf.shape, leaf.dtype.str) for leaf in _leaves(values)])
        name = f"{self._label}.sizes"
        everyone: list[_Said] = self._here.run(hvd.allgather_object, said, name)
        if error is not None:
            raise error
        for rank, other in enumerate(everyone):
            if other.error:
                raise StoreError(f"rank {rank} could not read its part of the rows: {other.error}")
        assert values is not None
        sizes = [_size(_layout(self._said_on(everyone, host))) for host in set(self._hosts)]
        try:
            buffer = self._engine.allocate(
                max(sizes) + len(everyone), name=f"{self._label}.memory", one_piece=True
            )
        except InvalidArgumentError:  # a host has no memory for it or forbids it, as all ranks hear
            return None
        memory = _Memory(buffer)
        here = self._said_on(everyone, self._hosts[self._rank])
        whole = [memory.array(place) for place in _layout(here)]
        self._copy(values, whole, here[: self.part[0]])
        marks = memory.array(_Place(buffer.num_bytes - len(everyone), (len(here),), _MARK))
        marks[self.part[0]] = 1
        self._engine.barrier(name=f"{self._label}.copied").wait()
        if not marks.all():  # an engine that uses sockets only has given each rank its own
            return None
        arrays = iter(whole)
        return {name: _rebuilt(value, arrays) for name, value in values.items()}

    def _said_on(self, everyone: Sequence[_Said], host: int) -> list[_Said]:
        return [said for r, said in enumerate(everyone) if self._hosts[r] == host]

    def _copy(
        self, values: Mapping[str, Values], whole: Sequence[Array], before: Sequence[_Said]
    ) -> None:
        """Copy this rank's rows behind those of the ranks before it; rows that refer to elements begin behind theirs."""
        for number, (leaf, target) in enumerate(zip(_leaves(values), whole, strict=True)):
            start = sum(said.leaves[number][0][0] for said in before)
            target[start : start + len(leaf)] = leaf
        number = 0
        for value in values.values():
            for one in _ragged(value):
                elements, rows = (
                    sum(said.leaves[at][0][0] for said in before) for at in (number, number + 1)
                )
                whole[number + 1][rows : rows + len(one)] += elements
                number += 3
            number += isinstance(value, np.ndarray)


def _ragged(value: Values) -> list[Ragged]:
    if isinstance(value, SparseRows):
        return [value.indices, value.values]
    return [value] if isinstance(value, Ragged) else []


def _leaves(values: Mapping[str, Values]) -> Iterator[Array]:
    """The arrays that rows are made of, with as many entries in front as rows or elements."""
    for value in values.values():
        if isinstance(value, np.ndarray):
            yield value
        for one in _ragged(value):
            yield from (one.values, one.starts, one.lengths)


def _rebuilt(value: Values, arrays: Iterator[Array]) -> Values:
    """Rows like these of other arrays."""
    if isinstance(value, np.ndarray):
        return next(arrays)
    made = [Ragged(next(arrays), next(arrays), next(arrays), one.inner) for one in _ragged(value)]
    return SparseRows(made[0], made[1], value.width) if isinstance(value, SparseRows) else made[0]


@dataclass(frozen=True)
class _Place:
    """Where an array of all rows lies: its first byte, its shape and its dtype."""

    begin: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def end(self) -> int:
        """Behind its last byte."""
        return self.begin + math.prod(self.shape) * self.dtype.itemsize


def _layout(parts: Sequence[_Said]) -> list[_Place]:
    places: list[_Place] = []
    at = 0
    for leaves in zip(*(said.leaves for said in parts), strict=True):
        (_, *rest), dtype = leaves[0]
        rows = sum(shape[0] for shape, _ in leaves)
        places.append(_Place(at, (rows, *rest), np.dtype(dtype)))
        at = -(-places[-1].end // _ALIGNMENT) * _ALIGNMENT
    return places


def _size(places: Sequence[_Place]) -> int:
    return places[-1].end if places else 0


class _Memory:
    """Registered memory as arrays, each of which keeps it."""

    def __init__(self, buffer: Buffer) -> None:
        self._bytes = (ctypes.c_uint8 * buffer.num_bytes).from_address(buffer.address)
        self._bytes.buffer = buffer  # type: ignore[attr-defined]  # freed with the last array

    def array(self, place: _Place) -> Array:
        flat: Array = np.frombuffer(memoryview(self._bytes), np.uint8)[place.begin : place.end]
        return flat.view(place.dtype).reshape(place.shape)
