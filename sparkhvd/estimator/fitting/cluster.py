"""Decide the number of ranks, the GPUs and the settings of a fit from arguments and the Spark conf.

An argument has priority over the conf (`spark.sparkhvd.<name>`), the conf over the environment, and the environment
over the default. This module starts no job.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.params.generated import FitOptions
from sparkhvd.estimator.params.groups import TrainParams
from sparkhvd.estimator.params.table import ParamRow, rows_of
from sparkhvd.runner import launching, preflight
from sparkhvd.runner.gpu import decide, probe
from sparkhvd.runner.slots import SLOT_CONF_KEYS, choose_num_proc, is_local
from sparkhvd.settings import CONF_PREFIX, JobSettings, conf_keys
from sparkhvd.spark import SparkShim
from sparkhvd.torch.gradients.powersgd import PowerSGD

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Cluster:
    """Facts for the launch of a fit's ranks.

    Attributes:
        num_proc: number of ranks; the maximum for an elastic job.
        least: minimum number of ranks of an elastic job; None for a fixed number.
        max_retries: relaunches after a lost process, executor or host.
        start_timeout: longest wait for task slots in seconds; None means the setting.
        verbose: 0 prints nothing on the driver.
        settings: settings of the engine.
        slots: number of tasks that the configuration can run at once; None if unbounded.
        use_gpu: the Param.
        looks_for_gpu: True if a rank uses a GPU that torch sees even if Spark assigned none.
        finds_gpu: True if torch sees such a GPU.
    """

    num_proc: int
    max_retries: int
    start_timeout: float | None
    verbose: int
    settings: JobSettings
    slots: int | None = None
    use_gpu: bool | None = None
    looks_for_gpu: bool = False
    finds_gpu: bool = False
    least: int | None = None

    @property
    def ranks(self) -> str:
        """The number of ranks, in words."""
        return f"{self.num_proc}" if self.least is None else f"{self.least} to {self.num_proc}"


def resolve_cluster(shim: SparkShim, options: FitOptions, *, takes_slots: bool = True) -> Cluster:
    """Decide how a fit uses the cluster, and print the number of ranks if it was not given.

    Args:
        shim: shim of the session.
        options: options of the fit.
        takes_slots: True if ranks are Spark tasks. Other ranks may be more than Spark's slots, but their number must be
            given.

    Raises:
        InvalidArgumentError: an argument or a conf is wrong; the message names it.
        PreflightError: the configured cluster can never run so many ranks at once, or gives one GPU to several ranks.
    """
    keys = [CONF_PREFIX + name for name in _rows_in_conf()] + conf_keys()
    conf = shim.conf((*SLOT_CONF_KEYS, *preflight.PREFLIGHT_CONF_KEYS, *keys))
    options = replace(options, **_values_of_conf(options, conf))
    settings = launching.choose_settings(options.settings, {}, conf)
    least, given = _range_of_ranks(options)
    if takes_slots:
        preflight.check_conf(conf, is_barrier=least is None)
        preflight.check_databricks(shim.is_connect)
    # The plan may change later, because only the launch shows whether Spark accepts the resource profile.
    plan = decide.decide(conf, options.use_gpu, refused=decide.no_profiles())
    slots = decide.slots_of(conf, plan)
    looks = plan.mode == decide.GpuMode.FREE and is_local(conf.get("spark.master", ""))
    may_find = looks and torch.version.cuda is not None
    takes_gpus = plan.mode == decide.GpuMode.HOST or may_find
    chosen = slots
    if options.num_proc is None and takes_gpus:
        chosen = decide.default_slots(shim, conf, slots, settings.values.cuda_library)
    if not takes_slots:
        assert given is not None
        num_proc = given
    elif least is None:
        num_proc = choose_num_proc(given, chosen)
    else:
        assert given is not None
        num_proc = given
        if not preflight.is_dynamic(conf):
            choose_num_proc(least, chosen)
    if options.num_proc is None and options.verbose:
        ranks = f"{num_proc} rank{'s' * (num_proc != 1)}"
        per = "GPU" if plan.mode == decide.GpuMode.TASK or chosen is not slots else "task slot"
        sys.stdout.write(f"num_proc is not given: {ranks}, one per {per} ({chosen.reason}).\n")
        sys.stdout.flush()
    return Cluster(
        num_proc=num_proc,
        max_retries=options.max_retries,
        least=least,
        start_timeout=options.start_timeout,
        verbose=options.verbose,
        settings=settings,
        slots=slots.maximum,
        use_gpu=options.use_gpu,
        looks_for_gpu=looks,
        # A Connect client cannot look for GPUs, because the ranks run on another host.
        finds_gpu=may_find
        and not shim.is_connect
        and probe.count_beside(settings.values.cuda_library, {}) > 0,
    )


def fixed_num_proc(options: FitOptions, who: str) -> int | None:
    """Read `num_proc` for an estimator without elastic training.

    Raises:
        InvalidArgumentError: `num_proc` is a range.
    """
    if isinstance(options.num_proc, tuple):
        raise InvalidArgumentError(
            f"{who}: num_proc is {options.num_proc}; only TorchEstimator supports elastic training. Give a number."
        )
    return options.num_proc


def _range_of_ranks(options: FitOptions) -> tuple[int | None, int | None]:
    """Read the minimum and maximum number of ranks. The minimum is None for a fixed number.

    Raises:
        InvalidArgumentError: another Param contradicts `num_proc`.
    """
    given = options.num_proc
    if not isinstance(given, tuple):
        if options.elastic_batch is not None:
            raise InvalidArgumentError(
                f"elastic_batch is {options.elastic_batch!r}, but num_proc is {given}. elastic_batch is for elastic training: give "
                "num_proc=(least, most), or leave elastic_batch out."
            )
        return None, given
    what = f"num_proc is {given}"
    if options.train_fn is not None:
        raise InvalidArgumentError(
            f"{what}, but train_fn has its own loop, which does not support elastic training. Set num_proc to one number, or "
            "call sparkhvd.runner.run_elastic with a function that uses hvd.elastic.run."
        )
    if options.timeline:
        raise InvalidArgumentError(
            f"{what}, but timeline needs a fixed number of ranks. Leave timeline out, or set num_proc to one number."
        )
    if isinstance(options.gradient_compression, PowerSGD):
        raise InvalidArgumentError(
            f"{what}, but powersgd keeps a part of the gradients on each rank, which is lost if the rank is lost. Set num_proc to one "
            "number, or use another gradient_compression."
        )
    if options.accumulate > 1 and options.elastic_batch is not None:
        raise InvalidArgumentError(
            f"{what}, elastic_batch is {options.elastic_batch!r} and accumulate is {options.accumulate}. Give only one of elastic_batch and accumulate."
        )
    return given


def _rows_in_conf() -> dict[str, ParamRow]:
    return {name: row for name, row in rows_of(TrainParams).items() if row.in_conf}


def _values_of_conf(options: FitOptions, conf: Mapping[str, str]) -> dict[str, Any]:
    """Read the Params set in the conf but not by the caller."""
    values: dict[str, Any] = {}
    for name, row in _rows_in_conf().items():
        key = CONF_PREFIX + name
        text = conf.get(key, "")
        if name in options.explicit or not text:
            continue
        kind = float if row.holds == "float" else int
        try:
            value = kind(text)
        except ValueError:
            expected = "a number" if kind is float else "a whole number"
            raise InvalidArgumentError(
                f"{key} is {text!r}; it must be {expected}. Set another value, or give {name} to fit."
            ) from None
        if row.check is not None and (problem := row.check(value)):
            raise InvalidArgumentError(f"{key} is {value}; {problem}.")
        values[name] = value
    return values
