"""Random training programs on ranks that are stopped for a while, and one of which is killed at the end."""

from __future__ import annotations

import random
import secrets
import signal
import time
from typing import Any

import pytest

from sparkhvd.settings import Settings
from tests.harness.fork_server import ForkServer
from tests.harness.rank_process import RankProcess, rank_processes
from tests.harness.soak import SOAK, amount, soak

pytestmark = pytest.mark.processes

# Half an hour in `make soak`. Otherwise one round, whose programs run this long.
SECONDS = amount(1, 1800)
ROUND_S = 1.0 if not SOAK else 20.0
SEED = secrets.randbelow(2**32) if SOAK else 1
# Tests of faults check how soon a loss is noticed. Here, the limit only ends a hang.
DEADLINE_S = 60.0

LAYOUTS: tuple[dict[str, Any], ...] = ({}, {"tcp_only": True}, {"hosts": (0, 0, 1, 1)})


def assert_lost(rank: RankProcess, lost: int) -> None:
    """Read a rank's messages until its error, which must name the lost rank."""
    while "value" in (message := rank.message(DEADLINE_S) or {}):
        pass
    assert message, f"rank {rank.rank} hangs, or ended without a word"
    assert message["kind"] == "PeerLostError", message.get("traceback", message)
    assert f"rank {lost}" in message["text"].lower(), message["text"]


def one_round(seed: int, server: ForkServer) -> None:
    """Run programs until a rank is killed. Before that, ranks are stopped for a while."""
    dice = random.Random(seed)
    size = dice.choice((2, 3, 4)) if SOAK else 2
    layout = dice.choice(LAYOUTS) if SOAK and size == 4 else {}
    settings = Settings(
        bucket_bytes=dice.choice((256, 4096, 1 << 25)), stall_shutdown_s=60, connect_timeout_s=60
    )
    body = "tests.torch.random_training:work"
    with rank_processes(body, size, settings=settings, server=server, **layout) as ranks:
        for rank in ranks:
            rank.tell(seed)
        for rank in ranks:
            assert [rank.expect(90) for _ in range(3)][0] == "running"  # and two programs are done
        killed_at = time.monotonic() + dice.uniform(0.5, 1) * ROUND_S
        while time.monotonic() < killed_at:
            time.sleep(dice.uniform(0, ROUND_S / 4))
            stopped = dice.choice(ranks)
            stopped.kill(signal.SIGSTOP)
            time.sleep(dice.uniform(0, ROUND_S / 10))
            stopped.kill(signal.SIGCONT)
        lost = dice.choice(ranks)
        lost.kill(signal.SIGKILL)
        for rank in ranks:
            if rank is not lost:
                assert_lost(rank, lost.rank)


@soak(
    "torch/test_exact: programs of each kind equal one process; engine/test_faults: a rank that is killed in training, or stopped"
)
@pytest.mark.timeout(SECONDS + 300)
def test_random_programs_are_exact_and_a_killed_rank_is_named(fork_server: ForkServer) -> None:
    dice = random.Random(SEED)
    until = time.monotonic() + SECONDS
    while True:
        seed = dice.randrange(2**32)
        try:
            one_round(seed, fork_server)
        except BaseException as error:
            raise AssertionError(f"the round of seed {seed}") from error
        if time.monotonic() > until:
            break
