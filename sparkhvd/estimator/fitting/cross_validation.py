"""Models of one `fitMultiple`, and the end of the data that their fits share."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import TypeVar

from sparkhvd.data.reuse import Scope

__all__ = ["FoldModels"]

M = TypeVar("M")


class FoldModels(Iterator[tuple[int, M]]):
    """Iterator over pairs (index of the param map, model); several threads may take them, as a CrossValidator's do."""

    def __init__(self, models: Iterator[tuple[int, M]], num_models: int, scope: Scope) -> None:
        """Keep `scope` open until all `num_models` fits of `models` have ended, well or not."""
        self._models = models
        self._left = num_models
        self._lock = threading.Lock()
        self._close = weakref.finalize(self, scope.close)
        if not num_models:
            self._close()

    def __next__(self) -> tuple[int, M]:
        """Fit with the next param map."""
        try:
            return next(self._models)
        finally:
            with self._lock:
                self._left -= 1
                is_last = self._left == 0
            if is_last:
                self._close()
