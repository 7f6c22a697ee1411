"""The stand-in also reads its rules from the environment, because tests set them for processes that they start."""

from __future__ import annotations

import os
import signal

import pytest

from tests.soak.nccl.programs import conformity, started

pytestmark = pytest.mark.soak


def run(test: str, **environment: str) -> str:
    done = conformity("--ranks", "1", test, **{"CUDA_VISIBLE_DEVICES": "3", **environment})
    assert (done.returncode == 0) == ("FAILED" not in done.stdout), done.stdout + done.stderr
    return done.stdout


def test_stand_in_version_says_fake() -> None:
    text = run("identity", FAKE_NCCL_VERSION="23203")
    assert text.startswith("1 ranks in threads, NCCL 2.32.3 (fake)\n")
    assert text.endswith("1 tests passed\n")


@pytest.mark.parametrize(
    ("rules", "test", "message"),
    [
        (
            "fail:ncclAllReduce:2:6",
            "allreduce",
            "ncclAllReduce failed: remote process exited or there was a network error (6): "
            "ncclAllReduce: a failure that the test asked for.",
        ),
        (
            "fail:cuStreamCreateWithPriority:1:2",
            "identity",
            "cuStreamCreateWithPriority failed: CUDA_ERROR_OUT_OF_MEMORY (2: out of memory).",
        ),
        (
            "fail:ncclAllReduce@stream:1:3",
            "two_communicators",
            "internal error - please report this issue to the NCCL developers (3)",
        ),
        ("stream_delay:20000,skip_wait:1", "ordered_by_events", "wrong result"),
        ("stream_delay:20000,skip_wait:2", "ordered_by_events", "wrong result"),
    ],
)
def test_stand_in_reads_its_rules_from_the_environment(rules: str, test: str, message: str) -> None:
    text = run(test, FAKE_CUDA=rules)
    assert "FAILED  rank 0 of 1" in text
    assert message in text


def test_a_killed_rank_is_named_and_ends_the_others() -> None:
    with started("--ranks", "2", "--processes", "allreduce", FAKE_CUDA="hang:ncclAllReduce:3") as (
        program,
        ranks,
    ):
        os.kill(ranks[1], signal.SIGKILL)
        text, _ = program.communicate(timeout=20)
    assert program.returncode == 1
    assert "FAILED  rank 1 of 2: its process ended by signal 9\n" in text
    assert "FAILED  rank 0" not in text


def test_cuda_visible_devices_limits_the_gpus() -> None:
    done = conformity("--ranks", "2", "identity", CUDA_VISIBLE_DEVICES="3")
    assert "primary context failed: CUDA_ERROR_INVALID_DEVICE (101: invalid device ordinal)." in (
        done.stdout
    )
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("22907", "Duplicate GPU detected : rank 1 and rank 0 both on the same CUDA device"),
        ("23003", "Multiple Ranks are using the same GPU/Partition: ranks 0 and 1"),
    ],
)
def test_two_ranks_cannot_share_a_gpu(version: str, message: str) -> None:
    # Threads, so that both have one NCCL_HOSTID.
    done = conformity(
        "--ranks",
        "2",
        "--same-gpu",
        "identity",
        CUDA_VISIBLE_DEVICES="3",
        FAKE_NCCL_VERSION=version,
    )
    assert done.returncode == 1
    assert message in done.stdout
