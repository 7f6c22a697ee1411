"""Buckets of a reducer: created by its planner, submitted once per cycle and waited for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from sparkhvd.engine.engine import Engine
from sparkhvd.torch.gradients.dense import Bucket, GradientSlot, UnusedParameters
from sparkhvd.torch.gradients.plan import BucketPlanner
from sparkhvd.torch.gradients.powersgd import LowRankBucket


class Buckets:
    """The current buckets of a reducer's gradients.

    Args:
        planner: creates the same buckets on every rank.
        engine: reduces them.
    """

    def __init__(self, planner: BucketPlanner, engine: Engine) -> None:
        self._planner = planner
        self._engine = engine
        self._all: list[Bucket] = []
        self._two_rounds: list[LowRankBucket] = []

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def describe(self) -> list[dict[str, str | int]]:
        """Give for each bucket its operation's `name`, `kind`, number of `parameters`, and `bytes` on the wire."""
        return [
            {
                "name": bucket.name,
                "kind": type(bucket).__name__.removesuffix("Bucket"),
                "parameters": len(bucket.entries),
                "bytes": sum(entry.num_bytes for entry in bucket.entries),
            }
            for bucket in self._all
        ]

    def divide(self, order: Sequence[int], unused: set[int]) -> None:
        """Divide the parameters into new buckets.

        Args:
            order: numbers of all parameters, in the expected order of their gradients.
            unused: numbers of the parameters without a bucket.
        """
        for index in unused:
            self._planner.entries[index].bucket = UnusedParameters()
        self._all = self._planner.divide([index for index in order if index not in unused])
        self._two_rounds = _low_rank(self._all)

    def assign_memory(self, *, is_registered: bool) -> None:
        """Allocate missing memory of GPU buckets.

        Waits for the other ranks if `is_registered`.
        """
        self._planner.assign_memory(self._all, is_registered=is_registered)

    def submit(self, bucket: Bucket) -> None:
        """Submit this rank's gradients, and zeros for missing gradients."""
        for entry in bucket.entries:
            # A later hook of the user may have replaced the gradient, or it arrived in the first cycle.
            if entry.grad is None or entry.param.grad is not entry.grad:
                bucket.take(entry)
        bucket.start(self._engine)
        for entry in bucket.entries:
            if entry.grad is not None:
                entry.version = entry.grad._version

    def find_changed(self) -> GradientSlot | None:
        """Find a parameter with a gradient changed or replaced after its submission."""
        for bucket in self._all:
            for entry in bucket.entries:
                if entry.is_changed:
                    return entry
        return None

    def wait(self) -> None:
        """Wait for all reduced gradients in `.grad`."""
        for first in self._two_rounds:
            first.start_second_round(self._engine)
        for bucket in self._all:
            bucket.wait()

    def wait_for_engine(self) -> None:
        """Wait until the engine no longer writes into gradients, and ignore the results."""
        for bucket in self._all:
            if bucket.work is not None:
                bucket.work.wait()

    def reset(self) -> None:
        """Get every bucket ready for the next cycle."""
        for bucket in self._all:
            bucket.reset()

    def reduce_late(self, indices: Sequence[int]) -> None:
        """Reduce the gradients of these parameters now, in new buckets kept for later cycles."""
        late = self._planner.divide(indices)
        self._planner.assign_memory(late, is_registered=True)
        for bucket in late:
            self.submit(bucket)
        self._all += late
        self._two_rounds += (low_rank := _low_rank(late))
        for first in low_rank:
            first.start_second_round(self._engine)
        for bucket in late:
            bucket.wait()

    def reduce_once(self, named: Mapping[str, GradientSlot]) -> None:
        """Reduce the gradients of these parameters now, each in a bucket for this cycle only."""
        once = [self._planner.bucket(name, [entry]) for name, entry in named.items()]
        self._planner.assign_memory(once, is_registered=False)
        for bucket in once:
            self.submit(bucket)
        for first in _low_rank(once):
            first.start_second_round(self._engine)
        for bucket in once:
            bucket.wait()
            bucket.reset()


def _low_rank(buckets: Sequence[Bucket]) -> list[LowRankBucket]:
    return [bucket for bucket in buckets if isinstance(bucket, LowRankBucket)]
