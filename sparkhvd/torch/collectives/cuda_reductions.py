"""Reductions and broadcasts of tensors on a GPU, made of what NCCL can do.

NCCL sums. Factors are torch's: the input is scaled into the output on the caller's stream, which then is reduced in
place; the steps after the sum (an average's division, a postscale, a type that NCCL lacks) are torch's too, on the
waiter's stream. Results of integers and bool have the bits that the CPU's have. An average of floats is the
correctly rounded quotient of NCCL's sum; that sum may differ from the CPU's in its last bits, since NCCL adds in an
order of its own, and halves as halves.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from sparkhvd.engine.engine import Call, Collective, DType, ReduceOp, Reduction, Work
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.collectives.tensors import DTYPES, lend, view
from sparkhvd.torch.context import Context
from sparkhvd.torch.cuda import Device, copy_each, opened
from sparkhvd.torch.process_sets import num_members

__all__ = [
    "DeviceWork",
    "Scheme",
    "divide_",
    "scheme_of",
    "start_allreduce",
    "start_broadcast",
    "start_reducescatter",
    "submit",
]

# Types that NCCL does not reduce, and the types in which they travel. Sums of the wider type wrap around to the same bits.
_WIRES = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.bool: torch.uint8}
_OF_BOOL = {
    ReduceOp.SUM: ReduceOp.MAX,
    ReduceOp.MAX: ReduceOp.MAX,
    ReduceOp.PRODUCT: ReduceOp.MIN,
    ReduceOp.MIN: ReduceOp.MIN,
}


class DeviceWork:
    """An operation in flight on the device.

    Args:
        device: the GPU.
        work: the engine's.
        stream: the current stream of the submission.
        results: tensors that the operation writes.
        finish: the last steps, on the stream that waits.
    """

    __slots__ = ("_device", "_finish", "_results", "_stream", "_work")

    def __init__(
        self,
        device: Device,
        work: Work,
        stream: int,
        results: Sequence[Tensor] = (),
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._device = device
        self._work = work
        self._stream = stream
        self._results = results
        self._finish = finish

    def done(self) -> bool:
        """Return True if the GPU has finished it."""
        return self._work.done()

    def wait(self) -> None:
        """Make the current stream wait; this thread waits only until every rank has submitted."""
        stream = self._device.stream()
        self._work.wait_stream(stream)
        if stream != self._stream:
            for result in self._results:
                self._device.keep_for(result)
        self._results = ()
        finish, self._finish = self._finish, None
        if finish is not None:
            with torch.no_grad():
                finish()


def submit(
    ctx: Context,
    device: Device,
    call: Call,
    name: str,
    stream: int,
    keep: object,
    results: Sequence[Tensor] = (),
    finish: Callable[[], None] | None = None,
) -> DeviceWork:
    """Submit a call whose inputs are ready on the stream."""
    call.request.stream = stream
    return DeviceWork(device, ctx.engine.start(call, name, keep), stream, results, finish)


class Scheme(NamedTuple):
    """Steps of a reduction of one element type.

    Attributes:
        op: NCCL's operation.
        wire: the type in which NCCL reduces.
        before: factor of the input.
        after: factor of the result.
        divisor: of the result, after that.
        digest: of arguments that must be equal on all ranks and that the engine does not see.
    """

    op: ReduceOp
    wire: torch.dtype
    before: float
    after: float
    divisor: float
    digest: tuple[int, ...]


@lru_cache(maxsize=64)
def _digest(dtype: torch.dtype, op: ReduceOp, before: float, after: float) -> tuple[int, ...]:
    text = f"{dtype} {op.name} {before} {after}"
    return (int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little"),)


def scheme_of(what: str, dtype: torch.dtype, reduction: Reduction, size: int) -> Scheme:
    """Return the scheme for tensors of a type on `size` ranks.

    Raises:
        InvalidArgumentError: it cannot be done.
    """
    op, before, after = reduction
    if op is ReduceOp.ADASUM:
        raise InvalidArgumentError(f"{what}: Adasum is for allreduce only. Use Average or Sum.")
    wire = _WIRES.get(dtype, dtype)
    has_factors = (before, after) != (1.0, 1.0)
    if not has_factors and op is not ReduceOp.AVERAGE and wire == dtype:
        return Scheme(op, wire, 1.0, 1.0, 1.0, ())
    digest = _digest(dtype, op, before, after)
    if dtype == torch.bool:
        if op is ReduceOp.AVERAGE or has_factors:
            raise InvalidArgumentError(
                f'{what}: bool has no Average and cannot be scaled. Use Sum or Max for "or", or convert it.'
            )
        return Scheme(_OF_BOOL[op], wire, 1.0, 1.0, 1.0, digest)
    divisor = 1.0
    if op is ReduceOp.AVERAGE:
        op, divisor = ReduceOp.SUM, float(size)
        # A power of two is divided out before the sum: it rounds nothing, and copies are scaled on their way. Sums
        # of halves need it, because they stay halves, whose range they would leave.
        power = 1 << (size - 1).bit_length()
        if dtype.is_floating_point and (power == size or dtype.itemsize < torch.float32.itemsize):
            before, divisor = before / power, size / power
    return Scheme(op, wire, before, after, divisor, digest)


def divide_(tensors: Sequence[Tensor], divisor: float) -> None:
    """Divide floating-point tensors of one type in place, each quotient correctly rounded."""
    if not tensors or divisor == 1.0:
        return
    by: float | Tensor = divisor
    if tensors[0].dtype.itemsize >= torch.float32.itemsize:
        # By a number torch multiplies with its rounded reciprocal on a GPU, by a tensor there it divides. Halves do not
        # show it: the product is of float32, and quotients of theirs lie further from where rounding changes.
        by = tensors[0].new_full((), divisor)
    torch._foreach_div_(list(tensors), by)


def _scale_(tensors: Sequence[Tensor], factor: float, divisor: float = 1.0) -> None:
    """Multiply and divide in place, as the CPU's reductions do it."""
    if (factor, divisor) == (1.0, 1.0) or not tensors:
        return
    if not tensors[0].dtype.is_floating_point:
        for tensor in tensors:
            tensor.copy_(_scaled_integers(tensor, factor, divisor))
    elif divisor != 1.0:
        divide_(tensors, divisor / factor if factor else math.copysign(math.inf, factor))
    else:
        torch._foreach_mul_(list(tensors), factor)


def _scaled_integers(tensor: Tensor, factor: float, divisor: float) -> Tensor:
    """Scale in double, truncate and saturate; NaN gives 0."""
    limits = torch.iinfo(tensor.dtype)
    values = tensor.to(torch.float64).mul_(factor)
    divide_([values], divisor)
    values = values.nan_to_num_(0.0, float("inf"), float("-inf"))
    if limits.bits < 64:  # the limits are numbers of double
        return values.clamp_(limits.min, limits.max).to(tensor.dtype)
    beyond = 2.0 ** (64 if limits.min == 0 else 63)
    too_high = values >= beyond
    # 2048 and 1024 are the distances between numbers of double just below the limits.
    inside = values.clamp_(limits.min, beyond - (2048 if limits.min == 0 else 1024))
    # As signed numbers of 64 bits, which torch has every operation for.
    highest = -1 if limits.min == 0 else limits.max
    return (
        inside.to(tensor.dtype).view(torch.int64).masked_fill_(too_high, highest).view(tensor.dtype)
    )


def start_allreduce(
    ctx: Context,
    name: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    reduction: Reduction,
    process_set: int,
    digest: tuple[int, ...] = (),
) -> DeviceWork:
    """Submit contiguous tensors of one type, which may be their own outputs."""
    device = _of_all(ctx, name, (*inputs, *outputs))
    scheme = scheme_of(name, inputs[0].dtype, reduction, num_members(ctx, process_set))
    stream = device.stream()
    sources, targets = _to_send(inputs, outputs, scheme)
    views = [view(x, y) for x, y in zip(sources, targets, strict=True)]
    call = ctx.engine.prepare(
        Collective.ALLREDUCE,
        views,
        DTYPES[scheme.wire],
        Reduction(scheme.op),
        process_set,
        numbers=_joined(digest, scheme.digest),
        device=device.ordinal,
    )
    keep = lend(*sources, *targets, *outputs)
    finish = _finish(scheme, targets, outputs)
    return submit(ctx, device, call, name, stream, keep, outputs, finish)


def _to_send(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], scheme: Scheme
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the tensors that NCCL reads and those that it writes; autograd sees nothing of what is computed for them."""
    if scheme.before == 1.0 and scheme.wire is inputs[0].dtype:
        return inputs, outputs
    ins = [each.detach() for each in inputs]
    outs = [each.detach() for each in outputs]
    if ins[0].dtype == torch.bool:
        return [x.view(torch.uint8) for x in ins], [x.view(torch.uint8) for x in outs]
    if scheme.before != 1.0:
        _copy_scaled(outs, ins, scheme.before)
        ins = outs
    if scheme.wire != outs[0].dtype:
        ins = outs = [x.to(scheme.wire) for x in ins]
    return ins, outs


def _copy_scaled(targets: list[Tensor], sources: list[Tensor], factor: float) -> None:
    """Compute `targets = sources * factor`; a target may be its own source."""
    if sources[0].dtype.is_floating_point and len(sources) == 1:
        torch.mul(sources[0], factor, out=targets[0])
        return
    others = [(y, x) for y, x in zip(targets, sources, strict=True) if y.data_ptr() != x.data_ptr()]
    if others:
        copy_each([y for y, _ in others], [x for _, x in others])
    _scale_(targets, factor)


def _finish(
    scheme: Scheme, written: Sequence[Tensor], outputs: Sequence[Tensor]
) -> Callable[[], None] | None:
    """Return the steps after the operation; None if there are none."""
    is_converted = scheme.wire != outputs[0].dtype and outputs[0].dtype != torch.bool
    if scheme.after == scheme.divisor == 1.0 and not is_converted:
        return None

    def finish() -> None:
        if is_converted:
            copy_each([each.detach() for each in outputs], written)
        _scale_([each.detach() for each in outputs], scheme.after, scheme.divisor)

    return finish


@torch.no_grad()
def start_reducescatter(
    ctx: Context,
    name: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    reduction: Reduction,
    process_set: int,
    digest: tuple[int, ...] = (),
) -> DeviceWork:
    """Submit contiguous tensors of one type; `outputs` are this rank's rows. Inputs are not changed."""
    device = _of_all(ctx, name, inputs)
    dtype = inputs[0].dtype
    scheme = scheme_of(name, dtype, reduction, num_members(ctx, process_set))
    stream = device.stream()
    sources, targets = [x.detach() for x in inputs], list(outputs)
    if dtype == torch.bool:
        sources, targets = ([x.view(torch.uint8) for x in each] for each in (sources, targets))
    if scheme.before != 1.0:
        copies = [torch.empty_like(x) for x in sources]
        _copy_scaled(copies, sources, scheme.before)
        sources = copies
    if dtype != torch.bool and scheme.wire != dtype:
        sources = [x.to(scheme.wire) for x in sources]
        targets = [x.to(scheme.wire) for x in targets]
    views = [view(x, y) for x, y in zip(sources, targets, strict=True)]
    call = ctx.engine.prepare(
        Collective.REDUCESCATTER,
        views,
        DTYPES[scheme.wire],
        Reduction(scheme.op),
        process_set,
        numbers=_joined(digest, scheme.digest),
        device=device.ordinal,
    )
    finish = _finish(scheme, targets, outputs)
    return submit(ctx, device, call, name, stream, lend(*sources, *targets), outputs, finish)


def start_broadcast(
    ctx: Context,
    name: str,
    source: Tensor,
    target: Tensor,
    root_rank: int,
    dtype: DType,
    process_set: int,
) -> DeviceWork:
    """Submit contiguous tensors; `target` may be `source`."""
    device = _of_all(ctx, name, (source, target))
    stream = device.stream()
    call = ctx.engine.prepare(
        Collective.BROADCAST,
        [view(source, target)],
        dtype,
        process_set=process_set,
        root_rank=root_rank,
        device=device.ordinal,
    )
    return submit(ctx, device, call, name, stream, lend(source, target), (target,))


def _of_all(ctx: Context, name: str, tensors: Sequence[Tensor]) -> Device:
    """Return the device on which all of these are."""
    for tensor in tensors:
        device = opened(ctx, name, tensor)
    return device


def _joined(*digests: tuple[int, ...]) -> tuple[int, ...]:
    """Combine digests into one."""
    present = [digest for digest in digests if digest]
    if len(present) < 2:
        return present[0] if present else ()
    whole = hashlib.sha256(repr(present).encode()).digest()
    return (int.from_bytes(whole[:7], "little"),)
