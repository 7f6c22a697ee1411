"""What a fit takes from the cluster: number of ranks, GPUs, and settings that may stand in the Spark conf.

An argument wins over the conf (`spark.sparkhvd.<name>`), the conf over the environment, the environment over the
default. Nothing here starts a job.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.rank_settings import JobSettings
from sparkhvd.runner import launching, placement, preflight
from sparkhvd.runner.gpu import decide, probe, profiles
from sparkhvd.settings import CONF_PREFIX, Settings
from sparkhvd.spark import SparkShim

__all__ = ["Cluster", "Given", "resolve_cluster"]

# Params that may stand in the conf -> their type and least value.
_PARAMS: dict[str, tuple[type, float]] = {
    "num_proc": (int, 1),
    "max_retries": (int, 0),
    "start_timeout": (float, 0),
    "verbose": (int, 0),
}


@dataclass(frozen=True)
class Cluster:
    """How the ranks of a fit are launched.

    Attributes:
        num_proc: number of ranks.
        max_retries: relaunches after a lost process, executor or host.
        start_timeout: longest wait for task slots in seconds; None means the setting.
        verbose: 0 prints nothing on the driver.
        settings: of the engine.
        slots: tasks that the configuration can run at once; None where nothing bounds them.
        use_gpu: the Param.
        looks_for_gpu: a rank takes a GPU that torch sees, although nobody gave it one.
        finds_gpu: and there are such GPUs.
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


@dataclass(frozen=True)
class Given:
    """What the caller says.

    Attributes:
        value: the value of a Param by name, its default included, or None.
        is_set: whether the caller gave it.
    """

    value: Callable[[str], Any]
    is_set: Callable[[str], bool]


def resolve_cluster(shim: SparkShim, given: Given) -> Cluster:
    """Decide on everything that depends on the cluster; prints the number of ranks where nobody gave it.

    Raises:
        InvalidArgumentError: an argument or a conf is wrong (the message has its name).
        PreflightError: the configured cluster can never run that many ranks at once, or gives several of them one GPU.
    """
    keys = [CONF_PREFIX + name for name in _PARAMS] + Settings.conf_keys()
    conf = shim.conf((*placement.CONF_KEYS, *preflight.CONF_KEYS, *keys))
    values = {name: _param(name, given, conf) for name in _PARAMS}
    settings = launching.choose_settings(given.value("settings"), {}, conf)
    preflight.check_conf(conf)
    use_gpu = given.value("use_gpu")
    # Whether Spark takes the profile that may be needed is found out when the ranks are launched.
    plan = decide.decide(conf, use_gpu, refused=profiles.no_profiles())
    slots = profiles.slots_of(conf, plan)
    looks = plan.mode == decide.Mode.FREE and placement.is_local(conf.get("spark.master", ""))
    may_find = looks and torch.version.cuda is not None
    takes_gpus = plan.mode == decide.Mode.HOST or may_find
    chosen = slots
    if values["num_proc"] is None and takes_gpus:
        chosen = profiles.default_slots(shim, conf, slots, settings.values.cuda_library)
    num_proc = placement.choose_num_proc(values["num_proc"], chosen)
    if values["num_proc"] is None and values["verbose"]:
        ranks = f"{num_proc} rank{'s' * (num_proc != 1)}"
        per = "GPU" if plan.mode == decide.Mode.TASK or chosen is not slots else "task slot"
        sys.stdout.write(f"num_proc is not given: {ranks}, one per {per} ({chosen.reason}).\n")
        sys.stdout.flush()
    given_values = {**values, "num_proc": num_proc}
    return Cluster(
        **given_values,
        settings=settings,
        slots=slots.maximum,
        use_gpu=use_gpu,
        looks_for_gpu=looks,
        # Over Connect the ranks are on another host.
        finds_gpu=may_find
        and not shim.is_connect
        and probe.count_beside(settings.values.cuda_library, {}) > 0,
    )


def _param(name: str, given: Given, conf: Mapping[str, str]) -> Any:
    """The caller's value, else the conf's, else the default."""
    kind, least = _PARAMS[name]
    key = CONF_PREFIX + name
    text = conf.get(key, "")
    if given.is_set(name) or not text:
        value, source = given.value(name), name
    else:
        source = key
        try:
            value = kind(text)
        except ValueError:
            raise InvalidArgumentError(
                f"{key} is {text!r}; it must be a plain {kind.__name__}. Set another, or give {name} to fit."
            ) from None
    if value is None:
        return None
    # A length of time is more than 0, a count at least its least.
    if kind is float and not value > least:
        raise InvalidArgumentError(f"{source} is {value}; it must be more than {least:g}.")
    if kind is int and value < least:
        raise InvalidArgumentError(f"{source} is {value}; it must be at least {least:g}.")
    return value
