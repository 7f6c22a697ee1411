"""`run_elastic` while executors are killed and added at random moments: each epoch has every row once."""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.processes import find, wait_for_no_trainers
from tests.harness.spark import standalone_cluster, start_worker, started_script, write_script

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
SEED = secrets.randbelow(2**32)
LIVES = 5
PROGRAM = f"""
from sparkhvd.runner import run_elastic
from tests.harness.elastic_fn import count_rows

for number in range({LIVES}):
    weights = run_elastic(
        count_rows, (101, 4, 0.1), num_proc=2, min_num_proc=1, max_num_proc=3, max_retries=20, spark=spark
    )
    assert all(each == [4.0] for each in weights), weights
    print("LIFE", number, "ended with", len(weights), "ranks")
print("ALL WELL")
"""
CONF = {
    "spark.executor.memory": "512m",
    "spark.task.maxFailures": "1000",
    "spark.deploy.maxExecutorRetries": "-1",
}


def live(master: str, folder: Path, act: Callable[[random.Random], str]) -> None:
    """Run the program, and disturb it every few seconds until it ends."""
    dice, done = random.Random(SEED), []
    script = write_script(folder / "driver.py", PROGRAM, master=master, conf=CONF)
    with started_script(script) as driver:
        while True:
            try:
                output, _ = driver.communicate(timeout=4 + 8 * dice.random())
                break
            except subprocess.TimeoutExpired:
                done.append(act(dice))
    assert "ALL WELL" in output, (SEED, done, output)
    assert "kill" in done, (SEED, done)
    assert wait_for_no_trainers() == set()


def kill_an_executor(dice: random.Random) -> str:
    """Kill one of several executors. The cluster starts another one."""
    executors = sorted(find("CoarseGrainedExecutorBackend"))
    if len(executors) < 2:
        return "nothing"
    os.kill(dice.choice(executors), signal.SIGKILL)
    return "kill"


def test_each_row_counts_once_while_executors_are_killed_and_replaced(tmp_path: Path) -> None:
    live("local-cluster[3,1,1024]", tmp_path, kill_an_executor)


def test_each_row_counts_once_while_workers_are_killed_and_started(tmp_path: Path) -> None:
    workers: list[subprocess.Popen[bytes]] = []
    with standalone_cluster(tmp_path, workers=0) as master:

        def start() -> None:
            workers.append(start_worker(tmp_path, f"worker-{len(workers)}", master))

        def act(dice: random.Random) -> str:
            there = [worker for worker in workers if worker.poll() is None]
            if len(there) < 2 or (len(there) < 3 and dice.random() < 0.5):
                start()
                return "start"
            os.killpg(dice.choice(there).pid, signal.SIGKILL)
            return "kill"

        try:
            start()
            start()
            live(master, tmp_path, act)
        finally:
            for worker in workers:
                if worker.poll() is None:
                    os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()
