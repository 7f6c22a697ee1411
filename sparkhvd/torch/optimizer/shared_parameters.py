"""Parameters in one copy for all ranks of a host: `DistributedOptimizer(sharded=True, share_parameters=True)`.

**Who writes when.** Parameters are written in `step()` only, each element by the rank that it belongs to. A rank may
write when every rank has come to its `step()` (`begin`), and goes on when every rank has written (`end`), so no rank
computes with parameters that change. Whatever else writes them on one rank would change them under the others: it is
noticed by the tensors' version counters in the next step, and raised on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from sparkhvd.engine.engine import Call, Collective, DType, ReduceOp, Reduction
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.collectives.tensors import written
from sparkhvd.torch.context import Context
from sparkhvd.torch.registered import over_buffer

__all__ = ["SharedParameters", "unshare"]

# Every parameter begins on a cache line.
_ALIGNMENT = 64

# Where parameters lie in memory of several ranks: it stays shared when the optimizer is gone.
_addresses: MutableMapping[Any, int] = WeakIdKeyDictionary()


class SharedParameters:
    """Memory of one host that holds the parameters of all its ranks.

    Every rank of the process set must make one, with the same parameters; they get the first rank's values. It
    waits for all ranks.

    Args:
        context: whose engine shares memory.
        label: of the optimizer.
        named: the parameters; their memory is replaced.
        process_set: the engine's number of the ranks.
        ranks: their global ranks, ascending.

    Raises:
        InvalidArgumentError: the ranks are on several hosts, or one of them cannot map the memory.
        MismatchError: ranks have parameters of different sizes.
    """

    def __init__(
        self,
        context: Context,
        label: str,
        named: Sequence[tuple[str, Tensor]],
        process_set: int,
        ranks: Sequence[int],
    ) -> None:
        topology = context.engine.topology
        hosts = {topology.hosts[rank] for rank in ranks}
        if len(hosts) > 1:
            raise InvalidArgumentError(
                f"DistributedOptimizer(share_parameters=True): the {len(ranks)} ranks are on {len(hosts)} hosts, "
                "and memory is shared inside one. Leave share_parameters out, or give process_set=."
            )
        self._engine = context.engine
        self._label = label
        self._process_set = process_set
        self._named = list(named)
        # The number of the first parameter that was written outside step(), plus 1; 0 if there is none.
        self._written = torch.zeros(1, dtype=torch.int64)
        self._exchange = Call(
            Collective.ALLREDUCE, [(1,)], DType.INT64, Reduction(ReduceOp.MAX), process_set
        )
        self._exchange.place(0, self._written.data_ptr(), self._written.data_ptr())
        self._move(is_first=topology.rank == ranks[0])
        self._note_versions()

    def _move(self, *, is_first: bool) -> None:
        sizes = [
            -(-p.numel() * p.element_size() // _ALIGNMENT) * _ALIGNMENT for _, p in self._named
        ]
        buffer = self._engine.allocate(
            sum(sizes),
            name=f"{self._label}.memory",
            process_set=self._process_set,
            one_piece=True,
        )
        views = []
        begin = 0
        for (_, p), size in zip(self._named, sizes, strict=True):
            strides = torch.empty_like(p, device="meta").stride()
            # A storage for each: torch.save and deepcopy take whole storages, and refuse several types in one.
            piece = over_buffer(buffer, p.dtype, p.numel(), begin)
            views.append(piece.as_strided(p.shape, strides))
            if is_first:
                views[-1].copy_(p.detach())
            begin += size
        self._meet("copied")
        for (_, p), view in zip(self._named, views, strict=True):
            p.data = view
        self._addresses = [view.data_ptr() for view in views]
        for (_, p), address in zip(self._named, self._addresses, strict=True):
            _addresses[p] = address

    def _note_versions(self) -> None:
        self._versions = [p._version for _, p in self._named]

    def _meet(self, where: str) -> None:
        name = f"{self._label}.{where}"
        self._engine.barrier(name=name, process_set=self._process_set).wait()

    def begin(self) -> None:
        """Wait until every rank has come to its step.

        Raises:
            InvalidArgumentError: a rank wrote parameters outside of `step()`; raised on every rank.
        """
        changed = [
            number
            for number, ((_, p), version) in enumerate(
                zip(self._named, self._versions, strict=True), start=1
            )
            if p._version != version
        ]
        moved = [
            number
            for number, ((_, p), address) in enumerate(
                zip(self._named, self._addresses, strict=True), start=1
            )
            if p.data_ptr() != address
        ]
        # Moved memory is the worse error: its numbers are above those of parameters that were written.
        count = len(self._named)
        self._written.fill_(count + moved[0] if moved else changed[0] if changed else 0)
        self._engine.run(self._exchange, f"{self._label}.begin", self._written)
        first = int(self._written)
        if first > count:
            raise InvalidArgumentError(
                f"DistributedOptimizer(share_parameters=True): {self._named[first - count - 1][0]!r} was given other "
                "memory (model.to(), p.data = ...) on this rank or another, so the ranks share it no more. Build the "
                "optimizer after that, or leave share_parameters out."
            )
        if first:
            self._note_versions()
            raise InvalidArgumentError(
                f"DistributedOptimizer(share_parameters=True): {self._named[first - 1][0]!r} was written outside of "
                "step(), on this rank or another. All ranks of the host share it. Write it inside `with "
                "optimizer.writing_parameters():`, on every rank, or leave share_parameters out."
            )

    def end(self) -> None:
        """Wait until every rank has written its part."""
        self._meet("end")
        written([p for _, p in self._named if p.grad is not None])  # also by other ranks
        self._note_versions()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Let parameters be written inside, while no rank computes with them."""
        self.begin()  # what was written before must not pass as written here
        try:
            yield
        finally:
            self._meet("written")
            self._note_versions()


def unshare(parameters: Iterable[Tensor]) -> None:
    """Give parameters memory of this rank alone again, where an optimizer of before has shared it."""
    for p in parameters:
        if p in _addresses and _addresses.pop(p) == p.data_ptr():
            p.data = p.detach().clone(memory_format=torch.preserve_format)
