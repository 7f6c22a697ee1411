"""Adasum of tensors on a GPU, by the CPU's plane: NCCL has no such reduction, and it needs products of whole tensors.

The tensors are copied to the host, combined there, and copied back: twice the bytes over PCIe besides what the CPU's
plane costs, and the host waits for the GPU when they are submitted. Results have the bits that the CPU's have.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparkhvd.engine.engine import Collective, Reduction, Work
from sparkhvd.torch.collectives.tensors import engine_dtype, lend, view
from sparkhvd.torch.context import Context
from sparkhvd.torch.cuda import opened

__all__ = ["HostWork", "start_adasum"]


class HostWork:
    """An operation on copies.

    Args:
        work: the engine's.
        copies: on the host.
        outputs: tensors on the GPU for the results.
    """

    __slots__ = ("_copies", "_outputs", "_work")

    def __init__(self, work: Work, copies: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self._work = work
        self._copies = copies
        self._outputs = outputs

    def done(self) -> bool:
        """Return True if the host has the results; `wait` copies them to the GPU."""
        return self._work.done()

    @torch.no_grad()
    def wait(self) -> None:
        """Wait for the results, and copy them back on the current stream."""
        self._work.wait()
        for output, copy in zip(self._outputs, self._copies, strict=True):
            output.detach().copy_(copy)
        self._outputs = self._copies = ()


def start_adasum(
    ctx: Context,
    name: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    reduction: Reduction,
    process_set: int,
    digest: tuple[int, ...] = (),
) -> HostWork:
    """Submit contiguous tensors of one type on the rank's GPU, which may be their own outputs."""
    for tensor in (*inputs, *outputs):
        opened(ctx, name, tensor).stream()  # refuses one that is being captured
    copies = [each.detach().cpu() for each in inputs]
    views = [view(copy, copy) for copy in copies]
    dtype = engine_dtype(name, copies[0])
    call = ctx.engine.prepare(
        Collective.ALLREDUCE, views, dtype, reduction, process_set, numbers=digest
    )
    return HostWork(ctx.engine.start(call, name, lend(*copies)), copies, outputs)
