"""Reductions and broadcasts of tensors on a GPU, built on NCCL's operations.

NCCL sums, and torch scales: the input is scaled into the output on the caller's stream, and the output is reduced in
place. The steps after the sum (an average's division, a postscale, a type that NCCL lacks) run in torch on the
waiter's stream. Results of integers and bool have the same bits as the CPU's. An average of floats is the
correctly rounded quotient of NCCL's sum. That sum may differ from the CPU's in its last bits, because NCCL adds in
another order, and adds 16-bit floats in 16 bits.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from sparkhvd.engine.calls import Call, Reduction, TensorView
from sparkhvd.engine.library import Collective, DType, ReduceOp
from sparkhvd.engine.work import Work
from sparkhvd.errors import CollectiveTimeoutError, InvalidArgumentError, MismatchError
from sparkhvd.torch.collectives.tensors import DTYPES, as_sent, engine_dtype, lend, view
from sparkhvd.torch.context import Context, ContextPart
from sparkhvd.torch.cuda import Device, copy_each, opened
from sparkhvd.torch.process_sets import num_members

# Types that NCCL does not reduce, and the types that are sent instead. Sums in the wider type, truncated to the
# narrow type, have the same bits.
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
        work: the engine's operation.
        stream: the stream that was current at the submission.
        results: output tensors of the operation.
        finish: runs the remaining steps on the waiting stream.
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
        """Whether the GPU has finished the operation."""
        return self._work.done()

    def wait(self) -> None:
        """Make the current stream wait for the result. The host waits only until every rank has submitted."""
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
    """Submit a call with its inputs ready on the stream."""
    call.request.stream = stream
    return DeviceWork(device, ctx.engine.start(call, name, keep), stream, results, finish)


class Scheme(NamedTuple):
    """Steps of a reduction of one element type.

    Attributes:
        op: NCCL's operation.
        wire: NCCL's type of the reduction.
        before: factor of the input.
        after: factor of the result.
        divisor: divisor of the result, applied last.
        digest: digest of arguments that the engine does not know, but that must be equal on all ranks.
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
    """Choose how to reduce tensors of a type on `size` ranks.

    Raises:
        InvalidArgumentError: the reduction is not supported.
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
        # Divide by a power of two before the sum: this does not round, and costs nothing because the copies are scaled
        # anyway. 16-bit floats need it, because their sums stay in 16 bits and would overflow.
        power = 1 << (size - 1).bit_length()
        if dtype.is_floating_point and (power == size or dtype.itemsize < torch.float32.itemsize):
            before, divisor = before / power, size / power
    return Scheme(op, wire, before, after, divisor, digest)


def divide_(tensors: Sequence[Tensor], divisor: float) -> None:
    """Divide floating-point tensors of one type in place, with correct rounding."""
    if not tensors or divisor == 1.0:
        return
    by: float | Tensor = divisor
    if tensors[0].dtype.itemsize >= torch.float32.itemsize:
        # On a GPU torch replaces the division by a Python number with a multiplication by its rounded reciprocal, but
        # really divides by a tensor. 16-bit floats do not need this: torch multiplies them in float32, whose error is
        # too small to change the rounding to 16 bits.
        by = tensors[0].new_full((), divisor)
    torch._foreach_div_(list(tensors), by)


def _scale_(tensors: Sequence[Tensor], factor: float, divisor: float = 1.0) -> None:
    """Multiply and divide in place, with the rounding of the CPU's reductions."""
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
    """Scale integers in float64, then truncate and saturate. NaN becomes 0."""
    limits = torch.iinfo(tensor.dtype)
    values = tensor.to(torch.float64).mul_(factor)
    divide_([values], divisor)
    values = values.nan_to_num_(0.0, float("inf"), float("-inf"))
    if limits.bits < 64:  # float64 represents the limits exactly
        return values.clamp_(limits.min, limits.max).to(tensor.dtype)
    beyond = 2.0 ** (64 if limits.min == 0 else 63)
    too_high = values >= beyond
    # Clamp to the largest float64 below the limit; the spacing there is 2048 (2**64) or 1024 (2**63).
    inside = values.clamp_(limits.min, beyond - (2048 if limits.min == 0 else 1024))
    # Fill as int64, because torch lacks many operations for uint64.
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
    """Submit contiguous tensors of one type. `outputs` may be the inputs themselves."""
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
    """Prepare NCCL's input and output tensors, without autograd."""
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
    """Compute `targets = sources * factor`. A target may be the source itself."""
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
    """Make a function for the steps after the operation, or None without such steps."""
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
    """Submit contiguous tensors of one type. `outputs` are this rank's rows.

    Inputs are not changed.
    """
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
    """Submit contiguous tensors. `target` may be `source`."""
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
    """Check that all tensors are on the rank's GPU, and return its device."""
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


# ----------------------------------------------------------------------------------------------------
# allgather and alltoall of tensors on a GPU, with results of any number of rows.
# Step one: the ranks exchange their numbers of rows, with a collective on the CPU. Step two: torch allocates the
# result and the operation is submitted.
#
# **Threads.** A caller that waits does both steps itself. For asynchronous calls a thread begins the second step,
# because another rank may wait for this operation while this rank's caller does something else. There is one thread
# per context; it ends when no gather is pending.
#
# **Ownership.** A gather's state belongs to the thread that holds its lock.

_INT64 = ctypes.c_int64
# Time for which the thread waits for one gather before it polls the other gathers.
_SLICE_S = 0.002
# Time for which a caller waits before Python can handle pending signals.
_WAIT_S = 0.05

Outcome = list[tuple[Tensor, tuple[int, ...]]]


class DeviceGather:
    """An operation in two steps.

    Args:
        rows: the first step.
        begin: submits the second step after the first has finished; returns it (None for an empty result) and the
            outcome.
    """

    def __init__(
        self, rows: Work, begin: Callable[[Work], tuple[DeviceWork | None, Outcome]]
    ) -> None:
        self._rows = rows
        self._begin = begin
        self._lock = threading.Lock()
        self._has_begun = False
        self._work: DeviceWork | None = None
        self._outcome: Outcome = []
        self._error: BaseException | None = None

    def advance(self, timeout_s: float) -> bool:
        """Begin the second step if possible within this time and return True if it has begun or failed."""
        with self._lock:
            if self._has_begun:
                return True
            try:
                if not self._rows.done():
                    self._drive(timeout_s)
                    if not self._rows.done():
                        return False
                self._has_begun = True
                self._work, self._outcome = self._begin(self._rows)
                del self._begin, self._rows  # free the memory that they keep alive
            except Exception as error:  # noqa: BLE001 - the waiter raises it
                self._has_begun = True
                self._error = error
            return True

    def _drive(self, timeout_s: float) -> None:
        if timeout_s > 0:
            # Either this wait or the operation timed out. `done` raises the operation's error.
            with contextlib.suppress(CollectiveTimeoutError):
                self._rows.wait(timeout_s)

    def done(self) -> bool:
        """Whether the GPU has finished both steps."""
        if not self.advance(0):
            return False
        self._raise()
        return self._work is None or self._work.done()

    def wait(self) -> None:
        """Make the current stream wait for the result. The host waits until every rank has submitted both steps."""
        while not self.advance(_WAIT_S):
            pass
        self._raise()
        if self._work is not None:
            self._work.wait()

    def outcome(self) -> Outcome:
        """Return each concatenated tensor and its number of rows from every rank.

        The result is complete after `wait`.
        """
        return self._outcome

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


class GatherThread(ContextPart):
    """Thread to begin the second steps of asynchronous gathers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: list[DeviceGather] = []
        self._is_running = False

    def add(self, gather: DeviceGather) -> None:
        """Let the thread advance a gather to its second step. Start the thread if necessary."""
        with self._lock:
            self._pending.append(gather)
            if self._is_running:
                return
            self._is_running = True
        threading.Thread(target=self._run, name="sparkhvd-gathers", daemon=True).start()

    def _run(self) -> None:
        pending: list[DeviceGather] = []
        while True:
            with self._lock:
                pending = [*pending, *self._pending]
                self._pending.clear()
                if not pending:
                    self._is_running = False
                    return
            # Other ranks may wait for any of the gathers, so all are polled while the thread waits for one.
            waiting = pending[0]
            pending = [each for each in pending[1:] if not each.advance(0)]
            if not waiting.advance(_SLICE_S):
                pending.append(waiting)


def _advanced_by_thread(ctx: Context, gather: DeviceGather) -> DeviceGather:
    ctx.part(GatherThread).add(gather)
    return gather


def start_device_allgather(
    ctx: Context,
    name: str,
    tensors: Sequence[Tensor],
    process_set: int,
    digest: tuple[int, ...] = (),
    *,
    is_awaited: bool = False,
) -> DeviceGather:
    """Submit tensors of one type with at least one dimension.

    `is_awaited` means that the caller waits at once.
    """
    sources = [as_sent(tensor) for tensor in tensors]
    devices = [opened(ctx, name, source) for source in sources]
    device, here, stream = devices[0], devices[0].here(), devices[0].stream()
    members = num_members(ctx, process_set)
    own_rows = torch.tensor([source.shape[0] for source in sources], dtype=torch.int64)
    rows_view = TensorView(own_rows.data_ptr(), 0, own_rows.shape)
    rows = ctx.engine.start(
        ctx.engine.prepare(
            Collective.ALLGATHER, [rows_view], DTYPES[torch.int64], process_set=process_set
        ),
        f"{name}.rows",
        own_rows,
    )

    def begin(exchange: Work) -> tuple[DeviceWork | None, Outcome]:
        by_rank = _numbers(exchange, name, members, len(sources))
        rows = [tuple(each[index] for each in by_rank) for index in range(len(sources))]
        with here():
            joined = [
                source.new_empty((sum(counts), *source.shape[1:]))
                for source, counts in zip(sources, rows, strict=True)
            ]
            outcome = list(zip(joined, rows, strict=True))
            if not any(each.numel() for each in joined):  # the same on every rank
                return None, outcome
            call = ctx.engine.prepare(
                Collective.ALLGATHER,
                [_view(x, y) for x, y in zip(sources, joined, strict=True)],
                DTYPES[sources[0].dtype],
                process_set=process_set,
                numbers=digest,
                device=device.ordinal,
            )
            keep = lend(*sources, *joined)
            return submit(ctx, device, call, name, stream, keep, joined), outcome

    gather = DeviceGather(rows, begin)
    return gather if is_awaited else _advanced_by_thread(ctx, gather)


def start_device_alltoall(
    ctx: Context,
    name: str,
    tensor: Tensor,
    splits: Sequence[int] | None,
    process_set: int,
    *,
    is_awaited: bool = False,
) -> DeviceGather:
    """Submit a tensor with at least one dimension.

    `is_awaited` means that the caller waits at once.
    """
    source = as_sent(tensor)
    device = opened(ctx, name, source)
    here, stream = device.here(), device.stream()
    members = num_members(ctx, process_set)
    own_rows = torch.tensor(_checked_splits(name, source, splits, members), dtype=torch.int64)
    rows = ctx.engine.start(
        ctx.engine.prepare(
            Collective.ALLTOALL,
            [TensorView(own_rows.data_ptr(), 0, own_rows.shape)],
            DTYPES[torch.int64],
            process_set=process_set,
        ),
        f"{name}.rows",
        own_rows,
    )

    def begin(exchange: Work) -> tuple[DeviceWork | None, Outcome]:
        counts = tuple(each[0] for each in _numbers(exchange, name, members, 1))
        with here():
            joined = source.new_empty((sum(counts), *source.shape[1:]))
            call = ctx.engine.prepare(
                Collective.ALLTOALL,
                [_view(source, joined)],
                DTYPES[source.dtype],
                process_set=process_set,
                numbers=tuple(own_rows.tolist()),
                device=device.ordinal,
            )
            work = submit(ctx, device, call, name, stream, lend(source, joined), [joined])
        return work, [(joined, counts)]

    gather = DeviceGather(rows, begin)
    return gather if is_awaited else _advanced_by_thread(ctx, gather)


def _checked_splits(
    name: str, source: Tensor, splits: Sequence[int] | None, members: int
) -> list[int]:
    """Compute each rank's number of rows, and refuse wrong splits before other ranks wait."""
    if source.dim() == 0:
        raise InvalidArgumentError(
            f"{name}: a tensor without dimensions cannot be split. Give tensor.reshape(1)."
        )
    rows = source.shape[0]
    if splits is None:
        if rows % members:
            raise InvalidArgumentError(
                f"{name}: {rows} rows cannot be divided into {members} equal parts. Give splits."
            )
        return [rows // members] * members
    if len(splits) != members or min(splits) < 0 or sum(splits) > rows:
        raise InvalidArgumentError(
            f"{name}: splits are {list(splits)}; they must be {members} numbers of 0 or more, one per rank of the "
            f"process set, and together at most the {rows} rows of the tensor."
        )
    return list(splits)


def _numbers(exchange: Work, name: str, members: int, each: int) -> list[list[int]]:
    """Read the exchanged numbers by rank, `each` numbers per rank."""
    output = exchange.output()
    if any(count != each for count in output.rows):
        raise MismatchError(
            f"{name}: ranks disagree on the number of tensors; it is {list(output.rows)} by rank. Give the same number of "
            "tensors on every rank."
        )
    # This memory belongs to the engine and is valid while `exchange` exists.
    numbers = (_INT64 * (members * each)).from_address(output.address)
    return [[int(n) for n in numbers[r * each : (r + 1) * each]] for r in range(members)]


def _view(source: Tensor, target: Tensor) -> TensorView:
    """Replace the null address of an empty output, because the engine would allocate memory for it."""
    return TensorView(source.data_ptr(), target.data_ptr() or 1, source.shape)


# ----------------------------------------------------------------------------------------------------
# Adasum of tensors on a GPU, computed on the CPU: NCCL does not have Adasum, which needs dot products of whole tensors.
# The tensors are copied to the host, combined there, and copied back. This adds twice the bytes over PCIe, and the host
# waits for the GPU at submission. Results have the same bits as the CPU's.


class HostWork:
    """An operation on host copies of GPU tensors.

    Args:
        work: the engine's operation.
        copies: the copies on the host.
        outputs: tensors on the GPU for the results.
    """

    __slots__ = ("_copies", "_outputs", "_work")

    def __init__(self, work: Work, copies: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self._work = work
        self._copies = copies
        self._outputs = outputs

    def done(self) -> bool:
        """Check whether the host has the results. `wait` copies them to the GPU."""
        return self._work.done()

    @torch.no_grad()
    def wait(self) -> None:
        """Wait for the results, and copy them back on the current stream."""
        self._work.wait()
        for output, copy in zip(self._outputs, self._copies, strict=True):
            output.detach().copy_(copy)
        self._outputs = self._copies = ()


def start_adasum(
    ctx: Context,
    name: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    reduction: Reduction,
    process_set: int,
    digest: tuple[int, ...] = (),
) -> HostWork:
    """Submit contiguous tensors of one type on the rank's GPU.

    `outputs` may be the inputs themselves.
    """
    for tensor in (*inputs, *outputs):
        opened(ctx, name, tensor).stream()  # refuses a stream that is being captured
    copies = [each.detach().cpu() for each in inputs]
    views = [view(copy, copy) for copy in copies]
    dtype = engine_dtype(name, copies[0])
    call = ctx.engine.prepare(
        Collective.ALLREDUCE, views, dtype, reduction, process_set, numbers=digest
    )
    return HostWork(ctx.engine.start(call, name, lend(*copies)), copies, outputs)
