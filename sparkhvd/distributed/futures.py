"""Futures whose callbacks may launch collectives: those match across ranks, whenever and wherever the callbacks run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Future", "Scope", "current_scope"]


class Scope:
    """Names in the order of a program: of a group's collectives, or of those that one callback launches.

    Callbacks run when a rank happens to find a work finished, so a group's own order would differ between ranks.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._callbacks = 0
        self.count = 0

    def name(self) -> str:
        """Return the next name."""
        name = f"{self._prefix}.{self.count}"
        self.count += 1
        return name

    def child(self) -> Scope:
        """Return the scope of the next callback, counted apart: a callback may launch before or after another is added."""
        self._callbacks += 1
        return Scope(f"{self._prefix}.then{self._callbacks}")


class _Current(threading.local):
    scope: Scope | None = None


_current = _Current()


def current_scope() -> Scope | None:
    """Return the scope of the callback that this thread runs."""
    return _current.scope


@contextmanager
def _entered(scope: Scope) -> Iterator[None]:
    before, _current.scope = _current.scope, scope
    try:
        yield
    finally:
        _current.scope = before


class Future(torch.futures.Future[Any]):
    """Future of a work or of a callback; who waits for it from Python waits for the work.

    Args:
        settle: waits for the work, and runs callbacks.
        scope: names what they launch.
    """

    def __init__(self, settle: Callable[[], object], scope: Scope) -> None:
        super().__init__()
        self._settle = settle
        self._scope = scope
        self._error: Exception | None = None
        self._children: list[Future] = []

    def finish(self, value: object, error: BaseException | None) -> None:
        """Complete the future; its callbacks run in this thread."""
        if error is None:
            self.set_result(value)
        else:
            self._error = error if isinstance(error, Exception) else RuntimeError(repr(error))
            self.set_exception(self._error)

    def check(self) -> None:
        """Raise the error of this future, or of one that a callback of it completes: torch's C++ cannot read it."""
        if self._error is not None:
            raise self._error
        for child in self._children:
            child.check()

    def wait(self) -> Any:
        """Return the result, and drive the engine until it is there."""
        if not self.done():
            self._settle()
        return super().wait()

    def then(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> Future:
        """Return the future of what the callback returns, which gets this one when it is complete."""
        child = Future(self._settle, self._scope.child())
        self._children.append(child)

        def run(_: object) -> None:
            try:
                with _entered(child._scope):
                    value = callback(self)
            except Exception as error:  # noqa: BLE001 - becomes the future's
                child.finish(None, error)
            else:
                child.finish(value, None)

        super().add_done_callback(run)
        return child

    def add_done_callback(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> None:
        """Call a function when the future is complete."""
        self.then(callback)
