"""Descriptors of this process, for tests that compare them."""

from __future__ import annotations

import contextlib
import os
import socket
import sys


def descriptors() -> frozenset[str]:
    """Return this process's descriptors, each with its target: `15 -> socket:[4711]`.

    Compare new descriptors with earlier ones: descriptors that an earlier test left to a thread (such as a connection of
    Spark) may close at any moment, and that is no leak. The gateway to a JVM may also open some, so it is excluded.
    """
    found = set()
    gateway = gateway_port()
    for entry in os.listdir("/proc/self/fd"):
        fd = int(entry)
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the listing's own
            continue
        if not (gateway and target.startswith("socket:") and _port_of_peer(fd) == gateway):
            found.add(f"{fd} -> {target}")
    return frozenset(found)


def gateway_port() -> int | None:
    """Return the port of this process's JVM gateway, if there is one."""
    pyspark = sys.modules.get("pyspark")
    gateway = getattr(getattr(pyspark, "SparkContext", None), "_gateway", None)
    return gateway and int(gateway.gateway_parameters.port)


def _port_of_peer(fd: int) -> int | None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
        peer = sock.getpeername()
        return int(peer[1]) if isinstance(peer, tuple) else None
    return None
