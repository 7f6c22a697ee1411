"""The loaded library, and the native handles of each engine.

Threads: any. Nothing here takes a lock: each step is one atomic operation of a dict, deque or set, so a garbage
collection may run a `__del__` anywhere, and a fork never meets a held lock.

Ownership: `State` owns the native handles and everything that operations read and write (`keep`). A `Work` that
is dropped before its operation has finished leaves its handle to the state, which releases it on a later call.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import deque
from functools import cache
from pathlib import Path

from sparkhvd.engine.library import Library, Loss, LossEntry, Status
from sparkhvd.engine.status import PENDING, to_exception
from sparkhvd.errors import CollectiveError, NotInitializedError, SparkhvdError

__all__ = ["State", "library_path", "load", "states"]


def library_path() -> Path:
    """Return the path of the compiled library."""
    return Path(__file__).parents[1] / "lib" / "libsparkhvd.so"


@cache
def load() -> Library:
    """Load the library on first use; from then on forked children close this process's engines.

    Raises:
        EngineUnavailableError: it is missing or of another ABI version.
    """
    library = Library(library_path())
    os.register_at_fork(after_in_child=_after_fork)
    return library


class State:
    """The native handles of one engine, shared by the engine, its works and its finalizer."""

    def __init__(self, library: Library, handle: int) -> None:
        self.library = library
        self.handle = handle
        self.pid = os.getpid()
        # Every work that has not been released, and the memory that its operation reads and writes.
        self.works: dict[int, object] = {}
        # Memory of operations that have no work although they may go on: their submission failed inside the
        # library (no memory, say), perhaps after the engine had taken them. Kept as long as the engine.
        self.lost: list[object] = []
        # Works that Python has dropped; released once they have finished.
        self.orphans: deque[int] = deque()
        # Waits in native code right now; the engine must not be freed under them.
        self.waiting: set[object] = set()
        self.usable = True  # neither closed nor forked: one look before every operation
        self.closed = False
        self.forked = False  # this process is a child of the one that made the engine
        self.destroyed = False

    def check_usable(self, what: str) -> None:
        """Raise a `NotInitializedError` if the engine was closed or forked."""
        if self.forked:
            raise NotInitializedError(
                f"{what}: the engine was created before fork() and does not work in the forked "
                "process. Start the process with spawn, or create an engine in it."
            )
        if self.closed:
            raise NotInitializedError(f"{what}: the engine was shut down. Create a new one.")

    def losses(self) -> dict[int, Loss]:
        """Return the ranks that are lost, and how, as far as this rank knows; none once the engine is gone."""
        if self.destroyed or self.pid != os.getpid():
            return {}
        found = self.library.engine_lost(self.handle, None, 0)
        entries = (LossEntry * found)()
        found = min(found, self.library.engine_lost(self.handle, entries, found))
        return {entry.rank: Loss(entry.kind) for entry in entries[:found]}

    def to_exception(self, status: int, buffer: ctypes.Array[ctypes.c_char]) -> SparkhvdError:
        """Return the exception for a status of an operation and its sentence."""
        error = to_exception(status, buffer)
        if isinstance(error, CollectiveError):
            error.lost = {rank: loss.name.lower() for rank, loss in self.losses().items()}
        return error

    def reap(self, patience: int | None = None) -> None:
        """Release dropped works that have finished, until `patience` unfinished ones were seen; None = all."""
        pending = 0
        for _ in range(len(self.orphans)):
            try:
                handle = self.orphans.popleft()
            except IndexError:  # another thread reaps too
                return
            if self.library.poll(handle, None, 0) != PENDING:
                self.release(handle)
                continue
            self.orphans.append(handle)  # a slow one does not hide those behind it
            pending += 1
            if pending == patience:
                return

    def release(self, handle: int) -> None:
        """Release a work that has finished."""
        keep = self.works.pop(handle, None)
        if keep is not None:
            self.keep_if_left(handle, keep)
        self.library.work_release(handle)
        del keep  # after the release: nothing reads or writes it any more

    def keep_if_left(self, handle: int, keep: object) -> None:
        """Keep the memory of an operation that has failed for good, if a GPU may still use it."""
        if self.library.work_is_left_to_device(handle):
            _left_to_devices.append(keep)

    def shutdown(self) -> Status:
        """Stop the native thread and release the works that have finished."""
        self.closed = True
        self.usable = False
        # No buffer: in a finalizer the thread's may not exist yet, or not any more.
        status = self.library.engine_shutdown(self.handle, None, 0)
        self.reap()
        return Status(status)

    def close(self) -> None:
        """Shut down and free the engine, in the process that made it; the engine's finalizer."""
        if self.destroyed or self.pid != os.getpid():
            return
        self.shutdown()
        if self.waiting:  # a daemon thread still waits while the interpreter exits
            return
        self.destroyed = True
        # Works that Python still holds stay: the memory of an allgather may be a tensor's that is in use, also
        # while the interpreter exits.
        self.reap()
        self.library.engine_destroy(self.handle)


# Memory of operations that ended by a deadline while a GPU was busy with them. It may write there at any time, so the
# memory must not become another tensor's as long as this process lives.
_left_to_devices: list[object] = []

# A forked child must close its copies of every engine's descriptors.
states: weakref.WeakSet[State] = weakref.WeakSet()


def _after_fork() -> None:
    for state in list(states):
        state.forked = True
        state.usable = False
        if not state.destroyed:
            state.library.engine_after_fork(state.handle)
