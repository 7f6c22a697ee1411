"""Agreement of ranks on GPUs, as tables: visible GPUs, and reasons why ranks cannot run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparkhvd.runner.gpu.agreement import (
    GpuAgreement,
    OwnGpu,
    RankGpus,
    agree,
    check_gpus,
    own_gpu,
    unknown_warning,
)
from sparkhvd.runner.gpu.decide import GpuMode

pytestmark = pytest.mark.pure


def rank(host: str, local_rank: int, *uuids: str, error: str = "", visible: str = "0") -> RankGpus:
    return RankGpus(host, local_rank, uuids, error, visible)


def test_ranks_with_separate_gpus_are_accepted() -> None:
    given = [rank("h", 0, "GPU-a"), rank("h", 1, "GPU-b"), rank("i", 0, "GPU-c")]
    assert check_gpus(GpuMode.TASK, given, is_required=True) == ""
    shared = [rank("h", 0, "GPU-a", "GPU-b"), rank("h", 1, "GPU-a", "GPU-b")]
    assert check_gpus(GpuMode.HOST, shared, is_required=True) == ""
    twice = [rank("h", 0, "GPU-a"), rank("h", 1, "GPU-a")]
    for mode in (GpuMode.OFF, GpuMode.FREE):
        assert check_gpus(mode, twice, is_required=False) == ""


def test_error_names_two_ranks_that_share_a_gpu() -> None:
    given = [rank("h", 0, "GPU-a"), rank("i", 0, "GPU-c"), rank("h", 1, "GPU-a")]
    assert check_gpus(GpuMode.TASK, given, is_required=False) == (
        "Ranks 0 and 2 on host h have the same GPU, GPU-a (CUDA_VISIBLE_DEVICES='0' and '0'); a GPU is for one rank. Set "
        "spark.task.resource.gpu.amount=1, and let the discovery script (spark.executor.resource.gpu.discoveryScript) "
        "print each GPU of a host once, or give use_gpu=False."
    )
    # Containers with different host names, all of which see the same card.
    contained = [rank("c1", 0, "GPU-a"), rank("c2", 0, "GPU-a")]
    assert check_gpus(GpuMode.HOST, contained, is_required=True).startswith(
        "Rank 0 on host c1 and rank 1 on host c2 have the same GPU, GPU-a"
    )


def test_error_names_a_rank_without_a_gpu_and_the_cause() -> None:
    given = [rank("h", 0, error="libcuda.so.1: cannot open shared object file", visible="3")]
    assert check_gpus(GpuMode.HOST, given, is_required=True) == (
        "use_gpu is True, and rank 0 on host h sees no GPU (CUDA_VISIBLE_DEVICES='3'): libcuda.so.1: cannot open shared "
        "object file. Run on hosts with a GPU and its driver, or leave use_gpu out to train on the CPU."
    )
    few = [RankGpus("h", r, ("GPU-a", "GPU-b")) for r in range(3)]
    assert check_gpus(GpuMode.HOST, few, is_required=True) == (
        "use_gpu is True, and rank 2 on host h is number 3 there, where a process sees 2 GPUs. Give num_proc so that no "
        "host has more ranks than GPUs, or leave use_gpu out to train on the CPU."
    )
    # GPUs are not required: only a warning.
    assert check_gpus(GpuMode.TASK, given, is_required=False) == ""
    assert unknown_warning(given).startswith(
        "Spark gave rank 0 on host h a GPU, and its process sees none (libcuda"
    )
    assert unknown_warning([rank("h", 0, "GPU-a")]) == ""


# GPUs that the ranks of a host have, and GPUs that one of them could see, with which CUDA_VISIBLE_DEVICES.
OWN_GPUS: list[tuple[list[tuple[str, ...]], int, tuple[str, ...], str | None, OwnGpu]] = [
    # One rank on the host needs no other's.
    ([("b",)], 0, ("a", "b"), None, OwnGpu(0)),
    # All visible: in the order of the local ranks, by the names that the executor's processes use.
    ([("b",), ("a",)], 0, ("a", "b"), None, OwnGpu(0, "1,0")),
    ([("b",), ("a",)], 1, ("a", "b"), None, OwnGpu(1, "1,0")),
    ([("c",), ("a",)], 1, ("a", "b", "c"), "4, 5,7", OwnGpu(1, "7,4")),
    ([("a",), ("b",)], 1, ("a", "b"), "GPU-a,GPU-b", OwnGpu(1, "GPU-a,GPU-b")),
    # Fewer ranks than GPUs.
    ([("d",), ("b",)], 1, ("a", "b", "c", "d"), None, OwnGpu(1, "3,1")),
    # Containers that see their own, and MIG devices, of which CUDA shows a process one.
    ([("a",), ("b",)], 1, ("b",), None, OwnGpu(0)),
    ([("a",), ("b",)], 1, ("a",), "MIG-a,MIG-b", OwnGpu(0)),
    # UUIDs are unknown, of all ranks or of some.
    ([(), ()], 1, (), None, OwnGpu(0)),
    ([("a",), ()], 0, ("a", "b"), None, OwnGpu(0)),
    # Several per rank: cuda:0 and cuda:1 of each.
    ([("a", "b"), ("c", "d")], 1, ("a", "b", "c", "d"), None, OwnGpu(0)),
]


@pytest.mark.parametrize(("gpus", "local_rank", "seen", "base", "expected"), OWN_GPUS)
def test_rank_selects_its_own_gpu_among_the_visible_gpus(
    gpus: list[tuple[str, ...]],
    local_rank: int,
    seen: tuple[str, ...],
    base: str | None,
    expected: OwnGpu,
) -> None:
    ranks = [rank("h", i, *uuids) for i, uuids in enumerate(gpus)]
    assert own_gpu(GpuMode.TASK, ranks, local_rank, seen, base) == expected
    # Without GPUs from Spark, the processes already see all GPUs.
    assert own_gpu(GpuMode.HOST, ranks, local_rank, (), base) == OwnGpu(local_rank)
    for mode in (GpuMode.OFF, GpuMode.FREE):
        assert own_gpu(mode, ranks, local_rank, seen, base) == OwnGpu(None)


def test_torch_without_cuda_trains_on_cpu_unless_use_gpu_is_set() -> None:
    given = [rank("h", 0, "GPU-a"), replace(rank("i", 0, "GPU-b"), cpu_torch="2.9.1+cpu")]
    agreed = agree(GpuMode.TASK, given, is_required=False)
    assert (agreed.mode, agreed.problem) == (GpuMode.OFF, "")
    assert agreed.warning == (
        "The ranks train on the CPU, although Spark gives them GPUs: rank 1 on host i has torch 2.9.1+cpu, which is built "
        "without CUDA. Install torch with CUDA on the executors, or give use_gpu=False."
    )
    for mode in (GpuMode.TASK, GpuMode.HOST):
        assert agree(mode, given, is_required=True).problem == (
            "use_gpu is True, and rank 1 on host i has torch 2.9.1+cpu, which is built without CUDA. Install torch with "
            "CUDA on the executors, or leave use_gpu out to train on the CPU."
        )
    # No GPU is to be used, or none was given.
    for mode in (GpuMode.OFF, GpuMode.FREE):
        assert agree(mode, given, is_required=False) == GpuAgreement(mode)


def test_agreement_reports_problems_and_warnings_with_a_cuda_torch() -> None:
    given = [rank("h", 0, "GPU-a"), rank("h", 1, "GPU-b")]
    assert agree(GpuMode.TASK, given, is_required=True) == GpuAgreement(GpuMode.TASK)
    twice = agree(GpuMode.TASK, [given[0], given[0]], is_required=False)
    assert twice.problem.startswith("Ranks 0 and 1 on host h have the same GPU, GPU-a")
    unknown = agree(GpuMode.TASK, [rank("h", 0, error="no driver")], is_required=False)
    assert (unknown.mode, unknown.problem) == (GpuMode.TASK, "")
    assert unknown.warning.endswith("whether ranks share a GPU is not known.")
