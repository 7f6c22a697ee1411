"""Gradients of a sharded optimizer, of which each rank has reduced its part: gathered, and clipped by their norm."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from sparkhvd.engine.engine import ReduceOp
from sparkhvd.torch.collectives import allreduce
from sparkhvd.torch.optimizer.division import Division
from sparkhvd.torch.optimizer.shards import Gatherer

__all__ = ["WholeGradients", "clip_parts_"]

# Kept for as many sets of parameters that have a gradient; a model may use others in every step.
_MAX_GATHERERS = 16


class WholeGradients:
    """Gathers whole gradients into `.grad`, once per cycle.

    Args:
        division: of the optimizer.

    Attributes:
        cycles: of each reducer the cycle whose gradients are whole.
    """

    def __init__(self, division: Division) -> None:
        self._division = division
        self.cycles: tuple[int, ...] = ()
        self._gatherers: dict[tuple[int, ...], Gatherer] = {}
        self._num_gatherers = 0  # that were ever made

    def clear(self) -> None:
        """Forget which parameters were gathered together: others have been added."""
        self._gatherers = {}

    def gather(self, cycles: tuple[int, ...]) -> None:
        """Gather the gradients of these cycles; every rank must."""
        if self.cycles != cycles:
            self._gather()
            self.cycles = cycles

    def _gather(self) -> None:
        division = self._division
        params = [s.param for s in division.shards.values() if s.is_cut]
        if division.gpu is not None:
            on_gpu = [p for p in params if not p.is_cpu]
            division.gpu.gather_cut({id(p): p.grad for p in on_gpu if p.grad is not None})
        grads = {i: p.grad for i, p in enumerate(p for p in params if p.is_cpu)}
        if not grads:
            return
        present = {i: grad for i, grad in grads.items() if grad is not None}
        indices, gradients = tuple(present), list(present.values())
        gatherer = self._gatherers.get(indices)
        if gatherer is None:
            if len(self._gatherers) >= _MAX_GATHERERS:
                self._gatherers.clear()
            self._num_gatherers += 1
            name = (
                f"{division.label}.gradients.{self._num_gatherers} (all ranks must call "
                "synchronize(), or use param_groups between backward() and step())"
            )
            gatherer = Gatherer(division.context, name, gradients, division.configuration.number)
            self._gatherers[indices] = gatherer
        gatherer.gather(gradients)


def clip_parts_(division: Division, max_norm: float, norm_type: float) -> Tensor:
    """Scale this rank's parts of the gradients as `torch.nn.utils.clip_grad_norm_` does; every rank must.

    Returns:
        The norm of all gradients.
    """
    for shard in division.shards.values():
        shard.take_gradient()
    parts = [s.part.grad for s in division.shards.values() if s.part is not None]
    gradients = [grad for grad in parts if grad is not None]
    total = _total_norm(division, gradients, norm_type)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    for grad in gradients:
        grad.mul_(factor.to(grad.device, grad.dtype))
    return total


def _local_norm(gradients: list[Tensor], norm_type: float) -> Tensor:
    norm: Tensor
    # Since torch 2.6; on a GPU for many gradients at a time.
    if get_total_norm := getattr(torch.nn.utils, "get_total_norm", None):
        norm = get_total_norm(gradients, norm_type)
    elif gradients:
        norms = [torch.linalg.vector_norm(grad, norm_type) for grad in gradients]
        norm = torch.linalg.vector_norm(
            torch.stack([each.to(norms[0].device) for each in norms]), norm_type
        )
    else:
        norm = torch.zeros(())
    return norm


def _total_norm(division: Division, gradients: list[Tensor], norm_type: float) -> Tensor:
    norm = _local_norm(gradients, norm_type).double()
    is_max = math.isinf(norm_type)
    # On a GPU if any rank's is there, also for a rank without a part.
    place = next((p for p in division.shards if not p.is_cpu), None)
    if place is not None and norm.is_cpu:
        norm = place.new_empty((), dtype=norm.dtype).copy_(norm)
    total = allreduce(
        norm if is_max else norm.pow(norm_type),
        op=ReduceOp.MAX if is_max else ReduceOp.SUM,
        name=f"{division.label}.norm",
        process_set=division.configuration.process_set,
    )
    # The type of all gradients, because every rank must scale by the same number; as torch.nn.utils.get_total_norm.
    dtypes = [p.grad.dtype for p in division.shards if p.grad is not None]
    dtype = functools.reduce(torch.promote_types, dtypes or [torch.get_default_dtype()]).to_real()
    return (total if is_max else total.pow(1.0 / norm_type)).to(dtype)
