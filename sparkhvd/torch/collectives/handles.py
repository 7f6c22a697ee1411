"""`Handle`: an operation in flight, for `poll` and `synchronize`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.collectives.tensors import written

__all__ = ["Handle", "Operation", "poll", "synchronize"]

_Result = TypeVar("_Result")


class Operation(Protocol):
    """An operation in flight: the engine's `Work`, or an operation on a GPU."""

    def done(self) -> bool:
        """Return True if it has finished, on the GPU too; raises its error."""

    def wait(self) -> None:
        """Wait until the host, or this thread's current stream of the GPU, may use the result."""


class Handle(Generic[_Result]):
    """An operation in flight; give it to `poll` and `synchronize`.

    Args:
        name: of the operation.
        works: the operations that must finish.
        finish: makes the result, once they have finished.
        changed: tensors of the user's that the engine writes.
    """

    __slots__ = ("_changed", "_finish", "_result", "_works", "name")

    def __init__(
        self,
        name: str,
        works: Sequence[Operation],
        finish: Callable[[], _Result],
        changed: Sequence[Tensor] = (),
    ) -> None:
        self.name = name
        self._works = works
        self._changed = changed
        self._finish: Callable[[], _Result] | None = finish
        self._result: _Result

    def __repr__(self) -> str:
        return f"<Handle {self.name!r}>"

    def done(self) -> bool:
        """Return True if `wait` would return at once; raises the errors of `wait`."""
        return all([work.done() for work in self._works])

    def wait(self) -> _Result:
        """Wait, and return the result; later calls return the same object."""
        for work in self._works:
            work.wait()
        if self._finish is not None:
            self._works = ()  # releases the memory that the operations kept alive
            written(self._changed)
            self._changed = ()
            self._result = self._finish()
            self._finish = None
        return self._result


def poll(handle: Handle[_Result]) -> bool:
    """Return True if `synchronize(handle)` would return without waiting.

    Raises:
        InvalidArgumentError: `handle` does not come from an asynchronous call of this module, or the ranks
            disagreed (`MismatchError`).
        CollectiveError: the set of ranks changed.
    """
    return _checked(handle).done()


def synchronize(handle: Handle[_Result]) -> _Result:
    """Wait for an asynchronous operation and return its result.

    Raises:
        InvalidArgumentError: `handle` does not come from an asynchronous call of this module.
        MismatchError: the ranks disagreed on shape, dtype or operation; raised on every rank.
        CollectiveTimeoutError: a rank did not come in time; the message names it.
        PeerLostError: a rank is gone; the contents of the tensors are undefined.
    """
    return _checked(handle).wait()


def _checked(handle: Handle[_Result]) -> Handle[_Result]:
    if not isinstance(handle, Handle):
        raise InvalidArgumentError(
            f"{handle!r} is not a handle. Give the result of an asynchronous call such as allreduce_async."
        )
    return handle
