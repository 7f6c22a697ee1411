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

# Rows in random order alternate between files; a process has a limit of descriptors, and a file of a remote store
# holds a buffer.
LIMIT = 16


class _Closes(Protocol):
    def close(self) -> None: ...


Key = TypeVar("Key")
File = TypeVar("File", bound=_Closes)


class OpenFiles(Generic[Key, File]):
    """LRU cache of open files; not thread-safe."""

    def __init__(self, open_file: Callable[[Key], File]) -> None:
        """Begin with no open file.

        Args:
            open_file: opens the file of a key, or raises.
        """
        self._open_file = open_file
        self._files: OrderedDict[Key, File] = OrderedDict()

    def get(self, key: Key) -> File:
        """Open the file unless it is open; close the least recently used beyond `LIMIT`."""
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
# Memory for windows of rows: allocated once, reused for each window.

# Allocates an array of a name, shape and dtype.
Empty = Callable[[str, tuple[int, ...], npt.DTypeLike], Array]


def fresh(name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Allocate an array; its name has no effect."""
    del name
    return np.empty(shape, dtype)


class Buffers:
    """Arrays by name, each valid until the next of its name; not thread-safe.

    Each has its own mapping: a freed window would leave a hole in the heap that the next, slightly larger one does not fit.
    """

    def __init__(self) -> None:
        self._held: dict[str, Array] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Reuse the memory of this name if it is large enough; the values are arbitrary."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        held = self._held.get(name)
        if held is None or held.nbytes < size:
            held = None  # freed before the next allocation
            self._held.pop(name, None)
            # Pages never written use no memory.
            memory = mmap.mmap(-1, max(1, size + size // 16), flags=mmap.MAP_PRIVATE)
            held = self._held[name] = np.frombuffer(memory, np.uint8)
        out: Array = held[:size].view(dtype).reshape(shape)
        return out

    def clear(self) -> None:
        """Release the memory of unused arrays."""
        self._held.clear()
