"""Ranks that leave or die during an operation, with forced timing of the network."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from sparkhvd.engine.engine import Engine
from sparkhvd.engine.work import Work
from sparkhvd.errors import CollectiveError, MismatchError, PeerLostError
from sparkhvd.settings import Settings
from tests.engine.arrays import allreduce, start_allreduce, start_broadcast
from tests.harness.ranks import rank_outcomes, run_threads
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.ranks

BIG = 2_000_000  # 8 MB of float32: far more than sockets buffer
SMALL = 12_500  # 50 KB: the root sends the whole tensor to either rank, and sockets buffer it


class Wire:
    """The connection of two ranks, with a gate for the bytes towards the second."""

    def __init__(self) -> None:
        self.first, first_inside = socket.socketpair()
        self.second, second_inside = socket.socketpair()
        self.may_pass = threading.Event()
        self.may_pass.set()
        self.hold_after = 1 << 20
        self.passed = 0  # bytes towards the second rank that have reached the gate
        self._inside = (first_inside, second_inside)
        self._threads = [
            threading.Thread(target=self._pump, args=ends, name="test-wire", daemon=True)
            for ends in ((first_inside, second_inside, True), (second_inside, first_inside, False))
        ]
        for thread in self._threads:
            thread.start()

    def _pump(self, source: socket.socket, target: socket.socket, gated: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if gated:
                    self.passed += len(data)
                if gated and self.passed > self.hold_after:
                    self.may_pass.wait()
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def cut(self) -> None:
        """Make both ends see the death of the other's process."""
        self.may_pass.set()
        for end in self._inside:
            end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self.may_pass.set()
        for thread in self._threads:
            thread.join(5)
        for end in self._inside:
            end.close()


Wires = dict[tuple[int, int, str], Wire]  # by both ranks, for control frames and for tensors
PAIRS = ((0, 1), (0, 2), (1, 2))


class Ends:
    """`Connections` of one rank over the wires. Every rank has its own host."""

    def __init__(self, rank: int, wires: Wires) -> None:
        self.rank, self.size = rank, 3
        self.hosts = (0, 1, 2)
        self.sockets = [-1] * self.size
        self.stream_sockets = [-1] * self.size
        for (first, second, kind), wire in wires.items():
            sockets = self.stream_sockets if kind == "data" else self.sockets
            if rank == first:
                sockets[second] = wire.first.detach()
            elif rank == second:
                sockets[first] = wire.second.detach()

    def close(self) -> None:
        for fd in (*self.sockets, *self.stream_sockets):
            if fd >= 0:
                os.close(fd)


@pytest.fixture
def wires() -> Any:
    made = {(*pair, kind): Wire() for pair in PAIRS for kind in ("control", "data")}
    yield made
    for wire in made.values():
        wire.close()


def start(wires: Wires) -> list[Engine]:
    settings = Settings(connect_timeout_s=20)
    ends = [Ends(rank, wires) for rank in range(3)]
    engines = run_threads([lambda e=e: Engine(e, settings) for e in ends])
    assert all(isinstance(engine, Engine) for engine in engines), engines
    return engines


def wait_until_done(work: Work) -> None:
    wait_until(work.done, "the operation finishes", within_s=10, every_s=0.001)


def test_running_operation_finishes_although_a_rank_leaves_before_the_next(
    wires: Wires,
) -> None:
    """Rank 1 has finished A and leaves while rank 2 still receives A, and the ranks have already agreed on B."""
    engines = start(wires)
    wires[0, 2, "data"].hold_after = 0
    wires[0, 2, "data"].may_pass.clear()
    values = np.arange(SMALL, dtype=np.float32)
    works: dict[int, tuple[Work, np.ndarray, Work]] = {}
    for rank in (1, 2, 0):  # rank 0 last: both orders to run go out before A's bytes
        first, result = start_broadcast(engines[rank], "A", values * (rank == 0), 0)
        second, _ = start_allreduce(engines[rank], "B", np.ones(3))
        works[rank] = (first, result, second)
        time.sleep(0.2 if rank == 2 else 0)
    wait_until_done(works[1][0])
    engines[1].shutdown()
    time.sleep(0.2)
    assert not works[2][0].done()
    wires[0, 2, "data"].may_pass.set()
    works[2][0].wait(10)
    np.testing.assert_array_equal(works[2][1], values)
    with pytest.raises(CollectiveError, match="rank 1 shut down before it"):
        works[2][2].wait(10)
    for engine in engines:
        engine.shutdown()


def test_failure_cause_overtakes_tensors_in_full_buffers(
    wires: Wires,
) -> None:
    """Rank 2 learns of rank 1's death only from rank 0, whose tensors for rank 2 wait for room."""
    engines = start(wires)
    wires[0, 2, "data"].may_pass.clear()
    wires[1, 2, "control"].hold_after = 0  # rank 1 sends nothing from now on
    wires[1, 2, "control"].may_pass.clear()
    works = [start_broadcast(engine, "A", np.ones(BIG, np.float32), 0)[0] for engine in engines]
    wire = wires[0, 2, "data"]
    wait_until(lambda: wire.passed > wire.hold_after, "the wire is full")
    time.sleep(0.3)  # and later bytes fill the sockets
    assert not works[2].done()
    wires[0, 1, "control"].cut()
    for rank in (0, 2):
        with pytest.raises(PeerLostError, match="rank 1 is lost"):
            works[rank].wait(2)
    assert not wire.may_pass.is_set()
    for engine in engines:
        engine.shutdown()


def test_abort_reason_reaches_other_ranks_before_a_following_shutdown() -> None:
    def body(engine: Engine) -> None:
        work, _ = start_allreduce(engine, "never", np.ones(3, np.float32))
        if engine.rank == 1:
            work.wait()
        waiter = threading.Thread(target=lambda: pytest.raises(CollectiveError, work.wait))
        waiter.start()  # a thread drives the engine, and sleeps
        start_allreduce(engine, "not on rank 1", np.ones(3))
        time.sleep(0.02)
        engine.abort("the reason")
        engine.shutdown()
        waiter.join()

    def apart(engine: Engine) -> None:
        if engine.rank == 1:
            start_allreduce(engine, "other", np.ones(3))[0].wait()
        body(engine)

    for _ in range(10):
        outcomes = rank_outcomes(2, apart)
        assert outcomes[0] is None
        assert "rank 0 aborted: the reason" in str(outcomes[1])


def test_every_rank_raises_the_mismatch_although_others_shut_down_immediately() -> None:
    def body(engine: Engine) -> str:
        time.sleep(0.002 * engine.rank)
        try:
            allreduce(engine, "w", np.ones(3 if engine.rank else 4))
        except MismatchError as error:
            engine.shutdown()
            return str(error)
        raise AssertionError("no mismatch")

    for hosts in (None, [0, 1, 2]):
        for _ in range(10):
            outcomes = rank_outcomes(3, body, hosts=hosts)
            assert len({str(outcome) for outcome in outcomes}) == 1, outcomes
            assert "ranks disagree on shape" in outcomes[0]


LATE_READER = """
import atexit, gc, torch
import sparkhvd.torch as hvd

def check(when):
    print(when, all(bool((t == 7).all()) for t in kept), flush=True)

atexit.register(check, "at exit")  # runs after sparkhvd's own
hvd.init()
kept = [hvd.allgather(torch.full((n,), 7.0), name=str(n)) for n in (100, 25_000, 1_000_000)]
hvd.shutdown()
gc.collect()
check("after shutdown")
hvd.init()
kept += [hvd.allgather(torch.full((n,), 7.0), name=str(n)) for n in (100, 25_000, 1_000_000)]
class Late:
    def __del__(self, kept=kept, check=check): check("in __del__")
late = Late()
"""


def test_gathered_tensors_stay_valid_after_shutdown_and_at_exit() -> None:
    pytest.importorskip("torch")
    ended = subprocess.run(
        [sys.executable, "-c", LATE_READER],
        env={**os.environ, "MALLOC_PERTURB_": "165"},  # freed memory is overwritten
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["after shutdown True", "at exit True", "in __del__ True"]
    assert ended.stderr == ""
