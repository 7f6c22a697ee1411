"""Connections to other hosts: an unreachable host is an error before anything starts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from sparkhvd.errors import InvalidArgumentError, PreflightError
from sparkhvd.runner import run_hosts
from sparkhvd.runner.hosts import connection
from sparkhvd.runner.hosts.connection import HostError, Reach

pytestmark = pytest.mark.pure


def test_an_ssh_command_with_an_open_quote_raises_a_clear_error() -> None:
    assert Reach("ssh -F 'a file'").command("other")[:3] == ["ssh", "-F", "a file"]
    with pytest.raises(HostError, match=r"SPARKHVD_SSH is .*No closing quotation"):
        Reach("ssh -F 'a file").command("other")


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf")])
def test_an_invalid_start_timeout_raises_a_clear_error(seconds: float) -> None:
    with pytest.raises(InvalidArgumentError, match="start_timeout is .*seconds above 0"):
        run_hosts(print, hosts="other:1", start_timeout=seconds)


def test_an_unresponsive_host_raises_promptly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ssh that hangs, for example at a name server, must not be waited for a second time when it is ended."""
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nsleep 100\n")
    ssh.chmod(0o700)
    monkeypatch.setenv("SPARKHVD_SSH", str(ssh))
    assert connection.CONNECT_S < 10
    monkeypatch.setattr(connection, "CONNECT_S", 0.5)
    began = time.monotonic()
    with pytest.raises(PreflightError, match=r"other: no answer within 0\.5 s"):
        run_hosts(print, hosts="other:1")
    assert time.monotonic() - began < connection.END_S
