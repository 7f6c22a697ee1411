"""`CudaDevice` as far as it can be tested without CUDA: what it asks of torch.cuda, and copies of many tensors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparkhvd.torch import device as device_module
from sparkhvd.torch.device import CudaDevice, copy_each, find_nccl


class FakeTorchCuda:
    """Streams are their names."""

    def __init__(self) -> None:
        self.waits: list[tuple[str, str]] = []

    def current_stream(self, ordinal: int) -> Any:
        return SimpleNamespace(wait_stream=lambda other: self.waits.append(("current", other)))

    def default_stream(self, ordinal: int) -> str:
        return f"default of {ordinal}"

    def ExternalStream(self, handle: int, device: int) -> str:  # noqa: N802 - torch's name
        return f"{handle:#x} of {device}" if handle else "a new one"


def test_the_default_stream_is_waited_for_although_its_handle_is_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeTorchCuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda ordinal: 0, raising=False)
    device = CudaDevice(3)
    device.await_stream(0)
    device.await_stream(0xABC)
    assert cuda.waits == [("current", "default of 3"), ("current", "0xabc of 3")]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float16])
def test_copies_where_torch_has_no_kernel_for_many(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    kernels: list[int] = []
    many = torch._foreach_copy_

    def foreach(targets: Any, sources: Any) -> None:
        kernels.append(len(targets))
        many(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", foreach)
    sources = [torch.arange(3).to(dtype), torch.arange(5).to(dtype)]
    targets = [torch.zeros_like(each) for each in sources]
    copy_each(targets, sources)
    assert all(torch.equal(x, y) for x, y in zip(targets, sources, strict=True))
    assert kernels == ([2] if dtype == torch.float16 else [])


def test_targets_of_several_types_are_copied_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_foreach_copy_", None)
    targets = [torch.zeros(2), torch.zeros(3, dtype=torch.float64)]
    copy_each(targets, [torch.ones(2).half(), torch.ones(3).half()])
    assert [each.tolist() for each in targets] == [[1, 1], [1, 1, 1]]


def test_nccl_outside_of_the_engine_is_the_copy_that_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_module, "nccl_candidates", lambda: ["/a wheel's"])
    assert find_nccl() == "/a wheel's"
    loaded = next(
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "libtorch_cpu.so" in line
    )
    monkeypatch.setattr(device_module, "_NCCL", "libtorch_cpu.so")
    assert find_nccl() == loaded
