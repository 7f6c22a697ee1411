"""Memory for rows that are read window by window: taken once, and filled again for each window."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Buffers", "Empty", "fresh"]

Array = npt.NDArray[Any]
# Makes an array of a name, shape and dtype.
Empty = Callable[[str, tuple[int, ...], Any], Array]


def fresh(name: str, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return an array of its own."""
    del name
    return np.empty(shape, dtype)


class Buffers:
    """Arrays by name, each valid until the next of its name; not for several threads at once.

    They are mappings of their own: a window that an allocator has taken back leaves a hole which the next one, a little
    larger, or with something small in it, does not fit.
    """

    def __init__(self) -> None:
        """Nothing is taken yet."""
        self._held: dict[str, Array] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an array in the memory of this name."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        held = self._held.get(name)
        if held is None or held.nbytes < size:
            held = None  # before there is another
            self._held.pop(name, None)
            # What is never written takes no memory.
            memory = mmap.mmap(-1, max(1, size + size // 16), flags=mmap.MAP_PRIVATE)
            held = self._held[name] = np.frombuffer(memory, np.uint8)
        out: Array = held[:size].view(dtype).reshape(shape)
        return out

    def clear(self) -> None:
        """Give everything back that nobody uses."""
        self._held.clear()
