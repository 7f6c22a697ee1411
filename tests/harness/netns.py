"""Two hosts on this machine: network namespaces connected by a cable (a veth pair). `ranks_on_hosts` runs ranks in them.

Needs `ip` of iproute2 and the right to make namespaces. `why_not()` says what is missing. The end removes all of it,
and the next run removes leftovers of a killed run.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TIMEOUT_S = 30.0
PREFIX = "sparkhvd"
# Larger than the largest packet that the kernel gives a device at once, so that shaping splits no packet.
BURST_BYTES = 256 << 10


@dataclass(frozen=True)
class Host:
    """Host at one side of the cable.

    Attributes:
        namespace: name for `ip netns`.
        device: its end of the veth pair.
        address: of that end.
    """

    namespace: str
    device: str
    address: str

    def command(self, *words: str) -> list[str]:
        """Return the command line that runs `words` on this host."""
        return ["ip", "netns", "exec", self.namespace, *words]

    def run(self, *words: str, timeout_s: float = TIMEOUT_S) -> str:
        """Run a command on this host and return what it printed."""
        return _run(*self.command(*words), timeout_s=timeout_s)

    def set_cable(self, state: str) -> None:
        """Plug the cable in ("up") or pull it out ("down")."""
        self.run("ip", "link", "set", self.device, state)

    def shape(self, rate: str | None) -> None:
        """Limit the rate of sent bytes (in `tc`'s form, "1gbit"). None removes the limit."""
        if rate is None:
            self.run("tc", "qdisc", "del", "dev", self.device, "root")
            return
        limit = ["tbf", "rate", rate, "burst", f"{BURST_BYTES}b", "latency", "50ms"]
        self.run("tc", "qdisc", "replace", "dev", self.device, "root", *limit)


@cache
def why_not() -> str | None:
    """Return the reason why two hosts cannot be made on this machine, or None if they can."""
    if shutil.which("ip") is None:
        return "the command `ip` (iproute2) is not installed"
    try:
        with two_hosts():
            return None
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return f"network namespaces cannot be made here: {error}"


@contextlib.contextmanager
def two_hosts(*, ipv6_only: bool = False) -> Iterator[tuple[Host, Host]]:
    """Two hosts with a cable between them.

    Args:
        ipv6_only: no IPv4 address anywhere on them, not even 127.0.0.1.

    Raises:
        RuntimeError: a command failed, with what it said.
    """
    _remove_leftovers()
    tag = f"{os.getpid()}-{secrets.token_hex(2)}"
    addresses = ("fd57::1", "fd57::2") if ipv6_only else ("10.57.0.1", "10.57.0.2")
    hosts = [
        # The name of a device has at most 15 characters.
        Host(f"{PREFIX}-{tag}-{side}", f"v{os.getpid()}{side}"[-15:], address)
        for side, address in zip("ab", addresses, strict=True)
    ]
    try:
        for host in hosts:
            _run("ip", "netns", "add", host.namespace)
        a, b = hosts
        peer = ["peer", "name", b.device, "netns", b.namespace]
        _run("ip", "link", "add", a.device, "netns", a.namespace, "type", "veth", *peer)
        for host in hosts:
            host.run("ip", "link", "set", "lo", "up")
            if ipv6_only:
                host.run("ip", "address", "flush", "dev", "lo", "scope", "host")
                host.run("ip", "address", "add", "::1/128", "dev", "lo")
                # "nodad": usable at once, no other host is on the cable.
                place = [f"{host.address}/64", "dev", host.device, "nodad"]
            else:
                place = [f"{host.address}/24", "dev", host.device]
            host.run("ip", "address", "add", *place)
            host.run("ip", "link", "set", host.device, "up")
        yield a, b
    finally:
        for host in hosts:
            _remove(host.namespace)


def _run(*words: str, timeout_s: float = TIMEOUT_S) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise RuntimeError(f"`{' '.join(words)}`: {said}")
    return done.stdout


def _remove(namespace: str) -> None:
    """Remove a namespace and its devices, after its processes, which would keep it."""
    with contextlib.suppress(RuntimeError):
        for pid in _run("ip", "netns", "pids", namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), 9)
        _run("ip", "netns", "delete", namespace)


def _remove_leftovers() -> None:
    """Namespaces of test runs that were killed before they could clean up."""
    for name in re.findall(rf"^{PREFIX}-(\d+-\w+-[ab])\b", _run("ip", "netns", "list"), re.M):
        if not Path(f"/proc/{name.partition('-')[0]}").exists():
            _remove(f"{PREFIX}-{name}")
