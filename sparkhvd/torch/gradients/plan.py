"""Which gradients are reduced together, as what kind of bucket, and in whose memory."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from sparkhvd.torch.compressors import NoneCompressor
from sparkhvd.torch.context import Context
from sparkhvd.torch.cuda import Device
from sparkhvd.torch.gradients.cuda import DeviceBucket, give_memory
from sparkhvd.torch.gradients.cuda_sharded import ShardedDeviceBucket
from sparkhvd.torch.gradients.dense import DenseBucket, ViewBucket
from sparkhvd.torch.gradients.entry import Bucket, Entry, ReduceOptions
from sparkhvd.torch.gradients.powersgd import LowRankBucket, PowerSGD
from sparkhvd.torch.gradients.registered_views import GradientMemory
from sparkhvd.torch.gradients.sharded import ShardedBucket
from sparkhvd.torch.gradients.sparse import SparseBucket

__all__ = ["BucketPlanner", "plan_buckets"]


def plan_buckets(
    sizes: Sequence[int],
    kinds: Sequence[Hashable],
    order: Sequence[int],
    bucket_bytes: int,
    groups: Sequence[Sequence[int]] = (),
) -> list[tuple[int, ...]]:
    """Divide tensors into buckets of one kind each, at most `bucket_bytes` unless one tensor alone is larger.

    Args:
        sizes: bytes of each tensor.
        kinds: what must be equal within a bucket (the element type).
        order: tensor numbers, in the order in which they are expected to become ready.
        bucket_bytes: when a bucket is full.
        groups: tensor numbers that stay together whatever their size; the rest is divided as above.

    Returns:
        Tensor numbers per bucket; buckets in the order in which they are expected to become full.
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


class BucketPlanner:
    """Makes the buckets of a reducer, the same on every rank.

    Args:
        context: of the ranks.
        entries: the reducer's parameters, by index.
        options: of the reducer.
        label: how the names of its operations begin.
        flagged: whether a flag per parameter says if any rank used it.
        device: this rank's GPU, if it has parameters there.
        low_rank: what compresses some of them.
        memory: where gradients of the CPU live, if they are views.

    Attributes:
        options: of the reducer; may be replaced between two plans.
    """

    def __init__(
        self,
        context: Context,
        entries: Sequence[Entry],
        options: ReduceOptions,
        *,
        label: str,
        flagged: bool,
        device: Device | None,
        low_rank: PowerSGD | None,
        memory: GradientMemory | None,
    ) -> None:
        self.options = options
        self._context = context
        self._entries = entries
        self._label = label
        self._flagged = flagged
        self._device = device
        self._low_rank = low_rank
        self._memory = memory
        self._plan_number = 0

    def restart(self, label: str) -> None:
        """Count plans anew, under another name: ranks that had joined have missed some."""
        self._label, self._plan_number = label, 0

    def divide(self, order: Sequence[int]) -> list[Bucket]:
        """Make buckets of these parameters."""
        entries, options = self._entries, self.options
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
        # A new plan has new names, because the old ones mean other shapes to the engine.
        prefix = f"{self._label}.{self._plan_number}"
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

    def bucket(self, name: str, entries: list[Entry]) -> Bucket:
        """One bucket of these parameters, which are alike in what divides buckets."""
        options, device = self.options, None if entries[0].param.is_cpu else self._device
        # Of all optimizers: a bucket that knew the reducer would keep it alive.
        neighbours = functools.partial(_reduced_parameters, self._context)
        if self._low_rank is not None:
            if self._is_low_rank(entries[0]):
                gpu = None if device is None else (self._context, device)
                return LowRankBucket(name, entries, options, self._low_rank, neighbours, gpu)
            options = replace(options, compression=NoneCompressor)
        if device is not None:
            kind = ShardedDeviceBucket if options.sharded else DeviceBucket
            return kind(name, entries, self._flagged, options, device, self._context)
        if options.sharded:
            place = options.ranks.index(self._context.engine.topology.rank)
            return ShardedBucket(name, entries, self._flagged, options, place)
        return DenseBucket(
            name, entries, self._flagged, options, options.compression, neighbours=neighbours
        )

    def give_memory(self, buckets: Sequence[Bucket], *, is_registered: bool) -> None:
        """To buckets on the GPU that have none; the same on every rank. Waits for them if it is registered."""
        if self._device is None:
            return
        lacking = [b for b in buckets if isinstance(b, DeviceBucket) and not b.has_memory]
        give_memory(
            self._context.engine,
            self._device,
            lacking,
            name=f"{self._label}.memory.{self._plan_number}",
            process_set=self.options.process_set,
            is_registered=is_registered,
        )
        if self.options.as_views:
            for bucket in lacking:
                bucket.show()

    def _views(self, named: list[tuple[str, list[Entry]]], memory: GradientMemory) -> list[Bucket]:
        flats = memory.lay_out([entries for _, entries in named])
        return [
            ViewBucket(name, entries, self.options, memory, flat)
            for (name, entries), flat in zip(named, flats, strict=True)
        ]

    def _is_low_rank(self, entry: Entry) -> bool:
        return self._low_rank is not None and self._low_rank.is_due(entry)


def _reduced_parameters(context: Context) -> Iterable[Tensor]:
    return list(context.owners or ())
