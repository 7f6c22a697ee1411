"""A rank of `network.py`. It runs the driver's orders with the library named in them.

The driver sends {"library", "bytes", "repeats"}; the answer is {"wall": seconds of each call, "cpu": CPU seconds of
this process per call}. None ends the rank.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any


def rank(rendezvous: Any, talk: Any) -> None:
    """Meet over both libraries, then measure on demand."""
    import torch
    import torch.distributed as dist

    import sparkhvd.torch as hvd

    torch.set_num_threads(1)
    hvd.init(rendezvous)
    gloo = talk.hear()
    os.environ["GLOO_SOCKET_IFNAME"] = gloo["device"]
    dist.init_process_group(
        "gloo", init_method=gloo["address"], rank=hvd.rank(), world_size=hvd.size()
    )

    def with_sparkhvd(tensor: Any) -> None:
        hvd.allreduce_(tensor, name="x", op=hvd.Sum)

    calls: dict[str, Callable[[Any], None]] = {"sparkhvd": with_sparkhvd, "gloo": dist.all_reduce}
    tensors: dict[int, Any] = {}
    talk.say("ready")
    while (order := talk.hear()) is not None:
        num_bytes = order["bytes"]
        tensor = tensors.setdefault(num_bytes, torch.zeros(num_bytes // 4))
        call = calls[order["library"]]
        hvd.barrier()
        walls = []
        cpu = time.process_time()
        for _ in range(order["repeats"]):
            began = time.perf_counter()
            call(tensor)
            walls.append(time.perf_counter() - began)
        talk.say({"wall": walls, "cpu": (time.process_time() - cpu) / order["repeats"]})
    dist.destroy_process_group()
    hvd.shutdown()
