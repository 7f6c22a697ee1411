"""Warnings of the coordinator name the rank that delays the others, and its stack."""

from __future__ import annotations

import signal
import time

import pytest

from sparkhvd.settings import Settings
from tests.engine.observe_bodies import LATE_S
from tests.harness.rank_process import DEADLINE_S, RankProcess, rank_processes
from tests.harness.soak import left_to_soak, soak

pytestmark = pytest.mark.ranks

BODIES = "tests.engine.observe_bodies"
REASONS = ("sleeping_here", "holding_the_gil_here", "computing_here")
SETTINGS = Settings(connect_timeout_s=DEADLINE_S, stall_warning_s=0.4)


def run_late(ranks: list[RankProcess], reason: str) -> None:
    for rank in ranks:
        rank.tell(reason)
    for rank in ranks:
        assert rank.expect() == "done"


@pytest.mark.parametrize(
    ("reason", "tcp_only"),
    [
        *((reason, False) for reason in REASONS),
        (REASONS[0], True),
        *left_to_soak("another reason, here", *((reason, True) for reason in REASONS[1:])),
    ],
)
def test_stall_warning_names_the_missing_rank_and_shows_its_stack(
    reason: str, tcp_only: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with rank_processes(
        f"{BODIES}:one_rank_is_late", 2, settings=SETTINGS, tcp_only=tcp_only
    ) as ranks:
        run_late(ranks, reason)
    printed = capfd.readouterr().err
    assert "sparkhvd warning: barrier('late'): waiting for rank 1 since 0." in printed
    assert "sparkhvd warning: rank 1 is here:\n" in printed
    assert f"in {reason}\n" in printed
    assert "in one_rank_is_late\n" in printed
    assert "rank 0 is here" not in printed


def test_stall_warning_shows_the_stack_of_a_late_coordinator(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with rank_processes(f"{BODIES}:coordinator_is_late", 2, settings=SETTINGS) as ranks:
        for rank in ranks:
            assert rank.expect() == "done"
    printed = capfd.readouterr().err
    assert "waiting for rank 0 since 0." in printed
    assert "sparkhvd warning: rank 0 is here:\n" in printed
    assert "in coordinator_is_late\n" in printed


def test_stall_warning_has_no_stack_if_the_program_uses_the_signal(
    capfd: pytest.CaptureFixture[str],
) -> None:
    target = "tests.engine.own_signal_bodies:one_rank_is_late"
    with rank_processes(target, 2, settings=SETTINGS) as ranks:
        run_late(ranks, "sleeping_here")
    printed = capfd.readouterr()
    assert "sparkhvd warning: rank 1 is here:\n(no stack: " in printed.err
    assert "mine" not in printed.out + printed.err


def test_late_rank_survives_if_the_program_replaced_its_stack_handler(
    capfd: pytest.CaptureFixture[str],
) -> None:
    target = f"{BODIES}:late_rank_has_lost_its_handler"
    with rank_processes(target, 2, settings=SETTINGS) as ranks:
        for rank in ranks:
            assert rank.expect() == "done"
    printed = capfd.readouterr().err
    assert (
        "(no stack: the handler of signal 44 was replaced after the engine had started)" in printed
    )


def test_stack_signal_zero_disables_stacks_in_stall_warnings(
    capfd: pytest.CaptureFixture[str],
) -> None:
    settings = Settings(connect_timeout_s=DEADLINE_S, stall_warning_s=0.4, stack_signal=0)
    with rank_processes(f"{BODIES}:one_rank_is_late", 2, settings=settings) as ranks:
        run_late(ranks, "sleeping_here")
    printed = capfd.readouterr().err
    assert "rank 1 is here:\n(no stack: " in printed
    assert "in sleeping_here" not in printed


def wait_for(text: str, capfd: pytest.CaptureFixture[str]) -> str:
    """Return the output until `text` appears."""
    printed = ""
    deadline = time.monotonic() + DEADLINE_S
    while text not in printed and time.monotonic() < deadline:
        time.sleep(0.02)
        printed += capfd.readouterr().err
    return printed


def test_stall_warning_distinguishes_a_stopped_rank_from_a_busy_rank(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with rank_processes(f"{BODIES}:say_running_and_wait", 2, settings=SETTINGS) as ranks:
        for rank in ranks:
            assert rank.expect() == "running"
        ranks[1].kill(signal.SIGSTOP)
        printed = wait_for("has not even answered", capfd)
        ranks[1].kill(signal.SIGCONT)
        printed += wait_for("rank 1 is here", capfd)
        ranks[1].tell("continue")
        for rank in ranks:
            assert rank.expect() == "done"
    printed += capfd.readouterr().err
    assert "rank 1 has not even answered the request for its stack" in printed
    # Once when it continued. A later question gets another answer.
    answers = printed.split("has not even answered")[1].split("waiting for")[0]
    assert answers.count("sparkhvd warning: rank 1 is here:\n") == 1


def test_rank_beyond_the_stall_timeout_raises_on_every_rank() -> None:
    settings = Settings(connect_timeout_s=DEADLINE_S, stall_shutdown_s=LATE_S / 3)
    with rank_processes(f"{BODIES}:one_rank_comes_too_late", 2, settings=settings) as ranks:
        for rank in ranks:
            assert "barrier('late'): rank 1 did not submit it within 0." in rank.expect()


@soak("one sign of life, in the tests before it")  # two signs of life take 18 s
def test_join_waits_for_a_busy_coordinator_but_not_a_stopped_one(
    capfd: pytest.CaptureFixture[str],
) -> None:
    settings = Settings(connect_timeout_s=DEADLINE_S, stall_shutdown_s=0.5)
    patience_s = settings.stall_shutdown_s + 5
    with rank_processes(f"{BODIES}:join_a_busy_rank", 2, settings=settings) as ranks:
        assert [rank.expect() for rank in ranks] == ["busy", "joining"]
        began = time.monotonic()
        time.sleep(1.3 * patience_s)  # asked once, answered
        ranks[0].kill(signal.SIGSTOP)
        stopped_s = time.monotonic() - began
        found = ranks[1].expect(3 * patience_s)
        ranks[0].kill(signal.SIGCONT)
    assert "join('join'): rank 0, which coordinates, has not answered within 5.5 s" in found["text"]
    assert stopped_s < found["seconds"] < stopped_s + 2 * patience_s + 2
    assert "is here" not in capfd.readouterr().err
