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

# Rows in random order alternate between files, so files stay open. The limit exists because a process has few
# descriptors and each open file of a remote store holds a buffer.
LIMIT = 16


class _Closes(Protocol):
    def close(self) -> None: ...


Key = TypeVar("Key")
File = TypeVar("File", bound=_Closes)


class OpenFiles(Generic[Key, File]):
    """LRU cache of open files, not thread-safe."""

    def __init__(self, open_file: Callable[[Key], File]) -> None:
        """Start with an empty cache.

        Args:
            open_file: opens the file of a key, or raises.
        """
        self._open_file = open_file
        self._files: OrderedDict[Key, File] = OrderedDict()

    def get(self, key: Key) -> File:
        """Get an open file, and close the least recently used files beyond `LIMIT`."""
        file = self._files.get(key)
        if file is None:
            file = self._files[key] = self._open_file(key)
        self._files.move_to_end(key)
        while len(self._files) > LIMIT:
            self._files.popitem(last=False)[1].close()
        return file

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()


# ----------------------------------------------------------------------------------------------------
# Memory for windows of rows, allocated once and reused for each window.

# Function (name, shape, dtype) -> array.
Empty = Callable[[str, tuple[int, ...], npt.DTypeLike], Array]


def fresh(name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Allocate a new array. The name has no effect."""
    del name
    return np.empty(shape, dtype)


class Buffers:
    """Reusable memory for arrays by name. An array is valid until the next request of its name. Not thread-safe.

    Each name has its own memory mapping. In the heap, a freed window would leave a hole too small for the next,
    slightly larger window.
    """

    def __init__(self) -> None:
        self._held: dict[str, Array] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Make an uninitialized array in the memory of this name, and grow the memory if needed."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        held = self._held.get(name)
        if held is None or held.nbytes < size:
            held = None  # free the memory before the next allocation
            self._held.pop(name, None)
            # The 1/16 in addition costs nothing, because pages that are never written use no memory.
            memory = mmap.mmap(-1, max(1, size + size // 16), flags=mmap.MAP_PRIVATE)
            held = self._held[name] = np.frombuffer(memory, np.uint8)
        out: Array = held[:size].view(dtype).reshape(shape)
        return out

    def clear(self) -> None:
        """Release the memory. An array in use keeps its own."""
        self._held.clear()
