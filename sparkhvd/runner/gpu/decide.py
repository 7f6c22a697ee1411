"""GPUs of ranks: pure decisions from the configuration, each with its reason.

Spark counts GPUs, and knows them by addresses that the cluster's discovery script prints. A rank's process
starts with those addresses as its visible GPUs. Where possible it then sees those of its host's other ranks as well,
so that its local rank is the ordinal of its own. If Spark counts none, ranks of a host choose from the GPUs that a
process there sees by their local rank. `agreement` decides on the GPUs that the ranks then see.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sparkhvd.cpus import jvm_processors
from sparkhvd.errors import InvalidArgumentError, PreflightError
from sparkhvd.runner.gpu import probe
from sparkhvd.runner.gpu.probe import VISIBLE
from sparkhvd.runner.slots import (
    SLOT_CONF_KEYS,
    Slots,
    configured_slots,
    executor_cores,
    is_local,
)
from sparkhvd.spark import SparkShim

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile


EXECUTOR_AMOUNT = "spark.executor.resource.gpu.amount"
TASK_AMOUNT = "spark.task.resource.gpu.amount"
DYNAMIC = "spark.dynamicAllocation.enabled"
# Tasks per GPU if the cores of an executor are unknown.
_UNKNOWN_SLOTS = 4


class GpuMode:
    """Source of a rank's GPU."""

    OFF = "off"  # its process sees no GPU
    TASK = "task"  # the GPUs that Spark gave the task
    HOST = "host"  # the GPU with its local rank among those that its process sees
    FREE = "free"  # no GPUs were requested: its process sees the executor's


@dataclass(frozen=True)
class TaskShare:
    """Resources of a task. None means the value of Spark's conf.

    Attributes:
        cpus: cores.
        gpus: GPUs.
    """

    cpus: int | None = None
    gpus: float | None = None


@dataclass(frozen=True)
class GpuPlan:
    """Decision on the GPUs of a job.

    Attributes:
        mode: of `GpuMode`.
        reason: its reason, in the user's own conf names.
        profile: resources that a profile of the stage must request; None for no profile.
        is_required: whether a rank without a GPU is an error.
        leaves_gpus: whether executors have GPUs and ranks get no GPU, although the caller has not asked for that.
    """

    mode: str
    reason: str
    profile: TaskShare | None = None
    is_required: bool = False
    leaves_gpus: bool = False


def decide(
    conf: Mapping[str, str],
    use_gpu: bool | None,
    *,
    refused: str = "",
    given: TaskShare | None = None,
) -> GpuPlan:
    """Decide how ranks get GPUs.

    Args:
        conf: Spark configuration; only `SLOT_CONF_KEYS` are read.
        use_gpu: True, False, or None for "if Spark gives tasks GPUs".
        refused: reason why stages cannot have a resource profile here, or "".
        given: resources requested by the user's own profile, or None.

    Raises:
        InvalidArgumentError: `use_gpu` is not a bool, or contradicts the user's own profile.
        PreflightError: several ranks would share a GPU, or no rank can get a GPU.
    """
    if use_gpu is not None and not isinstance(use_gpu, bool):
        raise InvalidArgumentError(
            f"use_gpu is {use_gpu!r}; it must be True, False or None (automatic)."
        )
    master = conf.get("spark.master", "").strip()
    if is_local(master) and conf.get(TASK_AMOUNT):
        raise PreflightError(
            f"{TASK_AMOUNT} is {conf[TASK_AMOUNT]}, and master {master!r} has no GPUs for tasks, so Spark would never start one. Start "
            "the session without it; with use_gpu=True ranks get the GPUs of this host by their local rank."
        )
    if use_gpu is False:
        return GpuPlan(GpuMode.OFF, "use_gpu is False")
    required = bool(use_gpu)
    if is_local(master):
        return _by_local_rank(required, f"master {master!r} gives tasks no GPUs")
    if given is not None:
        return _of_profile(given, required)
    gpus, amount = _number(conf, EXECUTOR_AMOUNT), _number(conf, TASK_AMOUNT)
    if gpus < 1:
        return _by_local_rank(required, f"{EXECUTOR_AMOUNT} is not set")
    reason = (
        f"{EXECUTOR_AMOUNT}={gpus:g}, {TASK_AMOUNT}={amount:g}"
        if amount
        else f"{EXECUTOR_AMOUNT}={gpus:g}"
    )
    cores = executor_cores(conf)
    cpus = None if cores is None else max(1, int(cores // gpus))
    if not refused:
        if amount == 1 and (cpus is None or cpus <= int(conf.get("spark.task.cpus") or 1)):
            return GpuPlan(GpuMode.TASK, reason, is_required=required)
        return GpuPlan(
            GpuMode.TASK,
            f"{reason}; a rank gets a whole GPU",
            TaskShare(cpus, 1.0),
            is_required=required,
        )
    if amount >= 1:
        return GpuPlan(GpuMode.TASK, reason, is_required=required)
    if amount:
        raise PreflightError(
            f"{TASK_AMOUNT} is {amount:g}, so Spark would put {int(1 / amount)} ranks on one GPU, and this stage cannot ask for "
            f"whole GPUs: {refused}. Set {TASK_AMOUNT}=1, or give use_gpu=False."
        )
    if required:
        raise PreflightError(
            f"use_gpu is True, {EXECUTOR_AMOUNT} is {gpus:g} and {TASK_AMOUNT} is not set, so tasks get no GPU, and this stage cannot "
            f"ask for one: {refused}. Set {TASK_AMOUNT}=1."
        )
    return GpuPlan(GpuMode.FREE, f"{TASK_AMOUNT} is not set, and {refused}", leaves_gpus=True)


def _by_local_rank(required: bool, reason: str) -> GpuPlan:
    return GpuPlan(GpuMode.HOST if required else GpuMode.FREE, reason, is_required=required)


def _of_profile(given: TaskShare, required: bool) -> GpuPlan:
    if not given.gpus:
        if required:
            raise InvalidArgumentError(
                "use_gpu is True, and the profile given asks for no GPU per task. Add "
                "TaskResourceRequests().resource('gpu', 1), or leave profile out."
            )
        return GpuPlan(GpuMode.FREE, "the profile given asks for no GPU")
    if given.gpus < 1:
        raise InvalidArgumentError(
            f"The profile given asks for {given.gpus:g} GPUs per task, so Spark would put several ranks on one GPU. Ask "
            "for 1, or leave profile out."
        )
    return GpuPlan(GpuMode.TASK, "as the profile given asks", is_required=required)


def share_of_a_gpu(conf: Mapping[str, str]) -> TaskShare | None:
    """Choose the GPU share of a Python task, small enough to keep the number of concurrent tasks.

    None if the tasks get GPUs without a request, or cannot get them.

    Args:
        conf: Spark configuration; only `SLOT_CONF_KEYS` and `DYNAMIC` are read.
    """
    gpus = _number(conf, EXECUTOR_AMOUNT)
    if gpus < 1 or _number(conf, TASK_AMOUNT) or is_local(conf.get("spark.master", "").strip()):
        return None
    if conf.get(DYNAMIC, "").lower() == "true":
        return None  # Spark would start more executors only for the profile
    cores = executor_cores(conf)
    slots = (
        _UNKNOWN_SLOTS * gpus if cores is None else cores // int(conf.get("spark.task.cpus") or 1)
    )
    per_gpu = max(1, math.ceil(slots / gpus))
    # Rounded down: Spark uses the integer part of 1 / amount as the number of tasks.
    return TaskShare(gpus=1.0 if per_gpu == 1 else math.floor(1e6 / per_gpu) / 1e6)


def _number(conf: Mapping[str, str], key: str) -> float:
    text = conf.get(key, "")
    try:
        return float(text or 0)
    except ValueError:
        raise PreflightError(f"{key} is {text!r}; it must be a number.") from None


# --- in a task ------------------------------------------------------------------------------------------------


def variables(
    mode: str, addresses: Sequence[str], visible: str | None, order: str | None
) -> dict[str, str]:
    """Choose a rank's visible GPUs, as environment variables for its process.

    Args:
        mode: of `GpuMode`.
        addresses: addresses of the GPUs that Spark gave the task.
        visible: CUDA_VISIBLE_DEVICES of the executor, or None. Numeric addresses index this list.
        order: CUDA_DEVICE_ORDER of the executor, or None.

    Raises:
        PreflightError: Spark gave no address, or one that is not visible to the executor's processes.
    """
    if mode == GpuMode.OFF:
        return {VISIBLE: ""}
    if mode != GpuMode.TASK:
        return {}
    if not addresses:
        raise PreflightError(
            f"Spark gave the task no GPU. Set {EXECUTOR_AMOUNT}, {TASK_AMOUNT}=1 and a discovery script, or give use_gpu=False."
        )
    chosen = ",".join(_seen(address, visible) for address in addresses)
    # nvidia-smi, from which discovery scripts take addresses, counts by PCI bus; CUDA puts the fastest GPU first.
    ordered = {} if order else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return {VISIBLE: chosen, **ordered}


def visible_names(visible: str) -> list[str]:
    """List the names of GPUs in a value of CUDA_VISIBLE_DEVICES."""
    return [name.strip() for name in visible.split(",") if name.strip()]


def _seen(address: str, visible: str | None) -> str:
    """Translate a GPU's address for CUDA_VISIBLE_DEVICES. A numeric address indexes `visible`."""
    if visible is None:
        return address
    names = visible_names(visible)
    if not address.isdigit():
        return address
    if int(address) >= len(names):
        raise PreflightError(
            f"Spark gave the task the GPU with address {address}, and CUDA_VISIBLE_DEVICES={visible!r} of the executor "
            f"names {len(names)}; addresses count in this list, from 0. Unset the variable for the executors, or let "
            "the discovery script print the numbers of its entries."
        )
    return names[int(address)]


def views(mode: str, visible: str | None) -> list[dict[str, str | None]]:
    """List the environments for the GPU search in a rank's process.

    Each is a change to the result of `variables`. The first changes nothing. The second has the executor's value of
    CUDA_VISIBLE_DEVICES. It is needed if a listed GPU is missing, as in a container: CUDA then also hides the GPUs
    after it in the list.

    Args:
        mode: of `GpuMode`.
        visible: CUDA_VISIBLE_DEVICES of the executor, or None.
    """
    if mode == GpuMode.TASK:
        return [{}, {VISIBLE: visible}]
    return [{}] if mode == GpuMode.HOST else []


# ----------------------------------------------------------------------------------------------------
# Resource profiles of stages: the caller's, or one that gives each rank a GPU and its share of the cores.


def check_profile(profile: ResourceProfile | None, conf: Mapping[str, str]) -> None:
    """Reject the caller's profile if Spark does not support it.

    Raises:
        InvalidArgumentError: Spark does not support it.
    """
    if profile is None:
        return
    if refused := no_profiles():
        raise InvalidArgumentError(
            f"profile is given, and {refused}. Leave profile out, or use pyspark 4."
        )
    if is_local(conf.get("spark.master", "")):
        raise InvalidArgumentError(
            f"profile is given, and Spark takes no profile on master {conf['spark.master']!r}. Leave profile out."
        )


def no_profiles() -> str:
    """Find why stages of this pyspark have no resource profile, or return ""."""
    import pyspark

    if int(pyspark.__version__.split(".")[0]) < 4:
        return f"pyspark {pyspark.__version__} has no resource profiles for DataFrame stages"
    return ""


def plan_gpus(
    shim: SparkShim, conf: Mapping[str, str], use_gpu: bool | None, given: ResourceProfile | None
) -> tuple[GpuPlan, ResourceProfile | None]:
    """Decide how ranks get GPUs, and choose the profile of the stage: the caller's, or a new profile if needed.

    Raises:
        InvalidArgumentError: see `decide`.
        PreflightError: see `decide`.
    """
    share = share_of(given)
    plan = decide(conf, use_gpu, refused=no_profiles(), given=share)
    if given is not None or plan.profile is None:
        return plan, given
    try:
        return plan, shim.profile(plan.profile.cpus, plan.profile.gpus)
    except Exception as e:  # noqa: BLE001 - Py4JJavaError or Spark's own: this master supports no profiles
        refused = f"Spark takes no resource profile here ({_first_line(e)})"
        return decide(conf, use_gpu, refused=refused), None


# Stages with different profiles cannot be merged, so an application has one for all its models: a
# plan may have DataFrames of several sessions, such as the one that Spark creates for each `foreachBatch`.
_shared: dict[str, ResourceProfile | None] = {}
_sharing = threading.Lock()


def profile_to_share_gpus(shim: SparkShim) -> ResourceProfile | None:
    """Make a resource profile to share the executors' GPUs among the tasks of an ordinary stage.

    Return None without GPUs. The result is the same object for an application (on Connect: a session) during this
    process. The first call costs a few requests to the server.
    """
    key = shim.profile_scope()
    with _sharing:
        if key not in _shared:
            _shared[key] = _profile_to_share(shim)
        return _shared[key]


def _profile_to_share(shim: SparkShim) -> ResourceProfile | None:
    if no_profiles():
        return None
    share = share_of_a_gpu(shim.conf((*SLOT_CONF_KEYS, DYNAMIC)))
    if share is None:
        return None
    # A cluster manager without profiles leaves its tasks without GPUs, as before.
    with contextlib.suppress(Exception):
        return shim.profile(share.cpus, share.gpus)
    return None


def _first_line(error: Exception) -> str:
    """First line of a Spark error's message, without the JVM's stack."""
    text = str(getattr(error, "java_exception", None) or error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def slots_of(conf: Mapping[str, str], plan: GpuPlan, given: ResourceProfile | None = None) -> Slots:
    """Configured slots, each with the share of `given`, else of the plan, else of the configuration."""
    share = share_of(given) or plan.profile or TaskShare()
    return configured_slots(conf, jvm_processors(), share.cpus, share.gpus)


def default_slots(
    shim: SparkShim,
    conf: Mapping[str, str],
    slots: Slots,
    library: str,
    env: Mapping[str, str] | None = None,
) -> Slots:
    """Choose the default slots for ranks with GPUs by local rank.

    On a local master at most the number of this host's GPUs, if any. Over Connect the master's host is another one.

    Args:
        shim: the session.
        conf: its configuration.
        slots: the most that the configuration can run at once.
        library: path of CUDA's driver library; "" for the system's.
        env: the user's variables for the ranks.
    """
    master = conf.get("spark.master", "")
    if shim.is_connect or not is_local(master):
        return slots
    count = probe.count_beside(library, env or {})
    if not count or slots.maximum is None or slots.maximum <= count:
        return slots
    reason = f"master {master!r} on a host with {count} GPU{'s' * (count != 1)}"
    return replace(slots, maximum=count, reason=reason)


def share_of(profile: ResourceProfile | None) -> TaskShare | None:
    if profile is None:
        return None
    cpus, gpu = (profile.taskResources.get(name) for name in ("cpus", "gpu"))
    # A profile without GPUs gives none, even if the conf does.
    return TaskShare(None if cpus is None else int(cpus.amount), 0.0 if gpu is None else gpu.amount)
