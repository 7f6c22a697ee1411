"""Allreduce of sparse tensors: gathers the values and the indices."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparkhvd.engine.library import ReduceOp
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.collectives.allgathers import allgather_async
from sparkhvd.torch.collectives.tensors import Average, Sum, resolve_op
from sparkhvd.torch.process_sets import ProcessSet, global_process_set


def sparse_allreduce_async(
    tensor: Tensor,
    name: str,
    op: ReduceOp | int,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], Tensor]:
    """Start to sum or average a sparse COO tensor over all ranks. Call the returned function to wait.

    Args:
        tensor: sparse, same shape on every rank, any number of entries.
        name: matches calls across ranks.
        op: Sum or Average.
        process_set: the ranks that take part.

    Returns:
        A function that waits and returns the sparse result, with the entries of all ranks (not coalesced). Average
        divides each entry.

    Raises:
        InvalidArgumentError: the tensor is not sparse, or `op` is not supported. Otherwise as `allgather`.
    """
    op = resolve_op(None, op)
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.sparse_coo:
        kind = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
        raise InvalidArgumentError(
            f"sparse_allreduce_async({name!r}): expected a sparse COO tensor, got {kind}. "
            "Use allreduce_async for dense tensors."
        )
    if op not in (Sum, Average):
        raise InvalidArgumentError(
            f"sparse_allreduce_async({name!r}): op={op.name.title()} is not possible, because the ranks' entries are "
            "concatenated and entries of the same index add up. Use Sum or Average."
        )
    indices = allgather_async(tensor._indices().t(), f"{name}.indices", process_set)
    values = allgather_async(tensor._values(), f"{name}.values", process_set)
    size = tensor.size()

    def wait() -> Tensor:
        joined = values.wait()
        if op is Average:
            # `joined / size` would multiply by a rounded reciprocal on a GPU.
            (joined,) = torch._foreach_div([joined], process_set.size() or 1)
        return torch.sparse_coo_tensor(indices.wait().t(), joined, size, check_invariants=False)

    return wait
