"""Texts of all ranks, gathered over a Unix socket where they share a host.

Processes that know the socket's abstract name meet at rank 0; the kernel says whose they are, and other users' are refused.
Used where a launcher tells ranks their numbers and nothing more, and in place of Spark's `allGather`, which takes a
second, with a `local` master.

**Failure**: a rank that ends while others wait for it is an error on those that had met it.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import time
from typing import Any, TextIO

from sparkhvd.errors import PreflightError
from sparkhvd.rendezvous.loop import is_same_user

__all__ = ["gather", "name_of"]

_PAUSE_S = 0.005
_ADVICE = "Look for why in Spark's log."


def name_of(key: str, job_id: str, attempt: int) -> str:
    """Return the name of the socket, which only processes with the attempt's key know in advance."""
    text = f"sparkhvd tasks {job_id} {attempt}".encode()
    return "sparkhvd-tasks-" + hmac.digest(bytes.fromhex(key), text, "sha256").hex()


def gather(
    name: str, rank: int, size: int, text: str, timeout_s: float, advice: str = _ADVICE
) -> list[str]:
    """Return the texts of all ranks, by rank. All of them must call it.

    Args:
        name: of the socket.
        rank: this one.
        size: number of ranks.
        text: this rank's.
        timeout_s: longest wait.
        advice: what to do if a rank does not come.

    Raises:
        PreflightError: a rank did not come in time, or has ended.
    """
    try:
        return (
            _lead(name, size, text, timeout_s) if rank == 0 else _join(name, rank, text, timeout_s)
        )
    except TimeoutError as e:
        raise PreflightError(
            f"Rank {rank} waited {timeout_s:g} s (start_timeout_s) for the other ranks, which run on this host; one of them "
            f"did not start. {advice}"
        ) from e
    except ConnectionError as e:
        raise PreflightError(f"Rank {rank} cannot start: {e}. {advice}") from e


def _lead(name: str, size: int, text: str, timeout_s: float) -> list[str]:
    """Receive the texts of the others, and send all of them to each."""
    texts = {0: text}
    others = []
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(f"\0{name}")
        listener.listen(size)
        while len(texts) < size:
            if (left_s := deadline - time.monotonic()) <= 0:  # also where others keep knocking
                raise TimeoutError
            listener.settimeout(left_s)
            connection = stack.enter_context(listener.accept()[0])
            connection.settimeout(left_s)
            if not is_same_user(connection):
                connection.close()
                continue
            file = stack.enter_context(connection.makefile("rw", encoding="utf-8"))
            rank, received = _read(file)
            texts[rank] = received
            others.append(file)
        by_rank = [texts[rank] for rank in range(size)]
        for file in others:
            file.write(json.dumps(by_rank) + "\n")
            file.flush()
    return by_rank


def _join(name: str, rank: int, text: str, timeout_s: float) -> list[str]:
    """Send a text to rank 0, and receive those of all."""
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.socket(socket.AF_UNIX))
        connection.settimeout(timeout_s)
        while connection.connect_ex(f"\0{name}") != 0:  # rank 0 is not there yet
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(_PAUSE_S)
        if not is_same_user(connection):
            raise PermissionError(f"{name} belongs to another user")
        file = stack.enter_context(connection.makefile("rw", encoding="utf-8"))
        file.write(json.dumps([rank, text]) + "\n")
        file.flush()
        texts: list[str] = _read(file)
        return texts


def _read(file: TextIO) -> Any:
    """Read one message; at the end of a task there is none."""
    line = file.readline()
    if not line:
        raise ConnectionError("another rank ended while the ranks met")
    return json.loads(line)
