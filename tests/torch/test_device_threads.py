"""Gradients of a GPU arrive on autograd's own thread."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import threading
import time

import pytest
from torch.utils import backend_registration

from tests.harness.fake_cuda import gpu
from tests.harness.paths import ROOT
from tests.harness.soak import soak

pytestmark = pytest.mark.ranks


@soak("a backward pass on threads of autograd's own, on the CPU, in test_features")
@pytest.mark.usefixtures("fake_gpus")
@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no backends made in Python",
)
def test_reentrant_checkpoints_on_autograd_threads_equal_one_process() -> None:
    command = [sys.executable, "-m", "tests.harness.autograd_threads"]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.split() == ["equal"]


@pytest.mark.usefixtures("fake_gpus")
def test_the_stand_in_releases_finished_tasks_outside_its_stream_thread() -> None:
    """A stream's thread may call nothing of CUDA, and a released task may free device memory."""
    device, where = gpu(0), []

    class Held:
        def __del__(self) -> None:
            where.append(threading.get_ident())

    held, running = Held(), threading.Event()

    def run(held: Held) -> None:
        running.set()
        time.sleep(0.1)

    device.enqueue(functools.partial(run, held))
    del held
    assert running.wait(10)
    device.enqueue(lambda: None)  # while the first one still runs
    device.synchronize()
    device.forget()
    assert where == [threading.get_ident()]


@pytest.mark.usefixtures("fake_gpus")
def test_stream_threads_run_no_garbage_collection() -> None:
    """Garbage may be device memory, which a stream's thread must not free."""
    device, where = gpu(0), set()

    def collected(phase: str, _: dict[str, int]) -> None:
        where.add(threading.get_ident())

    def run() -> None:
        streams_thread.add(threading.get_ident())

    streams_thread: set[int] = set()
    thresholds = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(1, 1, 1)
    try:
        for _ in range(300):
            device.enqueue(run)
            [[] for _ in range(3)]
        device.synchronize()
        [[] for _ in range(10)]
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(collected)
    assert streams_thread
    assert threading.get_ident() in where  # the collector runs as often as possible
    assert not where & streams_thread
