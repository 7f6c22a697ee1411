"""Operations on devices in real processes, with the stand-in for CUDA and NCCL: results, death, forks."""

from __future__ import annotations

import os
import re
import signal
import statistics
import time
from pathlib import Path

import pytest

from sparkhvd.engine.engine import Engine
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.settings import Settings
from tests.engine import device_bodies
from tests.harness.rank_process import DEADLINE_S, rank_processes
from tests.harness.ranks import run_ranks

BODIES = "tests.engine.device_bodies"

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(
        not device_bodies.NCCL.exists(),
        reason="the stand-in is not built: cmake --build build/native --target fake_cuda",
    ),
]


def test_ranks_reduce_on_their_devices() -> None:
    with rank_processes(f"{BODIES}:add", 3) as ranks:
        for rank in ranks:
            values, device, algorithms = rank.expect()
            assert values == [6.0] * 5
            assert device == rank.rank
            assert "nccl_allreduce" in algorithms


@pytest.mark.parametrize(
    "body",
    [
        "spin_until_it_fails",
        "negotiate_until_it_fails",
        "relay_until_it_fails",
        "connect_until_it_fails",
    ],
)
def test_killed_rank_is_named_by_every_other_within_five_seconds(body: str) -> None:
    shared = set(os.listdir("/dev/shm"))
    with rank_processes(f"{BODIES}:{body}", 3) as ranks:
        for rank in ranks:
            assert rank.expect() == "running"
        time.sleep(0.5)
        start = time.monotonic()
        ranks[2].kill(signal.SIGKILL)
        for rank in ranks[:2]:
            error = rank.error()
            assert error["kind"] == "PeerLostError", error
            assert "rank 2" in error["text"].lower(), error
        assert time.monotonic() - start < 5
        pids = [rank.pid for rank in ranks]
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    assert {name for name in set(os.listdir("/dev/shm")) - shared if "sparkhvd" in name} == set()


@pytest.mark.parametrize("first", ["error", "goodbye"])
def test_rank_shutdown_is_not_reported_as_peer_loss(first: str) -> None:
    with rank_processes(f"{BODIES}:leave_and_let_nccl_tell", 3) as ranks:
        for rank in ranks:
            rank.tell(first)
        text, values = ranks[0].expect()
        assert ranks[1].expect() == "left"
        assert text.startswith("CollectiveError: allreduce('x'): rank 1 shut down before it"), text
        assert values == [2.0] * 5
        assert ranks[2].expect() == ["", [2.0] * 5]


def test_a_stalled_gpu_operation_causes_a_warning(
    capfd: pytest.CaptureFixture[str],
) -> None:
    settings = Settings(connect_timeout_s=DEADLINE_S, stall_warning_s=0.4)
    with rank_processes(f"{BODIES}:stand_still", 2, settings=settings) as ranks:
        for rank in ranks:
            assert rank.expect() == 0
        for rank in ranks:
            assert rank.expect() == "warned"
        for rank in ranks:
            rank.tell("continue")
        for rank in ranks:
            assert rank.expect() >= 2
    printed = capfd.readouterr().err
    for rank in ("rank 0", "rank 1"):
        said = rf"allreduce\('stuck'\) of process set 1: {rank} is waiting for the GPU since ([\d.]+) s"
        assert float(re.findall(said, printed)[0]) >= 0.4, printed
    assert "'after'" not in printed
    assert "'first'" not in printed


def test_kernel_launch_wait_serves_other_operations_on_a_busy_cpu() -> None:
    with rank_processes(f"{BODIES}:reduce_beside_a_launch", 1) as ranks:
        seconds, is_waiting = ranks[0].expect()
    assert is_waiting
    # A waiter that yielded its CPU twenty times before it checked took 100 ms.
    assert statistics.median(seconds) < 0.03


def test_memory_of_unfinished_gpu_operations_is_not_freed() -> None:
    with rank_processes(f"{BODIES}:time_out", 1) as ranks:
        assert ranks[0].expect() == [False, True]


def test_a_forked_child_makes_no_cuda_call() -> None:
    with rank_processes(f"{BODIES}:fork_beside_it", 2) as ranks:
        for rank in ranks:
            assert rank.expect() == [0, [2.0] * 5]


def test_error_explains_why_a_device_cannot_be_opened() -> None:
    def body(engine: Engine) -> None:
        with pytest.raises(InvalidArgumentError, match="/nowhere/libcuda.so"):
            engine.open_device(0, "/nowhere/libcuda.so")
        with pytest.raises(InvalidArgumentError, match="device 99 does not exist"):
            engine.open_device(99, str(device_bodies.CUDA), str(device_bodies.NCCL))
        with pytest.raises(InvalidArgumentError, match="device 0 is not open on rank 0"):
            engine.allocate(100, device=0)

    run_ranks(1, body)
