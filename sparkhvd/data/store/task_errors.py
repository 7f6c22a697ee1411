"""A `StoreError` of a Spark task as a `StoreError` of the driver: Spark itself keeps only text."""

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
    """In a task: a `StoreError` of the block carries its message in a form that survives Spark's texts."""
    try:
        yield
    except StoreError as e:
        told = json.dumps([str(e), e.errno]).encode().hex()
        raise StoreError(f"{e}\n[sparkhvd-store:{told}]") from e.__cause__


@contextlib.contextmanager
def raised_by_tasks(store: Store) -> Iterator[None]:
    """On the driver: a failure of the block that a task's `StoreError` caused is raised as that error."""
    try:
        yield
    except Exception as e:
        found = _EMBEDDED.search(str(e))
        if found is None:
            raise
        text, number = json.loads(bytes.fromhex(found[1]))
        error = StoreError(store.hide(text))
        error.errno = number
        # Spark's own text is thousands of lines around this one.
        raise error from None
