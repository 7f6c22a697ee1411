"""Layout of tensors in flat memory, divided among the ranks.

NCCL's reducescatter and allgather work on this memory in place, as one operation for all tensors. Gradients and stepped
parameters are in it during an operation; the tensors themselves may be elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sparkhvd.torch.collectives.reducescatters import own_rows

# Every tensor is aligned for vector instructions of kernels.
_ALIGNMENT = 64


def _aligned(count: int, itemsize: int) -> int:
    step = max(1, _ALIGNMENT // itemsize)
    return -(-count // step) * step


def offsets_of(counts: Sequence[int], itemsize: int) -> list[int]:
    """Compute the offset of each tensor, then the total length, in elements.

    `counts` are the tensors' numbers of elements.
    """
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + _aligned(count, itemsize))
    return offsets


@dataclass(frozen=True)
class Slices:
    """Division of a flat memory with tensors of one type into equal slices, one for each rank.

    Attributes:
        counts: number of elements of each tensor.
        offsets: index of each tensor's first element.
        length: number of elements of a slice.
        num: number of slices.
    """

    counts: tuple[int, ...]
    offsets: tuple[int, ...]
    length: int
    num: int

    @classmethod
    def cut(cls, counts: Sequence[int], itemsize: int, num: int) -> Slices:
        """Lay out tensors in sequence. A slice may begin or end inside of a tensor."""
        *offsets, end = offsets_of(counts, itemsize)
        return cls(tuple(counts), tuple(offsets), _aligned(-(-end // num), itemsize), num)

    @classmethod
    def owned(cls, counts: Sequence[int], owners: Sequence[int], itemsize: int, num: int) -> Slices:
        """Lay out every tensor in the slice of its owner."""
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
        """Number of elements of the whole memory."""
        return self.length * self.num

    def part(self, number: int, place: int) -> tuple[int, int]:
        """Compute the range of a tensor's elements in a slice: (0, 0) if there are no elements."""
        begin = self.offsets[number]
        first = max(0, place * self.length - begin)
        last = min(self.counts[number], (place + 1) * self.length - begin)
        return (first, last) if first < last else (0, 0)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one range of memory, without gaps and without shared memory."""
    lengths = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    expected = 1
    for stride, length in lengths:
        if stride != expected:
            return False
        expected *= length
    return True


def flat(tensor: Tensor) -> Tensor:
    """View the elements of a dense tensor in the order of its memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def cut_range(count: int, num_parts: int, part: int) -> tuple[int, int]:
    first = part * (count // num_parts) + min(part, count % num_parts)
    return first, first + own_rows(count, num_parts, part)


def same_places(strides: tuple[int, ...], tensor: Tensor) -> bool:
    """Whether `tensor` has these strides. The strides of dimensions of length 1 are not compared."""
    return all(
        a == b or n == 1 for a, b, n in zip(strides, tensor.stride(), tensor.shape, strict=True)
    )
