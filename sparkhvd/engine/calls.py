"""Operations before they are submitted: `TensorView`, `Reduction`, `Call`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from sparkhvd.engine.library import DEVICE_CPU, ReduceOp, Request, Tensor


class TensorView(NamedTuple):
    """Contiguous, row-major memory of the caller.

    Attributes:
        input: address that is read until the operation has finished.
        output: address that is written; may equal `input`; 0 where the engine allocates the result.
        shape: length of every dimension.
        room: capacity in bytes at `output`, if the ranks negotiate the size of the result (allgather, alltoall, gather,
            scatter); a result that does not fit is an error on every rank.
    """

    input: int
    output: int
    shape: tuple[int, ...]
    room: int = 0


class Reduction(NamedTuple):
    """Operation and factors of a reduction.

    Attributes:
        op: Average of floats is the correctly rounded quotient of the sum by the number of ranks, both in the
            accumulation type (float32 for 16-bit floats). Average of integers divides the sum in double and truncates.
        prescale: factor of every input, in the accumulation type.
        postscale: factor of the result. Average of floats divides once, by N / postscale.
    """

    op: ReduceOp
    prescale: float = 1.0
    postscale: float = 1.0


# Reduction in the requests of operations that do not reduce.
NO_REDUCTION = Reduction(ReduceOp.AVERAGE)


class Call:
    """Request of the library, built once and submitted any number of times.

    Not for two threads at a time. The library copies it at submission, so the caller may reuse it at once.

    Args:
        collective: kind of operation; see `Collective`.
        shapes: of the tensors; `place` sets their addresses.
        dtype: element type of all tensors.
        reduction: of the kinds that reduce.
        process_set: 0 = all ranks.
        root_rank: of a broadcast, counted among all ranks.
        numbers: further arguments of the kind: the splits of an alltoall, ranks, bytes; or a digest.
        device: device of the tensors: -1, the CPU, or the opened device. Then the caller sets `request.stream`
            before every submission.
    """

    __slots__ = ("_kept", "key", "reference", "request", "tensors", "work", "work_reference")

    def __init__(
        self,
        collective: int,
        shapes: Sequence[tuple[int, ...]] = (),
        dtype: int = 0,
        reduction: Reduction = NO_REDUCTION,
        process_set: int = 0,
        root_rank: int = 0,
        numbers: Sequence[int] = (),
        device: int = DEVICE_CPU,
    ) -> None:
        self.key: object = None  # under which an engine keeps the idle call
        array = (Tensor * len(shapes))()
        self.tensors = list(array)  # the same memory
        lengths = [(ctypes.c_int64 * len(shape))(*shape) for shape in shapes]
        for tensor, shape, values in zip(self.tensors, shapes, lengths, strict=True):
            tensor.shape = values
            tensor.num_dims = len(shape)
        self.request = Request(
            struct_size=ctypes.sizeof(Request),
            collective=collective,
            process_set=process_set,
            dtype=dtype,
            reduce_op=reduction.op,
            root_rank=root_rank,
            prescale=reduction.prescale,
            postscale=reduction.postscale,
            device=device,
            num_tensors=len(shapes),
            tensors=array,
        )
        if numbers:
            self.request.splits = (ctypes.c_int64 * len(numbers))(*numbers)
            self.request.num_splits = len(numbers)
        self.work = ctypes.c_void_p()
        self.reference = ctypes.byref(self.request)
        self.work_reference = ctypes.byref(self.work)
        self._kept = array, lengths

    def place(self, index: int, input_address: int, output_address: int) -> None:
        """Set the addresses where a tensor is read and written."""
        tensor = self.tensors[index]
        tensor.input = input_address
        tensor.output = output_address
