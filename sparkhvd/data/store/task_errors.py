"""Carry a `StoreError` from a Spark task to the driver; Spark itself keeps only text."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator

from sparkhvd.data.store.store import Store
from sparkhvd.errors import StoreError

__all__ = ["raised_by_tasks", "telling_the_driver"]

_EMBEDDED = re.compile(r"\[sparkhvd-store:([0-9a-f]+)\]")


@contextlib.contextmanager
def telling_the_driver() -> Iterator[None]:
    """Add to a `StoreError` of the block, in a task, its message in a form that survives Spark's texts."""
    try:
        yield
    except StoreError as e:
        code = json.dumps([str(e), e.errno]).encode().hex()
        raise StoreError(f"{e}\n[sparkhvd-store:{code}]") from e.__cause__


@contextlib.contextmanager
def raised_by_tasks(store: Store) -> Iterator[None]:
    """Raise the `StoreError` of a task, on the driver, instead of the failure that it caused in the block."""
    try:
        yield
    except Exception as e:
        embedded = _EMBEDDED.search(str(e))
        if embedded is None:
            raise
        text, number = json.loads(bytes.fromhex(embedded[1]))
        error = StoreError(store.hide(text))
        error.errno = number
        # Spark's own text is thousands of lines around this one.
        raise error from None
