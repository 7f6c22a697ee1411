"""Nurseries of Spark's Python workers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from sparkhvd.runner import run
from tests.harness.processes import NURSERY

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def parent() -> tuple[int, str]:
    """Return the number and the command line of this process's parent."""
    return os.getppid(), Path(f"/proc/{os.getppid()}/cmdline").read_text().replace("\0", " ")


def test_ranks_are_forked_by_nurseries_unless_the_setting_says_otherwise(
    spark: SparkSession,
) -> None:
    first = run(parent, num_proc=2, spark=spark, verbose=0)
    later = run(parent, num_proc=2, spark=spark, verbose=0)
    for _, command in (*first, *later):
        assert NURSERY in command
    assert {pid for pid, _ in first} & {pid for pid, _ in later}, "no worker was used again"
    fresh = run(parent, num_proc=2, spark=spark, verbose=0, env={"SPARKHVD_NURSERY": "0"})
    assert all(NURSERY not in command for _, command in fresh)
