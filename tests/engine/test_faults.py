"""Ranks are killed, stopped, disconnected or forked at any moment: the error names the rank in time, and the rest continues."""

from __future__ import annotations

import random
import secrets
import signal
import statistics
import time
from contextlib import ExitStack
from typing import Any

import pytest

from sparkhvd.settings import Settings
from tests.engine.fault_bodies import time_until_known
from tests.harness.processes import is_alive
from tests.harness.rank_process import RankProcess, rank_processes
from tests.harness.soak import SOAK, amount, left_to_soak

pytestmark = pytest.mark.processes

BODIES = "tests.engine.fault_bodies"
SEED = secrets.randbelow(2**32) if SOAK else 7
WITHIN_S = 2.0


def ending(rank: RankProcess, timeout_s: float = 30) -> dict[str, Any]:
    """Return the outcome of a rank, and skip its earlier messages."""
    while True:
        message = rank._said.get(timeout=timeout_s)
        if "error" in message:
            return message
        assert "value" in message, f"rank {rank.rank} ended without a word"


def assert_named(
    rank: RankProcess, lost: int, kinds: tuple[str, ...] = ("PeerLostError",)
) -> dict[str, Any]:
    error = ending(rank)
    assert error["kind"] in kinds, error
    assert f"rank {lost}" in error["text"].lower(), error
    return error


@pytest.mark.timeout(120 if not SOAK else 3600)
@pytest.mark.parametrize("tcp_only", [False, True])
def test_all_ranks_name_a_rank_killed_at_a_random_moment(tcp_only: bool) -> None:
    dice = random.Random(f"{SEED} {tcp_only}")
    for _ in range(amount(2, 100)):
        lost, starts_first, delay = dice.randrange(3), dice.random() < 0.7, dice.random() * 0.3
        with rank_processes(f"{BODIES}:work_until_lost", 3, tcp_only=tcp_only) as ranks:
            if starts_first:  # otherwise while they import, meet or map
                for rank in ranks:
                    assert rank.expect() == "running"
            time.sleep(delay)
            ranks[lost].kill(signal.SIGKILL)
            began = time.monotonic()
            for rank in ranks:
                if rank.rank != lost:
                    error = assert_named(rank, lost)
                    if starts_first:  # otherwise the rendezvous has failed
                        assert error["lost"] == {str(lost): "dead"}, error
            if starts_first:
                assert time.monotonic() - began < WITHIN_S


@pytest.mark.parametrize("reason", ["", "out of patience"])
def test_death_of_a_rank_is_reported_despite_queued_tensors(reason: str) -> None:
    """One rank is stopped for a while, so the report follows many queued tensors."""
    with rank_processes(f"{BODIES}:move_large_tensors_until_lost", 3, tcp_only=True) as ranks:
        for rank in ranks:
            assert rank.expect() == "running"
        time.sleep(0.5)
        ranks[2].kill(signal.SIGSTOP)
        time.sleep(0.5)
        if reason:
            ranks[0].tell(reason)
        else:
            ranks[0].kill(signal.SIGKILL)
        for rank in (ranks[1], ranks[2]):
            rank.kill(signal.SIGCONT)
            began = time.monotonic()
            error = ending(rank)
            assert (reason or "rank 0 is lost") in error["text"].lower(), error
            assert time.monotonic() - began < WITHIN_S


# A GiB that is resident takes the kernel a tenth of a second to free, before it closes connections.
@pytest.mark.parametrize("resident_mib", [512, *left_to_soak("512 MiB, here", 4096)])
def test_killed_rank_is_detected_on_its_host_before_memory_is_freed(resident_mib: int) -> None:
    """The fastest round counts, because other programs delay the ranks, but the memory is freed later in every round."""
    took, gone = [], []
    for _ in range(amount(3, 10)):
        with rank_processes(f"{BODIES}:wait_for_a_rank_with_memory", 3) as ranks:
            known_s, gone_s = time_until_known(ranks, resident_mib)
            took.append(known_s)
            gone.append(gone_s)
    assert min(took) < 0.02, (took, gone)
    # Otherwise the memory was freed so fast that this shows nothing.
    assert min(gone) > 0.02, (took, gone)
    assert statistics.median(took) < statistics.median(gone), (took, gone)


@pytest.mark.parametrize("host_loss_s", [3, *left_to_soak("3 s, here", Settings().host_loss_s)])
def test_other_ranks_wait_for_a_stopped_rank_that_continues(host_loss_s: float) -> None:
    """A host is not lost while its kernel answers, however long its process reads nothing."""
    settings = Settings(connect_timeout_s=30, host_loss_s=host_loss_s)
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(
                rank_processes(f"{BODIES}:{body}", 3, tcp_only=tcp_only, settings=settings)
            )
            for body, tcp_only in (
                ("work_until_told", False),
                ("work_until_told", True),
                ("move_large_tensors", True),
            )
        ]
        for ranks in jobs:
            assert [rank.expect() for rank in ranks] == ["running"] * 3
        time.sleep(0.3)
        for ranks in jobs:
            ranks[1].kill(signal.SIGSTOP)
        time.sleep(amount(5, 20))
        for ranks in jobs:
            ranks[1].kill(signal.SIGCONT)
        time.sleep(0.3)
        for ranks in jobs:
            ranks[0].tell("stop")
            reports = [rank.expect() for rank in ranks]
            assert len({report["rounds"] for report in reports}) == 1
            assert reports[0]["rounds"] > 0
            assert amount(4.5, 19.5) < reports[0]["longest_s"] < amount(10, 30)


@pytest.mark.parametrize(
    ("tcp_only", "place", "within_s"),
    # The last connection is for tensors: the peer has some time to report why it ends.
    [(False, 0, WITHIN_S), (True, 0, WITHIN_S), (True, -1, 2 * WITHIN_S)],
)
def test_broken_connection_fails_every_rank_and_names_its_ranks(
    tcp_only: bool, place: int, within_s: float
) -> None:
    with rank_processes(f"{BODIES}:lose_a_connection", 3, tcp_only=tcp_only) as ranks:
        for rank in ranks:
            assert rank.expect() == "running"
        ranks[1].tell(place)
        began = time.monotonic()
        errors = [ending(rank) for rank in ranks]
        assert time.monotonic() - began < 0.2 + within_s
        for error in errors:
            assert error["kind"] == "PeerLostError", error
            assert "is lost: its connection" in error["text"], error
        # Whichever end noticed first, the connection belonged to rank 1.
        assert all("rank 1" in error["text"].lower() for error in errors), errors


@pytest.mark.parametrize(
    ("body", "size", "server"),
    [("fork_while_working", 3, "engine_server"), ("train_with_forked_loaders", 2, "fork_server")],
)
def test_killed_rank_is_named_although_its_forked_children_live(
    request: pytest.FixtureRequest, body: str, size: int, server: str
) -> None:
    lost = size - 1
    forks = request.getfixturevalue(server)
    with rank_processes(f"{BODIES}:{body}", size, server=forks) as ranks:
        for rank in ranks:
            assert rank.expect(90) == "running"  # torch is imported, and loaders are started
        time.sleep(0.5)
        assert all(is_alive(rank.pid) for rank in ranks)
        ranks[lost].kill(signal.SIGKILL)
        began = time.monotonic()
        for rank in ranks[:lost]:
            assert_named(rank, lost)
        assert time.monotonic() - began < WITHIN_S


@pytest.mark.parametrize("tcp_only", [False, True])
def test_a_rank_stopped_in_a_reduce_does_not_corrupt_the_next_generation(
    tcp_only: bool,
) -> None:
    settings = Settings(stall_shutdown_s=1, stall_warning_s=0, connect_timeout_s=20)
    body = f"{BODIES}:stop_inside_a_reduce"
    with rank_processes(body, 3, tcp_only=tcp_only, settings=settings) as ranks:
        for rank in ranks:
            assert rank.expect() == "running"
        time.sleep(0.3)
        ranks[2].kill(signal.SIGSTOP)
        began = time.monotonic()
        for rank in ranks[:2]:
            reason = rank.expect()
            assert "rank 2" in reason, reason
            assert "ranks 1" not in reason, reason
        # 5 s more if the coordinator itself does not wait for the stopped rank.
        assert time.monotonic() - began < 1 + 5 + WITHIN_S
        assert [rank.expect() for rank in ranks[:2]] == ["met again"] * 2
        ranks[2].kill(signal.SIGCONT)
        assert "rank" in ranks[2].expect()  # it learns that the others have given up
        for rank in ranks[:2]:
            rank.tell("look")
        assert [rank.expect() for rank in ranks[:2]] == [True, True]


@pytest.mark.parametrize("tcp_only", [False, True])
@pytest.mark.parametrize(
    ("num_bytes", "left", "num_done"),
    # The spare memory of an engine is enough for one small result, and for none beside others.
    [(128 << 20, 96 << 20, 0), (16 << 20, 12 << 20, 0), (6 << 20, 3 << 20, 1)],
)
def test_missing_result_memory_fails_only_that_operation_on_every_rank(
    num_bytes: int, left: int, num_done: int, tcp_only: bool
) -> None:
    with rank_processes(f"{BODIES}:too_little_memory", 2, tcp_only=tcp_only) as ranks:
        for rank in ranks:
            rank.tell({"bytes": num_bytes, "left": left})
        for rank in ranks:
            *results, total = rank.expect()
            assert results[:num_done] == ["done"] * num_done
            for text in results[num_done:]:
                assert "rank 1 has no memory for the result" in text
            assert total == [2.0] * 3


@pytest.mark.parametrize("reason", ["", "out of patience"])
@pytest.mark.parametrize("tcp_only", [False, True])
def test_shutdown_does_not_wait_for_a_stopped_rank(tcp_only: bool, reason: str) -> None:
    body = f"{BODIES}:leave_beside_a_stopped_rank"
    with rank_processes(body, 3, tcp_only=tcp_only) as ranks:
        for rank in ranks:
            assert rank.expect() == "running"
        ranks[2].kill(signal.SIGSTOP)
        for rank in ranks[:2]:
            rank.tell(reason)
        for rank in ranks[:2]:
            assert rank.expect() == "queued"
        for rank in ranks[:2]:
            rank.tell("leave")
        took = [rank.expect() for rank in ranks[:2]]
        ranks[2].kill(signal.SIGCONT)
        assert max(took) < 0.3, took
        heard = ranks[2].expect()
        assert reason in heard if reason else "shut down" in heard, heard
