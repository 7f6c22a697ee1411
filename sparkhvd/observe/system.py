"""Sample the load of a rank's process once per second: CPU, memory, and its GPU's load by NVIDIA's library.

Threads: one thread, which works for 0.1 ms per second. Failure: an unavailable value is NaN.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

_INTERVAL_S = 1.0


class Sample(NamedTuple):
    """Resource use of a rank's process in a second, or NaN if unknown.

    Attributes:
        time: seconds since 1970.
        cpu_percent: CPU use of all its threads; 100 means one CPU.
        rss_megabytes: resident memory, 10^6 bytes.
        gpu_percent: share of the second in which its GPU ran a kernel of any process.
        gpu_megabytes: memory that all processes use on its GPU.
    """

    time: float
    cpu_percent: float
    rss_megabytes: float
    gpu_percent: float = math.nan
    gpu_megabytes: float = math.nan


# Attribute of a sample -> name of the metric, which is MLflow's name if MLflow has the metric.
METRICS = {
    "cpu_percent": "cpu_utilization_percentage",
    "rss_megabytes": "rss_megabytes",
    "gpu_percent": "gpu_utilization_percentage",
    "gpu_megabytes": "gpu_memory_usage_megabytes",
}


class LoadMonitor:
    """Samples the load of this process until `close`."""

    def __init__(
        self,
        gpu: Callable[[], tuple[float, float]] | None = None,
        notify: Callable[[Sample], object] | None = None,
    ) -> None:
        """Prepare sampling. Call `start` to begin.

        Args:
            gpu: function that returns percent and megabytes of the rank's GPU.
            notify: function that the thread calls with each sample; None keeps the samples for `take`.
        """
        self._gpu = gpu
        self._notify = notify
        self._samples: list[Sample] = []
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start sampling."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sparkhvd-system", daemon=True)
            self._thread.start()

    def take(self) -> list[Sample]:
        """Remove and return the samples since the last call."""
        samples, self._samples = self._samples, []
        return samples

    def close(self) -> None:
        """End the thread."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        before, used = time.monotonic(), _cpu_s()
        due = before + _INTERVAL_S
        while not self._stopping.wait(max(0.0, due - time.monotonic())):
            now, now_used = time.monotonic(), _cpu_s()
            percent = 100 * (now_used - used) / (now - before)
            gpu = self._gpu() if self._gpu is not None else (math.nan, math.nan)
            sample = Sample(time.time(), percent, _rss_megabytes(), *gpu)
            (self._notify or self._samples.append)(sample)
            before, used = now, now_used
            # After a pause of the process, skip missed samples.
            due = max(due + _INTERVAL_S, now + _INTERVAL_S / 2)


def _cpu_s() -> float:
    return time.process_time()


def _rss_megabytes() -> float:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return math.nan
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_ulonglong) for name in ("total", "free", "used"))


class Gpu:
    """GPU, queried through NVIDIA's management library."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle

    @classmethod
    def find(cls, uuid: str, load: Callable[[str], Any] = ctypes.CDLL) -> Gpu | None:
        """Find the GPU with a UUID, such as "GPU-1234...", or return None if the library is missing or does not know it."""
        try:
            library, handle = load("libnvidia-ml.so.1"), ctypes.c_void_p()
            if library.nvmlInit_v2():
                return None
            if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
                return None
        except (OSError, AttributeError):
            return None
        return cls(library, handle)

    def __call__(self) -> tuple[float, float]:
        """Read the GPU's utilization in percent and its used memory in megabytes."""
        rates, memory = _Utilization(), _Memory()
        percent = megabytes = math.nan
        if not self._library.nvmlDeviceGetUtilizationRates(self._handle, ctypes.byref(rates)):
            percent = float(rates.gpu)
        if not self._library.nvmlDeviceGetMemoryInfo(self._handle, ctypes.byref(memory)):
            megabytes = memory.used / 1e6
        return percent, megabytes
