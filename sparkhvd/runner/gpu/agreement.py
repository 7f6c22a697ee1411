"""Agreement of the ranks on their GPUs.

The functions are pure and depend only on the GPUs that the ranks see, so every rank gets the same result. Each GPU is
for one rank. Processes report the UUIDs of CUDA's driver, because a number means another GPU in another container.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparkhvd.runner.gpu.decide import EXECUTOR_AMOUNT, TASK_AMOUNT, GpuMode, visible_names


@dataclass(frozen=True)
class RankGpus:
    """GPUs visible to the process of a rank.

    Attributes:
        host: its host's name.
        local_rank: its index among the ranks of the host.
        uuids: of the GPUs, in CUDA's order.
        error: reason why they are unknown, or "".
        visible: CUDA_VISIBLE_DEVICES of the process, or None.
        cpu_torch: version of its torch if torch is required and built without CUDA, else "".
    """

    host: str
    local_rank: int
    uuids: tuple[str, ...]
    error: str = ""
    visible: str | None = None
    cpu_torch: str = ""


@dataclass(frozen=True)
class GpuAgreement:
    """Decision on the GPUs of all ranks, equal on every rank.

    Attributes:
        mode: source of the ranks' GPUs, of `GpuMode`.
        problem: reason why they cannot run, or "".
        warning: message for the caller, or "".
    """

    mode: str
    problem: str = ""
    warning: str = ""


def agree(mode: str, ranks: Sequence[RankGpus], *, is_required: bool) -> GpuAgreement:
    """Decide whether the ranks use their GPUs.

    A job that does not require GPUs trains on the CPU if its torch cannot use them: Spark may provide GPUs for other
    jobs.
    """
    if mode not in (GpuMode.TASK, GpuMode.HOST):
        return GpuAgreement(mode)
    if text := _cpu_torch(ranks):
        if is_required:
            return GpuAgreement(
                mode,
                problem=f"use_gpu is True, and {text}. Install torch with CUDA on the executors, or leave use_gpu out to "
                "train on the CPU.",
            )
        return GpuAgreement(
            GpuMode.OFF,
            warning=f"The ranks train on the CPU, although Spark gives them GPUs: {text}. Install torch with CUDA on the "
            "executors, or give use_gpu=False.",
        )
    problem = check_gpus(mode, ranks, is_required=is_required)
    return GpuAgreement(mode, problem, unknown_warning(ranks) if mode == GpuMode.TASK else "")


def _cpu_torch(ranks: Sequence[RankGpus]) -> str:
    for rank, gpus in enumerate(ranks):
        if gpus.cpu_torch:
            return f"rank {rank} on host {gpus.host} has torch {gpus.cpu_torch}, which is built without CUDA"
    return ""


@dataclass(frozen=True)
class OwnGpu:
    """GPU of one rank.

    Attributes:
        ordinal: its ordinal in the rank's process; None without a GPU.
        visible: new CUDA_VISIBLE_DEVICES of the process; None for no change.
    """

    ordinal: int | None
    visible: str | None = None


def own_gpu(
    mode: str,
    local_ranks: Sequence[RankGpus],
    local_rank: int,
    seen: Sequence[str],
    base: str | None,
) -> OwnGpu:
    """Choose a rank's GPU. If possible, its ordinal is the local rank, as in scripts for Horovod.

    The rank's process then sees the GPUs of all ranks of its host, in order. It sees only its own if it cannot see the
    others', if they are unknown, and if ranks have several, which are then cuda:0, cuda:1, ... of each rank.

    Args:
        mode: of `GpuMode`.
        local_ranks: GPUs that the processes of this host's ranks see, by local rank.
        local_rank: of this rank.
        seen: UUIDs of all GPUs that this rank's process could see, in CUDA's order.
        base: CUDA_VISIBLE_DEVICES with which it would see them, or None.
    """
    if mode == GpuMode.HOST:
        return OwnGpu(local_rank)
    if mode != GpuMode.TASK:
        return OwnGpu(None)
    if len(local_ranks) == 1 or any(len(gpus.uuids) != 1 for gpus in local_ranks):
        return OwnGpu(0)
    # Use the names of the executor's processes, which Spark and the user know.
    names = [str(i) for i in range(len(seen))] if base is None else visible_names(base)
    name_of = dict(zip(seen, names, strict=False))
    if any(gpus.uuids[0] not in name_of for gpus in local_ranks):
        return OwnGpu(0)
    return OwnGpu(local_rank, ",".join(name_of[gpus.uuids[0]] for gpus in local_ranks))


def check_gpus(mode: str, ranks: Sequence[RankGpus], *, is_required: bool) -> str:
    """Find why these ranks have no GPUs of their own, or return "".

    Depends only on its arguments, so the result is equal on every rank.
    """
    if mode not in (GpuMode.TASK, GpuMode.HOST):
        return ""
    owners: dict[str, int] = {}
    for rank, gpus in enumerate(ranks):
        index = gpus.local_rank if mode == GpuMode.HOST else 0
        if index >= len(gpus.uuids):
            if is_required:
                return _describe_missing(rank, gpus)
            continue
        other = owners.setdefault(gpus.uuids[index], rank)
        if other != rank:
            return _describe_shared(mode, other, ranks[other], rank, gpus, gpus.uuids[index])
    return ""


def _describe_missing(rank: int, gpus: RankGpus) -> str:
    who = f"use_gpu is True, and rank {rank} on host {gpus.host}"
    seen = "" if gpus.visible is None else f" (CUDA_VISIBLE_DEVICES={gpus.visible!r})"
    if not gpus.uuids:
        why = gpus.error or "CUDA's driver counts no GPU"
        return (
            f"{who} sees no GPU{seen}: {why}. Run on hosts with a GPU and its driver, or leave use_gpu out to train on "
            "the CPU."
        )
    some = f"{len(gpus.uuids)} GPU{'s' * (len(gpus.uuids) != 1)}"
    return (
        f"{who} is number {gpus.local_rank + 1} there, where a process sees {some}{seen}. Give num_proc so that no host "
        "has more ranks than GPUs, or leave use_gpu out to train on the CPU."
    )


def _describe_shared(
    mode: str, a: int, first: RankGpus, b: int, second: RankGpus, uuid: str
) -> str:
    where = (
        f"Ranks {a} and {b} on host {first.host}"
        if first.host == second.host
        else f"Rank {a} on host {first.host} and rank {b} on host {second.host}"
    )
    seen = f"CUDA_VISIBLE_DEVICES={first.visible!r} and {second.visible!r}"
    remedy = (
        f"Set {TASK_AMOUNT}=1, and let the discovery script ({EXECUTOR_AMOUNT.replace('amount', 'discoveryScript')}) print each GPU "
        "of a host once"
        if mode == GpuMode.TASK
        else "Let each container see GPUs of its own"
    )
    return f"{where} have the same GPU, {uuid} ({seen}); a GPU is for one rank. {remedy}, or give use_gpu=False."


def unknown_warning(ranks: Sequence[RankGpus]) -> str:
    """Make a warning about GPUs from Spark with unknown UUIDs, or return "" if all are known."""
    for rank, gpus in enumerate(ranks):
        if not gpus.uuids:
            return (
                f"Spark gave rank {rank} on host {gpus.host} a GPU, and its process sees none "
                f"({gpus.error or 'CUDA counts no GPU'}); whether ranks share a GPU is not known."
            )
    return ""
