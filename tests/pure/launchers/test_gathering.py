"""Texts that the tasks of one host gather without Spark."""

from __future__ import annotations

import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from sparkhvd.errors import PreflightError
from sparkhvd.launchers.gathering import gather, name_of


def test_names_follow_from_the_key_the_job_and_the_attempt() -> None:
    names = {
        name_of(key, job, attempt) for key in ("ab", "cd") for job in "xy" for attempt in (0, 1)
    }
    assert len(names) == 8
    assert name_of("ab", "x", 0) in names


@pytest.mark.parametrize("size", [1, 2, 5, 16])
def test_every_rank_gets_all_texts_in_the_order_of_ranks(size: int) -> None:
    generator = random.Random(size)
    texts = [
        f"rank {rank} \n ü " + "x" * generator.choice([0, 10, 200_000]) for rank in range(size)
    ]
    delays = [generator.random() / 5 for _ in texts]
    name = name_of("ab" * 32, f"job {size}", 0)

    def task(rank: int) -> list[str]:
        time.sleep(delays[rank])
        return gather(name, rank, size, texts[rank], 10)

    with ThreadPoolExecutor(size) as pool:
        assert list(pool.map(task, range(size))) == [texts] * size


@pytest.mark.parametrize("rank", [0, 1])
def test_a_task_that_does_not_come_is_told(rank: int) -> None:
    with pytest.raises(PreflightError, match=rf"Rank {rank} waited 0.2 s"):
        gather(name_of("ab" * 32, "nobody else", rank), rank, 2, "", 0.2)


def test_a_task_that_ends_meanwhile_is_told() -> None:
    name = name_of("ab" * 32, "ends", 0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(gather, name, 0, 2, "", 10)
        with socket.socket(socket.AF_UNIX) as other:
            until = time.monotonic() + 10
            while other.connect_ex(f"\0{name}") != 0:
                assert time.monotonic() < until
                time.sleep(0.01)
        with pytest.raises(PreflightError, match="Rank 0 cannot start: another rank"):
            waiting.result()
