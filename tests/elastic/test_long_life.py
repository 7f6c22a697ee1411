"""A rank that survives half an hour of changes: no hang, every row exactly once, no growth."""

from __future__ import annotations

import os
import random
import secrets
import signal
import time
from pathlib import Path

import pytest

from tests.elastic.test_training import BODIES, limits, result_of, tell
from tests.harness.elastic import ElasticJob, elastic_job
from tests.harness.rank_process import RankProcess
from tests.harness.soak import soak

pytestmark = pytest.mark.processes

SEED = secrets.randbelow(2**32)
SECONDS = float(os.environ.get("SPARKHVD_TEST_LIFE_S", "1800"))
# Changes before the comparison: caches fill, and malloc gets the memory that it keeps.
FIRST = 40
GROWTH_KB = 8 << 10


def held(pid: int) -> dict[str, int]:
    """Return what a process holds: memory in kB, descriptors, mappings and threads."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return {
        "memory": int(status["RssAnon"].split()[0]),
        "shared": int(status["RssShmem"].split()[0]),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "mappings": len(Path(f"/proc/{pid}/maps").read_text().splitlines()),
        "threads": int(status["Threads"]),
    }


def change(job: ElasticJob, others: list[RankProcess], dice: random.Random, plan: dict) -> str:  # type: ignore[type-arg]
    """Let a rank come, or kill, stop for a moment or remove one of the others."""
    if len(others) < 2 or (len(others) < 4 and dice.random() < 0.5):
        (new,) = job.start(1)
        tell([new], **plan)
        others.append(new)
        return "join"
    member = others.pop(dice.randrange(len(others)))
    kind = dice.choice(["kill", "stop", "remove"])
    if kind == "stop":
        member.kill(signal.SIGSTOP)
        time.sleep(0.3)
    if kind == "remove":
        job.coordinator.remove(member.rank, "the test wants so")
        while member.message(30):  # until it has left
            pass
    else:
        member.kill(signal.SIGKILL)
    member.close()
    return kind


@soak("random lives: test_training")
@pytest.mark.timeout(SECONDS + 600)
def test_half_an_hour_of_membership_changes_leaks_nothing(tmp_path: Path) -> None:
    dice, done = random.Random(SEED), []
    plan = {"rows": 60, "batch": 4, "epochs": 10**9, "pause": 0.01, "until": f"{tmp_path}/over"}
    with elastic_job(f"{BODIES}:count_rows", 2, limits=limits(2)) as job:
        tell(job.members, **plan)
        first, others = job.members[0], job.members[1:]
        until, seen = time.monotonic() + SECONDS, []
        while time.monotonic() < until:
            done.append(change(job, others, dice, plan))
            time.sleep(dice.random())
            if len(done) >= FIRST:
                seen.append(held(first.pid))
        (tmp_path / "over").touch()
        results = [result_of(member) for member in (first, *others)]
    for result in results:
        assert result["weights"] == [float(result["epochs"])], (SEED, len(done))
    tenth = max(1, len(seen) // 10)
    for name in seen[0]:
        # The minimum of many samples, because temporary resources do not count.
        before, after = (min(each[name] for each in part) for part in (seen[:tenth], seen[-tenth:]))
        allowed = GROWTH_KB if name in ("memory", "shared") else 4
        print(f"{len(done)} changes: {name} {before} to {after}")
        assert after - before <= allowed, (SEED, len(done), name, before, after)
