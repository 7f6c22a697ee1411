"""Trainings whose ranks are killed and added: each epoch has every row exactly once."""

from __future__ import annotations

import random
import secrets
import signal
import time
from typing import Any

import pytest

from sparkhvd.elastic import Limits
from tests.harness.elastic import ElasticJob, elastic_job
from tests.harness.fork_server import ForkServer
from tests.harness.rank_process import RankProcess, rank_processes
from tests.harness.soak import SOAK, amount

pytestmark = pytest.mark.processes

BODIES = "tests.elastic.training_bodies"
SEED = secrets.randbelow(2**32) if SOAK else 11


def limits(first: int, **more: Any) -> Limits:
    return Limits(**{"first": first, "least": 1, "most": 16, "patience_s": 30.0, **more})


def result_of(member: RankProcess) -> dict[str, Any]:
    """Return the result of a member's training, and skip its earlier messages."""
    while "weights" not in (said := member.expect()):
        pass
    return dict(said)


def assert_exact(results: list[dict[str, Any]], epochs: int = 3) -> None:
    for result in results:
        assert result["weights"] == [float(epochs)], results
        assert result["same"]


def tell(members: list[RankProcess], **plan: Any) -> None:
    for member in members:
        member.tell(plan)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("plan", [{}, {"commit": 3}, {"by_index": True}, {"views": True}])
def test_each_row_counts_once_after_a_rank_dies(plan: dict[str, Any]) -> None:
    with elastic_job(f"{BODIES}:count_rows", 3) as job:
        tell(job.members[:2], **plan)
        tell(job.members[2:], **plan, die=(1, 4))
        results = [result_of(member) for member in job.members[:2]]
        assert_exact(results)
        assert {result["size"] for result in results} == {2}
        assert results[0]["sizes"] == [-2]


@pytest.mark.timeout(90)
def test_each_row_counts_once_after_two_deaths_and_a_join() -> None:
    with elastic_job(f"{BODIES}:count_rows", 4) as job:
        plan = {"pause": 0.04, "waits_in": 2, "size": 3}
        # Steps are counted from the last change of the ranks: a later step may not come if the new rank joins late in this epoch.
        # After two steps of four ranks, five ranks have four steps.
        tell(job.members[:1], **plan, die=(0, 2))
        tell(job.members[1:2], **plan, die=(1, 0))
        tell(job.members[2:], **plan)
        for member in job.members:
            assert member.expect()["size"] == 4
        tell(job.start(1), **plan)
        results = [result_of(member) for member in job.members[2:]]
        assert_exact(results)
        assert {result["size"] for result in results} == {3}
        assert results[0]["sizes"] == results[2]["sizes"]  # of the earlier ranks' state


@pytest.mark.timeout(60)
def test_a_single_remaining_rank_continues_and_the_job_grows_again() -> None:
    with elastic_job(f"{BODIES}:count_rows", 2) as job:
        tell(job.members[:1], die=(0, 3))
        tell(job.members[1:], pause=0.04)
        while job.members[1].expect()["size"] != 1:
            pass
        tell(job.start(1), pause=0.04)
        results = [result_of(member) for member in job.members[1:]]
        assert_exact(results)
        assert {result["size"] for result in results} == {2}


@pytest.mark.timeout(60)
def test_ranks_do_not_wait_for_a_process_preparing_to_join() -> None:
    """The process joins the other ranks when its function begins."""
    with elastic_job(f"{BODIES}:count_rows", 2) as job:
        tell(job.members, pause=0.04)
        for member in job.members:
            member.expect()
        assert job.next_change().change.generation == 1
        (new,) = job.start(1, f"{BODIES}:prepare")
        place = new.expect()
        assert (place["rank"], place["size"]) == (2, 3)
        assert "inside the function of hvd.elastic.run" in place["error"]
        time.sleep(0.2)  # of many commits
        assert job.formed.empty()
        tell([new], pause=0.04)
        assert job.next_change().change.joined == (2,)
        assert_exact([result_of(member) for member in job.members])


@pytest.mark.timeout(60)
def test_removed_members_leave_at_a_commit_and_no_row_is_lost() -> None:
    with elastic_job(f"{BODIES}:count_rows", 3) as job:
        tell(job.members, pause=0.02)
        for member in job.members:
            member.expect()
        time.sleep(0.2)
        job.coordinator.remove(0, "its host is not there any more")
        results = [result_of(member) for member in job.members[1:]]
        assert_exact(results)
        change = [job.next_change() for _ in range(2)][1].change
        assert not change.sync  # all of them have the state
        assert job.members[0].error()["kind"] == "SystemExit"


@pytest.mark.timeout(60)
def test_rows_repeated_to_equalize_ranks_lose_no_other_row() -> None:
    with elastic_job(f"{BODIES}:count_rows", 3) as job:
        tell(job.members, repeat=True, rows=100, batch=1)  # 34 rows each: two extra rows
        results = [result_of(member) for member in job.members]
        # A repeated row counts twice.
        assert results[0]["weights"] in ([3.0, 4.0], [3.0, 4.0, 5.0])


@pytest.mark.timeout(60)
def test_a_lost_rank_ends_a_non_elastic_job(fork_server: ForkServer) -> None:
    target = f"{BODIES}:reduce_for_ever"
    with rank_processes(target, 2, with_engine=False, server=fork_server) as ranks:
        for rank in ranks:
            assert rank.expect() == "reduces"
        began = time.monotonic()
        ranks[1].kill(signal.SIGKILL)
        error = ranks[0].error()
        assert error["kind"] == "PeerLostError"
        assert "rank 1" in error["text"]
        assert time.monotonic() - began < 10


@pytest.mark.timeout(60)
def test_second_run_in_one_process_continues_after_a_death() -> None:
    with elastic_job(f"{BODIES}:run_twice", 3) as job:
        results = []
        for member in job.members:
            try:
                results.append(member.expect())
            except AssertionError as error:
                assert "ended without a word" in str(error)  # noqa: PT017 - the one that was killed
        assert results == [{"sizes": [3, 2]}] * 2


def of_survivors(job: ElasticJob, killed: int) -> list[dict[str, Any]]:
    return [dict(member.expect()) for member in job.members if member.rank != killed]


@pytest.mark.timeout(60)
def test_repeated_rendezvous_leak_no_descriptors() -> None:
    """Engines close them without a garbage collection, because each engine also has megabytes of shared memory."""
    with elastic_job(f"{BODIES}:change_often", 2) as job:
        found = job.members[0].expect()
        assert len(set(found[1:])) == 1, found


@pytest.mark.timeout(60)
def test_batch_norm_statistics_cover_the_remaining_ranks() -> None:
    with elastic_job(f"{BODIES}:normalize", 3) as job:
        assert of_survivors(job, 0) == [{"size": 2, "is_right": True}] * 2


@pytest.mark.timeout(60)
def test_page_script_continues_after_a_death() -> None:
    with elastic_job(f"{BODIES}:run_page", 3) as job:
        results = of_survivors(job, 1)
        assert [result["size"] for result in results] == [2, 2]
        assert results[0]["weights"] == results[1]["weights"]


@pytest.mark.timeout(60)
def test_a_horovod_script_continues_after_the_death_of_rank_0() -> None:
    with elastic_job(f"{BODIES}:run_horovod_script", 3) as job:
        results = of_survivors(job, 0)
        for result in results:
            assert result["size"] == 2
            # 50 rows among three: 17 for each, one of them twice.
            assert result["lengths"][:2] == [[17, 51]] * 2
            assert result["lengths"][-1] == [25, 50]
            # Every epoch has every row. The first division repeats one, and the division of the rest repeats others.
            assert result["weights"][0] == 3.0
            assert result["weights"][-1] <= 5.0
            assert sum(result["weights"]) <= 3 * 50 + 4


def act(job: ElasticJob, dice: random.Random, plan: dict[str, Any]) -> str:
    """Disturb a random member, and return the action. At least one member with the state remains."""
    gone = job.__dict__["gone"]
    left = [member for member in job.members if member.rank not in gone]
    # The first members, and members that have reported a generation.
    trained = {m.rank for m in left if m.rank < job.limits.first or m.has_spoken()}
    kind = dice.choice(["kill", "kill", "join", "remove"])
    if kind == "join" or len(left) < 2:
        if len(left) < 5:
            tell(job.start(1), **plan)
        return "join"
    member = dice.choice(left)
    if trained <= {member.rank}:
        return "nothing"
    gone.add(member.rank)
    if kind == "kill":
        job.__dict__["killed"].add(member.rank)
        member.kill(signal.SIGKILL)
    else:
        job.coordinator.remove(member.rank, "the test wants so")
    return kind


@pytest.mark.timeout(120 if not SOAK else 3600)
def test_each_row_counts_once_with_random_kills_and_joins() -> None:
    for number in range(amount(1, 200)):
        dice = random.Random(f"{SEED} {number}")
        first = dice.randint(2, 4)
        plan = {
            "rows": dice.choice([60, 101, 128]),
            "epochs": 4,
            "batch": dice.randint(1, 5),
            "commit": dice.randint(1, 4),
            "pause": 0.03,
        }
        with elastic_job(f"{BODIES}:count_rows", first) as job:
            job.__dict__.update(gone=set(), killed=set())
            tell(job.members, **plan)
            for member in job.members:
                member.expect()
            done = []
            for _ in range(dice.randint(2, 5)):
                time.sleep(dice.random() * 0.5)
                done.append(act(job, dice, plan))
            results = []
            for member in job.members:
                if member.rank in job.__dict__["killed"]:
                    continue
                try:
                    results.append(result_of(member))
                except AssertionError as error:  # it has left, or joined too late
                    assert "SystemExit: 0" in str(error), (SEED, number, done)  # noqa: PT017
            assert results, (SEED, number, done)
            assert_exact(results, 4)
