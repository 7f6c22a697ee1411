"""A rank of `point_to_point.py`: receives {"device", "gloo", "socket", "rounds"}, and rank 0 returns seconds by size and leg."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

SIZES = {
    "4 B": 4,
    "4 KiB": 4 << 10,
    "64 KiB": 64 << 10,
    "1 MiB": 1 << 20,
    "64 MiB": 64 << 20,
}
# A leg sends a tensor, and receives one.
Leg = tuple[Callable[[Any], object], Callable[[Any], object]]


def connect(rank: int, address: tuple[str, int]) -> socket.socket:
    """Connect both ranks by TCP. Rank 0 must listen before the call of the other rank."""
    if rank == 0:
        with socket.create_server(address) as server:
            connection = server.accept()[0]
    else:
        connection = socket.create_connection(address)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def socket_leg(connection: socket.socket) -> Leg:
    def receive(tensor: Any) -> None:
        left = memoryview(tensor.numpy()).cast("B")
        while left:
            left = left[connection.recv_into(left) :]

    return lambda tensor: connection.sendall(memoryview(tensor.numpy()).cast("B")), receive


def ping_pong(rank: int, leg: Leg, tensor: Any, repeats: int) -> list[float]:
    """Measure the seconds of each message: half a round trip, on rank 0."""
    send, receive = leg
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        for step in (send, receive) if rank == 0 else (receive, send):
            step(tensor)
        times.append((time.perf_counter() - began) / 2)
    return times


def rank(rendezvous: Any, talk: Any) -> Any:
    """Meet over each library, and measure them by turns."""
    import torch
    import torch.distributed as dist

    import sparkhvd.torch as hvd

    torch.set_num_threads(1)
    hvd.init(rendezvous)
    order = talk.hear()
    os.environ["GLOO_SOCKET_IFNAME"] = order["device"]
    dist.init_process_group("gloo", init_method=order["gloo"], rank=hvd.rank(), world_size=2)
    other = 1 - hvd.rank()
    legs: dict[str, Leg] = {
        "sparkhvd": (lambda x: hvd.send(x, other), lambda x: hvd.recv(x, other)),
        "Gloo": (lambda x: dist.send(x, other), lambda x: dist.recv(x, other)),
    }
    if hvd.rank() == 1:
        time.sleep(0.5)  # until rank 0 listens
    connection = connect(hvd.rank(), tuple(order["socket"]))
    legs["socket"] = socket_leg(connection)
    found: dict[str, dict[str, list[float]]] = {size: {leg: [] for leg in legs} for size in SIZES}
    for number in range(order["rounds"] + 1):
        for size, num_bytes in SIZES.items():
            tensor = torch.zeros(num_bytes, dtype=torch.uint8)
            for name, leg in legs.items():
                hvd.barrier()
                times = ping_pong(
                    hvd.rank(), leg, tensor, max(2, min(200, (16 << 20) // num_bytes))
                )
                if number > 0:  # the first round warms up
                    found[size][name] += times
        if number > 0 and hvd.rank() == 0:
            talk.say("round")
            talk.hear()
    connection.close()
    dist.destroy_process_group()
    hvd.shutdown()
    return found
