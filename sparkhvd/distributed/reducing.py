"""`Reducing`: torch's reductions as plans of the engine's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparkhvd.distributed.checks import (
    check_count,
    check_kinds,
    check_parts,
    check_same,
)
from sparkhvd.distributed.launcher import Launcher, Plan
from sparkhvd.distributed.operands import (
    Flat,
    by_dtype,
    bytes_of,
    is_plain,
    moved,
    only,
    owners,
    reading,
    reading_into,
    received_numbers,
    reduced,
    restoring,
    write,
)
from sparkhvd.distributed.reductions import SIMPLE_BY_HASH, reduction_of
from sparkhvd.distributed.works import FINISHED, Work
from sparkhvd.engine.engine import Collective, DType, TensorView
from sparkhvd.engine.engine import Work as Operation
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.collectives.tensors import DTYPES, lend

__all__ = ["Reducing"]


if TYPE_CHECKING:

    class _ProcessGroup:  # torch's stub says how to call a group, not how to be one
        def __init__(self, rank: int, size: int) -> None: ...

        def _register_backend(
            self, device: torch.device, kind: object, backend: object
        ) -> None: ...

        def _set_default_backend(self, kind: object) -> None: ...

else:
    _ProcessGroup = dist.ProcessGroup


class Reducing(_ProcessGroup):
    """A process group whose reductions run on the engine."""

    def __init__(self, rank: int, size: int, launcher: Launcher) -> None:
        super().__init__(rank, size)  # the form that lets C++ find the methods of this class
        self._rank, self._size = rank, size
        self.launcher = launcher

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size

    getRank, getSize = rank, size  # noqa: N815 - C++'s names

    # Reductions

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        """Reduce one tensor in place, dense or sparse."""
        tensor = tensors[0]
        kind, dtype = SIMPLE_BY_HASH.get(hash(opts.reduceOp)), DTYPES.get(tensor.dtype)
        if kind is None or dtype is None or len(tensors) > 1 or not is_plain(tensor):
            if only("all_reduce", tensors).is_sparse:
                return self._allreduce_sparse(tensor, opts)
            return self._allreduce_each("all_reduce", tensors, opts)
        # What training does most, in the least time.
        address = tensor.data_ptr()
        view = tuple.__new__(TensorView, (address, address, tensor.shape))
        if not getattr(opts, "asyncOp", True):
            self.launcher.reduce_now(view, dtype, kind, tensor.untyped_storage(), opts)
            return FINISHED
        plan = Plan(Collective.ALLREDUCE, (view,), dtype, tensor.untyped_storage(), kind)
        return self.launcher.launch_one(plan, opts, tensors)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        """Reduce tensors in place, those of one type as one operation."""
        return self._allreduce_each("all_reduce_coalesced", tensors, opts)

    def _allreduce_each(self, what: str, tensors: Sequence[Tensor], opts: Any) -> Work:
        if not tensors:
            return Work(())
        flats = [reduced(what, tensor) for tensor in tensors]
        reduction = reduction_of(what, opts.reduceOp, tensors[0])
        plans = [
            Plan(
                Collective.ALLREDUCE, [each.shaped for each in part], dtype, owners(part), reduction
            )
            for dtype, part in by_dtype(flats)
        ]
        return self.launcher.launch(plans, opts, tensors, restoring(flats))

    def _allreduce_sparse(self, tensor: Tensor, opts: Any) -> Work:
        if opts.reduceOp.op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise InvalidArgumentError(
                f"all_reduce of a sparse tensor: op is {opts.reduceOp.op.name}; its entries are joined and add up. Use SUM "
                "or AVG, or .to_dense()."
            )
        own = tensor.detach().coalesce()
        dims, size = own.sparse_dim(), self._size
        # One operation, so that a rank with a dense tensor is told at once.
        kind = torch.tensor(list(f"{tuple(own.shape)} {own.dtype}".encode()), dtype=torch.uint8)
        parts = [kind, bytes_of(own.indices().t()), bytes_of(own.values())]

        def finish(works: Sequence[Operation]) -> None:
            received = received_numbers(works[0], torch.uint8)
            pieces = received.split(list(works[0].output().rows))
            kinds = [bytes(piece.tolist()).decode() for piece in pieces[:size]]
            # An index outside of another rank's tensor must not be written there.
            check_kinds("all_reduce of a sparse tensor", kinds, self._rank)
            indices = torch.cat(pieces[size : 2 * size]).view(torch.int64).view(-1, dims).t()
            values = torch.cat(pieces[2 * size :]).view(own.dtype)
            values = values.view(-1, *own.values().shape[1:])
            if opts.reduceOp.op == dist.ReduceOp.AVG:
                values = values / size
            whole = torch.sparse_coo_tensor(indices, values, own.size(), check_invariants=False)
            with torch.no_grad():
                tensor.copy_(whole.coalesce())

        views = [reading(part) for part in parts]
        plan = Plan(Collective.ALLGATHER, views, DType.UINT8, lend(*parts))
        return self.launcher.launch([plan], opts, [tensor], finish, needs_rows=True)

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        """Reduce a tensor in place on the root; elsewhere it stays."""
        tensor = only("reduce", tensors)
        flat, is_root = reduced("reduce", tensor), self._rank == opts.rootRank
        view = flat.shaped if is_root else flat.shaped._replace(output=0)
        reduction = reduction_of("reduce", opts.reduceOp, tensor)
        plan = Plan(Collective.REDUCE, [view], flat.dtype, owners([flat]), reduction, opts.rootRank)
        return self.launcher.launch([plan], opts, tensors, restoring([flat] if is_root else []))

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
    ) -> Work:
        """Reduce tensors; every rank gets its equal part of each."""
        what = "reduce_scatter_tensor"
        for output, tensor in zip(outputs, inputs, strict=True):
            check_parts(what, output, tensor, self._size)
        if not inputs:
            return Work(())
        sources = [reduced(what, tensor) for tensor in inputs]
        targets = [reduced(what, tensor) for tensor in outputs]
        reduction = reduction_of(what, opts.reduceOp, inputs[0])
        parts: dict[DType, list[tuple[Tensor, Tensor]]] = {}
        for source, target in zip(sources, targets, strict=True):
            parts.setdefault(source.dtype, []).append((source.numbers, target.numbers))
        plans = [
            Plan(
                Collective.REDUCESCATTER,
                [reading_into(*pair) for pair in pairs],
                dtype,
                [lend(*pair) for pair in pairs],
                reduction,
            )
            for dtype, pairs in parts.items()
        ]
        return self.launcher.launch(plans, opts, outputs, restoring(targets))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # before torch 2.13

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> Work:  # noqa: A002 - torch's
        """Reduce a tensor; every rank gets its equal part."""
        return Reducing.reduce_scatter_single_coalesced(self, [output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any
    ) -> Work:
        """Reduce a list with a tensor for each rank, which may differ in size; every rank gets its own."""
        what = "reduce_scatter"
        output, tensors = only(what, outputs), only(what, inputs)
        check_count(what, tensors, self._size)
        if (
            all([tensor.numel() == output.numel() for tensor in tensors])
            and len({tensor.numel() for tensor in tensors}) == 1
        ):
            whole = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
            return Reducing.reduce_scatter_single_coalesced(self, outputs, [whole], opts)
        copies = [tensor.detach().clone() for tensor in tensors]
        flats = [reduced(what, copy) for copy in copies]
        own, target = flats[self._rank], moved(output)
        check_same(what, output, tensors[self._rank])
        flats[self._rank] = Flat(own.numbers, lambda: write(target, own.numbers))
        reduction = reduction_of(what, opts.reduceOp, output)
        views = [each.view for each in flats]
        plan = Plan(Collective.ALLREDUCE, views, own.dtype, owners(flats), reduction)
        return self.launcher.launch([plan], opts, outputs, restoring(flats))
