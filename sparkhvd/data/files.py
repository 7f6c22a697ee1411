"""Cache of open files."""

from __future__ import annotations

import math
import mmap
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from sparkhvd.data.columns.ragged import Array

# Rows in random order go back and forth between files; a process may have few descriptors, and a file of a remote store
# holds a buffer.
LIMIT = 16


class _Closes(Protocol):
    def close(self) -> None: ...


Key = TypeVar("Key")
File = TypeVar("File", bound=_Closes)


class OpenFiles(Generic[Key, File]):
    """Cache of open files: keeps those that were used last; not for several threads at once."""

    def __init__(self, open_file: Callable[[Key], File]) -> None:
        """Begin with no open file.

        Args:
            open_file: opens the file of a key, or raises.
        """
        self._open_file = open_file
        self._files: OrderedDict[Key, File] = OrderedDict()

    def get(self, key: Key) -> File:
        """Return the file of a key, opened if need be."""
        file = self._files.get(key)
        if file is None:
            file = self._files[key] = self._open_file(key)
        self._files.move_to_end(key)
        while len(self._files) > LIMIT:
            self._files.popitem(last=False)[1].close()
        return file

    def close(self) -> None:
        """Close every file."""
        while self._files:
            self._files.popitem()[1].close()


# ----------------------------------------------------------------------------------------------------
# Memory for rows that are read window by window: allocated once, filled again for each window.

# Makes an array of a name, shape and dtype.
Empty = Callable[[str, tuple[int, ...], npt.DTypeLike], Array]


def fresh(name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Return a new array."""
    del name
    return np.empty(shape, dtype)


class Buffers:
    """Arrays by name, each valid until the next of its name; not for several threads at once.

    Each has a mapping of its own: a freed window would leave a hole in the heap that the next one, a little larger, does
    not fit.
    """

    def __init__(self) -> None:
        self._held: dict[str, Array] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return an array in the memory of this name."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        held = self._held.get(name)
        if held is None or held.nbytes < size:
            held = None  # before there is another
            self._held.pop(name, None)
            # Pages that are never written take no memory.
            memory = mmap.mmap(-1, max(1, size + size // 16), flags=mmap.MAP_PRIVATE)
            held = self._held[name] = np.frombuffer(memory, np.uint8)
        out: Array = held[:size].view(dtype).reshape(shape)
        return out

    def clear(self) -> None:
        """Release the memory of arrays that nobody uses."""
        self._held.clear()
