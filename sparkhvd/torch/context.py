"""The one default of the Horovod-like API: which engine `rank()` and `allreduce()` mean.

One process-wide variable, because a Horovod program may call from any of its threads. A context variable
overrides it only where ranks are threads of one process (tests): a new thread starts with an empty context,
so a context variable alone would leave user threads without an engine. Everything below takes the context as
an argument; an optimizer looks it up once, when it is built, because its hooks may run on autograd's threads.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from sparkhvd import rendezvous as meeting
from sparkhvd.engine.engine import Engine
from sparkhvd.errors import InvalidArgumentError, NotInitializedError
from sparkhvd.settings import Settings

if TYPE_CHECKING:
    from sparkhvd.rendezvous import Rendezvous

__all__ = ["Context", "context", "initialize", "is_initialized", "shut_down", "use_engine"]


class _Ended(threading.local):
    """The reducers whose backward pass has ended on this thread, which are about to wait (of `buckets.py`)."""

    def __init__(self) -> None:
        self.reducers: list[Any] = []


class Context:
    """An engine and what is counted per engine: every rank counts the same operations in the same order."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.is_open = True
        # Which reducer listens to a parameter, weakly (made and used by `optimizer.py`).
        self.owners: MutableMapping[Any, Callable[[], Any]] | None = None
        # The registered process sets by their ranks (made and used by `process_sets.py`).
        self.process_sets: dict[tuple[int, ...], Any] = {}
        self.joins = 0  # how often all ranks have joined
        self.ended = _Ended()
        # This rank's GPU, once a tensor on it has come, and what opens it (made and used by `device.py`).
        self.device: Any = None
        self.opener: Callable[[Engine, int], Any] | None = None
        # Gathers on it that go on without the caller (of `collectives/device_gathers.py`).
        self.gathers: Any = None
        self._counters: defaultdict[tuple[str, int], Iterator[int]] = defaultdict(itertools.count)

    def number(self, kind: str, process_set: int = 0) -> int:
        """The next number of its kind in the process set: 0, 1, ..."""
        return next(self._counters[kind, process_set])

    def name(self, kind: str, name: str | None, process_set: int = 0) -> str:
        """Horovod's name of an operation: `<kind>.<name>`, or `<kind>.noname.<n>`.

        Every rank of a process set counts the set's operations alike, whatever else it does.
        """
        if name is not None:
            if not isinstance(name, str):
                raise InvalidArgumentError(
                    f"{kind}: the name is {name!r}, a {type(name).__name__}. Give a string, or None to have the "
                    "operation numbered."
                )
            if "\0" in name:
                raise InvalidArgumentError(
                    f"{kind}: the name {name!r} has a zero character, where the engine's names end."
                )
            return f"{kind}.{name}"
        # Ranks that had joined did not count the others' operations: after a join all begin anew.
        kind = f"{kind}.noname.{self.joins}" if self.joins else f"{kind}.noname"
        return f"{kind}.{self.number(kind, process_set)}"

    def close(self) -> None:
        """Leave the job politely; gradients are not reduced any more."""
        self.retire()
        self.engine.shutdown()

    def retire(self) -> None:
        """From now on nobody may use the engine through this context."""
        self.is_open = False
        self.process_sets.clear()
        owners, self.owners = self.owners, None
        for find in (owners or {}).values():
            reducer = find()
            if reducer is not None:
                reducer.detach()


class _Process:
    """What `init()` made in this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.context: Context | None = None
        self.exit_pid: int | None = None  # the process whose exit shuts down


_process = _Process()
_override: ContextVar[Context | None] = ContextVar("sparkhvd_context", default=None)


def _find() -> Context | None:
    found = _override.get() or _process.context
    return found if found is not None and found.is_open else None


def context() -> Context:
    """The current context.

    Raises:
        NotInitializedError: there is none.
    """
    found = _find()
    if found is None:
        raise NotInitializedError("sparkhvd has not been initialized; use hvd.init().")
    return found


def is_initialized() -> bool:
    """Whether there is a current context."""
    return _find() is not None


def initialize(rendezvous: Rendezvous | None = None) -> bool:
    """Make the process's context, unless there is one; whether there was none."""
    rendezvous = rendezvous or meeting.current()
    with _process.lock:
        if _find() is not None:
            return False
        rendezvous = rendezvous or meeting.SingleRendezvous(Settings.resolve())
        _process.context = Context(Engine(rendezvous.connect(), rendezvous.settings))
        if _process.exit_pid != os.getpid():
            _process.exit_pid = os.getpid()
            atexit.register(_at_exit, os.getpid())
        return True


def shut_down() -> None:
    """Close the current context, if there is one."""
    found = _find()
    if found is None:
        return
    if found is _process.context:
        _process.context = None
    found.close()


def _at_exit(pid: int) -> None:
    # A forked child inherits this registration, and must not speak for its parent.
    if os.getpid() == pid and _process.context is not None:
        shut_down()


@contextmanager
def use_engine(engine: Engine) -> Iterator[Context]:
    """For ranks that are threads of one process: this thread's API means `engine` inside the block."""
    made = Context(engine)
    token = _override.set(made)
    try:
        yield made
    finally:
        made.retire()
        _override.reset(token)
