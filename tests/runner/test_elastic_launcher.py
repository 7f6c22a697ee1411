"""Parts of the elastic launcher without processes: excluded hosts, slots, lines, limits, ends."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any
from unittest.mock import Mock

import pytest

from sparkhvd.elastic import Change, Decided, GenerationFormed
from sparkhvd.elastic.membership import STATE_IS_GONE
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.runner.elastic import launcher as launching
from sparkhvd.runner.elastic.coordinator import ProcessOutcomes, end_of
from sparkhvd.runner.elastic.launcher import ChangeReport, ElasticLauncher, JobResult
from sparkhvd.runner.elastic.options import ElasticOptions, RankRange
from sparkhvd.runner.elastic.slots import Cooldown, Offer, Slot, slots_of, slots_to_fill, surplus
from sparkhvd.runner.host_names import Host
from sparkhvd.runner.options import LaunchOptions
from sparkhvd.runner.outcomes import Outcome, OutcomeKind
from sparkhvd.runner.supervisor import RankEnded

pytestmark = pytest.mark.pure

SLOTS = slots_of([Host("a", 2), Host("b", 2)])


def test_host_cooldown_doubles_up_to_its_maximum() -> None:
    cooldown = Cooldown(1.0, 5.0)
    assert cooldown.next_end(0.0) is None
    now = 0.0
    for seconds in (1.0, 2.0, 4.0, 5.0, 5.0):
        assert cooldown.fail("a", now) == seconds
        assert (
            cooldown.fail("a", now + seconds / 2) == seconds / 2
        )  # a consequence of the same failure
        assert cooldown.is_left_out("a", now + seconds * 0.99)
        assert not cooldown.is_left_out("b", now)
        assert cooldown.next_end(now) == now + seconds
        now += seconds
        assert not cooldown.is_left_out("a", now)
    assert cooldown.fail("a", now + 5.1) == 1.0  # it ran without failure for as long as the longest


def test_free_slots_are_filled_in_host_order_up_to_the_maximum() -> None:
    every = [Slot("a", 0), Slot("a", 1), Slot("b", 0), Slot("b", 1)]
    assert slots_to_fill(SLOTS, [], 8, []) == every
    assert slots_to_fill(SLOTS, [Slot("a", 0)], 3, []) == every[1:3]
    assert slots_to_fill(SLOTS, [Slot("a", 0)], 3, ["a"]) == every[2:]
    assert slots_to_fill(SLOTS, [Slot("c", 0), Slot("c", 1)], 2, []) == []


def test_processes_without_a_slot_are_removed() -> None:
    taken = {0: Slot("a", 0), 1: Slot("a", 1), 2: Slot("b", 0), 5: Slot("c", 0)}
    assert surplus(SLOTS, taken) == [5]
    assert surplus(slots_of([Host("a", 1)]), taken) == [1, 2, 5]
    assert surplus([], taken) == [0, 1, 2, 5]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"timeout_s": "9"}, "elastic_timeout is '9'; it must be a number of seconds"),
        ({"timeout_s": True}, "elastic_timeout is True; it must be a number of seconds"),
        ({"reset_limit": 1.5}, "reset_limit is 1.5. Give a whole number of at least 0"),
        ({"reset_limit": "3"}, "reset_limit is '3'. Give a whole number of at least 0"),
        ({"cooldown_s": ("a", 2)}, "cooldown_range is 'a' 2; it must be two numbers"),
    ],
)
def test_elastic_limits_of_a_wrong_type_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        RankRange(num_proc=1, **given).options(1, 1.0)


@pytest.mark.parametrize("given", ["9", True, 0])
def test_an_invalid_start_timeout_is_refused(given: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="start_timeout is .*seconds above 0"):
        LaunchOptions(start_timeout_s=given)


def change(generation: int, before: int, members: tuple[int, ...], **more: Any) -> Change:
    given = {"lost": {}, "joined": (), "asked_at": 0.0, "why": "", "sync": True}
    return Change(generation=generation, before=before, members=members, **{**given, **more})


def test_a_superseded_change_is_reported_with_the_next_change() -> None:
    hosts = {0: "a", 1: "a", 2: "b", 3: "b"}
    report = ChangeReport()
    first = GenerationFormed(change(1, 0, (0, 1, 2), joined=(0, 1, 2)), 1.0, has_met=True)
    assert str(report.describe(first, hosts, {})) == "3 ranks in 1.00 s: 2 on a, 1 on b"
    overtaken = GenerationFormed(change(2, 3, (0, 1), lost={2: "has died"}), 0.5, has_met=False)
    assert report.describe(overtaken, hosts, {}) is None
    last = GenerationFormed(
        change(3, 2, (1, 3), lost={0: "has died"}, joined=(3,)), 0.25, has_met=True
    )
    described = report.describe(last, hosts, {0: "was ended by SIGKILL"})
    assert str(described) == (
        "3 -> 2 ranks in 0.75 s: process 0 on a was ended by SIGKILL; process 2 on b has died; process 3 on b joined as rank 1"
    )
    same = GenerationFormed(change(4, 2, (1, 3), why="a timeout"), 0.1, has_met=True)
    assert str(report.describe(same, hosts, {})) == "2 -> 2 ranks in 0.10 s: a timeout"


def test_elastic_job_starts_with_the_available_slots_within_its_range() -> None:
    assert RankRange().largest() is None
    assert RankRange().first(3) == 3
    assert RankRange(num_proc=2).first(3) == 2
    assert RankRange(least=2, most=8).largest() == 8
    assert [RankRange(least=2, most=8).first(slots) for slots in (1, 4, 9)] == [2, 4, 8]
    limits = RankRange(num_proc=4).options(4, 7.0)
    assert (limits.smallest, limits.first, limits.largest) == (4, 4, 4)
    assert (limits.limits(5.0).start_timeout_s, limits.limits(5.0).timeout_s) == (7.0, 600.0)
    with pytest.raises(InvalidArgumentError, match="min_num_proc is 3, num_proc is 2"):
        RankRange(num_proc=2, least=3).largest()


def outcome(number: int, kind: str, **more: Any) -> Outcome:
    return Outcome(number, kind, exit="exit 1", **more)


def ends(*outcomes: Outcome, members: tuple[int, ...] = (), problem: str = "") -> ProcessOutcomes:
    failed = tuple(end_of(each) for each in outcomes if each.kind != OutcomeKind.OK)
    verdict = JobResult(False, True, problem, failed, 0, members)
    return ProcessOutcomes(verdict, {each.rank: each for each in outcomes if each.rank is not None})


def test_results_belong_to_successful_ranks_of_the_last_generation() -> None:
    well = [outcome(number, OutcomeKind.OK) for number in (0, 3, 4)]
    assert ends(*well, outcome(1, OutcomeKind.CRASH), members=(4, 1, 3)).order() == [4, 3]
    assert ends(*well).order() == [0, 3, 4]  # of a function without init()


def test_job_failure_names_ranks_and_distinguishes_losses_from_errors() -> None:
    raised = outcome(7, OutcomeKind.EXCEPTION, error="ValueError", message="why")
    lost = outcome(5, OutcomeKind.LOST)
    failure = ends(raised, lost, members=(5, 7)).failure("")
    assert str(failure.error).startswith("Rank 1 of 2 raised ValueError: why")
    assert not failure.is_lost
    failure = ends(lost, members=(5, 7)).failure("")
    assert "Rank 0 of 2 was lost" in str(failure.error)
    assert failure.is_lost
    failure = ends(lost, members=(5,)).failure(STATE_IS_GONE)
    assert "The elastic job cannot continue: every rank that had" in str(failure.error)
    assert failure.is_lost
    failure = ends(lost, members=(5,)).failure("too few")
    assert not failure.is_lost
    assert ends().failure("").is_lost


def test_unjoined_processes_are_named_but_do_not_delay_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launching, "WAITING_S", 0.1)
    monkeypatch.setattr(launching, "WAITING_AGAIN_S", 0.1)
    said: list[str] = []
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    options = ElasticOptions(num_proc=2, least=2, most=4)
    job = ElasticLauncher(options, SLOTS[:2], Mock(), Mock(), Mock(), said.append)
    events.put(Decided((0, 1)))
    events.put(GenerationFormed(change(1, 0, (0, 1), joined=(0, 1)), 0.1, has_met=True))
    events.put(Offer(SLOTS))
    for number in (0, 1):
        threading.Timer(1.0, events.put, [RankEnded(number, 0)]).start()
    began = time.monotonic()
    verdict = job.run(events, 60.0)
    assert verdict.has_finished
    assert 0.9 < time.monotonic() - began < 10
    waits = [line for line in said if line.startswith("still waiting")]
    # The first line names only process 2 if process 3 has started later, on a busy machine.
    line = "still waiting for processes to join: process 2 on b (started 0 s ago), process 3 on b (started 0 s ago)"
    assert line in waits[:2]
    assert 2 <= len(waits) <= 10
    assert said[-1].startswith(
        "the job has finished, and ends the processes that had not joined: process 2"
    )


def test_job_with_only_joined_ranks_runs_until_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "WAITING_S", 0.1)
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    job = ElasticLauncher(ElasticOptions(num_proc=2), SLOTS[:2], Mock(), Mock(), Mock(), print)
    events.put(Decided((0, 1)))
    events.put(GenerationFormed(change(1, 0, (0, 1), joined=(0, 1)), 0.1, has_met=True))
    for number in (0, 1):
        threading.Timer(0.5, events.put, [RankEnded(number, 0)]).start()
    assert job.run(events).has_finished


def test_processes_that_never_become_ranks_run_to_their_end() -> None:
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    job = ElasticLauncher(ElasticOptions(num_proc=2), SLOTS[:2], Mock(), Mock(), Mock(), print)
    events.put(RankEnded(0, 0))
    threading.Timer(0.3, events.put, [RankEnded(1, 0)]).start()
    began = time.monotonic()
    assert job.run(events, 60.0).has_finished
    assert time.monotonic() - began >= 0.25
