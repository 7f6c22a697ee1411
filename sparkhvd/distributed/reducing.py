"""`Reducing`: torch's reductions as plans of the engine's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparkhvd.distributed.checks import (
    check_count,
    check_parts,
    check_same,
    check_sizes,
)
from sparkhvd.distributed.launcher import Launcher, Plan, gather_plan
from sparkhvd.distributed.operands import (
    Flat,
    by_dtype,
    copied,
    is_plain,
    moved,
    only,
    owners,
    reading,
    reading_into,
    received_numbers,
    reduced,
    restore,
    restoring,
    write,
)
from sparkhvd.distributed.reductions import SIMPLE_BY_HASH, bits_of, reduction_of
from sparkhvd.distributed.works import FINISHED, Work
from sparkhvd.engine.engine import Collective, DType, TensorView
from sparkhvd.engine.engine import Work as Operation
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.collectives.tensors import DTYPES, lend, written

__all__ = ["Reducing"]


if TYPE_CHECKING:

    class _ProcessGroup:  # torch's stub says how to call a group, not how to be one
        def __init__(self, rank: int, size: int) -> None: ...

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
            return self.allreduce_coalesced(tensors, opts, "all_reduce")
        # What training does most, in the least time.
        address = tensor.data_ptr()
        view = tuple.__new__(TensorView, (address, address, (tensor.numel(),)))
        written(tensors)
        if not getattr(opts, "asyncOp", True):
            self.launcher.reduce_now(view, dtype, kind, tensor.untyped_storage(), opts)
            return FINISHED
        plan = Plan(Collective.ALLREDUCE, (view,), dtype, tensor.untyped_storage(), kind)
        return self.launcher.launch_one(plan, opts, tensors)

    def allreduce_coalesced(
        self, tensors: Sequence[Tensor], opts: Any, what: str = "all_reduce_coalesced"
    ) -> Work:
        """Reduce tensors in place, those of one type as one operation."""
        if not tensors:
            return Work(())
        bits = bits_of(what, opts.reduceOp, tensors[0])
        flats = [reduced(what, tensor) for tensor in tensors]
        if bits is not None:
            return self._reduce_bits(flats, opts, tensors, bits)
        reduction = reduction_of(what, opts.reduceOp, tensors[0])
        plans = [
            Plan(Collective.ALLREDUCE, [each.view for each in part], dtype, owners(part), reduction)
            for dtype, part in by_dtype(flats)
        ]
        written(tensors)
        return self.launcher.launch(plans, opts, tensors, restoring(flats))

    def _reduce_bits(
        self,
        flats: Sequence[Flat],
        opts: Any,
        tensors: Sequence[Tensor],
        combine: Callable[[Tensor], Tensor],
    ) -> Work:
        gathered = [each.numbers.new_empty(self._size, each.numbers.numel()) for each in flats]

        def finish(_: object) -> None:
            for flat, rows in zip(flats, gathered, strict=True):
                flat.numbers.copy_(combine(rows))
                restore(flat)

        plans = [
            gather_plan(each.numbers, rows) for each, rows in zip(flats, gathered, strict=True)
        ]
        written(tensors)
        return self.launcher.launch(plans, opts, tensors, finish)

    def _allreduce_sparse(self, tensor: Tensor, opts: Any) -> Work:
        if opts.reduceOp.op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise InvalidArgumentError(
                f"all_reduce of a sparse tensor: op is {opts.reduceOp.op.name}; its entries are joined and add up. Use SUM "
                "or AVG, or .to_dense()."
            )
        own = tensor.detach().coalesce()
        dims = own.sparse_dim()
        # Sizes come ahead of the indices: one outside of another rank's tensor must not be written there.
        size = torch.tensor([own.size()[:dims]], dtype=torch.int64)
        parts = [moved(torch.cat([size, own.indices().t()])), moved(own.values().contiguous())]

        def finish(works: Sequence[Operation]) -> None:
            numbers = received_numbers(works[0], parts[0].numbers.dtype)
            pieces = numbers.split(list(works[0].output().rows))
            sizes = [tuple(each[:dims].tolist()) for each in pieces]
            check_sizes("all_reduce of a sparse tensor", sizes, tuple(own.size()[:dims]))
            indices = torch.cat([each[dims:] for each in pieces]).view(-1, dims).t()
            values = received_numbers(works[1], parts[1].numbers.dtype)
            values = torch.view_as_complex(values.view(-1, 2)) if own.is_complex() else values
            values = values.view(-1, *own.values().shape[1:])
            if opts.reduceOp.op == dist.ReduceOp.AVG:
                values = values / self._size
            whole = torch.sparse_coo_tensor(indices, values, own.size(), check_invariants=False)
            with torch.no_grad():
                tensor.copy_(whole.coalesce())

        plans = [
            Plan(Collective.ALLGATHER, [reading(part.numbers)], part.dtype, owners([part]))
            for part in parts
        ]
        return self.launcher.launch(plans, opts, [tensor], finish, needs_rows=True)

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        """Reduce a tensor in place on the root; elsewhere it stays."""
        tensor = only("reduce", tensors)
        flat, is_root = reduced("reduce", tensor), self._rank == opts.rootRank
        bits = bits_of("reduce", opts.reduceOp, tensor)
        if bits is not None:
            return self._reduce_bits([flat if is_root else copied(flat)], opts, tensors, bits)
        view = flat.view if is_root else reading(flat.numbers)
        reduction = reduction_of("reduce", opts.reduceOp, tensor)
        plan = Plan(Collective.REDUCE, [view], flat.dtype, owners([flat]), reduction, opts.rootRank)
        if is_root:
            written(tensors)
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
        bits = bits_of(what, opts.reduceOp, inputs[0])
        if bits is not None:
            return self._scatter_bits(sources, targets, opts, outputs, bits)
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
        written(outputs)
        return self.launcher.launch(plans, opts, outputs, restoring(targets))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # before torch 2.13

    def _scatter_bits(
        self,
        sources: Sequence[Flat],
        targets: Sequence[Flat],
        opts: Any,
        outputs: Sequence[Tensor],
        combine: Callable[[Tensor], Tensor],
    ) -> Work:
        copies = [each.numbers.clone() for each in sources]
        own = [
            Flat(copy, partial(write, target, copy.view(self._size, -1)[self._rank]))
            for copy, target in zip(copies, targets, strict=True)
        ]
        return self._reduce_bits(own, opts, outputs, combine)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> Work:  # noqa: A002 - torch's
        """Reduce a tensor; every rank gets its equal part."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

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
            return self.reduce_scatter_single_coalesced(outputs, [whole], opts)
        copies = [tensor.detach().clone() for tensor in tensors]
        flats = [reduced(what, copy) for copy in copies]
        own, target = flats[self._rank], moved(output)
        check_same(what, output, tensors[self._rank])
        flats[self._rank] = Flat(own.numbers, lambda: write(target, own.numbers))
        bits = bits_of(what, opts.reduceOp, output)
        if bits is not None:
            return self._reduce_bits(flats, opts, outputs, bits)
        reduction = reduction_of(what, opts.reduceOp, output)
        views = [each.view for each in flats]
        plan = Plan(Collective.ALLREDUCE, views, own.dtype, owners(flats), reduction)
        return self.launcher.launch([plan], opts, outputs, restoring(flats))
