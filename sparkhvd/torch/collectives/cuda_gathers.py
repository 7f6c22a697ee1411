"""allgather and alltoall of tensors on a GPU, whose results are as long as the ranks' rows say.

First the ranks exchange their numbers of rows over the CPU's plane; then torch allocates the result and the operation
is submitted.

**Threads.** A caller that waits does both steps itself. For asynchronous calls one thread per context, which lives as
long as gathers are pending, begins the second steps: a rank may go on with other operations, or wait for them, while
another rank waits for this one.

**Ownership.** A gather's state belongs to the thread that holds its lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparkhvd.engine.engine import Collective, TensorView, Work
from sparkhvd.errors import CollectiveTimeoutError, InvalidArgumentError, MismatchError
from sparkhvd.torch.collectives.cuda_reductions import DeviceWork, submit
from sparkhvd.torch.collectives.tensors import DTYPES, as_sent, lend
from sparkhvd.torch.context import Context
from sparkhvd.torch.cuda import opened
from sparkhvd.torch.process_sets import num_members

__all__ = ["DeviceGather", "GatherThread", "start_device_allgather", "start_device_alltoall"]

_INT64 = ctypes.c_int64
# How long the thread drives the engine for one gather before it looks at the others.
_SLICE_S = 0.002
# How long a caller does so before it looks at pending signals.
_WAIT_S = 0.05

Outcome = list[tuple[Tensor, tuple[int, ...]]]


class DeviceGather:
    """An operation in two steps.

    Args:
        rows: the first step.
        begin: submits the second, once the first has finished; returns it (None if there is nothing to move) and
            the outcome.
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
        """Begin the second step if possible within this time; return True if it has begun, or never will."""
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
                del self._begin, self._rows  # and what they keep alive
            except Exception as error:  # noqa: BLE001 - the waiter raises it
                self._has_begun = True
                self._error = error
            return True

    def _drive(self, timeout_s: float) -> None:
        if timeout_s > 0:
            # Of this wait, or of the operation: `done` tells.
            with contextlib.suppress(CollectiveTimeoutError):
                self._rows.wait(timeout_s)

    def done(self) -> bool:
        """Return True if the GPU has finished."""
        if not self.advance(0):
            return False
        self._raise()
        return self._work is None or self._work.done()

    def wait(self) -> None:
        """Make the current stream wait; this thread waits until every rank has submitted both steps."""
        while not self.advance(_WAIT_S):
            pass
        self._raise()
        if self._work is not None:
            self._work.wait()

    def outcome(self) -> Outcome:
        """Return, after `wait`, each joined tensor and the rows received from every rank."""
        return self._outcome

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


class GatherThread:
    """Thread that begins second steps of asynchronous gathers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: list[DeviceGather] = []
        self._is_running = False

    def add(self, gather: DeviceGather) -> None:
        """Advance a gather until its second step has begun; starts the thread if it does not run."""
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
            # Any of them may be the one that the others wait for.
            waiting = pending[0]
            pending = [each for each in pending[1:] if not each.advance(0)]
            if not waiting.advance(_SLICE_S):
                pending.append(waiting)


def _advanced_by_thread(ctx: Context, gather: DeviceGather) -> DeviceGather:
    if ctx.gathers is None:
        ctx.gathers = GatherThread()
    ctx.gathers.add(gather)
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
    """Submit tensors of one type, of one dimension at least; `is_awaited`: the caller waits at once."""
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
    """Submit a tensor of one dimension at least; `is_awaited`: the caller waits at once."""
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
    """Return the rows for each rank; wrong ones are refused before any rank waits for them."""
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
            f"process set, and together at most the {rows} rows that there are."
        )
    return list(splits)


def _numbers(exchange: Work, name: str, members: int, each: int) -> list[list[int]]:
    """Return the exchanged numbers, `each` per rank, rank after rank."""
    output = exchange.output()
    if any(count != each for count in output.rows):
        raise MismatchError(
            f"{name}: ranks disagree on the number of tensors; it is {list(output.rows)} by rank. Give as many on every "
            "rank."
        )
    # The engine's memory, which lives as long as `exchange`.
    numbers = (_INT64 * (members * each)).from_address(output.address)
    return [[int(n) for n in numbers[r * each : (r + 1) * each]] for r in range(members)]


def _view(source: Tensor, target: Tensor) -> TensorView:
    """Return an operand; a tensor without elements has address 0, which would mean that the engine allocates the output."""
    return TensorView(source.data_ptr(), target.data_ptr() or 1, source.shape)
