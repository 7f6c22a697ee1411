"""Which GPU a rank gets: pure decisions from configuration and from what the ranks found, each with its reason.

Spark counts GPUs, and knows them by addresses that a discovery script of the cluster's owner prints. A rank's process
is started with those addresses as the GPUs that it can see; where Spark counts none, ranks of a host share the GPUs
that a process there sees, by their local rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparkhvd.errors import InvalidArgumentError, PreflightError
from sparkhvd.runner.placement import executor_cores, is_local

__all__ = [
    "GpuPlan",
    "Mode",
    "RankGpus",
    "Share",
    "check_gpus",
    "decide",
    "unknown_warning",
    "variables",
]

_EXECUTOR = "spark.executor.resource.gpu.amount"
_TASK = "spark.task.resource.gpu.amount"


class Mode:
    """Where a rank's GPU comes from."""

    OFF = "off"  # none: its process sees no GPU
    TASK = "task"  # those that Spark gave the task; the first is its device 0
    HOST = "host"  # the one with its local rank among those that its process sees
    FREE = "free"  # nobody has asked for GPUs: its process sees what the executor sees


@dataclass(frozen=True)
class Share:
    """What a task gets of its executor; None is what the conf says.

    Attributes:
        cpus: cores.
        gpus: GPUs.
    """

    cpus: int | None = None
    gpus: float | None = None


@dataclass(frozen=True)
class GpuPlan:
    """How the ranks of a job get GPUs.

    Attributes:
        mode: of `Mode`.
        reason: why, in the user's own conf names.
        profile: what a resource profile of the stage must ask for; None needs no profile.
        is_required: whether a rank without a GPU is an error.
        leaves_gpus: executors have GPUs, and ranks get none although nobody said so; worth a line.
    """

    mode: str
    reason: str
    profile: Share | None = None
    is_required: bool = False
    leaves_gpus: bool = False


def decide(
    conf: Mapping[str, str],
    use_gpu: bool | None,
    *,
    refused: str = "",
    given: Share | None = None,
) -> GpuPlan:
    """Decide how ranks get GPUs.

    Args:
        conf: Spark configuration; only `placement.CONF_KEYS` are read.
        use_gpu: True, False, or None for "if Spark gives tasks GPUs".
        refused: why Spark takes no profile of its stages here, or "".
        given: what the user's own profile asks for, or None.

    Raises:
        InvalidArgumentError: `use_gpu` is no truth value, or contradicts the user's own profile.
        PreflightError: several ranks would share a GPU, or none can get one.
    """
    if use_gpu is not None and not isinstance(use_gpu, bool):
        raise InvalidArgumentError(
            f"use_gpu is {use_gpu!r}; it must be True, False or None (automatic)."
        )
    master = conf.get("spark.master", "").strip()
    if is_local(master) and conf.get(_TASK):
        raise PreflightError(
            f"{_TASK} is {conf[_TASK]}, and master {master!r} has no GPUs for tasks, so Spark would never start one. Start "
            "the session without it; with use_gpu=True ranks get the GPUs of this host by their local rank."
        )
    if use_gpu is False:
        return GpuPlan(Mode.OFF, "use_gpu is False")
    required = bool(use_gpu)
    if is_local(master):
        return _by_local_rank(required, f"master {master!r} gives tasks no GPUs")
    if given is not None:
        return _of_profile(given, required)
    gpus, amount = _number(conf, _EXECUTOR), _number(conf, _TASK)
    if gpus < 1:
        return _by_local_rank(required, f"{_EXECUTOR} is not set")
    found = f"{_EXECUTOR}={gpus:g}, {_TASK}={amount:g}" if amount else f"{_EXECUTOR}={gpus:g}"
    cores = executor_cores(conf)
    cpus = None if cores is None else max(1, int(cores // gpus))
    if not refused:
        if amount == 1 and (cpus is None or cpus <= int(conf.get("spark.task.cpus") or 1)):
            return GpuPlan(Mode.TASK, found, is_required=required)
        return GpuPlan(
            Mode.TASK, f"{found}; a rank gets a whole GPU", Share(cpus, 1.0), is_required=required
        )
    if amount >= 1:
        return GpuPlan(Mode.TASK, found, is_required=required)
    if amount:
        raise PreflightError(
            f"{_TASK} is {amount:g}, so Spark would put {int(1 / amount)} ranks on one GPU, and this stage cannot ask for "
            f"whole ones: {refused}. Set {_TASK}=1, or give use_gpu=False."
        )
    if required:
        raise PreflightError(
            f"use_gpu is True, {_EXECUTOR} is {gpus:g} and {_TASK} is not set, so tasks get no GPU, and this stage cannot "
            f"ask for one: {refused}. Set {_TASK}=1."
        )
    return GpuPlan(Mode.FREE, f"{_TASK} is not set, and {refused}", leaves_gpus=True)


def _by_local_rank(required: bool, reason: str) -> GpuPlan:
    return GpuPlan(Mode.HOST if required else Mode.FREE, reason, is_required=required)


def _of_profile(given: Share, required: bool) -> GpuPlan:
    if not given.gpus:
        if required:
            raise InvalidArgumentError(
                "use_gpu is True, and the profile given asks for no GPU per task. Add "
                "TaskResourceRequests().resource('gpu', 1), or leave profile out."
            )
        return GpuPlan(Mode.FREE, "the profile given asks for no GPU")
    if given.gpus < 1:
        raise InvalidArgumentError(
            f"The profile given asks for {given.gpus:g} GPUs per task, so Spark would put several ranks on one GPU. Ask "
            "for 1, or leave profile out."
        )
    return GpuPlan(Mode.TASK, "as the profile given asks", is_required=required)


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
    """The variables that decide which GPUs a rank's process sees.

    Args:
        mode: of `Mode`.
        addresses: what Spark gave the task.
        visible: CUDA_VISIBLE_DEVICES of the executor, or None. Addresses that are numbers count in this list.
        order: CUDA_DEVICE_ORDER of the executor, or None.

    Raises:
        PreflightError: Spark gave no address, or one that the executor does not let its processes see.
    """
    if mode == Mode.OFF:
        return {"CUDA_VISIBLE_DEVICES": ""}
    if mode != Mode.TASK:
        return {}
    if not addresses:
        raise PreflightError(
            f"Spark gave the task no GPU. Set {_EXECUTOR}, {_TASK}=1 and a discovery script, or give use_gpu=False."
        )
    chosen = ",".join(_seen(address, visible) for address in addresses)
    # nvidia-smi, from which discovery scripts take addresses, counts by PCI bus; CUDA puts the fastest GPU first.
    ordered = {} if order else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return {"CUDA_VISIBLE_DEVICES": chosen, **ordered}


def _seen(address: str, visible: str | None) -> str:
    """How a process that inherits `visible` names the GPU with this address."""
    if visible is None:
        return address
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if not address.isdigit():
        return address
    if int(address) >= len(names):
        raise PreflightError(
            f"Spark gave the task the GPU with address {address}, and CUDA_VISIBLE_DEVICES={visible!r} of the executor "
            f"names {len(names)}; addresses count in this list, from 0. Unset the variable for the executors, or let "
            "the discovery script print the numbers of its entries."
        )
    return names[int(address)]


# --- among the ranks ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankGpus:
    """What the process of a rank sees.

    Attributes:
        host: its host's name.
        local_rank: its place among the ranks of the host.
        uuids: of the GPUs, in the order of CUDA.
        error: why CUDA's driver did not say, or "".
        visible: CUDA_VISIBLE_DEVICES of the process, or None.
    """

    host: str
    local_rank: int
    uuids: tuple[str, ...]
    error: str = ""
    visible: str | None = None


def check_gpus(mode: str, ranks: Sequence[RankGpus], *, is_required: bool) -> str:
    """Why these ranks have no GPUs of their own, or "".

    The same on every rank, because it depends on nothing but its arguments.
    """
    if mode not in (Mode.TASK, Mode.HOST):
        return ""
    owners: dict[str, int] = {}
    for rank, found in enumerate(ranks):
        index = found.local_rank if mode == Mode.HOST else 0
        if index >= len(found.uuids):
            if is_required:
                return _without(rank, found)
            continue
        other = owners.setdefault(found.uuids[index], rank)
        if other != rank:
            return _twice(mode, other, ranks[other], rank, found, found.uuids[index])
    return ""


def _without(rank: int, found: RankGpus) -> str:
    who = f"use_gpu is True, and rank {rank} on host {found.host}"
    seen = "" if found.visible is None else f" (CUDA_VISIBLE_DEVICES={found.visible!r})"
    if not found.uuids:
        why = found.error or "CUDA's driver counts none"
        return (
            f"{who} sees no GPU{seen}: {why}. Run on hosts with a GPU and its driver, or leave use_gpu out to train on "
            "the CPU."
        )
    some = f"{len(found.uuids)} GPU{'s' * (len(found.uuids) != 1)}"
    return (
        f"{who} is number {found.local_rank + 1} there, where a process sees {some}{seen}. Give num_proc so that no host "
        "has more ranks than GPUs, or leave use_gpu out to train on the CPU."
    )


def _twice(mode: str, a: int, first: RankGpus, b: int, second: RankGpus, uuid: str) -> str:
    where = (
        f"Ranks {a} and {b} on host {first.host}"
        if first.host == second.host
        else f"Rank {a} on host {first.host} and rank {b} on host {second.host}"
    )
    seen = f"CUDA_VISIBLE_DEVICES={first.visible!r} and {second.visible!r}"
    what = (
        f"Set {_TASK}=1, and let the discovery script ({_EXECUTOR.replace('amount', 'discoveryScript')}) print each GPU "
        "of a host once"
        if mode == Mode.TASK
        else "Let each container see GPUs of its own"
    )
    return f"{where} have the same GPU, {uuid} ({seen}); a GPU is for one rank. {what}, or give use_gpu=False."


def unknown_warning(ranks: Sequence[RankGpus]) -> str:
    """A warning where Spark gave GPUs whose identity nobody could ask for, else ""."""
    for rank, found in enumerate(ranks):
        if not found.uuids:
            return (
                f"Spark gave rank {rank} on host {found.host} a GPU, and its process sees none "
                f"({found.error or 'CUDA counts none'}); whether ranks share a GPU is not known."
            )
    return ""
