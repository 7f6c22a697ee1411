"""`Messages`: torch's send and receive as the engine's."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparkhvd.distributed.collectives import Collectives
from sparkhvd.distributed.errors import NUMBER_BITS, TAG_BITS, as_torch
from sparkhvd.distributed.futures import Scope
from sparkhvd.distributed.launcher import Launcher
from sparkhvd.distributed.operands import Flat, moved, only, restore
from sparkhvd.distributed.works import Work
from sparkhvd.engine.engine import Collective
from sparkhvd.engine.engine import Work as Operation
from sparkhvd.errors import CollectiveError, InvalidArgumentError, MismatchError
from sparkhvd.torch.collectives.tensors import lend

__all__ = ["Messages"]

_ANY_RANK = -1


class Messages(Collectives):
    """A process group with collectives, and messages from rank to rank."""

    def __init__(self, rank: int, size: int, launcher: Launcher) -> None:
        super().__init__(rank, size, launcher)
        self._messages = Scope(f"{launcher.name}.message")

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> Work:
        """Send a tensor to a rank of the group."""
        tensor = moved(only("send", tensors))
        return self.launcher.noted(
            Work([self._start(Collective.SEND, tensor, self._global(to), tag)], tensors)
        )

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Work:
        """Receive a tensor of a rank of the group."""
        return self._receive(tensors, self._global(source), tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> Work:
        """Receive the next tensor that any rank sends; `source_rank()` of the work tells whose it was."""
        return self._receive(tensors, _ANY_RANK, tag)

    def _receive(self, tensors: Sequence[Tensor], source: int, tag: int) -> Work:
        target = moved(only("recv", tensors))
        operation = self._start(Collective.RECEIVE, target, source, tag)

        def finish() -> None:
            restore(target)
            work.source = self.launcher.team.ranks.index(operation.output().rows[0])

        work = self.launcher.noted(Work([operation], tensors, finish))
        return work

    def _global(self, rank: int) -> int:
        if not 0 <= rank < self._size:
            raise InvalidArgumentError(
                f"send/recv: rank {rank} is not in the group of {self._size} ranks. Give one from 0 to {self._size - 1}."
            )
        return self.launcher.team.ranks[rank]

    def _start(self, collective: Collective, flat: Flat, peer: int, tag: int) -> Operation:
        if not 0 <= tag < 1 << TAG_BITS:
            raise InvalidArgumentError(
                f"send/recv: the tag is {tag}. Give one from 0 to {(1 << TAG_BITS) - 1}."
            )
        team = self.launcher.team
        numbers = ((team.generation << NUMBER_BITS | team.number) << TAG_BITS | tag,)
        engine, views = team.engine, [flat.view]
        call = engine.prepare(
            collective,
            views,
            flat.dtype,
            process_set=team.process_set,
            root_rank=peer,
            numbers=numbers,
        )
        timeout_s = self.launcher.timeout_s
        try:
            return engine.start(call, self._messages.name(), lend(flat.numbers), timeout_s)
        except (CollectiveError, MismatchError) as error:
            raise as_torch(error) from None
