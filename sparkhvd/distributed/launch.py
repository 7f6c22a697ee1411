"""Launches of collectives in the order of a group: names, timeouts, waiting and asynchronous forms."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sparkhvd.distributed.work import (
    FINISHED,
    BackwardQueue,
    OperationNames,
    Work,
    as_torch,
    current_scope,
)
from sparkhvd.engine.calls import NO_REDUCTION, Call, Reduction, TensorView
from sparkhvd.engine.engine import Engine
from sparkhvd.engine.library import Collective, DType, ReduceOp
from sparkhvd.engine.work import Work as Operation
from sparkhvd.errors import CollectiveError, InvalidArgumentError, MismatchError
from sparkhvd.torch.collectives.tensors import DTYPES, lend
from sparkhvd.torch.gradients.reducer import in_backward, is_worth_overlapping

# A constant, because the lookup of an enumeration's member would slow every call.
_ALLREDUCE = Collective.ALLREDUCE


@dataclass(frozen=True)
class EngineGroup:
    """An engine and the ranks of a torch group in it.

    Attributes:
        engine: engine that runs the group's operations.
        process_set: the engine's number of the group's process set.
        ranks: the engine's rank for each rank of the group.
        is_own: whether the engine belongs to this group only and ends with it.
        generation: number of the default group in this engine, from 1. Operations of different generations never match.
        number: number of the group in its generation.
    """

    engine: Engine
    process_set: int
    ranks: tuple[int, ...]
    is_own: bool
    generation: int = 1
    number: int = 0


class CollectivePlan(NamedTuple):
    """A collective before its launch.

    Attributes:
        collective: kind of the collective.
        views: memory of the tensors.
        dtype: type of the tensors.
        keep: owners of the memory, kept until the collective has finished.
        reduction: the reduction, for kinds that reduce.
        root: root as a rank of the group.
        numbers: further arguments of the kind.
    """

    collective: Collective
    views: Sequence[TensorView]
    dtype: DType
    keep: object
    reduction: Reduction = NO_REDUCTION
    root: int = 0
    numbers: tuple[int, ...] = ()


# Function that moves results to torch's tensors; its argument has the engine's works if the launch needs rows.
Finish = Callable[[Sequence[Operation]], object]


class Launcher:
    """Launcher of a group's collectives. The ranks match them by their order in the group.

    All kinds share this order, so ranks that call different collectives get a `MismatchError` that names both.

    Attributes:
        overlaps: whether reductions of gradients start while backward runs; None if not decided yet.
    """

    def __init__(self, team: EngineGroup, name: str, timeout: timedelta) -> None:
        self.team = team
        self.timeout_s = timeout.total_seconds()  # of operations without a timeout
        self.name = f"torch{'' if team.generation == 1 else team.generation}.{name}"
        self.scope = OperationNames(self.name)
        self.passes = BackwardQueue()
        self._coalesced: list[Work] | None = None
        self.overlaps: bool | None = None

    def launch(
        self,
        plans: Sequence[CollectivePlan],
        opts: Any,
        outputs: Sequence[Tensor],
        finish: Finish | None = None,
        *,
        needs_rows: bool = False,
    ) -> Work:
        """Launch collectives as a single work of torch.

        Args:
            plans: the collectives; the same number on every rank.
            opts: torch's options: `timeout`, and `asyncOp` False if the caller waits at once.
            outputs: result of an asynchronous work and of its future.
            finish: called after the last collective.
            needs_rows: `finish` reads the rows of each rank from the engine's works.
        """
        timeout_s = self._timeout_s(opts)
        scope = current_scope() or self.scope
        engine = self.team.engine
        try:
            if not needs_rows and not getattr(opts, "asyncOp", True):
                for plan in plans:
                    engine.run(self._call(plan), scope.name(), plan.keep, timeout_s)
                if finish is not None:
                    finish(())
                return FINISHED
            names = [scope.name() for _ in plans]
            works = [
                engine.start(self._call(plan), name, plan.keep, timeout_s)
                for name, plan in zip(names, plans, strict=True)
            ]
        except (CollectiveError, MismatchError) as error:
            if in_backward() and getattr(opts, "asyncOp", True):
                return self.recorded(self.failed(error, outputs))
            raise as_torch(error) from None
        last = None if finish is None else partial(finish, works)
        return self.recorded(Work(works, outputs, last, OperationNames(names[0]), self.passes))

    def launch_one(self, plan: CollectivePlan, opts: Any, outputs: Sequence[Tensor]) -> Work:
        """Launch an asynchronous collective, in a backward pass only at the end of the pass unless overlapping helps."""
        if not in_backward() or self._coalesced is not None or self._is_overlapping():
            return self.launch((plan,), opts, outputs)
        name, timeout_s = (current_scope() or self.scope).name(), self._timeout_s(opts)
        engine = self.team.engine

        def start() -> Sequence[Operation]:
            return (engine.start(self._call(plan), name, plan.keep, timeout_s),)

        return Work((), outputs, None, OperationNames(name), self.passes, start)

    def failed(self, error: BaseException, outputs: Sequence[Tensor]) -> Work:
        """Create a failed work, to return in a backward pass, because DDP refuses later steps if a hook raises."""

        def start() -> Sequence[Operation]:
            raise error

        return Work((), outputs, None, OperationNames(self.name), self.passes, start)

    def _is_overlapping(self) -> bool:
        if self.overlaps is None:
            self.overlaps = is_worth_overlapping(self.team.engine, self.team.ranks)
        return self.overlaps

    def reduce_now(
        self, view: TensorView, dtype: DType, reduction: Reduction, keep: object, opts: Any
    ) -> None:
        """Reduce one tensor and wait, faster than `launch`."""
        team = self.team
        engine, scope = team.engine, current_scope() or self.scope
        call = engine.prepare(
            _ALLREDUCE, (view,), dtype, reduction, team.process_set, team.ranks[0]
        )
        try:
            engine.run(call, scope.name(), keep, self._timeout_s(opts))
        except (CollectiveError, MismatchError) as error:
            raise as_torch(error) from None

    def start_coalescing(self) -> None:
        """Record works from now on."""
        self._coalesced = []

    def recorded(self, work: Work) -> Work:
        """Record a work while works are coalesced, and return it."""
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def end_coalescing(self) -> Work:
        """Combine the works since `start_coalescing` into one work."""
        works, self._coalesced = self._coalesced or [], None

        def finish() -> None:
            for work in works:
                work.wait()

        outputs = [output for work in works for output in work.result()]
        return Work([each for work in works for each in work.operations], outputs, finish)

    def _call(self, plan: CollectivePlan) -> Call:
        team = self.team
        if not 0 <= plan.root < len(team.ranks):
            raise InvalidArgumentError(
                f"{plan.collective.name.lower()}: root rank {plan.root} is not in the group of {len(team.ranks)} ranks. Give a rank "
                f"from 0 to {len(team.ranks) - 1}."
            )
        return team.engine.prepare(
            plan.collective,
            plan.views,
            plan.dtype,
            plan.reduction,
            team.process_set,
            team.ranks[plan.root],
            plan.numbers,
        )

    def _timeout_s(self, opts: Any) -> float:
        given = getattr(opts, "timeout", None)
        if given is None or given.days < 0:  # torch's encoding of no timeout
            return self.timeout_s
        return float(given.total_seconds())


# ----------------------------------------------------------------------------------------------------
# torch's tensors as flat memory of the engine's types.

_Item = TypeVar("_Item")


class Flat(NamedTuple):
    """Contiguous numbers of a tensor, and a function to copy results back.

    Attributes:
        numbers: the numbers in one dimension, with a type that the engine supports.
        restore: copies the numbers to the caller's tensor; None if they are the tensor's own memory.
        shape: shape of the caller's tensor, in numbers; None means one dimension.
    """

    numbers: Tensor
    restore: Callable[[], object] | None
    shape: tuple[int, ...] | None = None

    @property
    def dtype(self) -> DType:
        """The engine's type of the numbers."""
        return DTYPES[self.numbers.dtype]

    @property
    def view(self) -> TensorView:
        """The numbers as input and output of an operation."""
        address = self.numbers.data_ptr()
        return TensorView(address, address, (self.numbers.numel(),))

    @property
    def shaped(self) -> TensorView:
        """`view` in the caller's shape, because the engine compares it across ranks."""
        address = self.numbers.data_ptr()
        shape = (self.numbers.numel(),) if self.shape is None else self.shape
        return TensorView(address, address, shape)


def is_plain(tensor: Tensor) -> bool:
    """Check that a tensor is on the CPU and contiguous, without torch's conjugate and negative bits."""
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


def moved(tensor: Tensor) -> Flat:
    """Prepare a tensor for an operation without arithmetic.

    Complex numbers become pairs, and unsupported types become bytes.
    """
    _check_dense(tensor)
    plain = tensor.detach()
    shape = tensor.shape if width(tensor) == 1 else (*tensor.shape, width(tensor))
    if is_plain(plain):
        return Flat(numbers_of(plain), None, shape)
    copy = plain.contiguous().resolve_conj().resolve_neg()
    return Flat(numbers_of(copy), lambda: plain.copy_(copy), shape)


def reduced(what: str, tensor: Tensor) -> Flat:
    """Prepare a tensor for a reduction.

    Raises:
        InvalidArgumentError: the engine does not reduce its type.
    """
    if tensor.dtype not in DTYPES and not tensor.is_complex():
        raise InvalidArgumentError(
            f"{what}: the tensor has dtype {tensor.dtype}, which no reduction supports. Convert it, for example "
            "with .float()."
        )
    return moved(tensor)


def numbers_of(plain: Tensor) -> Tensor:
    """View a contiguous tensor's memory as numbers in one dimension."""
    flat = plain.view(-1)
    if flat.dtype in DTYPES:
        return flat
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat.view(torch.uint8)


def bytes_of(tensor: Tensor) -> Tensor:
    """View a dense tensor's memory, or a copy, as bytes in one dimension."""
    return tensor.contiguous().resolve_conj().resolve_neg().view(-1).view(torch.uint8)


def _check_dense(tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or not tensor.is_cpu:
        where = tensor.layout if tensor.is_cpu else tensor.device
        raise InvalidArgumentError(
            f"backend 'sparkhvd': the tensor is {where}; this collective takes dense tensors on the CPU. Use "
            ".to_dense() or .cpu(). all_reduce also takes sparse tensors."
        )


def width(tensor: Tensor) -> int:
    """Count the numbers per element."""
    if tensor.dtype in DTYPES:
        return 1
    return 2 if tensor.is_complex() else tensor.dtype.itemsize


def only(what: str, items: Sequence[_Item]) -> _Item:
    """Unpack a list with one item.

    torch passes lists with a tensor per device, and a rank has one device.
    """
    if len(items) != 1:
        raise InvalidArgumentError(
            f"{what}: got {len(items)} tensors for one rank. Give one tensor; the coalesced forms take several."
        )
    return items[0]


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate the numbers of several tensors in new memory."""
    parts = [moved(tensor).numbers for tensor in tensors]
    return torch.cat(parts) if parts else torch.empty(0)


def split_flat(numbers: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy concatenated numbers to tensors."""
    first = 0
    for tensor in tensors:
        target = moved(tensor)
        count = target.numbers.numel()
        target.numbers.copy_(numbers[first : first + count])
        if target.restore is not None:
            target.restore()
        first += count


def reading(numbers: Tensor) -> TensorView:
    """Describe input numbers to the engine. It allocates memory for the result, if any."""
    return TensorView(numbers.data_ptr(), 0, (numbers.numel(),))


def reading_into(source: Tensor, target: Tensor) -> TensorView:
    """Describe input numbers, and memory for the result."""
    return TensorView(source.data_ptr(), target.data_ptr(), (source.numel(),), target.nbytes)


def owners(flats: Sequence[Flat]) -> object:
    """Return the memory of tensors, for the caller to keep until the engine has finished."""
    return lend(*[each.numbers for each in flats])


def restore(flat: Flat) -> None:
    """Copy the results to the caller's tensor, unless they are already in its memory."""
    if flat.restore is not None:
        flat.restore()


def write(flat: Flat, numbers: Tensor) -> None:
    """Write numbers into the caller's tensor."""
    flat.numbers.copy_(numbers)
    restore(flat)


def restoring(flats: Sequence[Flat]) -> Callable[[object], None] | None:
    """Make a function to restore several tensors, or None if not needed."""
    restores = [each.restore for each in flats if each.restore is not None]
    if not restores:
        return None

    def finish(_: object) -> None:
        for restore in restores:
            restore()

    return finish


def by_dtype(flats: Sequence[Flat]) -> list[tuple[DType, list[Flat]]]:
    """Group tensors by the engine's type, because an operation has one type."""
    parts: dict[DType, list[Flat]] = {}
    for flat in flats:
        parts.setdefault(flat.dtype, []).append(flat)
    return list(parts.items())


def room_for(like: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Allocate memory for the numbers of several tensors."""
    return like.new_empty(sum([tensor.numel() * width(tensor) for tensor in tensors]))


def received_numbers(work: Operation, dtype: torch.dtype) -> Tensor:
    """Copy the engine's result."""
    output = work.output()
    if not output.num_bytes:
        return torch.empty(0, dtype=dtype)
    memory = (ctypes.c_char * output.num_bytes).from_address(output.address)
    return torch.frombuffer(memory, dtype=dtype).clone()


# ----------------------------------------------------------------------------------------------------
# Conversion of torch's reductions to the engine's.

_Type: Any = dist.ReduceOp.RedOpType  # torch's type stub does not have the members
_SIMPLE = {
    _Type.SUM: Reduction(ReduceOp.SUM),
    _Type.AVG: Reduction(ReduceOp.AVERAGE),
    _Type.MIN: Reduction(ReduceOp.MIN),
    _Type.MAX: Reduction(ReduceOp.MAX),
    _Type.PRODUCT: Reduction(ReduceOp.PRODUCT),
    _Type.BAND: Reduction(ReduceOp.BIT_AND),
    _Type.BOR: Reduction(ReduceOp.BIT_OR),
    _Type.BXOR: Reduction(ReduceOp.BIT_XOR),
}
# Look up a ReduceOp by its hash, which is its kind, because reading and looking up the kind takes three times as long.
SIMPLE_BY_HASH = {hash(dist.ReduceOp(kind)): reduction for kind, reduction in _SIMPLE.items()}
_LINEAR = (_Type.SUM, _Type.AVG, _Type.PREMUL_SUM)


def reduction_of(what: str, op: Any, tensor: Tensor) -> Reduction:
    """Convert torch's reduction to the engine's, for a tensor like this.

    Raises:
        InvalidArgumentError: the reduction is undefined for the tensor's type.
    """
    kind = op.op
    if tensor.is_complex() and kind not in _LINEAR:
        raise InvalidArgumentError(
            f"{what}: op={kind.name} is not defined for complex numbers. Use SUM or AVG, or send "
            "torch.view_as_real(tensor)."
        )
    found = _SIMPLE.get(kind)
    if found is not None:
        return found
    if kind == _Type.PREMUL_SUM:
        return Reduction(ReduceOp.SUM, prescale=float(op.__getstate__()[1]))
    raise InvalidArgumentError(
        f"{what}: op={kind.name} is not supported. Use SUM, AVG, MIN, MAX, PRODUCT, PREMUL_SUM, BAND, BOR or BXOR."
    )


# ----------------------------------------------------------------------------------------------------
# Checks of arguments of torch's collectives, and of received rows.


def check_count(what: str, items: Sequence[object], size: int) -> None:
    """Check that a list has a tensor for each rank."""
    if len(items) != size:
        raise InvalidArgumentError(
            f"{what}: the list has {len(items)} tensors for {size} ranks. Give one for each rank of the group."
        )


def check_same(what: str, output: Tensor, tensor: Tensor) -> None:
    """Check that a rank's tensor matches its entry in the list."""
    if output.numel() != tensor.numel() or output.dtype != tensor.dtype:
        raise InvalidArgumentError(
            f"{what}: this rank's tensor has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, but its entry in the list has "
            f"{tuple(output.shape)} and {output.dtype}. Give both the same shape and dtype."
        )


def check_kinds(what: str, kinds: Sequence[str], own: int) -> None:
    """Check that all ranks' shapes and dtypes, as texts by rank, equal this rank's."""
    other = next((rank for rank, kind in enumerate(kinds) if kind != kinds[own]), None)
    if other is not None:
        raise MismatchError(
            f"{what}: the ranks disagree on shape or dtype. This rank sent {kinds[own]}, rank {other} of the group "
            f"{kinds[other]}. Give tensors of the same shape and dtype on every rank."
        )


def check_parts(what: str, part: Tensor, whole: Tensor, size: int) -> None:
    """Check that equal parts of all ranks add up to the whole."""
    if part.numel() * size != whole.numel() or part.dtype != whole.dtype:
        raise InvalidArgumentError(
            f"{what}: {size} parts of shape {tuple(part.shape)} and dtype {part.dtype} do not make a tensor of shape "
            f"{tuple(whole.shape)} and dtype {whole.dtype}. Give the whole the elements of all parts."
        )


def check_rows(what: str, work: Operation, tensors: Sequence[Tensor]) -> None:
    """Check that the rows received from each rank fit its tensor."""
    check_received(what, work, tuple([each.numel() * width(each) for each in tensors]))


def check_received(what: str, work: Operation, wanted: tuple[int, ...]) -> None:
    """Check that each rank sent as many numbers as its tensor has."""
    rows = work.output().rows
    if rows != wanted:
        raise MismatchError(
            f"{what}: the ranks sent {list(rows)} numbers, by rank, but this rank's tensors have room for {list(wanted)}. "
            "Give tensors of the sizes that the ranks send."
        )
