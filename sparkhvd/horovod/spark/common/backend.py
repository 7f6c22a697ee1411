"""Horovod's `horovod.spark.common.backend`: backends to run a function on ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.runner import run
from sparkhvd.spark import active_session

__all__ = ["Backend", "SparkBackend", "launch_arguments"]


class Backend(ABC):
    """Interface of a backend. A backend runs a function on ranks."""

    @abstractmethod
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank, with extra environment variables, and return the results by rank."""

    @abstractmethod
    def num_processes(self) -> int:
        """Number of ranks."""


class SparkBackend(Backend):
    """Ranks in a barrier stage of the active Spark session.

    Args:
        num_proc: number of ranks; None: as many as there are task slots.
        env: environment variables of the ranks. Default: no variables; Horovod sends all of the driver's.
        **kwargs: of `horovod.spark.run`.
    """

    def __init__(
        self, num_proc: int | None = None, env: Mapping[str, str] | None = None, **kwargs: Any
    ) -> None:
        self._num_proc = num_proc
        self._env = env
        self._kwargs = kwargs

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank, and return the results by rank."""
        variables = {**(self._env or {}), **(env or {})}
        return run(fn, args, kwargs, num_proc=self.num_processes(), env=variables, **self._kwargs)

    def num_processes(self) -> int:
        """Return the number of ranks, by default Spark's default parallelism.

        Raises:
            InvalidArgumentError: no number was given, and there is no classic session.
        """
        if self._num_proc is None:
            session = active_session()
            if not hasattr(session, "sparkContext"):
                raise InvalidArgumentError(
                    "SparkBackend(): num_proc is not given, and Spark Connect does not report its default parallelism. Give num_proc."
                )
            self._num_proc = int(session.sparkContext.defaultParallelism)
        return self._num_proc


def launch_arguments(backend: object) -> tuple[dict[str, Any], dict[str, str]] | None:
    """Arguments of `horovod.spark.run` and variables of a `SparkBackend`, for an estimator's own launch.

    None for a backend with its own `run`. An estimator must call that `run`; relaunches and live output are then up to
    the program.
    """
    if not isinstance(backend, SparkBackend) or type(backend).run is not SparkBackend.run:
        return None
    given = {name: value for name, value in backend._kwargs.items() if value is not None}
    return given, dict(backend._env or {})
