"""Parts of the adapter for a real GPU that need no GPU: reading a profile, NCCL's variables."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from sparkhvd.torch.optimizer.distributed import Distributed
from tests.gpu import bodies, machine
from tests.gpu.machine import LOGS, Cuda, as_with_partners, nccl_environment, profiled, share_gpu

pytestmark = pytest.mark.pure


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """A real GPU's adapter, where torch.cuda does nothing."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    return Cuda.__new__(Cuda)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the profiler, which finds no CUDA
def test_profile_contains_only_events_of_the_measured_steps(cuda: Cuda) -> None:
    x = torch.ones(8)
    names = [event.name for event in profiled(lambda: x.mul_(2))]
    assert "aten::mul_" in names
    assert "the steps" not in names
    assert cuda.watch(lambda: x.mul_(2)).waits == []
    assert "aten::_local_scalar_dense" in cuda.watch(lambda: x.sum().item()).waits


def event(name: str, start: float, end: float) -> Any:
    return SimpleNamespace(
        name=name, device_type=DeviceType.CUDA, time_range=SimpleNamespace(start=start, end=end)
    )


@pytest.mark.parametrize(
    ("events", "said"),
    [
        (
            [
                event("sm80_xmma_gemm_f32f32", 0, 5),
                event("ncclDevKernel_AllReduce_Sum_f32", 4, 9),
                event("ampere_sgemm_128x64_nt", 6, 8),
            ],
            "1 of 2 matrix products ran beside NCCL's kernels",
        ),
        (
            [event("ampere_sgemm_nt", 0, 5), event("ncclDevKernel_AllReduce", 6, 9)],
            AssertionError("none of 1 matrix products ran beside 1 of NCCL"),
        ),
        (
            [event("ampere_sgemm_nt", 0, 5)],
            AssertionError(r"no kernel of NCCL among \['ampere_sgemm_nt'\]"),
        ),
    ],
)
def test_overlap_is_computed_from_kernel_times(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, events: list[Any], said: str | Exception
) -> None:
    def no_step(*_: Any, **__: Any) -> tuple[Callable[[], None], None]:
        return lambda: None, None

    monkeypatch.setattr(bodies, "stepper", no_step)
    monkeypatch.setattr(bodies, "profiled", lambda _: events)
    if isinstance(said, str):
        assert bodies.overlap(cuda) == said
    else:
        with pytest.raises(AssertionError, match=str(said)):
            bodies.overlap(cuda)


def test_ranks_that_share_a_gpu_get_separate_nccl_host_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOGS, "/logs")
    for name in (*nccl_environment(), "NCCL_HOSTID"):
        monkeypatch.setenv(name, "before")  # so that it comes back
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    share_gpu(1)
    given = machine.os.environ
    assert given["NCCL_HOSTID"] == "rank-1"
    assert given["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert given["NCCL_DEBUG_FILE"] == "/logs/nccl.%p"
    assert given["NCCL_SOCKET_IFNAME"] == "eth7"


def test_single_rank_acts_as_with_partners_only_inside_the_context() -> None:
    before = Distributed._has_partners
    with as_with_partners():
        assert Distributed._has_partners is not before
    assert Distributed._has_partners is before
