"""Hosts in users' notation, the places of ranks, and the variables sent to them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.interfaces import Interface
from sparkhvd.runner import host_names
from sparkhvd.runner.host_names import (
    Host,
    HostSlots,
    forwarded,
    given_variables,
    is_here,
    merged,
    parse_hosts,
    place_ranks,
    read_hostfile,
)
from sparkhvd.runner.hosts.connection import Reach

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:4", [Host("a", 4)]),
        ("a, me@b.example:2", [Host("a", 1), Host("me@b.example", 2)]),
        ("[fd00::1]:3,[fd00::2]", [Host("fd00::1", 3), Host("fd00::2", 1)]),
    ],
)
def test_hosts_argument_is_parsed_into_hosts_and_slots(text: str, hosts: list[Host]) -> None:
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a:",
        "a:x",
        "a:0",
        "-l:2",
        "a b:1",
        "a:1,,b:1",
        "$(x):1",
        "a:" + "9" * 20,
        "a:" + "9" * 5000,
    ],
)
def test_malformed_hosts_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="it must be host:slots"):
        parse_hosts(text)


def test_duplicate_hosts_raise_except_names_of_this_host() -> None:
    with pytest.raises(InvalidArgumentError, match="appears twice, a"):
        parse_hosts("a:1,b:1,a:2")
    with pytest.raises(InvalidArgumentError, match="appears twice, a and me@a"):
        parse_hosts("a:1,me@a:1")
    hosts = parse_hosts("b:1,localhost:2,c:1,127.0.0.1:3")
    assert hosts == [Host("b", 1), Host("localhost", 2), Host("c", 1), Host("127.0.0.1", 3)]
    assert merged(hosts) == [Host("b", 1), Host("localhost", 5), Host("c", 1)]
    assert merged(hosts[:3]) == hosts[:3]


def test_this_host_is_recognized_by_names_and_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of another host's name asks no name server."""
    own = [Interface("eth0", "10.0.0.7", is_up=True), Interface("eth0", "fd00::7", is_up=True)]
    monkeypatch.setattr(host_names, "interfaces", lambda: own)
    monkeypatch.setattr(socket, "gethostname", lambda: "node7.example")
    asked: list[str] = []
    monkeypatch.setattr(socket, "getfqdn", lambda: asked.append("") or "node7.example.org")
    here = ("localhost", "127.0.0.1", "::1", "node7", "node7.example", "node7.example.org")
    assert all(is_here(name) and is_here(name, by_ssh=True) for name in here)
    asked.clear()
    assert is_here("10.0.0.7")
    assert is_here("fd00::7")
    assert not any(map(is_here, ("10.0.0.8", "127.0.0.2", "node77", "other.example", "me@node7")))
    assert not asked
    hosts = parse_hosts("localhost:1,10.0.0.7:1")
    assert merged(hosts) == [Host("localhost", 2)]
    assert merged(hosts, Reach(port=2222).is_here) == hosts
    assert Reach().is_here("10.0.0.7")
    # Perhaps a container, at its own port.
    assert not Reach(port=2222).is_here("10.0.0.7")


def test_hostfiles_of_open_mpi_and_with_slots_are_read(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# cluster\na slots = 4 max_slots = 8\n\nb:2  # old\nc\n")
    assert read_hostfile(str(path)) == [Host("a", 4), Host("b", 2), Host("c", 1)]
    path.write_text("a slots=4\nb slots=many\n")
    with pytest.raises(InvalidArgumentError, match="line 2: 'b slots=many' is neither"):
        read_hostfile(str(path))


def test_ranks_fill_hosts_in_order() -> None:
    hosts = [Host("a", 2), Host("b", 3), Host("c", 1)]
    assert place_ranks(hosts, 4) == [HostSlots("a", 0, 2), HostSlots("b", 2, 2)]
    assert place_ranks(hosts, 6)[-1] == HostSlots("c", 5, 1)
    with pytest.raises(InvalidArgumentError, match="'a:2,b:3,c:1' with 6 slots.* is 7"):
        place_ranks(hosts, 7)


def test_only_settings_variables_are_forwarded_to_hosts() -> None:
    environ = {
        **{
            "PATH": "/bin",
            "SPARKHVD_STREAMS": "2",
            "HOROVOD_TIMELINE": "x",
            "OMP_NUM_THREADS": "3",
        },
        **{"AWS_SECRET_ACCESS_KEY": "x", "HOME": "/root", "SPARKHVD_RANK_PROCESS": "7"},
        **{"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "SPARKHVD_PLACE": "of this rank"},
    }
    sent = forwarded(environ)
    assert set(sent) == {"PATH", "SPARKHVD_STREAMS", "HOROVOD_TIMELINE", "OMP_NUM_THREADS"}
    assert given_variables(["HOME", "A=b=c", "B="], environ) == {
        "HOME": "/root",
        "A": "b=c",
        "B": "",
    }
    with pytest.raises(InvalidArgumentError, match="-x NO: .* as in -x NO=VALUE"):
        given_variables(["NO"], environ)
