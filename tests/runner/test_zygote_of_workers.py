"""Zygotes of Spark's Python workers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sparkhvd.runner import run
from tests.harness.by_value import by_value
from tests.harness.processes import ZYGOTE, is_alive
from tests.harness.soak import soak
from tests.harness.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

travels_by_value = by_value(__name__)


def parent() -> tuple[int, str]:
    """Return the number and the command line of this process's parent."""
    return os.getppid(), Path(f"/proc/{os.getppid()}/cmdline").read_text().replace("\0", " ")


@soak("test_prewarm: ranks are forked; the setting: runner/test_zygote")
def test_zygotes_fork_ranks_unless_the_setting_disables_them(
    spark: SparkSession,
) -> None:
    first = run(parent, num_proc=2, spark=spark, verbose=0)
    later = run(parent, num_proc=2, spark=spark, verbose=0)
    for _, command in (*first, *later):
        assert ZYGOTE in command
    assert {pid for pid, _ in first} & {pid for pid, _ in later}, "no worker was used again"
    fresh = run(parent, num_proc=2, spark=spark, verbose=0, env={"SPARKHVD_NURSERY": "0"})
    assert all(ZYGOTE not in command for _, command in fresh)


@soak("runner/test_zygote")
def test_launches_with_different_variables_leave_few_zygotes(
    spark: SparkSession,
) -> None:
    used = set()
    for value in range(4):
        env = {"OMP_STACKSIZE": f"{value + 1}M"}
        for _ in range(2):  # one after the other
            used |= {pid for pid, _ in run(parent, num_proc=1, spark=spark, verbose=0, env=env)}
    assert len(used) >= 4
    left = wait_until(
        lambda: [alive] if len(alive := set(filter(is_alive, used))) <= 2 else [],
        "zygotes that get no more requests end",
        within_s=15,
    )
    assert left != [set()]
