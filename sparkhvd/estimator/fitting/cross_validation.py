"""Fit the models of several param maps, and delete their shared data."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, TypeVar

from sparkhvd.data.reuse import ReuseScope

M = TypeVar("M")


class FoldModels(Iterator[tuple[int, M]]):
    """Thread-safe iterator over pairs (index of the param map, model), as a CrossValidator needs it."""

    def __init__(self, models: Iterator[tuple[int, M]], num_models: int, scope: ReuseScope) -> None:
        """Keep `scope` open until all `num_models` fits of `models` have ended or failed."""
        self._models = models
        self._left = num_models
        self._lock = threading.Lock()
        self._close = weakref.finalize(self, scope.close)
        if not num_models:
            self._close()

    def __next__(self) -> tuple[int, M]:
        """Fit with the next param map and return its index and the model."""
        try:
            return next(self._models)
        finally:
            with self._lock:
                self._left -= 1
                is_last = self._left == 0
            if is_last:
                self._close()


@contextlib.contextmanager
def models_kept(models: dict[int, M]) -> Iterator[None]:
    """Attach the finished models to an error in the block, as its attribute `models`."""
    try:
        yield
    except BaseException as e:
        if models:
            error: Any = e
            error.models = dict(models)
            note = f"The models of the param maps {sorted(models)} are in the attribute `models` of this error, by index."
            if hasattr(error, "add_note"):
                error.add_note(note)
            else:  # before Python 3.11
                warnings.warn(note, stacklevel=2)
        raise
