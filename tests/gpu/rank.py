"""The rank processes of the checks, which `tests.harness.rank_process` calls."""

from __future__ import annotations

import faulthandler
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

import sparkhvd.torch as hvd
from sparkhvd.engine.engine import Engine
from sparkhvd.errors import PeerLostError
from sparkhvd.rendezvous import Endpoint, Job, Listener, SingleRendezvous, SocketRendezvous
from sparkhvd.wire import rebuild
from tests.gpu.bodies import BODIES
from tests.gpu.machine import Machine, as_with_partners, machine, share_gpu
from tests.harness.rank_process import Talk


@contextmanager
def on_gpu(engine: Engine) -> Iterator[Machine]:
    """Yield the GPU, with the engine as this thread's engine. SIGUSR1 prints all stacks."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    share_gpu(engine.rank)
    gpu = machine()
    with gpu.use_engine(engine):
        yield gpu


def serve(engine: Engine, talk: Talk) -> None:
    """Run bodies one after the other, by the received names. An empty name ends it."""
    with on_gpu(engine) as gpu, as_with_partners():
        talk.say("ready")
        while name := talk.hear():
            said = BODIES[name](gpu)
            hvd.barrier()  # no rank continues while another one still submits
            talk.say(said)


def until_killed(engine: Engine, talk: Talk) -> dict[str, Any]:
    """Repeat allreduces until a peer is gone."""
    with on_gpu(engine) as gpu:
        tensor = gpu.tensor(torch.ones(1 << 12 if gpu.is_stand_in else 1 << 22))
        hvd.allreduce_(tensor, op=hvd.Average)
        talk.say("running")

        def loop() -> None:
            while True:
                for number in range(20):
                    hvd.allreduce_(tensor, op=hvd.Average, name=f"{number}")
                gpu.synchronize()

        return survived(engine, gpu, loop)


def killed_at_first(engine: Engine, talk: Talk) -> dict[str, Any]:
    """Rank 1 dies while NCCL makes the communicator, or soon after."""
    with on_gpu(engine) as gpu:
        tensor = gpu.tensor(torch.ones(1 << 12))
        talk.say("ready")
        delay_s = talk.hear()

        def first() -> None:
            handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name="first")
            if engine.rank == 1:
                time.sleep(delay_s)
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.synchronize(handle)
            while True:
                hvd.allreduce_(tensor, op=hvd.Sum, name="second")
                gpu.synchronize()

        return survived(engine, gpu, first)


def survived(engine: Engine, gpu: Machine, run: Callable[[], None]) -> dict[str, Any]:
    """Return when and how a run ended after a peer's death. Check that the GPU and a new engine work afterwards."""
    try:
        run()
    except PeerLostError as error:
        at, text = time.monotonic(), str(error)
    began = time.monotonic()
    engine.shutdown()
    assert (
        gpu.tensor(torch.ones(1000)).sum().item() == 1000
    )  # no kernel of the lost communicator holds it
    ended = time.monotonic() - began
    with (
        Engine(SingleRendezvous(engine.settings).connect(), engine.settings) as alone,
        gpu.use_engine(alone),
    ):
        assert hvd.allreduce(gpu.tensor(torch.ones(5)), op=hvd.Sum).tolist() == [1] * 5
    return {"at": at, "text": text, "ended_s": ended}


def again(engine: Engine, talk: Talk) -> int:
    """Let the same processes leave and meet again, each time with a new communicator."""
    rounds = 3
    settings = replace(engine.settings)
    for number in range(rounds):
        with on_gpu(engine) as gpu:
            gathered = hvd.allgather(gpu.tensor(torch.tensor([float(hvd.rank() + number)])))
            assert gathered.tolist() == [r + number for r in range(hvd.size())]
            key = hvd.broadcast_object(secrets.token_bytes(32).hex(), 0)
            hvd.barrier()
            listener = Listener.bind("127.0.0.1", settings)
            places = hvd.allgather_object(listener.endpoint().to_dict())
            rank, size = hvd.rank(), hvd.size()
            hvd.barrier()
        engine.shutdown()
        endpoints = tuple(rebuild(Endpoint, place) for place in places)
        job = Job(bytes.fromhex(key), f"again {number}", 0, rank, size, endpoints)
        engine = Engine(SocketRendezvous(job, listener, settings).connect(), settings)
    with engine, on_gpu(engine) as gpu:
        total = hvd.allreduce(gpu.tensor(torch.ones(3)), op=hvd.Sum)
        assert total.tolist() == [float(hvd.size())] * 3
        hvd.barrier()
    return rounds
