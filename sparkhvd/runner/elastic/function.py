"""Elastic training of a function on Spark: `sparkhvd.runner.run_elastic`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO, TypeVar

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

    from sparkhvd.runner.elastic.job import SharedStore
    from sparkhvd.settings import Settings

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
    *,
    spark: SparkSession | None = None,
    settings: Settings | None = None,
    max_retries: int = 2,
    use_gpu: bool | None = None,
    profile: ResourceProfile | None = None,
    store: SharedStore | None = None,
) -> list[R]:
    """Call `fn(*args, **kwargs)` as an elastic job in one Spark stage, and return results by rank.

    `fn` trains with `hvd.elastic.run` (docs/elastic.md). The stage has `max_num_proc` tasks, and is not a barrier
    stage: each starts when a slot is free, and its rank joins the others at their next commit. A rank that dies is
    replaced; ranks of a lost executor restart elsewhere as soon as Spark has a slot. Dynamic allocation may be on. The
    driver prints a line for each change. An exception of `fn` before the ranks have connected ends the job.

    Output, Ctrl-C, and arguments without a description are those of `run`.

    Args:
        fn: any picklable function.
        args: positional arguments of `fn`.
        kwargs: keyword arguments of `fn`.
        num_proc: initial number of ranks. None means the configured slots, but at least `min_num_proc` and at most `max_num_proc`.
        min_num_proc: smallest number of ranks; with fewer the training waits. None means `num_proc`.
        max_num_proc: largest number of ranks; None means `num_proc`.
        start_timeout: longest wait in seconds for `min_num_proc` ranks at the start; None means
            `Settings.start_timeout_s`. Training starts as soon as a rank runs in every available slot.
        elastic_timeout: longest wait for them later; None means 600.
        reset_limit: changes of the ranks after the first; one more ends the job. None means any number.
        env: of `run`.
        stdout: of `run`.
        stderr: of `run`.
        verbose: of `run`.
        nics: of `run`.
        prefix_output_with_timestamp: of `run`.
        spark: of `run`.
        settings: of `run`.
        max_retries: relaunches of the job after the loss of all of its ranks, or of its Spark stage.
        use_gpu: of `run`.
        profile: of `run`.
        store: a `sparkhvd.Store` that the executors share. Over Spark Connect they then need not reach this client: the
            first task is the coordinator, and the others find it through the store. Its files there are deleted at the
            end. Classic Spark needs no store.

    Returns:
        The results of `fn` on the successful ranks of the last generation, by rank.

    Raises:
        InvalidArgumentError: an argument is wrong, or `fn` cannot be pickled. Nothing has started.
        PreflightError: the cluster cannot run this job. `fn` has not started.
        ElasticError: there were too few ranks for too long, or too many changes.
        RankError: every rank has failed; it has the first one's rank, host, and traceback or signal.
    """
    from sparkhvd.runner import horovod_arguments
    from sparkhvd.runner.elastic.job import launch_elastic, sharing
    from sparkhvd.runner.elastic.options import RankRange
    from sparkhvd.runner.options import LaunchOptions
    from sparkhvd.spark import SparkShim, active_session

    interfaces = horovod_arguments.join_interfaces(nics)
    options = LaunchOptions(
        env={**(env or {}), **({"SPARKHVD_INTERFACES": interfaces} if interfaces else {})},
        settings=settings,
        start_timeout_s=start_timeout,
        max_retries=max_retries,
        verbose=verbose,
        use_gpu=use_gpu,
        profile=profile,
        timestamps=prefix_output_with_timestamp,
        stream=horovod_arguments.choose_stream(stdout, stderr),
    )
    ranks = RankRange(num_proc, min_num_proc, max_num_proc, elastic_timeout, reset_limit)
    shim = SparkShim(active_session() if spark is None else spark)
    with sharing(options, store, shim) as options:
        return launch_elastic(shim, fn, args, kwargs or {}, ranks, options).results
