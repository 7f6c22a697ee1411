"""Keys and addresses of ranks on several hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkhvd.errors import InvalidArgumentError, PreflightError
from sparkhvd.launchers.gather import check_addresses, is_one_host, key_from_file, network_key
from sparkhvd.rendezvous import Endpoint
from sparkhvd.settings import Settings

pytestmark = pytest.mark.pure


def test_a_key_file_readable_by_other_users_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        key_from_file(path)
    path.write_bytes(b"k" * 32)
    path.chmod(0o640)
    with pytest.raises(InvalidArgumentError, match="mode 0640"):
        key_from_file(path)
    path.chmod(0o600)
    assert key_from_file(path) == b"k" * 32
    path.write_bytes(b"k")
    with pytest.raises(InvalidArgumentError, match="1 bytes"):
        key_from_file(path)


def test_ranks_on_several_hosts_need_a_key(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="SPARKHVD_JOB_KEY_FILE"):
        network_key(Settings(), "init()")
    assert network_key(Settings(trust_network=True), "init()") is None
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_bytes(b"k" * 40)
    assert network_key(Settings(job_key_file=str(path), trust_network=True), "") == b"k" * 40


def test_rank_addresses_without_a_common_network_raise() -> None:
    here, there = (Endpoint(f"10.0.0.{n}", 4000, f"boot-{n}", "") for n in (1, 2))
    assert not is_one_host([here, there])
    check_addresses([here, there], "init()")
    with pytest.raises(PreflightError, match="rank 1 has only the address 127.0.0.1"):
        check_addresses([here, Endpoint("127.0.0.1", 4000, "boot-2", "")], "init()")
    text = r"no common interface: rank 0 at 10.0.0.1:4000 has IPv4, rank 1 at \[fd00::1\]:4000 IPv6"
    with pytest.raises(PreflightError, match=text):
        check_addresses([here, Endpoint("fd00::1", 4000, "boot-2", "")], "init()")
