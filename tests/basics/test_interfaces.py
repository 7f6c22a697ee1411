"""Interfaces of this host, as other tools name them."""

from __future__ import annotations

import socket

import psutil
import pytest

from sparkhvd.errors import InvalidArgumentError, PreflightError
from sparkhvd.interfaces import address_on, address_towards, interfaces, own_address

pytestmark = pytest.mark.pure


def test_interfaces_match_the_list_of_the_operating_system() -> None:
    families = (socket.AF_INET, socket.AF_INET6)
    known = {
        (name, each.address)
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family in families and not each.address.startswith("fe80")
    }
    assert {(each.name, each.address) for each in interfaces()} == known
    assert next(each for each in interfaces() if each.name == "lo").is_up


@pytest.mark.parametrize(
    ("choice", "address"),
    [
        ("lo", "127.0.0.1"),
        ("none0, 127.0.0.0/8", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1"),
        ("::1/128,lo", "::1"),
    ],
)
def test_interfaces_are_chosen_by_name_or_network_in_given_order(choice: str, address: str) -> None:
    if "::1" in choice and "::1" not in {each.address for each in interfaces()}:
        pytest.skip("this host has no IPv6")
    assert address_on(choice) == address


def test_wrong_interface_choices_raise_a_clear_error() -> None:
    with pytest.raises(
        PreflightError,
        match=r"no interface of this choice that is up \(no interface matches\).*lo \(127",
    ):
        address_on("none0,none1")
    with pytest.raises(InvalidArgumentError, match="interfaces has '10.0.0.0/99'"):
        address_on("10.0.0.0/99")


def test_own_address_is_on_the_chosen_interface_or_the_route() -> None:
    assert own_address("lo", "192.0.2.77") == "127.0.0.1"
    assert address_towards("127.0.0.1") == "127.0.0.1"
