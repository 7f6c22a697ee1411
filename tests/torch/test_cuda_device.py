"""`CudaDevice` without CUDA: its calls of torch.cuda, and copies of many tensors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparkhvd.torch import cuda as device_module
from sparkhvd.torch.cuda import CudaDevice, copy_each, find_nccl

pytestmark = pytest.mark.ranks


class FakeTorchCuda:
    """Its streams are names."""

    def __init__(self) -> None:
        self.waits: list[tuple[str, str]] = []

    def current_stream(self, ordinal: int) -> Any:
        return SimpleNamespace(wait_stream=lambda other: self.waits.append(("current", other)))

    def default_stream(self, ordinal: int) -> str:
        return f"default of {ordinal}"

    def ExternalStream(self, handle: int, device: int) -> str:  # noqa: N802 - torch's name
        return f"{handle:#x} of {device}" if handle else "a new one"


def test_default_stream_with_handle_zero_is_waited_for(
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
def test_tensors_are_copied_one_by_one_without_a_foreach_kernel(
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


def test_strides_of_size_one_dimensions_do_not_split_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda *both: given.extend(zip(*both, strict=True))
    )
    weights = torch.zeros(8, 4, 1, 1)  # "channels last" as it is
    gradients = torch.arange(32.0).as_strided((8, 4, 1, 1), (4, 1, 4, 4))
    others = torch.zeros(2, 3), torch.arange(6.0).reshape(3, 2).t()
    copy_each([weights, others[0]], [gradients, others[1]])
    (target, source), (_, other) = given
    assert source.stride() == target.stride()
    assert source.data_ptr() == gradients.data_ptr()
    assert torch.equal(source, gradients)
    assert other is others[1]  # whose elements lie elsewhere


def test_targets_of_several_dtypes_are_copied_per_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    lists: list[set[torch.dtype]] = []
    many = torch._foreach_copy_

    def foreach(targets: Any, sources: Any) -> None:
        lists.append({each.dtype for each in targets})
        many(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", foreach)
    targets = [torch.zeros(2), torch.zeros(3, dtype=torch.float64), torch.zeros(1)]
    copy_each(targets, [torch.ones(len(each)).half() for each in targets])
    assert [each.tolist() for each in targets] == [[1, 1], [1, 1, 1], [1]]
    assert lists == [{torch.float32}, {torch.float64}]


def test_find_nccl_prefers_the_loaded_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_module, "nccl_candidates", lambda: ["/a wheel's"])
    # The library of a torch with CUDA is loaded.
    monkeypatch.setattr(device_module, "_NCCL", "libnccl-not-installed.so")
    assert find_nccl() == "/a wheel's"
    loaded = next(
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "libtorch_cpu.so" in line
    )
    monkeypatch.setattr(device_module, "_NCCL", "libtorch_cpu.so")
    assert find_nccl() == loaded
