"""Division of gradients into buckets: the parameters, the kind and the memory of each bucket."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, MutableMapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from sparkhvd.engine.library import ReduceOp
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.collectives.tensors import engine_dtype
from sparkhvd.torch.compressors import BUILT_IN, NoneCompressor
from sparkhvd.torch.context import Context, ContextPart
from sparkhvd.torch.cuda import Device, opened
from sparkhvd.torch.gradients.cuda import DeviceBucket, ShardedDeviceBucket, assign_memory
from sparkhvd.torch.gradients.dense import (
    Bucket,
    DenseBucket,
    GradientMemory,
    GradientSlot,
    ReduceOptions,
    ViewBucket,
    needed_bytes,
)
from sparkhvd.torch.gradients.powersgd import LowRankBucket, PowerSGD, describe
from sparkhvd.torch.gradients.sharded import ShardedBucket
from sparkhvd.torch.gradients.sparse import SparseBucket


def plan_buckets(
    sizes: Sequence[int],
    kinds: Sequence[Hashable],
    order: Sequence[int],
    bucket_bytes: int,
    groups: Sequence[Sequence[int]] = (),
) -> list[tuple[int, ...]]:
    """Divide tensors into buckets of at most `bucket_bytes`. A larger tensor has its own bucket.

    Args:
        sizes: bytes of each tensor.
        kinds: kind of each tensor; a bucket holds tensors of one kind.
        order: tensor numbers, in the order in which the gradients are expected to become ready.
        bucket_bytes: size of a full bucket.
        groups: numbers of tensors that share a bucket of any size; the other tensors are divided as above.

    Returns:
        Tensor numbers per bucket; buckets in their expected ready order.
    """
    place = {index: position for position, index in enumerate(order)}
    buckets: list[tuple[int, ...]] = []
    grouped: set[int] = set()
    for group in groups:
        by_kind: dict[Hashable, list[int]] = {}
        for index in sorted(group, key=place.__getitem__):
            by_kind.setdefault(kinds[index], []).append(index)
        buckets += [tuple(part) for part in by_kind.values()]
        grouped.update(group)
    filling: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    for index in order:
        if index in grouped:
            continue
        kind = kinds[index]
        if kind in filling and filled[kind] + sizes[index] > bucket_bytes:
            buckets.append(tuple(filling.pop(kind)))
        if kind not in filling:
            filling[kind], filled[kind] = [], 0
        filling[kind].append(index)
        filled[kind] += sizes[index]
    buckets += [tuple(rest) for rest in filling.values()]
    return sorted(buckets, key=lambda bucket: place[bucket[-1]])


def make_entries(named: Sequence[tuple[str, Tensor]], options: ReduceOptions) -> list[GradientSlot]:
    """Create an entry for each parameter.

    Raises:
        InvalidArgumentError: the engine cannot reduce a parameter's type, or the compression changes its shape.
    """
    return [
        GradientSlot(index, name, param, _wire_dtype(name, param, options))
        for index, (name, param) in enumerate(named)
    ]


def _wire_dtype(name: str, param: Tensor, options: ReduceOptions) -> torch.dtype:
    compression = options.compression
    if param.is_complex():
        _check_complex(name, param, options)
        return param.dtype
    if compression is NoneCompressor or isinstance(compression, PowerSGD):
        wire = param.detach()
    else:
        wire = compression.compress(torch.zeros_like(param))[0]
    engine_dtype(f"DistributedOptimizer, {name!r}", wire)
    if wire.shape != param.shape:
        raise InvalidArgumentError(
            f"DistributedOptimizer: {describe(compression)} turns {name!r} of shape {tuple(param.shape)} "
            f"into {tuple(wire.shape)}. A compressor must keep the shape."
        )
    return wire.dtype


def _check_complex(name: str, param: Tensor, options: ReduceOptions) -> None:
    """Refuse complex parameters with an unsupported reduction, compression or device."""
    problem = ""
    if options.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        problem = (
            f"op={options.op.name.title()} is not defined for complex numbers. Use Average or Sum"
        )
    elif options.compression is not NoneCompressor:
        problem = f"{describe(options.compression)} is for real numbers. Leave compression out"
    elif not param.is_cpu:
        problem = f"on {param.device} gradients must be real. Train it on the CPU"
    if problem:
        raise InvalidArgumentError(
            f"DistributedOptimizer: {name!r} is {param.dtype}, but {problem}, or use a real parameter with its real and "
            "imaginary parts, which forward converts with torch.view_as_complex()."
        )


class _Detachable(Protocol):
    def detach(self) -> None: ...


class ParameterOwners(ContextPart):
    """Reducer of each parameter, with weak references to reducers and parameters."""

    def __init__(self) -> None:
        self.reducers: MutableMapping[Tensor, Callable[[], _Detachable | None]] = (
            WeakIdKeyDictionary()
        )

    def retire(self) -> None:
        """Detach all reducers."""
        reducers, self.reducers = self.reducers, WeakIdKeyDictionary()
        for find in reducers.values():
            reducer = find()
            if reducer is not None:
                reducer.detach()


class BucketPlanner:
    """Creates the buckets of a reducer, the same on every rank.

    Args:
        context: context of the ranks.
        entries: the reducer's parameters, by index.
        options: options of the reducer.
        label: prefix of the names of its operations.

    Attributes:
        options: options of the reducer; may be replaced between two plans.
        entries: the reducer's parameters, by index.
        device: this rank's GPU, if it has parameters there.
        low_rank: the compression of large matrices, if any.
        is_flagged: whether a flag per parameter records if any rank used it. So an unused parameter ends without a
            gradient, exactly as in one process.

    Raises:
        InvalidArgumentError: the compression does not support this reduction, or has other parameters of the same names.
    """

    def __init__(
        self, context: Context, entries: Sequence[GradientSlot], options: ReduceOptions, label: str
    ) -> None:
        self.options = options
        self.entries = entries
        compression = options.compression
        self.is_flagged = (
            options.op in (ReduceOp.AVERAGE, ReduceOp.SUM)
            and (isinstance(compression, PowerSGD) or compression in BUILT_IN)
            and not options.as_views  # with views every gradient exists
        )
        self._context = context
        self._prefix = self._label = label
        self.device: Device | None = None
        for entry in entries:
            if not entry.param.is_cpu:
                name = f"DistributedOptimizer, {entry.name!r}"
                self.device = opened(context, name, entry.param)
        self.low_rank: PowerSGD | None = None
        if isinstance(compression, PowerSGD):
            self.low_rank = self._claim(compression)
        self._joins = context.joins
        self._memory: GradientMemory | None = None
        self._plan_number = 0

    def _claim(self, compression: PowerSGD) -> PowerSGD:
        if not self.is_flagged:
            raise InvalidArgumentError(
                f"DistributedOptimizer: {compression!r} supports op=Average and op=Sum, but op is "
                f"{self.options.op.name.title()}. Use Average or Sum."
            )
        compression.claim(self.entries)
        return compression

    def allocate_views(self) -> None:
        """Allocate the memory of gradient views on the CPU.

        On a GPU each bucket has its own memory.
        """
        needed = needed_bytes([entry for entry in self.entries if entry.param.is_cpu])
        if needed:
            buffer = self._context.engine.allocate(
                needed, name=f"{self._label}.memory", process_set=self.options.process_set
            )
            self._memory = GradientMemory(buffer)

    def zero_views(self) -> None:
        """Set the gradient views on the CPU to zero."""
        if self._memory is not None:
            self._memory.zero([entry for entry in self.entries if entry.param.is_cpu])

    def follow_joins(self) -> bool:
        """Reset the state shared by all ranks after `hvd.join()`, because ranks have missed steps.

        Returns:
            True if new buckets are needed.
        """
        if self.low_rank is None or self._joins == self._context.joins:
            return False
        self._joins = self._context.joins
        self.low_rank.restart(self.entries)
        # The ranks may have made different numbers of plans, so the names of plans start again with a new prefix.
        self._prefix, self._plan_number = f"{self._label}.joined.{self._joins}", 0
        return True

    def count_step(self) -> bool:
        """Count a step and return True if it ended a warm-up, so that new buckets are needed."""
        return self.low_rank is not None and self.low_rank.count_step(self.entries)

    def divide(self, order: Sequence[int]) -> list[Bucket]:
        """Create buckets for the parameters with these numbers."""
        entries, options = self.entries, self.options
        dense = [index for index in order if not entries[index].sparse_dim]
        plan: list[tuple[int, ...]] = []
        for is_cpu, bucket_bytes in (
            (True, options.bucket_bytes),
            (False, options.device_bucket_bytes),
        ):
            there = [index for index in dense if entries[index].param.is_cpu is is_cpu]
            among = set(there)
            plan += plan_buckets(
                [entry.num_bytes for entry in entries],
                [(entry.wire_dtype, self._is_low_rank(entry)) for entry in entries],
                there,
                bucket_bytes,
                [[index for index in group if index in among] for group in options.groups],
            )
        # Use new names for a new plan, because the engine remembers the shapes of the old names.
        prefix = f"{self._prefix}.{self._plan_number}"
        self._plan_number += 1
        named = [
            (f"{prefix}.{n}", [entries[index] for index in indices])
            for n, indices in enumerate(plan)
        ]
        buckets: list[Bucket] = []
        if self._memory is not None:
            buckets += self._views(
                [each for each in named if each[1][0].param.is_cpu], self._memory
            )
            named = [each for each in named if not each[1][0].param.is_cpu]
        buckets += [self.bucket(name, bucket) for name, bucket in named]
        sparse = [entries[index] for index in order if entries[index].sparse_dim]
        buckets += [
            SparseBucket(
                f"{prefix}.sparse.{n}",
                entry,
                options,
                None if entry.param.is_cpu else self._context,
            )
            for n, entry in enumerate(sparse)
        ]
        return buckets

    def bucket(self, name: str, entries: list[GradientSlot]) -> Bucket:
        """Create a bucket for these parameters. They must have the same type and device."""
        options, device = self.options, None if entries[0].param.is_cpu else self.device
        # Refer to the context instead of the reducer, because the bucket must not keep the reducer alive.
        neighbours = functools.partial(_reduced_parameters, self._context)
        if self.low_rank is not None:
            if self._is_low_rank(entries[0]):
                gpu = None if device is None else (self._context, device)
                return LowRankBucket(name, entries, options, self.low_rank, neighbours, gpu)
            options = replace(options, compression=NoneCompressor)
        if device is not None:
            kind = ShardedDeviceBucket if options.sharded else DeviceBucket
            return kind(name, entries, self.is_flagged, options, device, self._context)
        if options.sharded:
            place = options.ranks.index(self._context.engine.topology.rank)
            return ShardedBucket(name, entries, self.is_flagged, options, place)
        return DenseBucket(
            name, entries, self.is_flagged, options, options.compression, neighbours=neighbours
        )

    def assign_memory(self, buckets: Sequence[Bucket], *, is_registered: bool) -> None:
        """Allocate missing memory of GPU buckets.

        Waits for all ranks if `is_registered`. The buckets must be the same on every rank.
        """
        if self.device is None:
            return
        lacking = [b for b in buckets if isinstance(b, DeviceBucket) and not b.has_memory]
        assign_memory(
            self._context.engine,
            self.device,
            lacking,
            name=f"{self._prefix}.memory.{self._plan_number}",
            process_set=self.options.process_set,
            is_registered=is_registered,
        )
        if self.options.as_views:
            for bucket in lacking:
                bucket.show()

    def _views(
        self, named: list[tuple[str, list[GradientSlot]]], memory: GradientMemory
    ) -> list[Bucket]:
        flats = memory.lay_out([entries for _, entries in named])
        return [
            ViewBucket(name, entries, self.options, memory, flat)
            for (name, entries), flat in zip(named, flats, strict=True)
        ]

    def _is_low_rank(self, entry: GradientSlot) -> bool:
        return self.low_rank is not None and self.low_rank.is_due(entry)


def _reduced_parameters(context: Context) -> Iterable[Tensor]:
    return list(context.part(ParameterOwners).reducers)
