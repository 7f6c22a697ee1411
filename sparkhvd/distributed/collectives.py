"""`Collectives`: torch's collectives as plans of the engine's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from sparkhvd.distributed.checks import (
    check_count,
    check_parts,
    check_received,
    check_rows,
    check_same,
)
from sparkhvd.distributed.launcher import Plan
from sparkhvd.distributed.operands import (
    by_dtype,
    joined,
    moved,
    only,
    owners,
    reading,
    reading_into,
    restore,
    restoring,
    room_for,
    split_flat,
    width,
)
from sparkhvd.distributed.reducing import Reducing
from sparkhvd.distributed.works import Work
from sparkhvd.engine.engine import Collective, DType
from sparkhvd.engine.engine import Work as Operation
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.collectives.tensors import DTYPES, lend

__all__ = ["Collectives"]


class Collectives(Reducing):
    """A process group whose collectives run on the engine."""

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        """Copy the root's tensor to every rank."""
        tensor = only("broadcast", tensors)
        flat = moved(tensor)
        plan = Plan(
            Collective.BROADCAST, [flat.shaped], flat.dtype, owners([flat]), root=opts.rootRank
        )
        return self.launcher.launch([plan], opts, tensors, restoring([flat]))

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
    ) -> Work:
        """Join equal tensors of all ranks, one after the other."""
        for output, tensor in zip(outputs, inputs, strict=True):
            check_parts("all_gather_into_tensor", tensor, output, self._size)
        if not inputs:
            return Work(())
        targets = [moved(tensor) for tensor in outputs]
        for target, tensor in zip(targets, inputs, strict=True):
            own, source = target.numbers.view(self._size, -1)[self._rank], moved(tensor).numbers
            if own.data_ptr() != source.data_ptr():
                own.copy_(source)
        plans = [
            Plan(Collective.ALLGATHER_INTO, [each.view for each in part], dtype, owners(part))
            for dtype, part in by_dtype(targets)
        ]
        return self.launcher.launch(plans, opts, outputs, restoring(targets))

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # before torch 2.13

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any) -> Work:  # noqa: A002 - torch's
        """Join equal tensors of all ranks in one."""
        return Collectives.all_gather_single_coalesced(self, [output], [input], opts)

    _allgather_base = all_gather_single

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> Work:
        """Copy every rank's tensor to each place of a list; sizes may differ."""
        targets, tensor = only("all_gather", outputs), only("all_gather", inputs)
        return self._allgather_each("all_gather", [[each] for each in targets], [tensor], opts)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> Work:
        """Copy every rank's tensors to each rank's list."""
        return self._allgather_each("all_gather_coalesced", outputs, inputs, opts)

    def _allgather_each(
        self,
        what: str,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: Any,
    ) -> Work:
        check_count(what, outputs, self._size)
        columns = [
            [outputs[rank][index] for rank in range(self._size)] for index in range(len(inputs))
        ]
        for tensor, column in zip(inputs, columns, strict=True):
            check_same(what, column[self._rank], tensor)
        flats = [moved(tensor) for tensor in inputs]
        wholes = [
            room_for(flat.numbers, column) for flat, column in zip(flats, columns, strict=True)
        ]
        plans = [
            Plan(
                Collective.ALLGATHER,
                [reading_into(flat.numbers, whole)],
                flat.dtype,
                lend(flat.numbers, whole),
            )
            for flat, whole in zip(flats, wholes, strict=True)
        ]

        def finish(works: Sequence[Operation]) -> None:
            for work, whole, column in zip(works, wholes, columns, strict=True):
                check_rows(what, work, column)
                split_flat(whole, column)

        flat_outputs = [tensor for column in columns for tensor in column]
        return self.launcher.launch(plans, opts, flat_outputs, finish, needs_rows=True)

    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> Work:
        """Copy every rank's tensor to a list of the root; sizes may differ."""
        tensor, is_root = only("gather", inputs), self._rank == opts.rootRank
        targets = only("gather", outputs) if is_root else []
        if is_root:
            check_count("gather", targets, self._size)
        flat = moved(tensor)
        whole = room_for(flat.numbers, targets)
        view = reading_into(flat.numbers, whole) if is_root else reading(flat.numbers)
        keep = lend(flat.numbers, whole)
        plan = Plan(Collective.GATHER, [view], flat.dtype, keep, root=opts.rootRank)

        def finish(works: Sequence[Operation]) -> None:
            check_rows("gather", works[0], targets)
            split_flat(whole, targets)

        return self.launcher.launch(
            [plan], opts, targets, finish if is_root else None, needs_rows=is_root
        )

    def gather_single(self, output: Tensor, input: Tensor, opts: Any) -> Work:  # noqa: A002 - torch's
        """Join equal tensors of all ranks in one of the root."""
        is_root = self._rank == opts.rootRank
        if is_root:
            check_parts("gather_single", input, output, self._size)
        flat, target = moved(input), moved(output)
        view = (
            reading_into(flat.numbers, target.numbers) if is_root else reading(flat.numbers)
        )
        keep = lend(flat.numbers, target.numbers)
        plan = Plan(Collective.GATHER, [view], flat.dtype, keep, root=opts.rootRank)

        def finish(works: Sequence[Operation]) -> None:
            check_received("gather_single", works[0], (flat.numbers.numel(),) * self._size)
            restore(target)

        return self.launcher.launch(
            [plan], opts, [output], finish if is_root else None, needs_rows=is_root
        )

    gather_into_tensor = gather_single

    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any
    ) -> Work:
        """Copy each tensor of the root's list to its rank."""
        output, is_root = only("scatter", outputs), self._rank == opts.rootRank
        tensors = only("scatter", inputs) if is_root else []
        if is_root:
            check_count("scatter", tensors, self._size)
            check_same("scatter", output, tensors[self._rank])
        target = moved(output)
        whole = joined(tensors) if is_root else target.numbers.new_empty(0)
        counts = tuple([tensor.numel() * width(tensor) for tensor in tensors])
        plan = Plan(
            Collective.SCATTER,
            [reading_into(whole, target.numbers)],
            target.dtype,
            lend(whole, target.numbers),
            root=opts.rootRank,
            numbers=counts,
        )

        def finish(works: Sequence[Operation]) -> None:
            check_received("scatter", works[0], (target.numbers.numel(),))
            restore(target)

        return self.launcher.launch([plan], opts, outputs, finish, needs_rows=True)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 - torch's
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any,
    ) -> Work:
        """Send rows to every rank and join those that come; without splits in equal parts."""
        target, source = moved(output), moved(input)
        sent = self._counts(input, input_splits)
        received = self._counts(output, output_splits)
        plan = Plan(
            Collective.ALLTOALL,
            [reading_into(source.numbers, target.numbers)],
            source.dtype,
            lend(source.numbers, target.numbers),
            numbers=sent,
        )

        def finish(works: Sequence[Operation]) -> None:
            check_received("all_to_all_single", works[0], received)
            restore(target)

        return self.launcher.launch([plan], opts, [output], finish, needs_rows=True)

    alltoall_base = all_to_all_single

    def _counts(self, tensor: Tensor, splits: Sequence[int]) -> tuple[int, ...]:
        rows = tensor.size(0) if tensor.dim() else 1
        if not splits:
            if rows % self._size:
                raise InvalidArgumentError(
                    f"all_to_all_single: {rows} rows for {self._size} ranks are not equal parts. Give the split sizes."
                )
            splits = [rows // self._size] * self._size
        if len(splits) != self._size or sum(splits) != rows:
            raise InvalidArgumentError(
                f"all_to_all_single: split sizes {list(splits)} for {rows} rows and {self._size} ranks. Give one per rank; "
                "they add up to the rows."
            )
        row = width(tensor) * (tensor.numel() // rows if rows else 0)
        return tuple([split * row for split in splits])

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> Work:
        """Send a tensor to every rank; sizes may differ."""
        check_count("all_to_all", inputs, self._size)
        check_count("all_to_all", outputs, self._size)
        source = joined(inputs)
        whole = room_for(source, outputs)
        sent = tuple([tensor.numel() * width(tensor) for tensor in inputs])
        received = tuple([tensor.numel() * width(tensor) for tensor in outputs])
        view, keep = reading_into(source, whole), lend(source, whole)
        plan = Plan(Collective.ALLTOALL, [view], DTYPES[source.dtype], keep, numbers=sent)

        def finish(works: Sequence[Operation]) -> None:
            check_received("all_to_all", works[0], received)
            split_flat(whole, outputs)

        return self.launcher.launch([plan], opts, outputs, finish, needs_rows=True)

    def barrier(self, opts: Any = None) -> Work:
        """Wait for every rank."""
        return self.launcher.launch([Plan(Collective.BARRIER, (), DType.UINT8, None)], opts, ())
