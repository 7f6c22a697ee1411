"""Payloads: bytes that a Python function of Spark brings to its tasks, without a file left for each function.

pyspark makes a broadcast variable of every pickled function above 1 MiB: a file in the driver's `spark.local.dir`, which
stays until the application ends. So large bytes become a broadcast variable here, and the function that brings them
stays small. Spark Connect has no such variables: there the bytes stay in the function.

Threads: transforms and launches of any threads may use this at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sparkhvd.spark import SparkShim

if TYPE_CHECKING:
    from typing import TypeAlias

    from pyspark import Broadcast, SparkContext

    Payload: TypeAlias = bytes | Broadcast[bytes]

__all__ = ["INLINE_BYTES", "bytes_of", "carried", "kept_carried"]

# Half of what Spark leaves in a function: it adds its own part.
INLINE_BYTES = 512 << 10
# Broadcast variables that wait for the next function with equal bytes: a pipeline has few stages with a model.
_KEPT = 4


def bytes_of(payload: Payload) -> bytes:
    """Return the bytes of a payload, in a task."""
    return payload if isinstance(payload, bytes) else payload.value


@contextlib.contextmanager
def carried(shim: SparkShim, data: bytes) -> Iterator[Payload]:
    """Yield the payload of bytes that no task needs after the block."""
    if shim.is_connect or len(data) <= INLINE_BYTES:
        yield data
        return
    variable = shim.session.sparkContext.broadcast(data)
    try:
        yield variable
    finally:
        with contextlib.suppress(Exception):  # the application may be over
            variable.destroy()


def kept_carried(shim: SparkShim, data: bytes) -> Payload:
    """Return the payload of bytes that a DataFrame may need at any later time.

    Equal bytes are one broadcast variable as long as they are among the last few; others go when the JVM has no plan
    left that uses them, which is checked at each call.
    """
    if shim.is_connect or len(data) <= INLINE_BYTES:
        return data
    return _variables.get(shim.session.sparkContext, data)


class _Variables:
    """Broadcast variables of one process: those used last, and those that only plans may still use."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], Broadcast[bytes]] = OrderedDict()
        # Application, file and the JVM's weak reference of each that is not kept: a view, a cache or a stream may
        # use it longer than any object of Python.
        self._left: list[tuple[str, str, Any]] = []

    def get(self, context: SparkContext, data: bytes) -> Broadcast[bytes]:
        """Return the variable of these bytes, by which a function must be pickled before the next garbage collection."""
        application = str(context.applicationId)
        key = (application, hashlib.sha256(data).hexdigest())
        with self._lock:
            self._sweep(application)
            if key not in self._kept:
                self._kept[key] = context.broadcast(data)
            self._kept.move_to_end(key)
            while len(self._kept) > self._size:
                _, old = self._kept.popitem(last=False)
                jvm: Any = context._jvm
                weak = jvm.java.lang.ref.WeakReference(old._jbroadcast)
                self._left.append((application, old._path, weak))
            return self._kept[key]

    def _sweep(self, application: str) -> None:
        """Delete the files of variables that are no longer used, and of applications that have ended."""
        for key in [k for k in self._kept if k[0] != application]:
            _unlink(self._kept.pop(key)._path)
        left = []
        for owner, path, weak in self._left:
            if owner == application and weak.get() is not None:
                left.append((owner, path, weak))
            else:
                _unlink(path)
        self._left = left


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):  # Spark has deleted it with its folder
        os.unlink(path)


_variables = _Variables(_KEPT)
