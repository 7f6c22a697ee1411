"""Two persistent processes that train cases by a plain script of DistributedDataParallel, over gloo."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch

from tests.corpus.plain import Trained

SIZE = 2
# Limit of the longest case on a busy machine.
TIMEOUT_S = 120.0


class DdpFailed(Exception):
    """The plain script failed."""


def _serve(rank: int, address: str, pipe: Connection) -> None:
    """Train the cases whose names come through the pipe."""
    from tests.corpus.cases import find
    from tests.corpus.plain import train

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{address}",
        rank=rank,
        world_size=SIZE,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    while (name := pipe.recv()) is not None:
        try:
            found: Any = train(find(name), rank=rank, size=SIZE)
            # By value, because a tensor in a pipe is shared memory of a process that may end.
            found = Trained({n: v.clone() for n, v in found.state.items()}, found.outputs)
            pipe.send((_plain(found), ""))
        except Exception as e:
            pipe.send((None, f"{type(e).__name__}: {e}\n{traceback.format_exc()}"))
    torch.distributed.destroy_process_group()


def _plain(found: Trained) -> bytes:
    import io

    buffer = io.BytesIO()
    torch.save((dict(found.state), found.outputs), buffer)
    return buffer.getvalue()


def _loaded(data: bytes) -> Trained:
    import io

    state, outputs = torch.load(io.BytesIO(data), weights_only=False)
    return Trained(state, outputs)


class Ddp:
    """The processes. They start with the first case, and again after a failed case."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def train(self, name: str) -> Trained:
        """Train a case by its full name and return rank 0's result.

        Raises:
            DdpFailed: a rank failed, or took too long.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send(name)
        results = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(TIMEOUT_S):
                self.close()
                raise DdpFailed(f"rank {rank} did not answer within {TIMEOUT_S:g} s")
            try:
                found, problem = pipe.recv()
            except EOFError:
                self.close()
                raise DdpFailed(f"rank {rank} ended") from None
            if problem:
                self.close()  # the other rank may wait for it
                raise DdpFailed(problem)
            results.append(_loaded(found))
        return results[0]

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        folder = tempfile.mkdtemp(prefix="corpus-ddp-")
        for rank in range(SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, os.path.join(folder, "meeting"), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def __enter__(self) -> Ddp:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
