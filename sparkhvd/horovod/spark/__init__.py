"""Horovod's `horovod.spark`.

Each module imports only those above it:

    common     backends and stores, and shared parts of the estimators
    conf       Horovod's settings of Spark, not needed here
    elastic    a function on the ranks of an elastic job
    task       the GPU of a rank
    keras      the estimator of models of Keras 3
    lightning  the estimator of LightningModules
    torch      the estimator of PyTorch modules
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TextIO, TypeVar

from sparkhvd.runner import run
from sparkhvd.runner import run_elastic as _run_elastic

__all__ = ["run", "run_elastic"]

R = TypeVar("R")


def run_elastic(
    fn: Callable[..., R],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Iterable[str] | str | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[R]:
    """Call `fn(*args, **kwargs)` on the ranks of an elastic job, and return the results by rank.

    The arguments are those of `horovod.spark.run_elastic`, in its order, and of `sparkhvd.runner.run_elastic`, whose
    documentation explains each. `min_np` and `max_np` are the old names of `min_num_proc` and `max_num_proc`.

    Raises:
        Exception: as `sparkhvd.runner.run_elastic`.
    """
    return _run_elastic(
        fn,
        args,
        kwargs,
        num_proc,
        min_num_proc if min_np is None else min_np,
        max_num_proc if max_np is None else max_np,
        start_timeout,
        elastic_timeout,
        reset_limit,
        env,
        stdout,
        stderr,
        verbose,
        nics,
        prefix_output_with_timestamp,
    )
