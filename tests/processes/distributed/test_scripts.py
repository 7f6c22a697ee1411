"""Processes that nobody but the test has started find each other through torch's store, and learn of losses."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sparkhvd.distributed.store_meeting import _check_hosts, _read_key, _read_named_key
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.rendezvous import Endpoint
from sparkhvd.settings import Settings
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
    said = ["sum 2.0 hvd 2", "again 2.0", "then 4.0", "same store 16.0"]
    for status, text in outputs("meet", f"file://{tmp_path}/store"):
        assert (status, text.splitlines()) == (0, said)


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


def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sparkhvd-key-x"
    path.write_bytes(b"k" * 32)
    path.chmod(0o640)
    with pytest.raises(InvalidArgumentError, match="mode 0640"):
        _read_key(path)
    path.chmod(0o600)
    assert _read_key(path) == b"k" * 32
    path.write_bytes(b"k")
    with pytest.raises(InvalidArgumentError, match="1 bytes"):
        _read_key(path)
    with pytest.raises(InvalidArgumentError, match="only this"):
        _read_named_key("/etc/hostname")


def test_ranks_on_several_hosts_need_a_key_and_addresses() -> None:
    here, there = (Endpoint(f"10.0.0.{n}", 4000, f"boot-{n}", "") for n in (1, 2))
    with pytest.raises(InvalidArgumentError, match="SPARKHVD_JOB_KEY_FILE"):
        _check_hosts([here, there], Settings())
    _check_hosts([here, there], Settings(trust_network=True))
    alone = Endpoint("127.0.0.1", 4000, "boot-2", "")
    with pytest.raises(InvalidArgumentError, match="rank 1 has only the address 127.0.0.1"):
        _check_hosts([here, alone], Settings(trust_network=True))
