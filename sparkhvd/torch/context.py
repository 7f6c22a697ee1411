"""The default of the Horovod-like API: the engine that `rank()` and `allreduce()` use.

One process-wide variable, because a Horovod program may call from any of its threads. A context variable
overrides it only where ranks are threads of one process (tests): a new thread starts with an empty context,
so a context variable alone would leave user threads without an engine. Everything below takes the context as
an argument; an optimizer looks it up once, when it is built, because its hooks may run on autograd's threads.
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

from sparkhvd.elastic import ElasticRendezvous
from sparkhvd.engine.engine import Engine
from sparkhvd.errors import CollectiveError, InvalidArgumentError, NotInitializedError
from sparkhvd.rendezvous import SingleRendezvous
from sparkhvd.topology import Topology, horovod_variables

if TYPE_CHECKING:
    from sparkhvd.rendezvous import Rendezvous


class Follower(Protocol):
    """What is built on an engine, and built again on the next one of an elastic job."""

    def detach(self) -> None:
        """Stop using the engine, which may have failed."""

    def follow(self, current: Context) -> None:
        """Use another engine from now on; every rank calls this, for what it has built in the same order."""


class ContextPart:
    """State that another module keeps per context, such as the rank's GPU; `Context.part` makes it at its first use."""

    def retire(self) -> None:
        """Stop using the context, which has closed."""


_Part = TypeVar("_Part", bound=ContextPart)


class Context:
    """An engine, and the state and counters of this API per engine: every rank counts the same operations alike.

    Args:
        engine: of this process; where it joins later, one of its own.
        cleanup: ends with the engine.
        rendezvous: of `init()`.
        place: of a process that joins a running elastic job later; None of one that has the engine's.
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
        self.rendezvous = rendezvous  # of `init()`
        # Does that `init()` again, after a shutdown (of `elastic`).
        self.again: Callable[[], None] | None = None
        self.followers: list[weakref.ref[Follower]] = []
        self.cleanup = cleanup or contextlib.ExitStack()  # what ends with the engine
        self.is_open = True
        self.joins = 0  # how often all ranks have joined
        self._parts: dict[type[ContextPart], ContextPart] = {}
        self._counters: defaultdict[tuple[str, int], Iterator[int]] = defaultdict(itertools.count)

    def part(self, kind: type[_Part]) -> _Part:
        """Return this context's state of a kind."""
        part = self._parts.get(kind)
        if part is None:
            # Of two threads, the first one's stays.
            part = self._parts.setdefault(kind, kind())
        return cast("_Part", part)

    def number(self, kind: str, process_set: int = 0) -> int:
        """Count the operations of a kind in the process set: 0, 1, ..."""
        return next(self._counters[kind, process_set])

    def name(self, kind: str, name: str | None, process_set: int = 0) -> str:
        """Return Horovod's name of an operation: `<kind>.<name>`, or `<kind>.noname.<n>`.

        Every rank of a process set counts the set's operations alike, whatever else it does.

        Raises:
            NotInitializedError: this process has not joined the others yet.
        """
        if self.joins_later:
            raise NotInitializedError(
                f"{kind}: this process has come to an elastic job that is running, and joins it in the function of hvd.elastic.run. "
                "Communicate there: the others do not answer before."
            )
        if name is not None:
            if not isinstance(name, str):
                raise InvalidArgumentError(
                    f"{kind}: the name is {name!r}, a {type(name).__name__}. Give a string, or None to have the "
                    "operation numbered."
                )
            if "\0" in name:
                raise InvalidArgumentError(
                    f"{kind}: the name {name!r} has a zero character, where the engine's names end. Leave it out."
                )
            return f"{kind}.{name}"
        # Ranks that had joined did not count the others' operations: after a join all begin anew.
        kind = f"{kind}.noname.{self.joins}" if self.joins else f"{kind}.noname"
        return f"{kind}.{self.number(kind, process_set)}"

    def close(self) -> None:
        """Leave the job politely; gradients are not reduced any more."""
        self.retire()
        with self.cleanup:
            self.engine.shutdown()

    def retire(self) -> None:
        """Close this context, but not its engine."""
        self.is_open = False
        for part in tuple(self._parts.values()):
            part.retire()


class _Process:
    """The context that `init()` made in this process."""

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
    """Return the current context.

    Raises:
        NotInitializedError: there is none.
    """
    current = _override.get() or _process.context
    if current is None or not current.is_open:
        raise NotInitializedError("sparkhvd has not been initialized; use hvd.init().")
    return current


def is_initialized() -> bool:
    """Return True if there is a current context."""
    return _find() is not None


def initialize(
    join: Callable[[contextlib.ExitStack], Rendezvous], *, may_join_later: bool = False
) -> bool:
    """Make the process's context, unless there is one; return True if there was none.

    Args:
        join: meets the ranks; gets what ends with the job.
        may_join_later: in an elastic job whose ranks run already, have a context without them for the time being.
    """
    with _process.lock:
        if _find() is not None:
            return False
        with contextlib.ExitStack() as cleanup:
            rendezvous = join(cleanup)
            place = None
            if may_join_later and isinstance(rendezvous, ElasticRendezvous):
                place = rendezvous.arrive()
            alone = None if place is None else SingleRendezvous(rendezvous.settings)
            engine = _make_engine(alone or rendezvous)
            made = Context(engine, cleanup.pop_all(), rendezvous, place)
            _process.context = made
        known = horovod_variables(made.place, socket.gethostname())
        variables = os.environ  # noqa: TID251 - for what reads Horovod's; an outer launcher's are of another job
        # Libraries that look for these would take a process on its own for a rank.
        if made.place.size > 1 or known.keys() & variables.keys():
            variables.update(known)
        if _process.exit_pid != os.getpid():
            _process.exit_pid = os.getpid()
            atexit.register(_at_exit, os.getpid())
        return True


def _make_engine(rendezvous: Rendezvous) -> Engine:
    """Meet the ranks and make the engine; in an elastic job again without those that are lost meanwhile."""
    while True:
        connections = rendezvous.connect()
        try:
            return Engine(connections, rendezvous.settings)
        except CollectiveError as error:
            if not isinstance(rendezvous, ElasticRendezvous):
                raise
            rendezvous.standing.why = str(error)


def shut_down() -> None:
    """Close the current context, if there is one."""
    current = _find()
    if current is None:
        return
    if current is _process.context:
        _process.context = None
    current.close()


def _at_exit(pid: int) -> None:
    # A forked child inherits this registration, and must not speak for its parent.
    if os.getpid() == pid and _process.context is not None:
        shut_down()


@contextlib.contextmanager
def use_engine(engine: Engine) -> Iterator[Context]:
    """Make this thread's API use `engine` inside the block: for ranks that are threads of one process."""
    made = Context(engine)
    token = _override.set(made)
    try:
        yield made
    finally:
        made.retire()
        _override.reset(token)
