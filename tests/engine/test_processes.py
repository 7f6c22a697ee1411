"""Ranks as processes: asynchronous operations, death, forks, Ctrl-C."""

from __future__ import annotations

import signal
import time

import pytest

from tests.harness.rank_process import rank_processes

pytestmark = pytest.mark.processes

BODIES = "tests.engine.bodies"


@pytest.mark.parametrize("tcp_only", [False, True])
def test_allreduce_works_between_processes(tcp_only: bool) -> None:
    with rank_processes(f"{BODIES}:add", 3, tcp_only=tcp_only) as ranks:
        assert [rank.expect() for rank in ranks] == [[6.0, 6.0, 6.0]] * 3


@pytest.mark.parametrize("tcp_only", [False, True])
def test_polling_alone_finishes_operations_submitted_in_opposite_orders(tcp_only: bool) -> None:
    with rank_processes(f"{BODIES}:poll_in_opposite_orders", 2, tcp_only=tcp_only) as ranks:
        for rank in ranks:
            assert rank.expect() == {"A": [3.0, 3.0], "B": [3.0, 3.0]}


@pytest.mark.parametrize("tcp_only", [False, True])
def test_a_rank_that_holds_its_gil_does_not_delay_other_ranks(tcp_only: bool) -> None:
    with rank_processes(f"{BODIES}:hold_the_gil", 2, tcp_only=tcp_only) as ranks:
        seconds = ranks[0].expect()
        # A rank that noticed the loss would wait for half a second.
        assert max(seconds) < 0.2, seconds
        ranks[1].expect()


@pytest.mark.parametrize("body", ["reduce_until_it_fails", "wait_for_a_rank_that_never_comes"])
@pytest.mark.parametrize("tcp_only", [False, True])
def test_killed_rank_is_named_by_every_other_within_two_seconds(body: str, tcp_only: bool) -> None:
    with rank_processes(f"{BODIES}:{body}", 3, tcp_only=tcp_only) as ranks:
        for rank in ranks:
            assert rank.expect() == "running"
        time.sleep(0.3)
        start = time.monotonic()
        ranks[2].kill(signal.SIGKILL)
        for rank in ranks[:2]:
            error = rank.error()
            assert error["kind"] == "PeerLostError", error
            assert "rank 2" in error["text"].lower()
        assert time.monotonic() - start < 2


@pytest.mark.parametrize("tcp_only", [False, True])
def test_error_names_a_rank_killed_before_it_connects(tcp_only: bool) -> None:
    target = f"{BODIES}:add_without_rank_1"
    with rank_processes(target, 3, tcp_only=tcp_only, with_engine=False) as ranks:
        for rank in (ranks[0], ranks[2]):
            error = rank.error()
            assert error["kind"] == "PeerLostError", error
            assert "rank 1 at 127.0.0.1" in error["text"]


@pytest.mark.parametrize("tcp_only", [False, True])
def test_error_names_a_rank_killed_while_it_starts(tcp_only: bool) -> None:
    """The kill comes before, while or after the rank connects. Only the first error has its address."""
    with rank_processes(f"{BODIES}:add", 3, tcp_only=tcp_only) as ranks:
        ranks[1].kill(signal.SIGKILL)
        for rank in (ranks[0], ranks[2]):
            error = rank.error()
            assert error["kind"] == "PeerLostError", error
            assert "rank 1 " in error["text"], error


def test_killed_rank_is_detected_although_its_forked_child_lives() -> None:
    with rank_processes(f"{BODIES}:wait_beside_forked_children", 3) as ranks:
        for rank in ranks:
            assert rank.expect() == "running"
        time.sleep(0.2)
        start = time.monotonic()
        ranks[2].kill(signal.SIGKILL)
        for rank in ranks[:2]:
            error = rank.error()
            assert error["kind"] == "PeerLostError", error
            assert "rank 2" in error["text"].lower()
        assert time.monotonic() - start < 2


def test_a_forked_child_gets_an_error_and_the_parent_continues() -> None:
    with rank_processes(f"{BODIES}:use_in_forked_child", 2) as ranks:
        for rank in ranks:
            written, after = rank.expect()
            texts, sockets = eval(written)
            assert [t.split(":")[0] for t in texts] == ["NotInitializedError"] * 3
            assert texts[0] == (
                "NotInitializedError: x: the engine was created before fork() and does not work in the "
                "forked process. Start the process with spawn, or create an engine in it."
            )
            assert sockets == 0
            assert after == [2.0] * 4


def test_ctrl_c_interrupts_a_wait_and_the_operation_continues() -> None:
    with rank_processes(f"{BODIES}:interrupted_wait", 2) as ranks:
        assert ranks[0].expect() == "waiting"
        time.sleep(0.3)
        start = time.monotonic()  # CLOCK_MONOTONIC is the same in every process
        ranks[0].kill(signal.SIGINT)
        assert ranks[0].expect() - start < 0.2
        ranks[1].tell("continue")
        ranks[0].tell("continue")
        assert [rank.expect() for rank in ranks] == ["done", "done"]


def test_ctrl_c_interrupts_a_call_that_submits_and_waits() -> None:
    with rank_processes(f"{BODIES}:interrupted_run", 2) as ranks:
        assert ranks[0].expect() == "waiting"
        time.sleep(0.3)
        start = time.monotonic()
        ranks[0].kill(signal.SIGINT)
        assert ranks[0].expect() - start < 0.2
        ranks[1].tell("continue")
        ranks[0].tell("continue")
        assert [rank.expect() for rank in ranks] == ["done", "done"]


def test_operations_interrupted_at_any_moment_leave_the_engine_usable() -> None:
    with rank_processes(f"{BODIES}:interrupted_at_any_moment", 2) as ranks:
        (interrupted, left), finished = (rank.expect() for rank in ranks)
        assert interrupted > 10
        assert finished >= 3000 - interrupted
        # Python ignores an exception inside a `__del__`: its operation and memory stay until the end.
        assert left <= interrupted / 4


def test_other_ranks_raise_the_exception_of_the_failed_rank() -> None:
    with rank_processes(f"{BODIES}:leave_with_an_exception", 3) as ranks:
        assert ranks[0].error()["error"] == "ValueError: the reason"
        for rank in ranks[1:]:
            error = rank.error()
            assert error["kind"] in ("CollectiveError", "PeerLostError")
            assert "ValueError: the reason" in error["text"]
            assert "rank 0" in error["text"].lower()
