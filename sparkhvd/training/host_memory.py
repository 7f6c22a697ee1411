"""Rows and frozen parameters in memory shared by the ranks of a host.

Each rank reads a part of the rows and copies it into memory that the engine shares among the ranks of the host. Then
all ranks of the host have all rows. The memory has no name, so the system frees it with the last process that maps it.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

import sparkhvd.torch as hvd
from sparkhvd.data.columns.ragged import Array, Flags, Ragged, Rows, SparseRows, Values
from sparkhvd.data.manifest import Manifest
from sparkhvd.data.reading.source import Source, open_source
from sparkhvd.data.reading.subset import read_flags, read_groups
from sparkhvd.data.store.store import Store
from sparkhvd.engine.library import new_memfd
from sparkhvd.engine.work import Buffer
from sparkhvd.errors import InvalidArgumentError, StoreError
from sparkhvd.torch.context import context

# Each array begins at a multiple of a cache line.
_ALIGNMENT = 64
# Each rank writes a mark at the end of the memory. If a rank does not see all marks, the ranks do not share the memory.
_MARK = np.dtype(np.uint8)


@dataclass(frozen=True)
class _Part:
    """Description of a rank's part, exchanged by the ranks before they allocate shared memory.

    Attributes:
        leaves: (shape, dtype) of each array.
        error: why the rank has no part, or "".
    """

    leaves: list[tuple[tuple[int, ...], str]]
    error: str = ""


class HostRows:
    """Shares the rows of a reader among the ranks of this host.

    Attributes:
        part: (number, count) of this rank's part of the rows.
    """

    def __init__(self, label: str) -> None:
        """Find the ranks of this host.

        Args:
            label: prefix of the names of the collective operations, different for each reader.
        """
        self._label = label
        self._engine = context().engine
        self._here = contextvars.copy_context()  # a reader calls `gather` in another thread
        place = self._engine.topology
        self._rank, self._hosts = place.rank, place.hosts
        self.part = place.local_rank, place.local_size

    @property
    def is_shared(self) -> bool:
        """Whether any host has several ranks. The value is the same on all ranks."""
        return len(set(self._hosts)) < len(self._hosts)

    def gather(
        self, values: Mapping[str, Values] | None, error: BaseException | None = None
    ) -> dict[str, Values] | None:
        """Join the parts of all ranks of the host, in order, in shared memory. All ranks must call it.

        A rank waits for ranks that still read their part, at most `stall_shutdown_s` (0 means without a limit). The
        error names the missing ranks and the operation, whose name begins with the label.

        Args:
            values: this rank's part; None if it could not be read.
            error: the error of the failed read.

        Returns:
            All rows; None, on all ranks of a host, if they cannot share memory.

        Raises:
            StoreError: another rank could not read its part.
            CollectiveTimeoutError, PeerLostError: as for any operation.
        """
        part = _Part([], f"{type(error).__name__}: {error}")
        if values is not None:
            part = _Part([(leaf.shape, leaf.dtype.str) for leaf in _leaves(values)])
        name = f"{self._label}.sizes"
        parts: list[_Part] = self._here.run(hvd.allgather_object, part, name)
        if error is not None:
            raise error
        for rank, other in enumerate(parts):
            if other.error:
                raise StoreError(f"rank {rank} could not read its part of the rows: {other.error}")
        assert values is not None
        sizes = [_size(_layout(self._parts_on(parts, host))) for host in set(self._hosts)]
        try:
            buffer = self._engine.allocate(
                max(sizes) + len(parts), name=f"{self._label}.memory", one_piece=True
            )
        except (
            InvalidArgumentError
        ):  # a host has too little memory or forbids sharing; all ranks get this error
            return None
        memory = _Memory(buffer)
        here = self._parts_on(parts, self._hosts[self._rank])
        whole = [memory.array(place) for place in _layout(here)]
        _copy(values, whole, here[: self.part[0]])
        marks = memory.array(_Place(buffer.num_bytes - len(parts), (len(here),), _MARK))
        marks[self.part[0]] = 1
        self._engine.barrier(name=f"{self._label}.copied").wait()
        if not marks.all():  # the engine uses sockets only, and gave each rank private memory
            return None
        arrays = iter(whole)
        return {name: _rebuilt(value, arrays) for name, value in values.items()}

    def _parts_on(self, parts: Sequence[_Part], host: int) -> list[_Part]:
        return [part for rank, part in enumerate(parts) if self._hosts[rank] == host]


def read_flags_once(store: Store, manifest: Manifest, usable: Rows | None) -> Flags:
    """Read the validation column once per host, a part on each rank. All ranks must call it.

    Args:
        store: store of the files.
        manifest: manifest with a validation column.
        usable: numbers of the rows to use, ascending; None means all.

    Returns:
        The flags of all usable rows.

    Raises:
        StoreError: another rank could not read its part.
        CollectiveTimeoutError, PeerLostError: as for any operation.
    """

    def read(source: Source, part: tuple[int, int]) -> Flags:
        return read_flags(source, manifest, usable, part)

    return _read_once("validation flags", store, manifest, read)


def read_groups_once(store: Store, manifest: Manifest) -> Rows:
    """Read the group numbers of all rows once per host, a part on each rank. All ranks must call it."""

    def read(source: Source, part: tuple[int, int]) -> Rows:
        return read_groups(source, manifest, part)

    return _read_once("numbers of groups", store, manifest, read)


def _read_once(
    label: str,
    store: Store,
    manifest: Manifest,
    read: Callable[[Source, tuple[int, int]], Array],
) -> Array:
    host = HostRows(label)
    with open_source(store, manifest) as source:
        if not host.is_shared:
            return read(source, (0, 1))
        own: Array | None = None
        error: BaseException | None = None
        try:
            own = read(source, host.part)
        except BaseException as e:  # noqa: BLE001 - raised after the waiting ranks are notified
            error = e
        shared = host.gather(None if own is None else {"values": own}, error)
        return read(source, (0, 1)) if shared is None else np.asarray(shared["values"])


def _copy(values: Mapping[str, Values], whole: Sequence[Array], before: Sequence[_Part]) -> None:
    """Copy rows into the shared arrays, after the rows of earlier ranks.

    The starts of ragged rows are shifted.
    """
    for number, (leaf, target) in enumerate(zip(_leaves(values), whole, strict=True)):
        start = sum(part.leaves[number][0][0] for part in before)
        target[start : start + len(leaf)] = leaf
    number = 0
    for value in values.values():
        for ragged in _ragged(value):
            elements, rows = (
                sum(part.leaves[leaf][0][0] for part in before) for leaf in (number, number + 1)
            )
            whole[number + 1][rows : rows + len(ragged)] += elements
            number += 3
        number += isinstance(value, np.ndarray)


def _ragged(value: Values) -> list[Ragged]:
    if isinstance(value, SparseRows):
        return [value.indices, value.values]
    return [value] if isinstance(value, Ragged) else []


def _leaves(values: Mapping[str, Values]) -> Iterator[Array]:
    """Yield the arrays of rows. Their first dimension counts rows or elements."""
    for value in values.values():
        if isinstance(value, np.ndarray):
            yield value
        for ragged in _ragged(value):
            yield from (ragged.values, ragged.starts, ragged.lengths)


def _rebuilt(value: Values, arrays: Iterator[Array]) -> Values:
    """Build rows of the same kind from the shared arrays."""
    if isinstance(value, np.ndarray):
        return next(arrays)
    ragged = [Ragged(next(arrays), next(arrays), next(arrays), r.inner) for r in _ragged(value)]
    if isinstance(value, SparseRows):
        return SparseRows(ragged[0], ragged[1], value.width)
    return ragged[0]


@dataclass(frozen=True)
class _Place:
    """Position of an array of all rows in memory, with its shape and dtype."""

    begin: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    @property
    def end(self) -> int:
        """The offset after the array's last byte."""
        return self.begin + math.prod(self.shape) * self.dtype.itemsize


def _layout(parts: Sequence[_Part]) -> list[_Place]:
    places: list[_Place] = []
    at = 0
    for leaves in zip(*(part.leaves for part in parts), strict=True):
        (_, *rest), dtype = leaves[0]
        rows = sum(shape[0] for shape, _ in leaves)
        places.append(_Place(at, (rows, *rest), np.dtype(dtype)))
        at = -(-places[-1].end // _ALIGNMENT) * _ALIGNMENT
    return places


def _size(places: Sequence[_Place]) -> int:
    return places[-1].end if places else 0


class _Memory:
    """View of registered memory as arrays. Each array keeps the memory alive."""

    def __init__(self, buffer: Buffer) -> None:
        self._bytes = (ctypes.c_uint8 * buffer.num_bytes).from_address(buffer.address)
        self._bytes.buffer = buffer  # type: ignore[attr-defined]  # freed with the last array

    def array(self, place: _Place) -> Array:
        flat: Array = np.frombuffer(memoryview(self._bytes), np.uint8)[place.begin : place.end]
        return flat.view(place.dtype).reshape(place.shape)


# ----------------------------------------------------------------------------------------------------
# Frozen parameters in memory that the ranks of a host share.
# The weights of a large model are in a file that every rank maps. Other weights, which each rank builds or rank 0
# sends, are at first in private memory of each rank. The first rank of a host copies such frozen parameters into a file
# in memory, and all ranks map the file. The mapping is copy-on-write, so a write by user code does not change other
# ranks' parameters.

# Parameters are shared only from this total size on, because sharing costs a message and a mapping.
SHARED_BYTES = 8 << 20


def share_frozen(model: nn.Module, names: Collection[str] | None = None) -> None:
    """Share frozen parameters among the ranks of each host. All ranks must call it, with equal values.

    A parameter stays private on a rank that cannot map the first rank's, such as a rank in another container.

    Args:
        model: the module; only parameters on the CPU are shared.
        names: names of the parameters to share; None means all.
    """
    place = context().engine.topology
    if len(set(place.hosts)) == place.size:
        return
    frozen = _frozen(model, names)
    if sum(each.nbytes for each in frozen.values()) < SHARED_BYTES:
        return
    with contextlib.ExitStack() as kept:
        path = ""
        if place.local_rank == 0:
            # The system forbids it, or has too little memory.
            with contextlib.suppress(OSError, RuntimeError):
                path = _written(frozen, kept)
        paths = hvd.allgather_object(path, name="frozen.memory")
        first = paths[place.hosts.index(place.hosts[place.rank])]
        if first:
            _map_equal(frozen, first)
        hvd.barrier()  # keep the file until all ranks have opened it


def _frozen(model: nn.Module, names: Collection[str] | None) -> dict[str, nn.Parameter]:
    """Select the named frozen parameters with memory of their own."""
    state = model.state_dict(keep_vars=True)
    tensors = {id(t): t for t in state.values() if isinstance(t, Tensor)}
    owners = Counter(t.untyped_storage().data_ptr() for t in tensors.values())
    return {
        name: value
        for name, value in state.items()
        if (names is None or name in names)
        and type(value) is nn.Parameter
        and not value.requires_grad
        and value.device.type == "cpu"
        and value.untyped_storage().nbytes() == value.nbytes
        and owners[value.untyped_storage().data_ptr()] == 1
    }


def _written(frozen: dict[str, nn.Parameter], kept: contextlib.ExitStack) -> str:
    """Write parameters to a file in memory that `kept` closes and return a path for other processes of this host."""
    descriptor = new_memfd("sparkhvd-frozen")
    kept.callback(os.close, descriptor)
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    torch.save({name: each.detach() for name, each in frozen.items()}, path)
    return path


def _map_equal(frozen: dict[str, nn.Parameter], path: str) -> None:
    """Replace the memory of parameters by a mapping of the file, where the values are equal."""
    try:
        mapped = torch.load(path, weights_only=True, mmap=True)
    except Exception:  # noqa: BLE001 - a path of another container, which may be any file
        return
    for name, parameter in frozen.items():
        if _is_equal(parameter.detach(), mapped.get(name)):
            parameter.data = mapped[name]
    release()


def _is_equal(own: Tensor, other: object) -> bool:
    """Compare the bits of two tensors, so that equal NaNs are equal."""
    if not isinstance(other, Tensor) or (own.shape, own.stride(), own.dtype) != (
        *(other.shape, other.stride()),
        other.dtype,
    ):
        return False
    a, b = (each.untyped_storage() for each in (own, other))
    return torch.equal(*(torch.empty(0, dtype=torch.uint8).set_(each) for each in (a, b)))


def release() -> None:
    """Return freed memory to the system, because the allocator would otherwise keep it for later allocations."""
    with contextlib.suppress(OSError, AttributeError):  # the C library is not glibc
        ctypes.CDLL(None).malloc_trim(0)
