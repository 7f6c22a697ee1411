"""A process that starts and ends many engines holds no more memory than after the first few."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from sparkhvd.settings import Settings
from tests.harness.fork_server import ForkServer
from tests.harness.paths import ROOT
from tests.harness.rank_process import rank_processes
from tests.harness.soak import SOAK, amount

pytestmark = pytest.mark.processes

MIB = 1 << 20
LIMIT_S = 120 if not SOAK else 1800


def check(before: dict[str, int], after: dict[str, int], limit: int = 4 * MIB) -> None:
    """Compare numbers of resources for equality, and memory with a limit."""
    for what in ("descriptors", "threads", "mappings"):
        assert after[what] <= before[what] + (8 if what == "mappings" else 0), (before, after)
    assert after["rss"] < before["rss"] + limit, (before, after)


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(("tcp_only", "server"), [(False, "fork_server"), (True, "engine_server")])
def test_repeated_generations_of_processes_leak_nothing(
    request: pytest.FixtureRequest, tcp_only: bool, server: str
) -> None:
    """Each generation has a real rendezvous, and a leak of 4 KiB per generation fails the test."""
    settings = Settings(connect_timeout_s=60, stall_shutdown_s=60)
    body = "meet_and_leave" if tcp_only else "initialize_and_shut_down"
    body = f"tests.engine.generations:{body}"
    count = amount(50, 10_000)
    forks: ForkServer = request.getfixturevalue(server)
    with rank_processes(body, 2, tcp_only=tcp_only, settings=settings, server=forks) as ranks:
        for rank in ranks:
            rank.tell(count)
        reports = [rank.expect(LIMIT_S) for rank in ranks]
    for report in reports:
        assert report["generations"] == count
        # 0.03 MiB here, also beside three busy processes; 0.1 MiB after 600 generations.
        check(report["before"], report["after"], min(4 * MIB, count * 4096))


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(("how", "count"), [("shutdown", 100), ("abort", 50), ("vanish", 100)])
def test_engines_that_end_in_any_way_leak_nothing(how: str, count: int) -> None:
    """Ranks are threads that end with an operation in flight. An abort takes six times as long, so it has fewer rounds."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.engine.generations", how, str(amount(count, 10_000))],
        cwd=ROOT,
        env={**os.environ, "MALLOC_ARENA_MAX": "2"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    report: dict[str, Any] = json.loads(ended.stdout)
    check(report["before"], report["after"])
