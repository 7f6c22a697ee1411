"""Network interfaces of this host, and its address for ranks on other hosts."""

from __future__ import annotations

import array
import contextlib
import ipaddress
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sparkhvd.errors import InvalidArgumentError, PreflightError

_LOOPBACKS = ("127.0.0.1", "::1")
# Linux's numbers of ioctl requests, and flags of an interface.
_ALL_ADDRESSES = 0x8912
_FLAGS = 0x8913
_IS_UP, _HAS_CARRIER = 0x1, 0x40
_ENTRY_BYTES = 40
_MOST = 1024
_LINK_LOCAL = 0x20
# Linux reports a new carrier up to a second late.
_CARRIER_S = 2.0
# Documentation addresses, which no host has: they follow the default route.
_ANYWHERE = ("192.0.2.1", "2001:db8::1")


@dataclass(frozen=True)
class Interface:
    """Address of an interface of this host.

    Attributes:
        name: of the interface.
        address: one of its addresses, IPv4 or IPv6.
        is_up: whether it is up and has a carrier.
    """

    name: str
    address: str
    is_up: bool

    def __str__(self) -> str:
        return f"{self.name} ({self.address}{'' if self.is_up else ', down'})"


def loopback() -> str:
    """Address for processes of this host, independent of its name and networks. "::1" if it has no IPv4."""
    for address in _LOOPBACKS:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
            return address
    return _LOOPBACKS[0]  # the caller's error names the address


def interfaces() -> list[Interface]:
    """List the interfaces of this host: IPv4 first, without link-local addresses (fe80::)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        found = [*_ipv4(probe), *_ipv6()]
        return [Interface(name, address, _is_up(probe, name)) for name, address in found]


def _ipv4(probe: socket.socket) -> Iterator[tuple[str, str]]:
    import fcntl  # absent on Windows, where a Connect client may import this file

    entries = array.array("B", bytes(_MOST * _ENTRY_BYTES))
    where, size = entries.buffer_info()
    answer = fcntl.ioctl(probe, _ALL_ADDRESSES, struct.pack("iL", size, where))
    size, _ = struct.unpack("iL", answer)
    for start in range(0, size, _ENTRY_BYTES):
        entry = entries[start : start + _ENTRY_BYTES].tobytes()
        yield entry[:16].partition(b"\0")[0].decode(), socket.inet_ntoa(entry[20:24])


def _ipv6() -> Iterator[tuple[str, str]]:
    with contextlib.suppress(OSError):  # a kernel without IPv6
        for line in Path("/proc/self/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if int(scope, 16) != _LINK_LOCAL:
                yield name, str(ipaddress.IPv6Address(int(digits, 16)))


def _is_up(probe: socket.socket, name: str) -> bool:
    import fcntl

    try:
        answer = fcntl.ioctl(probe, _FLAGS, struct.pack("40s", name.encode()))
    except OSError:  # the interface has disappeared
        return False
    wanted = _IS_UP | _HAS_CARRIER
    return int(struct.unpack_from("H", answer, 16)[0]) & wanted == wanted


def address_on(choice: str) -> str:
    """Find the address of the first matching interface that is up. Waits up to 2 s for it.

    Args:
        choice: names, addresses or networks such as `10.0.0.0/8`, separated by commas.

    Raises:
        InvalidArgumentError: a network of the choice is invalid.
        PreflightError: no interface of the choice is here and up.
    """
    wanted = [part for text in choice.split(",") if (part := text.strip())]
    until = time.monotonic() + _CARRIER_S
    while True:
        there = interfaces()
        matching = [each for part in wanted for each in there if _is_in(each, part)]
        for each in matching:
            if each.is_up:
                return each.address
        if not matching or time.monotonic() > until:
            break
        time.sleep(0.1)
    what = "all of them are down" if matching else "no interface matches"
    raise PreflightError(
        f"interfaces={choice!r}: host {socket.gethostname()} has no interface of this choice that is up ({what}). Its interfaces are "
        f"{', '.join(map(str, there))}. Choose another interface (SPARKHVD_INTERFACES, --network-interfaces)."
    )


def _is_in(interface: Interface, part: str) -> bool:
    if "/" not in part and ":" not in part and not part.replace(".", "").isdigit():
        return interface.name == part
    try:
        return ipaddress.ip_address(interface.address) in ipaddress.ip_network(part, strict=False)
    except ValueError as error:
        raise InvalidArgumentError(
            f"interfaces has {part!r}: {error}. Give names of interfaces or networks, such as eth0 or 10.0.0.0/8."
        ) from error


def address_towards(host: str) -> str:
    """Numeric address of this host on the route to another host."""
    family, kind, _, _, to = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(to)  # UDP: sends nothing
        return str(probe.getsockname()[0])


def own_address(choice: str, towards: str) -> str:
    """This host's address for ranks on other hosts.

    Args:
        choice: as for `address_on`; empty for the interface towards another host.
        towards: that host. If it resolves to this host, the default route counts.

    Raises:
        PreflightError: this host has only its loopback address.
    """
    if choice:
        return address_on(choice)
    for host in (towards, *_ANYWHERE):
        with contextlib.suppress(OSError):
            if not is_loopback(address := address_towards(host)):
                return address
    raise PreflightError(
        f"Host {socket.gethostname()} has no route to {towards!r} and no default route; its interfaces are "
        f"{', '.join(map(str, interfaces()))}. Choose one with SPARKHVD_INTERFACES."
    )


def is_loopback(address: str) -> bool:
    """Whether only this host reaches the address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
