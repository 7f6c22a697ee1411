"""Memory for rows that are read window by window: allocated once, filled again for each window."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from sparkhvd.data.columns.ragged import Array

__all__ = ["Buffers", "Empty", "fresh"]

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
