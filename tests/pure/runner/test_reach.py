"""How other hosts are reached: what cannot be is told before anything starts."""

from __future__ import annotations

import pytest

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.runner import run_hosts
from sparkhvd.runner.hosts.connection import HostError, Reach


def test_ssh_command_with_an_open_quote_is_told() -> None:
    assert Reach("ssh -F 'a file'").command("other")[:3] == ["ssh", "-F", "a file"]
    with pytest.raises(HostError, match=r"SPARKHVD_SSH is .*No closing quotation"):
        Reach("ssh -F 'a file").command("other")


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf")])
def test_start_timeout_that_cannot_be_is_told(seconds: float) -> None:
    with pytest.raises(InvalidArgumentError, match="start_timeout is .*seconds above 0"):
        run_hosts(print, hosts="other:1", start_timeout=seconds)
