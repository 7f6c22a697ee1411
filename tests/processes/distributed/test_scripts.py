"""Processes that nobody but the test has started find each other through torch's store, and learn of losses."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.harness.paths import ROOT


def outputs(body: str, method: str, size: int = 2, **variables: str) -> list[tuple[int, str]]:
    """Run the ranks of a script; return status and output of each."""
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.processes.distributed.script",
                body,
                str(rank),
                str(size),
                method,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env={**os.environ, **variables},
        )
        for rank in range(size)
    ]
    found = []
    for rank in ranks:
        text, _ = rank.communicate(timeout=60)
        found.append((rank.returncode, text))
    return found


def test_ranks_meet_through_a_file_and_hvd_shares_their_engine(tmp_path: Path) -> None:
    for status, text in outputs("meet", f"file://{tmp_path}/store"):
        assert (status, text.splitlines()) == (0, ["sum 2.0 hvd 2", "again 2.0", "then 4.0"])


def test_a_rank_that_dies_in_backward_is_named_and_the_rest_make_a_new_group(
    tmp_path: Path,
) -> None:
    survivor, killed = outputs("lose", f"file://{tmp_path}/store")
    assert killed[0] == -9
    assert survivor == (0, "lost True True True\nnew group 1\n")


def test_a_rank_that_does_not_come_in_time_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    late = outputs("late", f"tcp://127.0.0.1:{port}")
    assert late[0] == (0, "timeout True True\n")
