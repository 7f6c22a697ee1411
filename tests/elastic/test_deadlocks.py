"""Elastic jobs in which Horovod hangs or ends. Each must continue, with every row exactly once."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.elastic.test_training import (
    BODIES,
    assert_exact,
    limits,
    result_of,
    tell,
)
from tests.harness.elastic import ElasticJob, elastic_job
from tests.harness.soak import left_to_soak

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]
TARGET = f"{BODIES}:count_rows"


def finish(job: ElasticJob, gone: set[int], size: int) -> list[dict[str, Any]]:
    results = [result_of(member) for member in job.members if member.rank not in gone]
    assert_exact(results)
    assert {result["size"] for result in results} == {size}
    return results


def test_survivors_below_the_minimum_sync_with_a_new_rank() -> None:
    """The survivors of a graceful leave need no state, but the rank that they wait for needs it."""
    with elastic_job(TARGET, 3, limits=limits(3, least=3)) as job:
        tell(job.members, pause=0.03)
        for member in job.members:
            member.expect()
        job.coordinator.remove(2, "its host is not there any more")
        assert job.members[2].error()["kind"] == "SystemExit"
        tell(job.start(1), pause=0.03)
        finish(job, {2}, 3)
        assert [job.next_change().change.sync for _ in range(2)] == [True, True]


def test_ranks_with_different_updates_all_synchronize() -> None:
    """One rank gets an update with removals, one an update with new hosts, and one no update."""
    with elastic_job(TARGET, 3) as job:
        for member, news in zip(job.members, ({"update": 1}, {"update": 2}, {}), strict=True):
            tell([member], **news)
        finish(job, set(), 3)
        assert [job.next_change().change.sync for _ in range(2)] == [True, True]


def test_survivors_continue_after_all_ranks_of_a_host_die() -> None:
    with elastic_job(TARGET, 4) as job:
        tell(job.members, pause=0.03)
        for member in job.members:
            member.expect()
        for member in job.members[2:]:
            member.kill(signal.SIGKILL)
        finish(job, {2, 3}, 2)


@pytest.mark.parametrize("where", ["reset", "sync", "synced", "commit"])
def test_training_survives_a_death_during_recovery_from_another_death(where: str) -> None:
    """After rank 0, the next rank 0 dies too, right after the ranks have met or while it sends the state."""
    with elastic_job(TARGET, 4) as job:
        tell(job.members[:1], die=(1, 2))
        tell(job.members[1:2], die_in=(where, 2))
        tell(job.members[2:])
        finish(job, {0, 1}, 2)


@pytest.mark.parametrize("where", ["sync", *left_to_soak("sync, here", "synced", "commit")])
def test_death_of_a_starting_rank_blocks_no_other_rank(where: str) -> None:
    with elastic_job(TARGET, 2) as job:
        tell(job.members, pause=0.05)
        for member in job.members:
            member.expect()
        tell(job.start(1), pause=0.05, die_in=(where, 2))
        finish(job, {2}, 2)


def test_early_successful_exit_of_a_rank_does_not_end_the_others() -> None:
    with elastic_job(TARGET, 3) as job:
        tell(job.members[:2])
        tell(job.members[2:], leave=[1, 1])
        finish(job, {2}, 2)
        error = job.members[2].message(5)
        while error is not None and "kind" not in error:
            error = job.members[2].message(5)
        assert error is not None
        assert error["kind"] == "SystemExit"


def test_ranks_survive_the_loss_of_ranks_in_process_sets() -> None:
    with elastic_job(TARGET, 3) as job:
        tell(job.members[:2], sets=[[1], [0, 2]])
        tell(job.members[2:], sets=[[1], [0, 2]], die=(1, 2))
        finish(job, {2}, 2)
