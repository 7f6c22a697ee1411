"""Ranks on one GPU as processes: their results within a deadline, and all of their stacks after it."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from sparkhvd.settings import Settings
from tests.harness.rank_process import RankProcess, rank_processes

BODIES = "tests.gpu.rank"
# A rank imports torch, makes a CUDA context, and NCCL loads its kernels.
START_S = 60.0
# Errors that say only that another rank has failed.
_ECHOES = ("PeerLostError", "CollectiveError", "CollectiveTimeoutError")


def settings() -> Settings:
    """Return settings with several buckets even for small models. A wait that hangs ends with an error before its check ends."""
    return Settings.resolve(
        connect_timeout_s=START_S, stall_shutdown_s=60.0, device_bucket_bytes=1024
    )


@contextlib.contextmanager
def started(body: str, size: int) -> Iterator[list[RankProcess]]:
    """Start processes of a function of `rank.py` or of "module:function", and kill them at the end."""
    target = body if ":" in body else f"{BODIES}:{body}"
    with rank_processes(target, size, settings=settings()) as ranks:
        yield ranks


def hear(ranks: list[RankProcess], seconds: float) -> list[Any]:
    """Receive the next message of each rank.

    Raises:
        AssertionError: a rank failed, with the text of the rank that failed first, or was silent until the deadline.
    """
    deadline = time.monotonic() + seconds
    said = [rank.message(max(0.0, deadline - time.monotonic())) for rank in ranks]
    silent = [str(rank.rank) for rank, one in zip(ranks, said, strict=True) if one is None]
    failed = [
        (str(one.get("kind", "")), rank.rank, one)
        for rank, one in zip(ranks, said, strict=True)
        if one is not None and "value" not in one
    ]
    if silent:
        dump_stacks(ranks)
    for _, rank, one in sorted(failed, key=lambda each: each[0] in _ECHOES):
        print(f"rank {rank}:\n{one.get('traceback', 'ended without a word')}", file=sys.stderr)
        text = one.get("error", "ended without a word")
        raise AssertionError(f"rank {rank}: {text}{_place(one.get('traceback', ''))}")
    if silent:
        raise AssertionError(
            f"rank {' and '.join(silent)} said nothing for {seconds:.0f} s (stacks above)"
        )
    return [one["value"] for one in said if one is not None]


def dump_stacks(ranks: list[RankProcess]) -> None:
    """Let every rank print the stacks of its threads, on its standard error."""
    for rank in ranks:
        print(f"stacks of rank {rank.rank}:", file=sys.stderr, flush=True)
        rank.kill(signal.SIGUSR1)
        time.sleep(0.5)


def _place(text: str) -> str:
    """Return the last line of a traceback that is in our tests."""
    lines = [line.split('"') for line in text.splitlines() if line.strip().startswith('File "')]
    ours = [(parts[1], parts[2]) for parts in lines if len(parts) > 2 and "/tests/" in parts[1]]
    if not ours:
        return ""
    path, rest = ours[-1]
    return f" ({path.rpartition('/')[2]}:{rest.split(',')[1].split()[-1]})"


class RankPool:
    """Ranks that run one body after the other. After a failure, new ranks replace them.

    Args:
        serve: the function that they run.
    """

    def __init__(self, serve: str = "serve") -> None:
        self._serve = serve
        self._stack = ExitStack()
        self._ranks: dict[int, list[RankProcess]] = {}

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def do(self, body: str, size: int, seconds: float) -> list[Any]:
        """Run a body of `bodies.py` on every rank and return the results."""
        began = time.monotonic()
        try:
            if size not in self._ranks:
                # One size at a time, because finished ranks hold GPU memory.
                self.stop()
                self._ranks[size] = self._stack.enter_context(started(self._serve, size))
                hear(self._ranks[size], min(START_S, seconds))
            for rank in self._ranks[size]:
                rank.tell(body)
            return hear(self._ranks[size], seconds - (time.monotonic() - began))
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End all of them."""
        self._ranks.clear()
        self._stack.close()
