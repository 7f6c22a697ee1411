"""Resource profiles of stages: the caller's own, or one that gives each rank a GPU and its share of the cores."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from sparkhvd import processors
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.runner import placement
from sparkhvd.runner.gpu import decide, probe
from sparkhvd.spark import SparkShim

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile

__all__ = [
    "check_profile",
    "default_slots",
    "no_profiles",
    "plan_gpus",
    "profile_to_share_gpus",
    "share_of",
    "slots_of",
]


def check_profile(profile: ResourceProfile | None, conf: Mapping[str, str]) -> None:
    """Refuse the caller's profile where Spark takes none.

    Raises:
        InvalidArgumentError: Spark takes none.
    """
    if profile is None:
        return
    if refused := no_profiles():
        raise InvalidArgumentError(
            f"profile is given, and {refused}. Leave profile out, or use pyspark 4."
        )
    if placement.is_local(conf.get("spark.master", "")):
        raise InvalidArgumentError(
            f"profile is given, and Spark takes none on master {conf['spark.master']!r}. Leave profile out."
        )


def no_profiles() -> str:
    """Return the reason why stages of this pyspark have no resource profile, or ""."""
    import pyspark

    if int(pyspark.__version__.split(".")[0]) < 4:
        return f"pyspark {pyspark.__version__} has no resource profiles for DataFrame stages"
    return ""


def plan_gpus(
    shim: SparkShim, conf: Mapping[str, str], use_gpu: bool | None, given: ResourceProfile | None
) -> tuple[decide.GpuPlan, ResourceProfile | None]:
    """Decide how ranks get GPUs, and on the profile of the stage: the caller's, or one if it is needed.

    Raises:
        InvalidArgumentError: see `decide.decide`.
        PreflightError: see `decide.decide`.
    """
    share = share_of(given)
    plan = decide.decide(conf, use_gpu, refused=no_profiles(), given=share)
    if given is not None or plan.profile is None:
        return plan, given
    try:
        return plan, shim.profile(plan.profile.cpus, plan.profile.gpus)
    except Exception as e:  # noqa: BLE001 - Spark raises Py4JJavaError or its own: this master takes no profiles
        refused = f"Spark takes no resource profile here ({_first_line(e)})"
        return decide.decide(conf, use_gpu, refused=refused), None


# Stages with different profiles cannot be merged into one, so an application has one for all its models: a
# plan may have DataFrames of several sessions, such as that which Spark makes for each `foreachBatch`.
_shared: dict[str, ResourceProfile | None] = {}
_sharing = threading.Lock()


def profile_to_share_gpus(shim: SparkShim) -> ResourceProfile | None:
    """Return a profile by which tasks of an ordinary stage share the GPUs of their executors; None if there are none.

    The same object for an application (on Connect: a session), as long as this process lives. Costs a few requests to the server the first time.
    """
    key = shim.profile_scope()
    with _sharing:
        if key not in _shared:
            _shared[key] = _profile_to_share(shim)
        return _shared[key]


def _profile_to_share(shim: SparkShim) -> ResourceProfile | None:
    if no_profiles():
        return None
    share = decide.share_of_a_gpu(shim.conf((*placement.CONF_KEYS, decide.DYNAMIC)))
    if share is None:
        return None
    # A cluster manager that takes no profiles leaves its tasks without GPUs, as they were.
    with contextlib.suppress(Exception):
        return shim.profile(share.cpus, share.gpus)
    return None


def _first_line(error: Exception) -> str:
    """Return Spark's message without the JVM's stack."""
    text = str(getattr(error, "java_exception", None) or error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def slots_of(
    conf: Mapping[str, str], plan: decide.GpuPlan, given: ResourceProfile | None = None
) -> placement.Slots:
    """Return the most ranks that the configuration can run at once, each with its share."""
    share = share_of(given) or plan.profile or decide.Share()
    return placement.configured_slots(conf, processors.whole(), share.cpus, share.gpus)


def default_slots(
    shim: SparkShim,
    conf: Mapping[str, str],
    slots: placement.Slots,
    library: str,
    env: Mapping[str, str] | None = None,
) -> placement.Slots:
    """Return the default slots of ranks that each take a GPU by their local rank.

    On a local master no more than this host has GPUs, if it has any. Over Connect the master's host is not this one.

    Args:
        shim: the session.
        conf: its configuration.
        slots: the most that the configuration can run at once.
        library: path of CUDA's driver library; "" for the system's.
        env: the user's variables for the ranks.
    """
    master = conf.get("spark.master", "")
    if shim.is_connect or not placement.is_local(master):
        return slots
    count = probe.count_beside(library, env or {})
    if not count or slots.maximum is None or slots.maximum <= count:
        return slots
    reason = f"master {master!r} on a host with {count} GPU{'s' * (count != 1)}"
    return replace(slots, maximum=count, reason=reason)


def share_of(profile: ResourceProfile | None) -> decide.Share | None:
    """Return the resources that a profile gives a task; None for no profile."""
    if profile is None:
        return None
    cpus, gpu = (profile.taskResources.get(name) for name in ("cpus", "gpu"))
    # A profile that does not name GPUs gives none, also where the conf does.
    return decide.Share(
        None if cpus is None else int(cpus.amount), 0.0 if gpu is None else gpu.amount
    )
