"""Samples of a process's load: their values while it computes and holds memory, and their cost."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sparkhvd.observe import system
from sparkhvd.observe.system import Gpu, LoadMonitor

pytestmark = pytest.mark.pure


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoadMonitor]:
    monkeypatch.setattr(system, "_INTERVAL_S", 0.1)
    made = LoadMonitor(lambda: (40.0, 1000.0))
    made.start()
    yield made
    made.close()


def test_load_samples_show_a_busy_process(sampler: LoadMonitor) -> None:
    held = bytearray(100 << 20)
    sampler.take()
    began, used = time.monotonic(), time.process_time()
    while time.monotonic() < began + 0.55:
        pass
    used = time.process_time() - used
    samples = sampler.take()
    took = time.monotonic() - began  # longer on a busy machine
    assert 1 <= len(samples) <= took / 0.1 + 1
    # Of the time that a busy machine has given.
    busy = max(sample.cpu_percent for sample in samples)
    assert 0.5 * 100 * used / took < busy < 300
    assert samples[-1].rss_megabytes > len(held) / 1e6
    assert samples[-1][3:] == (40.0, 1000.0)
    assert abs(samples[-1].time - time.time()) < 1
    assert len(sampler.take()) <= 1


def test_load_sample_takes_little_time() -> None:
    began = time.thread_time()
    for _ in range(100):
        system._cpu_s()
        system._rss_megabytes()
    assert (time.thread_time() - began) / 100 < 0.0005  # of a second, which is 0.05 %


def library(handle: int = 0, rates: int = 0) -> Any:
    def memory(_: object, found: Any) -> int:
        found._obj.used = 3_000_000_000
        return 0

    def utilization(_: object, found: Any) -> int:
        found._obj.gpu = 75
        return rates

    return SimpleNamespace(
        nvmlInit_v2=lambda: 0,
        nvmlDeviceGetHandleByUUID=lambda uuid, found: 0 if uuid == b"GPU-1" else 1,
        nvmlDeviceGetUtilizationRates=utilization,
        nvmlDeviceGetMemoryInfo=memory,
    )


def test_gpu_load_is_read_by_uuid() -> None:
    gpu = Gpu.find("GPU-1", lambda name: library())
    assert gpu is not None
    assert gpu() == (75.0, 3000.0)
    assert Gpu.find("GPU-2", lambda name: library()) is None
    silent = Gpu.find("GPU-1", lambda name: library(rates=3))  # as a part of a GPU is
    assert silent is not None
    assert math.isnan(silent()[0])


def test_gpu_load_is_absent_without_the_nvidia_library() -> None:
    def load(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    assert Gpu.find("GPU-1", load) is None
    assert Gpu.find("GPU-1", lambda name: ctypes.CDLL(None)) is None
