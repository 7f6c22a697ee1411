"""What follows from the GPUs that the ranks of a job found: pure, and so the same on every rank.

A GPU is for one rank. Which ones the processes see is asked of CUDA's driver, because names lie: a number means another
GPU in another container.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparkhvd.runner.gpu.decide import EXECUTOR_AMOUNT, TASK_AMOUNT, Mode, visible_names

__all__ = [
    "Agreement",
    "OwnGpu",
    "RankGpus",
    "agree",
    "check_gpus",
    "own_gpu",
    "unknown_warning",
]


@dataclass(frozen=True)
class RankGpus:
    """What the process of a rank sees.

    Attributes:
        host: its host's name.
        local_rank: its place among the ranks of the host.
        uuids: of the GPUs, in the order of CUDA.
        error: why CUDA's driver did not say, or "".
        visible: CUDA_VISIBLE_DEVICES of the process, or None.
        cpu_torch: version of its torch if that is needed and built without CUDA, else "".
    """

    host: str
    local_rank: int
    uuids: tuple[str, ...]
    error: str = ""
    visible: str | None = None
    cpu_torch: str = ""


@dataclass(frozen=True)
class Agreement:
    """What follows from what the ranks found; the same on every rank.

    Attributes:
        mode: of `Mode`: where the ranks' GPUs do come from.
        problem: why they cannot run, or "".
        warning: what the caller should know, or "".
    """

    mode: str
    problem: str = ""
    warning: str = ""


def agree(mode: str, ranks: Sequence[RankGpus], *, is_required: bool) -> Agreement:
    """Decide what the ranks use of the GPUs that they were given.

    Nobody who has not asked for GPUs fails for want of a torch that can use them: Spark's are there for other jobs, too.
    """
    if mode not in (Mode.TASK, Mode.HOST):
        return Agreement(mode)
    if text := _cpu_torch(ranks):
        if is_required:
            return Agreement(
                mode,
                problem=f"use_gpu is True, and {text}. Install torch with CUDA on the executors, or leave use_gpu out to "
                "train on the CPU.",
            )
        return Agreement(
            Mode.OFF,
            warning=f"The ranks train on the CPU, although Spark gives them GPUs: {text}. Install torch with CUDA on the "
            "executors, or give use_gpu=False.",
        )
    problem = check_gpus(mode, ranks, is_required=is_required)
    return Agreement(mode, problem, unknown_warning(ranks) if mode == Mode.TASK else "")


def _cpu_torch(ranks: Sequence[RankGpus]) -> str:
    for rank, found in enumerate(ranks):
        if found.cpu_torch:
            return f"rank {rank} on host {found.host} has torch {found.cpu_torch}, which is built without CUDA"
    return ""


@dataclass(frozen=True)
class OwnGpu:
    """Where a rank finds its GPU.

    Attributes:
        ordinal: as CUDA counts in its process; None where it was given none.
        visible: CUDA_VISIBLE_DEVICES of the process if that is to change, else None.
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
    """Let a rank's local rank be the number of its GPU, as scripts for Horovod have it, where that is possible.

    Its process then sees the GPUs of all ranks of its host, in their order. It sees its own only where it cannot see the
    others', where nobody could ask which they are, and where ranks have several: those are cuda:0, cuda:1, ... of each.

    Args:
        mode: of `Mode`.
        local_ranks: what the processes of the ranks of this host see, by local rank.
        local_rank: of this rank.
        seen: UUIDs of all GPUs that this rank's process could see, in the order of CUDA.
        base: the CUDA_VISIBLE_DEVICES with which it would, or None.
    """
    if mode == Mode.HOST:
        return OwnGpu(local_rank)
    if mode != Mode.TASK:
        return OwnGpu(None)
    if len(local_ranks) == 1 or any(len(one.uuids) != 1 for one in local_ranks):
        return OwnGpu(0)
    # The names that the executor's processes use, so that who reads the variable finds what Spark and the user wrote.
    names = [str(i) for i in range(len(seen))] if base is None else visible_names(base)
    name_of = dict(zip(seen, names, strict=False))
    if any(one.uuids[0] not in name_of for one in local_ranks):
        return OwnGpu(0)
    return OwnGpu(local_rank, ",".join(name_of[one.uuids[0]] for one in local_ranks))


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
        f"Set {TASK_AMOUNT}=1, and let the discovery script ({EXECUTOR_AMOUNT.replace('amount', 'discoveryScript')}) print each GPU "
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
