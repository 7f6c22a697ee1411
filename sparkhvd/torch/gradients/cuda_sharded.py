"""Bucket of gradients on a GPU, each rank with its slice: a reducescatter of flat memory, in place."""

from __future__ import annotations

from torch import Tensor

from sparkhvd.engine.engine import Call, Collective, ReduceOp, Reduction
from sparkhvd.torch.collectives.tensors import DTYPES
from sparkhvd.torch.gradients.cuda import DeviceBucket
from sparkhvd.torch.gradients.entry import ReduceOptions
from sparkhvd.torch.gradients.layout import Slices, flat, offsets_of

__all__ = ["ShardedDeviceBucket"]


class ShardedDeviceBucket(DeviceBucket):
    """Bucket on the rank's GPU that leaves this rank's part of each gradient reduced, and the rest undefined.

    The parameters of a bucket are those of one `Slices`, in its order; so the parts are those that the rank steps.
    """

    __slots__ = ("_num_copies", "_place", "_slices")

    def _arrange(self, num_flags: int, options: ReduceOptions, op: ReduceOp) -> Call:
        entries, wire = self.entries, self.entries[0].wire_dtype
        self._num_copies = len(options.ranks)
        self._place = options.ranks.index(self._context.engine.topology.rank)
        # As the optimizer divided the parameters, whatever is sent for their gradients.
        counts = [entry.param.numel() for entry in entries]
        self._slices = Slices.cut(counts, entries[0].dtype.itemsize, self._num_copies)
        self._offsets, self._num_values = list(self._slices.offsets), self._slices.total
        num_sent = self._num_copies * num_flags
        *_, self._count = offsets_of([self._num_values, num_sent, num_flags], wire.itemsize)
        shapes: list[tuple[int, ...]] = [(self._num_values,)]
        if num_flags:
            shapes.append((self._num_copies, num_flags))
        return Call(
            Collective.REDUCESCATTER,
            shapes,
            DTYPES[wire],
            Reduction(op),
            options.process_set,
            device=self._device.ordinal,
        )

    def _put(self, flat: Tensor, num_flags: int) -> None:
        own = flat[self._place * self._slices.length :]
        self._call.place(0, flat.data_ptr(), own.data_ptr())
        self._part = own[: self._slices.length]
        if num_flags:
            num_sent = self._num_copies * num_flags
            wire = self.entries[0].wire_dtype
            _, first, sums, _ = offsets_of([self._num_values, num_sent, num_flags], wire.itemsize)
            flags = flat[first : first + num_sent].view(self._num_copies, num_flags)
            self._flags, self._sums = flags, flat[sums : sums + num_flags]
            self._call.place(1, flags.data_ptr(), self._sums.data_ptr())

    def _reduced(self, number: int, gradient: Tensor) -> Tensor:
        first, last = self._slices.part(number, self._place)
        return flat(gradient)[first:last]
