"""Functions of the ranks of `test_streams`. Each is called as fn(engine, talk)."""

from __future__ import annotations

import os
import socket
import struct
from typing import Any

import numpy as np

from sparkhvd.engine.engine import Engine
from tests.engine.arrays import allreduce
from tests.harness.rank_process import Talk

# Blocks of 128 KiB go to one stream after the other: less than one, the edges of the first and second
# round over three streams, and many of them with a rest.
SIZES = (0, 1, 1009, 32768, 32769, 3 * 32768, 3 * 32768 + 1, 1_000_003)


def inputs_of(rank: int, size: int, dtype: str) -> Any:
    """Make small whole numbers, because each sum is exact in any order."""
    return np.random.default_rng([rank, size]).integers(-99, 100, size).astype(dtype)


def connections() -> list[socket.socket]:
    """Duplicates of this process's connected TCP sockets."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                sock = socket.socket(fileno=os.dup(int(entry)))
                if sock.family == socket.AF_INET and not sock.getsockopt(
                    socket.SOL_SOCKET, socket.SO_ACCEPTCONN
                ):
                    found.append(sock)
                else:
                    sock.close()
        except OSError:  # closed since: the folder's own descriptor
            continue
    return found


def traffic() -> dict[str, int]:
    """Return the bytes received so far on every TCP connection, by the names of both ends."""
    received = {}
    for sock in connections():
        with sock:
            # tcpi_bytes_received of Linux's struct tcp_info, there since 4.1.
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
            received[f"{sock.getsockname()} {sock.getpeername()}"] = struct.unpack_from(
                "Q", info, 128
            )[0]
    return received


def sums(engine: Engine, talk: Talk) -> Any:
    """Return wrong sums, and the bytes on each connection for 8 MB: as created, then with one stream in use."""
    wrong = []
    for size in SIZES:
        for dtype in ("float32", "int64", "uint8"):
            inputs = [inputs_of(rank, size, dtype) for rank in range(engine.size)]
            found = allreduce(engine, f"{size} {dtype}", inputs[engine.rank])
            if not np.array_equal(found, np.sum(inputs, axis=0, dtype=dtype)):
                wrong.append(f"{size} {dtype}")
    carried = [carried_by(engine, "all streams")]
    engine.configure(streams=1).wait()
    carried.append(carried_by(engine, "one stream"))
    return {"wrong": wrong, "carried": carried}


def carried_by(engine: Engine, name: str) -> list[int]:
    """Return the bytes that each connection received for an allreduce of 8 MB."""
    before = traffic()
    found = allreduce(engine, name, np.ones(2_000_000, np.float32))
    assert np.all(found == engine.size), f"wrong at {np.flatnonzero(found != engine.size)}: {found}"
    engine.barrier(name=f"after {name}").wait()
    after = traffic()
    engine.barrier(name=f"looked at {name}").wait()  # no rank leaves before all have looked
    assert after.keys() == before.keys(), f"other connections: {before}, then {after}"
    return sorted(after[ends] - before[ends] for ends in after)


def fork(engine: Engine, talk: Talk) -> Any:
    """Return the TCP connections of a rank, and of a child that it forked."""
    engine.barrier(name="start").wait()
    mine = len(traffic())
    child = os.fork()
    if child == 0:
        os._exit(len(traffic()))
    theirs = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    engine.barrier(name="end").wait()
    return [mine, theirs]
