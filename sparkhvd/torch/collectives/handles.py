"""`Handle`: an operation in flight, for `poll` and `synchronize`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.collectives.tensors import written

__all__ = ["Handle", "Operation", "poll", "synchronize"]


class Operation(Protocol):
    """What is in flight: the engine's `Work`, or an operation on a GPU."""

    def done(self) -> bool:
        """Whether it has finished, on the GPU too; raises its error."""

    def wait(self) -> None:
        """Return when its result may be used: by the host, or by this thread's current stream of the GPU."""


class Handle:
    """An operation in flight; give it to `poll` and `synchronize`.

    Args:
        name: of the operation.
        works: what must finish.
        result: what `wait` gives.
        changed: tensors of the user's that the engine writes.
        finish: makes the result instead, once the works have finished.
    """

    __slots__ = ("_changed", "_finish", "_result", "_works", "name")

    def __init__(
        self,
        name: str,
        works: Sequence[Operation],
        result: Any = None,
        changed: Sequence[Tensor] = (),
        finish: Callable[[], Any] | None = None,
    ) -> None:
        self.name = name
        self._works = works
        self._result = result
        self._changed = changed
        self._finish = finish

    def __repr__(self) -> str:
        return f"<Handle {self.name!r}>"

    def done(self) -> bool:
        """Whether `wait` would return at once; raises what `wait` would raise."""
        return all([work.done() for work in self._works])

    def wait(self) -> Any:
        """Wait, and give the result; later calls give the same object."""
        for work in self._works:
            work.wait()
        if self._works:
            self._works = ()  # frees what the operation kept alive
            written(self._changed)
            self._changed = ()
            if self._finish is not None:
                finish, self._finish = self._finish, None
                self._result = finish()
        return self._result


def poll(handle: Handle) -> bool:
    """Whether `synchronize(handle)` would return without waiting.

    Raises:
        InvalidArgumentError: `handle` does not come from an asynchronous call of this module, or the ranks
            disagreed (`MismatchError`).
        CollectiveError: the set of ranks changed.
    """
    return _checked(handle).done()


def synchronize(handle: Handle) -> Any:
    """Wait for an asynchronous operation and return its result.

    Raises:
        InvalidArgumentError: `handle` does not come from an asynchronous call of this module.
        MismatchError: the ranks disagreed on shape, dtype or operation; raised on every rank.
        CollectiveTimeoutError: a rank did not come in time; the message names it.
        PeerLostError: a rank is gone; the contents of the tensors are undefined.
    """
    return _checked(handle).wait()


def _checked(handle: Handle) -> Handle:
    if not isinstance(handle, Handle):
        raise InvalidArgumentError(
            f"{handle!r} is not a handle. Give what an asynchronous call such as allreduce_async returned."
        )
    return handle
