"""Members of an elastic job are killed, stopped or added: who stays, how soon, and what the others see."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from typing import Any

import pytest

from sparkhvd.elastic import Limits
from tests.harness.elastic import ElasticJob, elastic_job
from tests.harness.rank_process import RankProcess

pytestmark = pytest.mark.processes

BODIES = "tests.elastic.bodies"
# For a machine that is busy with other tests. An idle machine needs a tenth of it.
WITHIN_S = 3.0


def generation_of(members: Iterable[RankProcess], number: int) -> list[dict[str, Any]]:
    """Wait until members have worked in a generation, and check that they agree on it."""
    said = []
    for member in members:
        while (each := member.expect())["generation"] < number:
            pass
        said.append(each)
    assert {each["generation"] for each in said} == {number}
    assert len({tuple(each["members"]) for each in said}) == 1
    return said


def limits(first: int, **more: Any) -> Limits:
    return Limits(**{"first": first, "least": 1, "most": 16, "patience_s": 30.0, **more})


@pytest.mark.timeout(60)
@pytest.mark.parametrize("tcp_only", [False, True])
def test_survivors_continue_in_their_processes_after_a_kill(tcp_only: bool) -> None:
    with elastic_job(f"{BODIES}:go_on", 4, tcp_only=tcp_only) as job:
        first = generation_of(job.members, 1)
        pids = {each["members"][each["rank"]]: each["pid"] for each in first}
        killed = [first[0]["members"][0]]  # rank 0
        for generation in (2, 3):
            began = time.monotonic()
            job.members[killed[-1]].kill(signal.SIGKILL)
            left = [m for m in job.members if m.rank not in killed]
            said = generation_of(left, generation)
            assert max(each["at"] for each in said) - began < WITHIN_S
            assert {each["members"][each["rank"]]: each["pid"] for each in said} == {
                number: pid for number, pid in pids.items() if number not in killed
            }
            # A rank whose last operation ended before the kill has the newest state, and becomes the first.
            survivors = {n for n in first[0]["members"] if n not in killed}
            assert set(said[0]["members"]) == survivors
            killed.append(said[0]["members"][-1])
        assert job.next_change().change.generation == 1
        change = job.next_change().change
        assert (change.before, change.lost) == (4, {killed[0]: "has died"})


@pytest.mark.timeout(60)
def test_simultaneous_deaths_cause_a_single_membership_change() -> None:
    with elastic_job(f"{BODIES}:go_on", 5) as job:
        generation_of(job.members, 1)
        for number in (0, 3):
            job.members[number].kill(signal.SIGKILL)
        said = generation_of([job.members[n] for n in (1, 2, 4)], last_generation(job, {1, 2, 4}))
        # The newest state comes first, and either member may be a step ahead.
        assert sorted(said[0]["members"]) == [1, 2, 4]


def last_generation(job: ElasticJob, members: set[int]) -> int:
    """Wait for the change after which these are exactly the members."""
    while True:
        formed = job.next_change()
        if set(formed.change.members) == members and formed.has_met:
            return formed.change.generation


@pytest.mark.timeout(60)
def test_death_during_rendezvous_causes_another_membership_change() -> None:
    with elastic_job(f"{BODIES}:go_on", 2) as job:
        generation_of(job.members, 1)
        (late,) = job.start(1, f"{BODIES}:die_when_it_meets")
        generation = last_generation(job, {0, 1})
        assert generation == 1
        # It is a member of the second generation by decision, and gone before that generation has met.
        generation = last_generation(job, {0, 1})
        assert generation == 3
        said = generation_of(job.members[:2], 3)
        assert late.rank not in said[0]["members"]


@pytest.mark.timeout(60)
def test_new_members_join_at_a_commit() -> None:
    with elastic_job(f"{BODIES}:go_on", 2) as job:
        before = generation_of(job.members, 1)
        job.start(1)
        said = generation_of(job.members, 2)
        assert said[0]["members"] == [0, 1, 2]
        assert [each["pid"] for each in said[:2]] == [each["pid"] for each in before]
        last_generation(job, {0, 1})
        formed = job.next_change()
        assert (formed.change.joined, formed.change.lost, formed.has_met) == ((2,), {}, True)


@pytest.mark.timeout(60)
def test_stopped_member_is_excluded_and_raises_when_it_resumes() -> None:
    with elastic_job(f"{BODIES}:go_on", 3, limits=limits(3, patience_s=1.0)) as job:
        generation_of(job.members, 1)
        job.members[1].kill(signal.SIGSTOP)
        # A stop does not notify the others; a death does.
        job.members[2].kill(signal.SIGKILL)
        said = generation_of([job.members[0]], 2)
        assert said[0]["members"] == [0]
        assert job.refused.get(timeout=10)[0] == 1
        job.members[1].kill(signal.SIGCONT)
        error = job.members[1].error()
        assert error["kind"] == "LeftOutError"
        assert "the others waited 1 s for it and continued without it" in error["text"]
        assert "write nothing" in error["text"]


@pytest.mark.timeout(60)
def test_member_stopped_during_rendezvous_is_excluded() -> None:
    with elastic_job(f"{BODIES}:go_on", 2, limits=limits(2, patience_s=1.0)) as job:
        generation_of(job.members, 1)
        (late,) = job.start(1, f"{BODIES}:stop_when_it_meets")
        assert late.expect() == "stopped"
        said = generation_of(job.members[:2], 3)
        assert said[0]["members"] == [0, 1]
        late.kill(signal.SIGCONT)
        assert late.error()["kind"] == "LeftOutError"


@pytest.mark.timeout(60)
def test_members_raise_if_their_coordinator_has_ended() -> None:
    with elastic_job(f"{BODIES}:go_on", 2) as job:
        generation_of(job.members, 1)
        job.coordinator.close()
        for member in job.members:
            error = member.error()
            assert error["kind"] == "ElasticError"
            assert "coordinator" in error["text"]
            assert "start the job again" in error["text"]


@pytest.mark.timeout(60)
def test_removed_members_exit_cleanly_and_the_others_continue() -> None:
    with elastic_job(f"{BODIES}:go_on", 3) as job:
        generation_of(job.members, 1)
        job.coordinator.remove(1, "its host is not there any more")
        said = generation_of([job.members[0], job.members[2]], 2)
        assert said[0]["members"] == [0, 2]
        error = job.members[1].error()
        assert (error["kind"], error["text"]) == ("SystemExit", "0")
