"""Communicators in mpi4py's form without MPI: of threads of one process, and of processes of one host."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from sparkhvd.launchers import gather

DEADLINE_S = 30.0


class Board:
    """Meeting place of the threads of a communicator."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=DEADLINE_S)
        self.values: list[Any] = [None] * size


class ThreadComm:
    """Communicator of threads. `world(3)` makes one for each."""

    def __init__(
        self, rank: int, members: list[int], board: Board, boards: dict[Any, Board]
    ) -> None:
        self._rank, self._members = rank, members
        self._board, self._boards = board, boards
        self._lock = threading.Lock()

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return len(self._members)

    def allgather(self, sendobj: Any) -> list[Any]:
        board = self._board
        board.values[self._rank] = sendobj
        board.barrier.wait()
        values = list(board.values)
        board.barrier.wait()
        return values

    def Split(self, color: int | None, key: int = 0) -> ThreadComm | NullComm:
        """Return the communicator of the threads with this colour, or a null one without a colour."""
        entries = self.allgather((color, key, self._rank))
        if color is None:
            return NullComm()
        members = [rank for c, _, rank in sorted(e for e in entries if e[0] == color)]
        board = self._boards.setdefault((id(self._board), *members), Board(len(members)))
        return ThreadComm(members.index(self._rank), members, board, self._boards)

    def __repr__(self) -> str:
        return f"ThreadComm({self._rank} of {len(self._members)})"


class NullComm:
    """MPI.COMM_NULL: false, and its calls raise."""

    def Get_rank(self) -> int:
        raise RuntimeError("MPI_ERR_COMM: invalid communicator")

    Get_size = Get_rank

    def allgather(self, sendobj: Any) -> list[Any]:
        raise RuntimeError("MPI_ERR_COMM: invalid communicator")

    def __bool__(self) -> bool:
        return False


class ProcessComm:
    """Communicator of processes that share a name."""

    def __init__(self, name: str, rank: int, size: int) -> None:
        self._name, self._rank, self._size = name, rank, size
        self._numbers: Iterator[int] = iter(range(1_000_000))

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._size

    def allgather(self, sendobj: str) -> list[str]:
        name = gather.name_of("ab" * 32, self._name, next(self._numbers))
        point = gather.on_this_host(name)
        return gather.gather(point, self._rank, self._size, sendobj, DEADLINE_S)


def world(size: int) -> list[ThreadComm]:
    """Return the communicator of each of `size` threads."""
    board, boards = Board(size), dict[Any, Board]()
    return [ThreadComm(rank, list(range(size)), board, boards) for rank in range(size)]
