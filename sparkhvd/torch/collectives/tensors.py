"""Prepare tensors for the engine: element types, checks, memory, autograd."""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from sparkhvd.engine.calls import Reduction, TensorView
from sparkhvd.engine.library import DType, ReduceOp
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.arguments import to_factor
from sparkhvd.torch.context import context
from sparkhvd.torch.process_sets import ProcessSet, set_id

_Arguments = TypeVar("_Arguments")

DTYPES: dict[torch.dtype, DType] = {
    torch.uint8: DType.UINT8,
    torch.int8: DType.INT8,
    torch.uint16: DType.UINT16,
    torch.int16: DType.INT16,
    torch.uint32: DType.UINT32,
    torch.int32: DType.INT32,
    torch.uint64: DType.UINT64,
    torch.int64: DType.INT64,
    torch.float16: DType.FLOAT16,
    torch.bfloat16: DType.BFLOAT16,
    torch.float32: DType.FLOAT32,
    torch.float64: DType.FLOAT64,
    torch.bool: DType.BOOL,
}


class Saved(Protocol[_Arguments]):
    """Autograd's context, with the arguments of `forward` for `backward`."""

    arguments: _Arguments


def engine_dtype(what: str, tensor: Tensor) -> DType:
    """The engine's element type of a tensor.

    Raises:
        InvalidArgumentError: the engine does not support the tensor.
    """
    if (
        # Test for the usual type first, because every operation runs this.
        (type(tensor) is Tensor or (isinstance(tensor, Tensor) and not _is_dtensor(tensor)))
        and (tensor.is_cpu or tensor.is_cuda)
        and tensor.layout is torch.strided
    ):
        dtype = DTYPES.get(tensor.dtype)
        if dtype is not None:
            return dtype
    raise InvalidArgumentError(_refusal(what, tensor))


def _is_dtensor(tensor: Tensor) -> bool:
    """Check whether each rank holds only a part of the tensor, as with FSDP2. Does not import DTensor."""
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return False
    # torch 2.4 has DTensor in the second module only.
    for module in ("torch.distributed.tensor", "torch.distributed._tensor"):
        if kind := getattr(sys.modules.get(module), "DTensor", None):
            return isinstance(tensor, kind)
    return False


def _refusal(what: str, tensor: object) -> str:
    if not isinstance(tensor, Tensor):
        return f"{what}: expected a torch.Tensor, got {type(tensor).__name__}. Wrap it with torch.as_tensor()."
    if _is_dtensor(tensor):
        return (
            f"{what}: the tensor is a DTensor (FSDP2, tensor parallelism). Each rank holds only a part of it, and torch "
            "reduces its gradients. Give the plain model, before fully_shard() or parallelize_module(), or send "
            "tensor.to_local()."
        )
    if not (tensor.is_cpu or tensor.is_cuda):
        return (
            f"{what}: the tensor is on {tensor.device}, but sparkhvd supports only the CPU and NVIDIA GPUs. "
            "Move it with .cpu() or .cuda()."
        )
    if tensor.layout is not torch.strided:
        return (
            f"{what}: the tensor has layout {tensor.layout}, but only dense tensors can be sent. "
            "Convert it with .to_dense()."
        )
    if tensor.is_complex():
        return (
            f"{what}: dtype {tensor.dtype} is not supported, like every complex dtype here. Send its real and imaginary "
            "parts, torch.view_as_real(tensor)."
        )
    return (
        f"{what}: dtype {tensor.dtype} is not supported. Convert the tensor to one of "
        f"{', '.join(str(known).removeprefix('torch.') for known in DTYPES)}."
    )


def by_dtype(what: str, tensors: Sequence[Tensor]) -> dict[tuple[DType, bool], list[int]]:
    """Group tensors' indices by (element type, is on the CPU), because an operation has one type and one device."""
    parts: dict[tuple[DType, bool], list[int]] = {}
    for index, tensor in enumerate(tensors):
        parts.setdefault((engine_dtype(what, tensor), tensor.is_cpu), []).append(index)
    return parts


def require_contiguous(what: str, tensor: Tensor) -> None:
    """Check that an in-place operation can write into the tensor's own memory."""
    if tensor.is_neg():
        raise InvalidArgumentError(
            f"{what}: an in-place operation needs the tensor's values in memory, but the memory has them with the opposite "
            "sign (torch's negative bit, as in z.conj().imag). Use the form without the final underscore, or "
            ".resolve_neg()."
        )
    if tensor.is_conj():
        raise InvalidArgumentError(
            f"{what}: an in-place operation needs the tensor's values in memory, but the memory has their conjugates "
            "(torch's conjugate bit, as in z.conj()). Use the form without the final underscore, or .resolve_conj()."
        )
    if not tensor.is_contiguous():
        raise InvalidArgumentError(
            f"{what}: an in-place operation needs a contiguous tensor, got shape {tuple(tensor.shape)} with "
            f"strides {tensor.stride()}. Use the form without the final underscore, or .contiguous()."
        )


def paired(shape: Sequence[int], dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
    """Compute the engine's shape and dtype of a tensor.

    A complex number becomes a pair of real numbers.
    """
    return ((*shape, 2), dtype.to_real()) if dtype.is_complex else (tuple(shape), dtype)


def as_pairs(what: str, tensor: Tensor, op: ReduceOp, *, in_place: bool) -> Tensor:
    """Convert complex numbers to pairs of real numbers, with the same sums.

    Other tensors stay unchanged.

    Raises:
        InvalidArgumentError: the reduction is undefined for complex numbers, or cannot be done in place.
    """
    if not (isinstance(tensor, Tensor) and tensor.is_complex()):
        return tensor
    if tensor.layout is not torch.strided or _is_dtensor(tensor):
        raise InvalidArgumentError(_refusal(what, tensor))
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise InvalidArgumentError(
            f"{what}: op={op.name.title()} is not defined for complex numbers. Use Sum or Average, or send "
            "torch.view_as_real(tensor)."
        )
    if in_place:
        require_contiguous(what, tensor)
    return torch.view_as_real(tensor.detach().resolve_conj())


def as_sent(tensor: Tensor) -> Tensor:
    """Make the tensor row-major and resolve its signs, as the engine needs it.

    It is copied only if necessary.
    """
    return tensor.detach().contiguous().resolve_neg()


def view(source: Tensor, target: Tensor | None) -> TensorView:
    """Describe contiguous tensors of one shape to the engine.

    Without a target the engine allocates the result.
    """
    address = source.data_ptr()
    output = address if target is source else 0 if target is None else target.data_ptr()
    # The constructor of the named tuple takes twice the time.
    return tuple.__new__(TensorView, (address, output, source.shape))


def lend(*tensors: Tensor) -> list[torch.UntypedStorage]:
    """Get tensors' storages for the engine. The caller keeps them until the engine has finished.

    Keeping the tensors is not enough: `tensor.data = other`, as in `module.to()`, replaces a tensor's memory.
    """
    return [tensor.untyped_storage() for tensor in tensors]


def wants_gradient(tensor: Tensor) -> bool:
    """Check whether autograd must record the operation."""
    return isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled()


def written(tensors: Sequence[Tensor]) -> None:
    """Tell autograd that the engine has written into these tensors."""
    for tensor in tensors:
        if not tensor.is_inference():
            increment_version(tensor)


def gradient_name(name: str | None) -> str | None:
    """Derive the backward collective's name from the forward collective's."""
    return None if name is None else f"{name}.gradient"


# ----------------------------------------------------------------------------------------------------
# `Handle`: an operation in flight, for `poll` and `synchronize`.

_Result = TypeVar("_Result")


class Operation(Protocol):
    """An operation in flight: the engine's `Work`, or an operation on a GPU."""

    def done(self) -> bool:
        """Check whether the operation has finished, on the GPU too, or raise its error."""

    def wait(self) -> None:
        """Wait until the host, or this thread's current stream of the GPU, may use the result."""


class Handle(Generic[_Result]):
    """An operation in flight, for `poll` and `synchronize`.

    Args:
        name: name of the operation.
        works: the engine's operations that must finish.
        finish: returns the result after `works` have finished.
        changed: the user's tensors that the engine overwrites.
    """

    __slots__ = ("_changed", "_finish", "_result", "_works", "name")

    def __init__(
        self,
        name: str,
        works: Sequence[Operation],
        finish: Callable[[], _Result],
        changed: Sequence[Tensor] = (),
    ) -> None:
        self.name = name
        self._works = works
        self._changed = changed
        self._finish: Callable[[], _Result] | None = finish
        self._result: _Result

    def __repr__(self) -> str:
        return f"<Handle {self.name!r}>"

    def done(self) -> bool:
        """Check whether `wait` would return at once, or raise the errors of `wait`."""
        return all([work.done() for work in self._works])

    def wait(self) -> _Result:
        """Wait and return the result. Later calls return the same object."""
        for work in self._works:
            work.wait()
        if self._finish is not None:
            self._works = ()  # frees the memory that the operations kept alive
            written(self._changed)
            self._changed = ()
            self._result = self._finish()
            self._finish = None
        return self._result


def poll(handle: Handle[_Result]) -> bool:
    """Whether `synchronize(handle)` would return without waiting.

    Raises:
        InvalidArgumentError: `handle` does not come from an asynchronous call of this module, or the ranks
            disagreed (`MismatchError`).
        CollectiveError: the set of ranks changed.
    """
    return _checked(handle).done()


def synchronize(handle: Handle[_Result]) -> _Result:
    """Wait for an asynchronous operation and return its result.

    Raises:
        InvalidArgumentError: `handle` does not come from an asynchronous call of this module.
        MismatchError: the ranks disagreed on shape, dtype or operation; raised on every rank.
        CollectiveTimeoutError: a rank did not submit in time; the message names it.
        PeerLostError: a rank is gone; the contents of the tensors are undefined.
    """
    return _checked(handle).wait()


def _checked(handle: Handle[_Result]) -> Handle[_Result]:
    if not isinstance(handle, Handle):
        raise InvalidArgumentError(
            f"{handle!r} is not a handle. Give the result of an asynchronous call such as allreduce_async."
        )
    return handle


# ----------------------------------------------------------------------------------------------------
# A group of tensors becomes one operation per element type and device (CPU, GPU). All of them succeed or all fail.
# Each operation carries a digest of the whole group. If the ranks' groups differ, the engine refuses every operation
# that exists on all ranks. The first operation always does, because it has the group's own name. An operation that
# exists on some ranks only never runs, and stays in flight until its timeout.

_FLOATS = {DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64}

# Added to a tensor's part of the digest, by whether the tensor is on a GPU.
_GPU: tuple[tuple[str, ...], ...] = ((), ("gpu",))

# Function that submits a part of the group. Arguments: name, element type, indices of the tensors, digest.
Start = Callable[[str, DType, list[int], tuple[int, ...]], Operation]


def start_group(
    name: str,
    tensors: Sequence[Tensor],
    start: Start,
    reduction: Reduction | None = None,
    first_dimensions_differ: bool = False,
) -> list[Operation]:
    """Submit a group of tensors as one operation per element type and device.

    Args:
        name: name of the group.
        tensors: the group.
        start: submits a part of the group.
        reduction: the reduction, for kinds of operations that reduce.
        first_dimensions_differ: whether ranks may have different first dimensions, as in an allgather.
    """
    parts = by_dtype(name, tensors)
    digest: tuple[int, ...] = ()
    if len(parts) > 1:
        if reduction is not None:
            _check(name, [dtype for dtype, _ in parts], reduction)
        kinds = [
            (str(x.dtype), tuple(x.shape[int(first_dimensions_differ) :]), *_GPU[not x.is_cpu])
            for x in tensors
        ]
        whole = hashlib.sha256(repr(kinds).encode()).digest()
        digest = (int.from_bytes(whole[:7], "little"),)
    started: list[Operation] = []
    for (dtype, is_cpu), indices in parts.items():
        part = name
        if started:
            part = f"{name}.{dtype.name.lower()}{'' if is_cpu else '.gpu'}"
        started.append(start(part, dtype, indices, digest))
    return started


def _check(name: str, dtypes: Sequence[DType], reduction: Reduction) -> None:
    """Refuse a reduction unsupported by some types, before any part of the group is in flight."""
    is_plain = reduction == Reduction(reduction.op) and reduction.op != ReduceOp.AVERAGE
    for dtype in dtypes:
        if dtype == DType.BOOL and not is_plain:
            raise InvalidArgumentError(
                f"{name}: a tensor of the group is bool, which has no Average and cannot be scaled. Use Sum or Max "
                'for "or", or convert it.'
            )
        if reduction.op == ReduceOp.ADASUM and dtype not in _FLOATS:
            raise InvalidArgumentError(
                f"{name}: Adasum needs floating-point tensors, but a tensor of the group is {dtype.name.lower()}."
            )


# ----------------------------------------------------------------------------------------------------
# Arguments of reductions. The public functions check them once and combine them into a `ReductionRequest`.

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT
_NAMED = (Average, Sum, Adasum, Min, Max, Product)  # a subset of the engine's reductions

# Shared objects for reductions without factors, which are the usual case, to save time.
_WITHOUT_FACTORS = {op: Reduction(op) for op in ReduceOp}


class ReductionRequest(NamedTuple):
    """A reduction as the caller requested it.

    Attributes:
        kind: kind of operation and prefix of its name: "allreduce", "grouped_allreduce", ...
        name: the caller's name; None numbers the operation.
        reduction: operation and factors.
        process_set: the ranks that take part.
    """

    kind: str
    name: str | None
    reduction: Reduction
    process_set: ProcessSet

    def of_gradient(self) -> ReductionRequest:
        """Make the request of the backward pass, with a name derived from this request's name."""
        return self._replace(name=gradient_name(self.name))


def to_request(
    kind: str,
    name: str | None,
    op: ReduceOp,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> ReductionRequest:
    """Combine the arguments of a public function.

    Raises:
        InvalidArgumentError: a factor is not a number.
    """
    # Usually both are floats, and then the calls are not worth their time.
    if type(prescale_factor) is not float or type(postscale_factor) is not float:
        try:
            prescale_factor = to_factor(kind, "prescale_factor", prescale_factor)
            postscale_factor = to_factor(kind, "postscale_factor", postscale_factor)
        except InvalidArgumentError as error:
            # Use up a number for the refused operation. Otherwise this rank's next unnamed operation would match the
            # other ranks' current operation.
            operation = context().name(kind, name, set_id(process_set))
            raise InvalidArgumentError(f"{operation}{str(error).removeprefix(kind)}") from None
    if prescale_factor == postscale_factor == 1.0:
        reduction = _WITHOUT_FACTORS[op]
    else:
        reduction = Reduction(op, prescale_factor, postscale_factor)
    # The constructor of the named tuple takes twice the time.
    return tuple.__new__(ReductionRequest, (kind, name, reduction, process_set))


def resolve_op(average: bool | None, op: ReduceOp | int | None) -> ReduceOp:
    """Resolve `op`, or the deprecated `average`, to a reduction."""
    if average is None:
        if op is None:
            return Average
        return op if type(op) is ReduceOp else to_op(op)
    if op is not None:
        raise InvalidArgumentError(
            f"average={average!r} and op={op!r} were both given. op replaces average: give op alone."
        )
    warnings.warn(
        "average= is deprecated; give op=hvd.Average or op=hvd.Sum.",
        DeprecationWarning,
        stacklevel=3,
    )
    return Average if average else Sum


def to_op(op: ReduceOp | int) -> ReduceOp:
    """Convert `hvd.Average`, `hvd.Sum`, ... or their numbers to a `ReduceOp`."""
    try:
        return ReduceOp(op)
    except ValueError:
        names = ", ".join(f"hvd.{each.name.title()}" for each in _NAMED)
        raise InvalidArgumentError(f"op={op!r} is not a reduction. Give one of {names}.") from None


def check_linear(operation: str, op: ReduceOp) -> None:
    """Refuse the gradient of a nonlinear reduction."""
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise InvalidArgumentError(
            f"{operation}(op={op.name.title()}) has no gradient. Use Average or Sum, or detach the tensor."
        )
