"""Params of the launch: ranks, engine settings and output on the driver."""

from __future__ import annotations

import functools

from pyspark.ml.param import TypeConverters

from sparkhvd.estimator.params.base import TorchParams, accessors
from sparkhvd.estimator.params.converters import (
    any_value,
    to_float,
    to_function,
    to_loggers,
    to_ranks,
    to_timeline,
    to_whole,
)
from sparkhvd.estimator.params.table import above, at_least, one_of, param

__all__ = ["ClusterParams"]

cluster_param = functools.partial(param, group="cluster")


def is_number_of_ranks(value: int | tuple[int, int]) -> str:
    """Check `num_proc`."""
    least, most = value if isinstance(value, tuple) else (value, value)
    if least < 1:
        return "it must be at least 1"
    return "" if least <= most else "the first is the least number of ranks, the second the most"


@accessors
class ClusterParams(TorchParams):
    """Params of the launch."""

    num_proc = cluster_param(
        to_ranks,
        "number of ranks; default every GPU or task slot; (least, most) for ranks that come and go",
        annotation="int | tuple[int, int]",
        aliases=("numTrainWorkers",),
        check=is_number_of_ranks,
        in_conf=True,
    )
    elastic_batch = cluster_param(
        TypeConverters.toString,
        "'global': a batch of all ranks keeps least * batch_size rows while ranks come and go",
        check=one_of("global"),
        fingerprint=True,
    )
    verbose = cluster_param(
        to_whole,
        "0 prints nothing; 1 prints a line per epoch; 2 also leaves Spark's log of a failed rank",
        default=1,
        check=at_least(0),
        in_conf=True,
    )
    progress = cluster_param(to_function, "called on the driver with each epoch's record")
    loggers = cluster_param(
        to_loggers,
        "list of loggers, such as sparkhvd.MLflowLogger() or sparkhvd.TensorBoardLogger(), fed on the driver",
    )
    timeline = cluster_param(
        to_timeline,
        "True, or a number of steps: write their timeline, for ui.perfetto.dev, into the run's folder",
        default=0,
        check=at_least(0),
        to_ranks=True,
    )
    settings = cluster_param(
        any_value,
        "sparkhvd.Settings of the engine",
        annotation="Settings",
    )
    max_retries = cluster_param(
        to_whole,
        "relaunches after a lost process, executor or host",
        default=2,
        check=at_least(0),
        in_conf=True,
    )
    start_timeout = cluster_param(
        to_float,
        "longest wait for task slots in seconds",
        check=above(0),
        in_conf=True,
    )
