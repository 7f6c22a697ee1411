"""The current engine, for all functions of the Horovod API.

One process-wide variable, because a Horovod program may call from any of its threads. A context variable
overrides it only where ranks are threads of one process (tests): a new thread starts with an empty context,
so a context variable alone would leave user threads without an engine. Lower modules take the context as an
argument. An optimizer reads it once, when it is built, because its hooks may run on autograd's threads.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import socket
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from sparkhvd import lazy_compiler
from sparkhvd.elastic import ElasticRendezvous
from sparkhvd.engine.engine import Engine
from sparkhvd.errors import CollectiveError, InvalidArgumentError, NotInitializedError
from sparkhvd.rendezvous import SingleRendezvous
from sparkhvd.topology import Topology, horovod_variables

if TYPE_CHECKING:
    from sparkhvd.rendezvous import Rendezvous


class Follower(Protocol):
    """User of an engine. It moves to the next engine when the ranks of an elastic job change."""

    def detach(self) -> None:
        """Stop using the engine. The engine may have failed."""

    def follow(self, current: Context) -> None:
        """Use another context's engine from now on. Every rank calls this for its followers in the same order."""


class ContextPart:
    """Another module's state in a context, such as the rank's GPU. See `Context.part`."""

    def retire(self) -> None:
        """Stop using the closed context."""


_Part = TypeVar("_Part", bound=ContextPart)


class Context:
    """An engine with the state of this API, such as the numbers of unnamed operations.

    Args:
        engine: the engine of this process. A process that has not yet joined a running elastic job has an engine of one
            rank.
        cleanup: closed with the engine.
        rendezvous: the rendezvous of `init()`.
        place: provisional rank and size of a process until it joins a running elastic job; None for the engine's.
    """

    def __init__(
        self,
        engine: Engine,
        cleanup: contextlib.ExitStack | None = None,
        rendezvous: Rendezvous | None = None,
        place: Topology | None = None,
    ) -> None:
        self.engine = engine
        self.joins_later = place is not None
        self.place = place or engine.topology
        self.rendezvous = rendezvous
        # Calls `init()` with the same arguments; `elastic` needs it after a shutdown.
        self.again: Callable[[], None] | None = None
        self.comm: object = None  # the `comm` of `init()`
        self.followers: list[weakref.ref[Follower]] = []
        self.cleanup = cleanup or contextlib.ExitStack()
        self.is_open = True
        self.joins = 0  # number of completed `hvd.join()` calls
        self._parts: dict[type[ContextPart], ContextPart] = {}
        self._counters: defaultdict[tuple[str, int], Iterator[int]] = defaultdict(itertools.count)

    def part(self, kind: type[_Part]) -> _Part:
        """Get or create this context's state of a kind."""
        part = self._parts.get(kind)
        if part is None:
            # If two threads get here, both use the first thread's part.
            part = self._parts.setdefault(kind, kind())
        return cast("_Part", part)

    def number(self, kind: str, process_set: int = 0) -> int:
        """Take the number of the next operation of a kind in the process set: 0, 1, ..."""
        return next(self._counters[kind, process_set])

    def name(self, kind: str, name: str | None, process_set: int = 0) -> str:
        """Horovod's name of an operation: `<kind>.<name>`, or `<kind>.noname.<n>`.

        Each process set has its own numbers, so all its ranks give an operation the same number.

        Raises:
            NotInitializedError: this process has not joined the running elastic job yet.
        """
        if self.joins_later:
            raise NotInitializedError(
                f"{kind}: this process has not joined the running elastic job yet. Call collectives only inside the function of "
                "hvd.elastic.run, which joins it."
            )
        if name is not None:
            if not isinstance(name, str):
                raise InvalidArgumentError(
                    f"{kind}: the name is {name!r}, a {type(name).__name__}. Give a string, or None to have the "
                    "operation numbered."
                )
            if "\0" in name:
                raise InvalidArgumentError(
                    f"{kind}: the name {name!r} contains a NUL character. Remove it."
                )
            return f"{kind}.{name}"
        # A rank that waited in `hvd.join()` did not count the other ranks' operations, so the numbers restart after it.
        kind = f"{kind}.noname.{self.joins}" if self.joins else f"{kind}.noname"
        return f"{kind}.{self.number(kind, process_set)}"

    def close(self) -> None:
        """Leave the job gracefully. Optimizers no longer reduce gradients."""
        self.retire()
        with self.cleanup:
            self.engine.shutdown()

    def retire(self) -> None:
        """Close this context, but not its engine."""
        self.is_open = False
        for part in tuple(self._parts.values()):
            part.retire()


class _Process:
    """The context of `init()` in this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.context: Context | None = None
        self.exit_pid: int | None = None  # the process whose exit shuts down


_process = _Process()
_override: ContextVar[Context | None] = ContextVar("sparkhvd_context", default=None)


def _find() -> Context | None:
    current = _override.get() or _process.context
    return current if current is not None and current.is_open else None


def context() -> Context:
    """Find the context of this process's job.

    Raises:
        NotInitializedError: `init()` was not called.
    """
    current = _override.get() or _process.context
    if current is None or not current.is_open:
        raise NotInitializedError("sparkhvd has not been initialized; use hvd.init().")
    return current


def is_initialized() -> bool:
    return _find() is not None


def initialize(
    join: Callable[[contextlib.ExitStack], Rendezvous], *, may_join_later: bool = False
) -> bool:
    """Create the process's context, unless it exists, and return True if it was created.

    Args:
        join: connects the ranks; registers on its argument the resources to close at the end of the job.
        may_join_later: in a running elastic job, create a preliminary context without the other ranks.
    """
    with _process.lock:
        if _find() is not None:
            return False
        with contextlib.ExitStack() as cleanup:
            rendezvous = join(cleanup)
            if rendezvous.settings.lazy_compiler:
                cleanup.enter_context(lazy_compiler.installed())
            place = None
            if may_join_later and isinstance(rendezvous, ElasticRendezvous):
                place = rendezvous.arrive()
            alone = None if place is None else SingleRendezvous(rendezvous.settings)
            engine = _make_engine(alone or rendezvous)
            made = Context(engine, cleanup.pop_all(), rendezvous, place)
            _process.context = made
        known = horovod_variables(made.place, socket.gethostname())
        variables = os.environ  # noqa: TID251 - for libraries that read Horovod's variables
        # A job of one rank sets the variables only to replace values, or libraries would treat it as distributed.
        if made.place.size > 1 or known.keys() & variables.keys():
            variables.update(known)
        if _process.exit_pid != os.getpid():
            _process.exit_pid = os.getpid()
            atexit.register(_at_exit, os.getpid())
        return True


def _make_engine(rendezvous: Rendezvous) -> Engine:
    """Connect the ranks and create the engine. An elastic job retries without failed ranks."""
    while True:
        connections = rendezvous.connect()
        try:
            return Engine(connections, rendezvous.settings)
        except CollectiveError as error:
            if not isinstance(rendezvous, ElasticRendezvous):
                raise
            rendezvous.standing.why = str(error)


def shut_down() -> None:
    """Close the current context, if any."""
    current = _find()
    if current is None:
        return
    if current is _process.context:
        _process.context = None
    current.close()


def _at_exit(pid: int) -> None:
    # A forked child inherits this exit handler, but must not shut down its parent's engine.
    if os.getpid() == pid and _process.context is not None:
        shut_down()


@contextlib.contextmanager
def use_engine(engine: Engine) -> Iterator[Context]:
    """Use `engine` for this thread's calls inside the block, so that threads of one process can be ranks."""
    made = Context(engine)
    token = _override.set(made)
    try:
        yield made
    finally:
        made.retire()
        _override.reset(token)
