"""Programs that a rank starts: one may take the rank's place in the job, and the others get an error."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from typing import Any

import pytest

from sparkhvd.runner import run_local
from tests.harness.by_value import by_value

pytestmark = pytest.mark.processes

by_value(__name__)

# Only the engine, without torch.
PROGRAM = """
import json, os
from sparkhvd import launchers, rank_context
from sparkhvd.engine.engine import Engine
rendezvous = launchers.find()
with Engine(rendezvous.connect(), rendezvous.settings) as engine:
    engine.barrier().wait()
    print(json.dumps([engine.rank, engine.size, rank_context.context().local_rank, rendezvous.settings.streams]))
"""
# Variables of a program without ranks.
STRANGER = (
    "import os, threading; print(sorted(os.listdir('/proc/self/fd')), threading.active_count())"
)


def started(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command or [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_program_becomes_the_rank_if_its_parent_has_not_called_init() -> None:
    def starts() -> Any:
        from sparkhvd import launchers

        stranger = started(sys.executable, "-c", STRANGER)
        os.environ["SPARKHVD_STREAMS"] = "3"
        first = started("sh", "-c", f"{sys.executable} -c '{PROGRAM}'; true")  # a grandchild
        sibling = started()
        try:
            launchers.find()
        except ValueError as error:
            return stranger.stdout, first.stdout, sibling.stderr, str(error), first.stderr
        return None

    for rank, found in enumerate(run_local(starts, num_proc=2)):
        stranger, first, sibling, own, said = found
        assert (stranger, said) == ("['0', '1', '2', '3'] 1\n", "")
        assert json.loads(first) == [rank, 2, rank, 3]
        assert f" called init() first and is now rank {rank}. Call init() in" in sibling
        assert own.endswith("Call init() here before that program starts, or only in that program.")
        assert f"which this process started, called init() first and is now rank {rank}" in own


def test_a_program_started_by_an_initialized_rank_gets_an_error() -> None:
    def starts() -> Any:
        from sparkhvd import launchers
        from sparkhvd.engine.engine import Engine

        rendezvous = launchers.find()
        assert rendezvous is not None
        with Engine(rendezvous.connect(), rendezvous.settings) as engine:
            own = started("env", "-u", "SPARKHVD_PLACE", sys.executable, "-c", PROGRAM)
            refusal = started().stderr
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                size = pool.apply(size_of_own_job)
            engine.barrier().wait()
        return refusal, own.stderr, size

    lines: list[str] = []

    class Lines:
        def write(self, text: str) -> None:
            lines.append(text)

        def flush(self) -> None: ...

    for rank, (refusal, own, size) in enumerate(run_local(starts, num_proc=2, stdout=Lines())):
        assert f"rank {rank}, which started it, called init() itself. Call init() in" in refusal
        assert "AttributeError: 'NoneType'" in own  # no rank: `find` knows no job
        assert size == 1
        assert f"[{rank}] sparkhvd: process" in "".join(lines)
    assert "was started by multiprocessing and is a job of its own with one rank" in "".join(lines)


def size_of_own_job() -> int:
    from sparkhvd import launchers

    found = launchers.find()
    return 1 if found is None else found.size
