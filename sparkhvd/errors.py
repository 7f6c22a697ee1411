"""Exceptions of sparkhvd.

A caller does one of three things with an error, so there are three kinds: fix the call
(`InvalidArgumentError`, `MismatchError`), restore and try again because the set of ranks changed
(`CollectiveError`), or report a defect (`InternalError`). `RankError` is raised on the driver when a rank of a run
failed, and carries the failure as data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

__all__ = [
    "CollectiveError",
    "CollectiveTimeoutError",
    "ElasticError",
    "EngineUnavailableError",
    "HorovodInternalError",
    "InternalError",
    "InvalidArgumentError",
    "LeftOutError",
    "MismatchError",
    "NotInitializedError",
    "PeerLostError",
    "PreflightError",
    "RankError",
    "ResultMemoryError",
    "SparkUnavailableError",
    "SparkhvdError",
    "StoreError",
    "UntrustedError",
]


# A table may have ten thousand columns: a message with all of them would be unreadable.
_MOST_LISTED = 30


def listed(items: Iterable[str], separator: str = ", ") -> str:
    """Join the first 30 items for a message, and say how many more there are."""
    every = list(items)
    more = len(every) - _MOST_LISTED
    tail = [f"and {more:,} more"] if more > 0 else []
    return separator.join([*every[:_MOST_LISTED], *tail])


class SparkhvdError(Exception):
    """Base of every exception of this package."""


class InvalidArgumentError(SparkhvdError, ValueError):
    """The call is wrong, and only the caller can fix it. Never retried."""


class UnsupportedError(InvalidArgumentError, NotImplementedError):
    """The call requests an unsupported feature. Never retried."""


class MismatchError(InvalidArgumentError, RuntimeError):
    """Ranks disagree on shape, dtype, operation or root.

    Raised on every participating rank when it waits; the engine stays usable. Never retried.
    """


class PreflightError(InvalidArgumentError, RuntimeError):
    """The cluster or the store cannot run this job. Raised before ranks start."""


class UntrustedError(InvalidArgumentError):
    """Loading would run code from a file that the caller has not declared trusted."""


class CollectiveError(SparkhvdError, RuntimeError):
    """The set of ranks changed under an operation.

    The contents of all buffers in flight are undefined, and the engine is unusable until it is
    initialised again.

    Attributes:
        lost: by rank, how it was lost, as far as this rank knows: "dead" (its process has ended), "silent" (it may
            live, but does not answer, stopped in the middle of an operation, or its connection broke), "left" (it shut
            down).
    """

    lost: Mapping[int, str] = MappingProxyType({})


class ResultMemoryError(SparkhvdError, MemoryError):
    """A rank has no memory for the result of a collective.

    Raised on every participating rank, before a byte has moved; the engine stays usable. Never retried.
    """


class NotInitializedError(InvalidArgumentError, CollectiveError):
    """The call needs `init()` first, or came after `shutdown()`.

    A ValueError, and also a `HorovodInternalError`, which Horovod raises from operations.
    """


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """A rank did not arrive in time. The message names the rank."""


class PeerLostError(CollectiveError, ConnectionError):
    """The process or the connection of another rank is gone.

    The message names the rank, and `lost` lists all lost ranks.
    """


class ElasticError(SparkhvdError, RuntimeError):
    """An elastic job cannot continue. Never retried.

    There are too few ranks, too many resets, no rank with the training's state, or no coordinator.
    """


class LeftOutError(ElasticError):
    """This rank did not answer in time, so the elastic job continued without it. It must end, and write nothing."""


HorovodInternalError = CollectiveError
"""Horovod's name for `CollectiveError`."""


class StoreError(SparkhvdError, OSError):
    """The store cannot be read or written now: it is full, gone, unreachable, or closed to this user.

    Files written before remain: a fit with the same `run_id` resumes from the last checkpoint. Never retried.
    """


class EngineUnavailableError(SparkhvdError, ImportError):
    """The compiled library is missing or does not match this version of the package."""


class SparkUnavailableError(SparkhvdError, ModuleNotFoundError):
    """The call needs pyspark, but this environment does not have it."""


class InternalError(SparkhvdError, RuntimeError):
    """A defect of sparkhvd: please report it with the message."""


class RankError(SparkhvdError, RuntimeError):
    """A rank of a run failed. Raised on the driver with the root cause, not its consequences.

    Attributes:
        rank: the rank that failed first, or None if no rank had started.
        host: the host it ran on, or None if unknown.
        exit: how its process ended: "exception", "exit 3", "signal SIGKILL", "lost".
        error_type: class of the exception on that rank, "ValueError" or "torch.OutOfMemoryError"; empty without one.
            `__cause__` is an exception of that class and text if it is one of Python's or of this package, else None.
        traceback: the whole Python traceback on that rank; empty without one. The text of this error has the frames of
            the user's code.
        log_tail: the last lines that the rank printed; may be empty.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        host: str | None = None,
        exit: str = "",  # noqa: A002 - the public name of the attribute
        error_type: str = "",
        traceback: str = "",
        log_tail: str = "",
        cause: BaseException | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.exit = exit
        self.error_type = error_type
        self.traceback = traceback
        self.log_tail = log_tail
        if cause is not None:
            self.__cause__ = cause

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with attributes, notes and cause."""
        state = dict(vars(self))
        if self.__cause__ is not None:
            state["__cause__"] = self.__cause__
        return RankError, (str(self),), state
