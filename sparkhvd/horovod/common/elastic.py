"""Horovod's `horovod.common.elastic`: names that say that the number of ranks does not change."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["ObjectState", "State", "not_here", "run_fn"]


def not_here(name: str) -> NotImplementedError:
    """Make the error of an elastic name."""
    return NotImplementedError(
        f"{name}: the number of ranks does not change in this version of sparkhvd. A fit goes on from its last checkpoint when a rank is "
        "lost, and sparkhvd.data's loaders go on at any row with other ranks."
    )


class State:
    """State of a training whose ranks change; making one is an error."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise not_here(f"elastic.{type(self).__name__}")


class ObjectState(State):
    """State of plain objects; making one is an error."""


def run_fn(func: Any, reset: Any = None) -> NoReturn:
    """Refuse.

    Raises:
        NotImplementedError: always.
    """
    del func, reset
    raise not_here("elastic.run_fn")
