"""Bucket of gradients on a GPU, packed into flat memory and reduced while the host continues.

**The flat memory** comes from the engine, which registers it with NCCL. It has the type that is sent. After the
gradients it has one flag per parameter that says whether this rank has a gradient.

**A cycle.** Gradients are copied into the flat memory, all at once, on the stream that produced the last of them, and
scaled there. The sum runs on the engine's stream while backward continues. `wait` makes the caller's stream wait, does the
rest of an average's division (of 3, 5, 6, 7, ... ranks) and makes `.grad` views of the flat memory. So no results are
copied out, and a kept gradient (`zero_grad(False)`) is added to in place, without a copy in. With compression, and for
gradients without a backward hook (written by a captured graph), the sums are copied into the gradients, all at once.

**Bytes moved by packing** S bytes of gradients. Kept gradients are scaled in place: 2 S (read and written). Others must
be copied, because backward creates a new tensor for a parameter whose `.grad` is None. With `.grad` in place backward
would add to it, which with the necessary zeros is 4 S, before scaling. A copy is 2 S, and a separate scaling 2 S more.
No operation of torch does both for many tensors at once, so both are combined with a launch per tensor, for tensors
that are large enough to gain by it.

**The host waits** for the GPU only to learn whether any rank used a parameter that this rank did not use.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparkhvd.engine.calls import Call, Reduction
from sparkhvd.engine.engine import Engine
from sparkhvd.engine.library import Collective, ReduceOp
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.collectives.cuda import divide_, scheme_of, submit
from sparkhvd.torch.collectives.tensors import DTYPES
from sparkhvd.torch.compressors import BUILT_IN
from sparkhvd.torch.context import Context
from sparkhvd.torch.cuda import Device, copy_each
from sparkhvd.torch.gradients.dense import (
    GradientBucket,
    GradientSlot,
    ReduceOptions,
    drop_unused,
    owns_memory,
    require_same_dtype,
    require_same_shape,
)
from sparkhvd.torch.gradients.layout import Slices, flat, offsets_of

# Gradients of at least this size are scaled while they are copied, with one launch per gradient. A launch takes the
# host about 5 us, and in this time a GPU of 3 TB/s could scale about this many bytes in a separate pass.
_LARGE_BYTES = 8 << 20


class DeviceBucket(GradientBucket):
    """Bucket of gradients of one type on the rank's GPU.

    Args:
        name: name of the operation.
        entries: the parameters.
        flagged: whether to send a flag for each gradient that this rank has.
        options: options of the reducer.
        device: the GPU.
        context: the context whose engine reduces.
    """

    __slots__ = (
        "_as_views",
        "_call",
        "_casts",
        "_compression",
        "_context",
        "_count",
        "_device",
        "_divisor",
        "_factor",
        "_flags",
        "_memory",
        "_num_values",
        "_offsets",
        "_ones",
        "_part",
        "_places",
        "_resparsify",
        "_sums",
        "_takers",
        "_takes_sparse",
    )

    def __init__(
        self,
        name: str,
        entries: list[GradientSlot],
        flagged: bool,
        options: ReduceOptions,
        device: Device,
        context: Context,
    ) -> None:
        self._context = context
        super().__init__(name, entries)
        self._device = device
        self._compression = options.compression
        self._casts = options.compression in BUILT_IN
        self._takes_sparse = options.sparse_as_dense
        self._as_views = options.as_views
        self._resparsify = options.sparse_as_dense and not (options.sharded or options.as_views)
        wire = entries[0].wire_dtype
        # The predivide factor is not needed, because `scheme_of` keeps sums of 16-bit floats in range.
        scheme = scheme_of(name, wire, Reduction(options.op), len(options.ranks))
        self._factor, self._divisor = scheme.before, scheme.divisor
        num_flags = (1 + self._resparsify) * len(entries) if flagged else 0
        self._call = self._arrange(num_flags, options, scheme.op)
        # Flags of a rank that has all gradients, all of them dense.
        self._ones: Tensor | None = None
        if flagged:
            ones = entries[0].param.new_ones(self._num_copies, num_flags)
            ones[:, len(entries) :].zero_()
            self._ones = ones
        self._flags: Tensor | None = None  # copies of this rank's flags, shape (_num_copies, flags)
        self._sums: Tensor | None = None  # sums of all ranks' flags
        self._memory: FlatGradients | None = None
        self._part: Tensor | None = None  # the part of the gradients' memory with this rank's sums
        self._takers: set[int] = set()  # entries whose gradients receive copies of the results
        self._places = {id(entry): number for number, entry in enumerate(entries)}

    # Number of copies of the flags on the wire: one, or one per rank of a reducescatter.
    _num_copies = 1

    def _arrange(self, num_flags: int, options: ReduceOptions, op: ReduceOp) -> Call:
        """Compute the positions of gradients and flags, in elements, and return the operation, without memory.

        `_put` sets its memory.
        """
        entries, wire = self.entries, self.entries[0].wire_dtype
        counts = [entry.param.numel() for entry in entries]
        *self._offsets, self._num_values = offsets_of(counts, wire.itemsize)
        self._count = offsets_of([self._num_values, num_flags], wire.itemsize)[-1]
        return Call(
            Collective.ALLREDUCE,
            [(self._count,)],
            DTYPES[wire],
            Reduction(op),
            options.process_set,
            device=self._device.ordinal,
        )

    def _put(self, flat: Tensor, num_flags: int) -> None:
        """Set the memory of the operation and of the flags."""
        self._call.place(0, flat.data_ptr(), flat.data_ptr())
        self._part = flat[: self._num_values]
        if num_flags:
            flags = flat[self._num_values : self._num_values + num_flags]
            self._flags, self._sums = flags.view(1, num_flags), flags

    @property
    def num_bytes(self) -> int:
        """Length of the flat memory."""
        return self._count * self.entries[0].wire_dtype.itemsize

    @property
    def has_memory(self) -> bool:
        """Whether `lay_out` was called."""
        return self._memory is not None

    def lay_out(self, memory: Tensor) -> None:
        """Use these bytes as the flat memory. Every rank must do the same."""
        flat = memory.view(self.entries[0].wire_dtype)
        self._memory = FlatGradients(flat, self.entries, self._offsets, self._num_values)
        self._put(flat, 0 if self._ones is None else self._ones.shape[1])

    @property
    def _flat(self) -> FlatGradients:
        assert self._memory is not None
        return self._memory

    def show(self) -> None:
        """Make every `.grad` a view of the flat memory, before any backward pass."""
        self._flat.show()

    def zero(self) -> None:
        """Set all gradients to zero in place."""
        self._flat.zero()

    def take(self, entry: GradientSlot) -> None:
        """Take the gradient as it is, or zeros."""
        entry.grad = entry.param.grad
        if entry.grad is not None:
            return
        if entry.wire_dtype != entry.dtype or not self._casts:
            entry.grad = entry.make_zeros()
            return
        require_same_dtype(entry)
        require_same_shape(entry, entry.param)
        # `start` sets it to zero.
        entry.param.grad = entry.grad = self._flat.slot(self._places[id(entry)])
        entry.missing = True

    @torch.no_grad()
    def start(self, engine: Engine) -> None:
        """Pack `grad` of every entry into the flat memory, and submit the operation."""
        stream = self._device.stream()
        await_streams(self._device, self.entries)
        self._pack()
        # Only the flat memory needs protection: the gradients are read on the current stream, as torch expects.
        self.work = submit(
            self._context,
            self._device,
            self._call,
            self.name,
            stream,
            self._flat.flat.untyped_storage(),
            finish=self._divide if self._divisor != 1.0 else None,
        )

    def _divide(self) -> None:
        assert self._part is not None
        divide_([self._part], self._divisor)  # all gradients with one launch

    def _pack(self) -> None:
        factor, memory = self._factor, self._flat
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        zeros: list[Tensor] = []
        unscaled: list[Tensor] = []
        flags = self._flags
        self._takers.clear()
        for number, (entry, slot) in enumerate(zip(self.entries, memory.find_slots(), strict=True)):
            grad = entry.grad
            assert grad is not None
            is_shown = grad is slot or self._becomes_view(entry)
            if not is_shown and _can_take_result(entry, grad):
                self._takers.add(number)
            if entry.missing and self._casts:
                zeros.append(slot)
                if flags is not None:
                    zeros.append(flags[:, number])
            elif grad is slot:
                unscaled.append(slot)
            elif factor != 1.0 and slot.nbytes >= _LARGE_BYTES:
                torch.mul(self._source(entry, grad), factor, out=slot)
            else:
                targets.append(slot)
                sources.append(self._source(entry, grad))
                unscaled.append(slot)
            entry.place = grad.data_ptr() if grad.layout is torch.strided else -1
        if flags is not None and self._ones is not None:
            targets.append(flags)
            sources.append(self._ones)
        if targets:
            copy_each(targets, sources)
        if zeros:
            torch._foreach_zero_(zeros)
        if factor != 1.0:
            memory.scale(unscaled, factor)
        if self._resparsify and flags is not None:
            self._flag_dimensions(flags[:, len(self.entries) :])

    def _flag_dimensions(self, dimensions: Tensor) -> None:
        """Write the number of sparse dimensions of each sparse gradient into `dimensions`."""
        for number, entry in enumerate(self.entries):
            if entry.grad is not None and entry.grad.layout is not torch.strided:
                dimensions[:, number].fill_(entry.grad.sparse_dim())

    def _source(self, entry: GradientSlot, grad: Tensor) -> Tensor:
        """Check a gradient and return the values to copy into its slot."""
        require_same_dtype(entry)
        require_same_shape(entry, grad)
        if grad.get_device() != self._device.ordinal:
            raise InvalidArgumentError(
                f"DistributedOptimizer: {entry.name!r} was on cuda:{self._device.ordinal} when the optimizer was "
                f"built, but its gradient is on {grad.device} now. Build DistributedOptimizer after moving the model."
            )
        dense = grad  # autograd records nothing here
        if grad.layout is not torch.strided:
            if not self._takes_sparse:
                raise InvalidArgumentError(
                    f"DistributedOptimizer: the gradient of {entry.name!r} is sparse, but a dense gradient was agreed. Build "
                    "the layer with the same sparse= on every rank, or give sparse_as_dense=True."
                )
            dense = dense.to_dense()
        if self._casts:
            return dense.resolve_neg() if dense.is_neg() else dense
        wire, compression_context = self._compression.compress(dense.detach())
        self.sent.append((entry, wire, compression_context))
        return wire

    @torch.no_grad()
    def wait(self) -> None:
        """Make the caller's stream wait for the reduced gradients in `.grad`."""
        assert self.work is not None
        self.work.wait()
        contexts = {id(entry): context for entry, _, context in self.sent}
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        slots = self._flat.slots
        for number, entry in enumerate(self.entries):
            grad, slot = entry.grad, slots[number]
            assert grad is not None
            is_sparse = grad.layout is not torch.strided
            if is_sparse and self._resparsify:
                entry.param.grad = slot.to(grad.dtype).to_sparse(grad.sparse_dim())
            elif grad is slot or self._becomes_view(entry):
                entry.param.grad = slot
            else:
                result = self._reduced(number, slot)
                if not self._casts:
                    result = self._compression.decompress(result, contexts[id(entry)])
                own = grad.detach() if number in self._takers else _new(entry)
                targets.append(self._reduced(number, own))
                sources.append(result)
        if targets:
            copy_each(targets, sources)
        if self._sums is not None and any([entry.missing for entry in self.entries]):
            drop_unused(self.entries, self._sums.tolist(), resparsify=self._resparsify)

    def _becomes_view(self, entry: GradientSlot) -> bool:
        """Whether `.grad` becomes a view of the flat memory, instead of receiving a copy of the result.

        A gradient that arrived without a hook gets a copy, because a captured graph writes into the same memory again.
        """
        if entry.wire_dtype is not entry.dtype or not self._casts:
            return False
        return entry.stream is not None or self._as_views

    def _reduced(self, number: int, gradient: Tensor) -> Tensor:
        """Select the part of an entry's gradient with this rank's sums."""
        del number
        return gradient


def _can_take_result(entry: GradientSlot, grad: Tensor) -> bool:
    """Whether a result can be copied into the gradient: it has its planned form and its own memory."""
    return (
        grad.layout is torch.strided
        and grad.dtype is entry.dtype
        and grad.stride() == entry.stride  # so that a rank's part is one range of its memory
        and not grad.is_neg()
        and owns_memory(grad)
    )


def _new(entry: GradientSlot) -> Tensor:
    made = entry.param.new_empty_strided(entry.shape, entry.stride)
    entry.param.grad = made
    return made


def await_streams(device: Device, entries: Sequence[GradientSlot]) -> None:
    """Make the current stream wait for the gradients' streams."""
    stream = device.stream()
    for other in {entry.stream for entry in entries}:
        if other is not None and other != stream:
            device.await_stream(other)


def assign_memory(
    engine: Engine,
    device: Device,
    buckets: Sequence[DeviceBucket],
    *,
    name: str,
    process_set: int,
    is_registered: bool,
) -> None:
    """Allocate one piece of memory for several buckets.

    Args:
        engine: allocates the memory.
        device: the GPU.
        buckets: the buckets without memory; the same on every rank.
        name: name of the allocation.
        process_set: the reducing ranks.
        is_registered: register the memory with NCCL, which waits for all ranks of the set.
    """
    if not buckets:
        return
    lengths = [-(-bucket.num_bytes // 256) * 256 for bucket in buckets]
    if is_registered:
        made = engine.allocate(
            sum(lengths), name=name, process_set=process_set, device=device.ordinal
        )
        memory = device.over_buffer(made)
    else:
        memory = buckets[0].entries[0].param.new_empty(sum(lengths), dtype=torch.uint8)
    first = 0
    for bucket, length in zip(buckets, lengths, strict=True):
        bucket.lay_out(memory[first : first + bucket.num_bytes])
        first += length


# ----------------------------------------------------------------------------------------------------
# Gradients in flat memory of a GPU.


class FlatGradients:
    """Flat memory of a bucket, with a slot for the gradient of each parameter.

    Args:
        flat: the memory, of one type; is set to zero.
        entries: the parameters.
        offsets: index of each gradient's first element.
        num_values: number of elements of all gradients; flags may follow them.

    Attributes:
        flat: the memory.
        slots: for each parameter its `.grad` tensor. Users may change it: `model.cpu()` replaces its memory.
    """

    __slots__ = ("_addresses", "_entries", "_homes", "_values", "flat", "slots")

    def __init__(
        self, flat: Tensor, entries: Sequence[GradientSlot], offsets: Sequence[int], num_values: int
    ) -> None:
        flat.zero_()
        first = flat.storage_offset()
        self.flat = flat
        self._entries = entries
        self._values = flat[:num_values]
        # Tensors at the required addresses of the slots, to detect and repair slots with replaced memory.
        self._homes = [
            flat.as_strided(entry.shape, entry.stride, first + offset).detach()
            for entry, offset in zip(entries, offsets, strict=True)
        ]
        self._addresses = [home.data_ptr() for home in self._homes]
        # `.data` gives each a version counter of its own.
        self.slots = [home.data for home in self._homes]

    def slot(self, number: int) -> Tensor:
        """Return a parameter's slot, as a new tensor only if the slot's memory was replaced."""
        slot = self.slots[number]
        if slot.data_ptr() != self._addresses[number]:
            slot = self.slots[number] = self._homes[number].data
        return slot

    def find_slots(self) -> list[Tensor]:
        for number, (slot, address) in enumerate(zip(self.slots, self._addresses, strict=True)):
            if slot.data_ptr() != address:
                self.slots[number] = self._homes[number].data
        return self.slots

    @torch.no_grad()
    def show(self) -> None:
        """Move `.grad` to the flat memory, before any backward."""
        for entry, slot in zip(self._entries, self.slots, strict=True):
            grad = entry.param.grad
            if grad is not None:
                slot.copy_(grad if grad.layout is torch.strided else grad.to_dense())
            entry.param.grad = slot

    def zero(self) -> None:
        """Set all gradients to zero in place."""
        self._values.zero_()
        for number, entry in enumerate(self._entries):
            entry.param.grad = self.slot(number)

    def scale(self, slots: list[Tensor], factor: float) -> None:
        """Multiply these slots by a factor."""
        if len(slots) == len(self.slots):
            self._values.mul_(factor)  # all slots with one launch
        elif slots:
            torch._foreach_mul_(slots, factor)


# ----------------------------------------------------------------------------------------------------
# Bucket of gradients on a GPU that gives each rank a slice of the sums: a reducescatter of the flat memory, in place.


class ShardedDeviceBucket(DeviceBucket):
    """Bucket on the rank's GPU for only this rank's part of each gradient.

    Other parts are undefined. A bucket has the parameters of one `Slices`, in the same order. So the rank has sums for
    exactly the parts it steps.
    """

    __slots__ = ("_num_copies", "_place", "_slices")

    def _arrange(self, num_flags: int, options: ReduceOptions, op: ReduceOp) -> Call:
        entries, wire = self.entries, self.entries[0].wire_dtype
        self._num_copies = len(options.ranks)
        self._place = options.ranks.index(self._context.engine.topology.rank)
        # Divide as the optimizer divides the parameters, also if the gradients are sent in another type.
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
