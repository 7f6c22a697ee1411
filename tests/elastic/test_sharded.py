"""Sharded optimizers whose ranks are killed, leave and join: each part of their state is used exactly once."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.elastic.test_training import BODIES, result_of, tell
from tests.harness.elastic import ElasticJob, elastic_job

pytestmark = [pytest.mark.processes, pytest.mark.timeout(90)]
TARGET = f"{BODIES}:count_rows"


def finish(job: ElasticJob, gone: set[int], size: int) -> None:
    """Compare with Adagrad in one process, which has trained on each row once in each of three epochs."""
    results = [result_of(member) for member in job.members if member.rank not in gone]
    assert {result["size"] for result in results} == {size}
    weight = sum(1 / math.sqrt(count) for count in (1, 2, 3))
    for result in results:
        assert result["counted"] == [3.0], results
        assert result["steps"] == result["taken"]
        assert result["weights"] == pytest.approx([weight] * len(result["weights"]), rel=1e-9)
        assert result["same"]


def begin(job: ElasticJob, **plan: Any) -> None:
    tell(job.members, sharded=True, **plan)
    for member in job.members:
        member.expect()


@pytest.mark.parametrize(("lost", "commit"), [(0, 1), (2, 3)])
def test_shard_of_a_lost_rank_is_restored_from_its_neighbour(lost: int, commit: int) -> None:
    with elastic_job(TARGET, 3) as job:
        for member in job.members:
            dies = {"die": (1, 4)} if member.rank == lost else {}
            tell([member], sharded=True, commit=commit, **dies)
        finish(job, {lost}, 2)


@pytest.mark.parametrize("where", ["synced", "commit"])
def test_state_survives_a_death_before_the_first_commit(where: str) -> None:
    with elastic_job(TARGET, 4) as job:
        tell(job.members[:1], sharded=True, die=(1, 2))
        tell(job.members[1:2], sharded=True, die_in=(where, 2))
        tell(job.members[2:], sharded=True)
        finish(job, {0, 1}, 2)


def test_new_rank_joins_the_only_survivor_of_a_death_in_commit() -> None:
    with elastic_job(TARGET, 2) as job:
        tell(job.members[:1], sharded=True, pause=0.03, die_in=("commit", 1))
        tell(job.members[1:], sharded=True, pause=0.03)
        while job.members[1].expect()["size"] != 1:
            pass
        tell(job.start(1), sharded=True, pause=0.03)
        finish(job, {0}, 2)


@pytest.mark.parametrize("plan", [{}, {"commit": 4, "checks": True}])
def test_neighbours_pass_on_their_state_before_leaving_together(plan: dict[str, Any]) -> None:
    with elastic_job(TARGET, 3) as job:
        begin(job, pause=0.03, **plan)
        for number in (0, 1):
            job.coordinator.remove(number, "its host is not there any more")
        for number in (0, 1):
            assert job.members[number].error()["kind"] == "SystemExit"
        tell(job.start(1), sharded=True, pause=0.03, **plan)
        finish(job, {0, 1}, 2)


def test_job_ends_if_a_rank_and_its_neighbour_are_lost() -> None:
    with elastic_job(TARGET, 4) as job:
        lost = {"die": (1, 4), "with": job.members[2].pid}
        for member in job.members:
            tell([member], sharded=True, **(lost if member.rank == 1 else {}))
        for member in (job.members[0], job.members[3]):
            member.expect()  # it has begun
            error = member.error()
            assert error["kind"] == "ElasticError"
            assert "Rank 1's part (of 4) of the sharded optimizer's state is gone" in error["text"]
