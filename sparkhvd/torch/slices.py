"""How tensors lie one after the other in flat memory that is divided into equal slices, one for each rank.

NCCL's reducescatter and allgather move such memory as one operation, in place. So gradients, and the parameters that
were stepped, are in it for the time of an operation. It says nothing of where the tensors themselves are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Slices", "offsets_of"]

# Every tensor begins at a place from which kernels may read whole vectors.
_ALIGNMENT = 64


def _aligned(count: int, itemsize: int) -> int:
    step = max(1, _ALIGNMENT // itemsize)
    return -(-count // step) * step


def offsets_of(counts: Sequence[int], itemsize: int) -> list[int]:
    """Where tensors of so many elements begin, in elements; the last number is where they end."""
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + _aligned(count, itemsize))
    return offsets


@dataclass(frozen=True)
class Slices:
    """Flat memory of tensors of one type; all numbers are of elements.

    Attributes:
        counts: of each tensor.
        offsets: where each begins.
        length: of one slice.
        num: of slices.
    """

    counts: tuple[int, ...]
    offsets: tuple[int, ...]
    length: int
    num: int

    @classmethod
    def cut(cls, counts: Sequence[int], itemsize: int, num: int) -> Slices:
        """Tensors one after the other; slices begin and end inside of them."""
        *offsets, end = offsets_of(counts, itemsize)
        return cls(tuple(counts), tuple(offsets), _aligned(-(-end // num), itemsize), num)

    @classmethod
    def owned(cls, counts: Sequence[int], owners: Sequence[int], itemsize: int, num: int) -> Slices:
        """Every tensor in the slice of its owner."""
        ends = [0] * num
        inside = []
        for count, owner in zip(counts, owners, strict=True):
            inside.append(ends[owner])
            ends[owner] += _aligned(count, itemsize)
        length = max(ends)
        offsets = [owner * length + begin for owner, begin in zip(owners, inside, strict=True)]
        return cls(tuple(counts), tuple(offsets), length, num)

    @property
    def total(self) -> int:
        """Length of the memory."""
        return self.length * self.num

    def part(self, number: int, place: int) -> tuple[int, int]:
        """Of a tensor the first element that is in a slice, and the one behind the last; (0, 0) if there is none."""
        begin = self.offsets[number]
        first = max(0, place * self.length - begin)
        last = min(self.counts[number], (place + 1) * self.length - begin)
        return (first, last) if first < last else (0, 0)
