"""`send` and `recv`: a tensor from one rank to another. No other rank takes part."""

from __future__ import annotations

from torch import Tensor

from sparkhvd.engine.calls import Call
from sparkhvd.engine.library import Collective
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.arguments import to_integer
from sparkhvd.torch.collectives.tensors import (
    Handle,
    as_sent,
    engine_dtype,
    lend,
    require_contiguous,
    view,
    written,
)
from sparkhvd.torch.context import Context, context
from sparkhvd.torch.process_sets import ProcessSet, global_process_set, set_id

_ANY_RANK = -1


def send_async(
    tensor: Tensor,
    dst: int,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
    timeout_s: float | None = None,
) -> Handle[None]:
    """Start a `send`. `tensor` must not be changed before `synchronize` has returned."""
    source = as_sent(tensor)
    ctx = context()
    call, name = _prepare(ctx, Collective.SEND, "send", source, dst, tag, process_set)
    return Handle(name, (ctx.engine.start(call, name, lend(source), timeout_s),), lambda: None)


def send(
    tensor: Tensor,
    dst: int,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
    timeout_s: float | None = None,
) -> None:
    """Send a tensor to one rank. The receiver calls `recv`.

    Messages from one rank to another with one tag arrive in the order in which they were sent. `send` of a small message
    (up to 64 KiB) may return before the receiver has it; of a larger message it returns when the receiver has its
    bytes. Messages and collectives do not wait for each other, and may be submitted in any order.

    Args:
        tensor: on the CPU; not modified.
        dst: the global rank of the receiver. It may be this rank, if it receives asynchronously.
        tag: from 0 to 2**31 - 1; must equal the receiver's.
        process_set: contains both ranks; messages of different sets never match.
        timeout_s: longest wait for the receiver; None is `Settings.stall_shutdown_s`.

    Raises:
        InvalidArgumentError: an argument is wrong, or the tensor is on a GPU.
        MismatchError: the receiver's tensor has another number of elements or dtype (reported for large messages only).
        CollectiveTimeoutError: the receiver did not receive it in time; the engine stays usable.
        PeerLostError: a rank is gone.
        CollectiveError: the receiver has shut down.
    """
    source = as_sent(tensor)
    ctx = context()
    call, name = _prepare(ctx, Collective.SEND, "send", source, dst, tag, process_set)
    ctx.engine.run(call, name, lend(source), timeout_s)


def recv_async(
    tensor: Tensor,
    src: int | None = None,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
    timeout_s: float | None = None,
) -> Handle[int]:
    """Start a `recv` into `tensor`. `synchronize` returns the sender's rank."""
    ctx = context()
    rank = _ANY_RANK if src is None else src
    call, name = _prepare(ctx, Collective.RECEIVE, "recv", tensor, rank, tag, process_set)
    work = ctx.engine.start(call, name, lend(tensor), timeout_s)
    return Handle(name, (work,), lambda: work.output().rows[0], changed=(tensor,))


def recv(
    tensor: Tensor,
    src: int | None = None,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
    timeout_s: float | None = None,
) -> int:
    """Receive a tensor from another rank's `send`.

    Args:
        tensor: contiguous, on the CPU, with the sender's number of elements and dtype; overwritten.
        src: the global rank of the sender; None receives the next message of any rank of the process set.
        tag: as for `send`.
        process_set: as for `send`.
        timeout_s: longest wait for the sender; None is `Settings.stall_shutdown_s`.

    Returns:
        The sender's global rank.

    Raises:
        InvalidArgumentError, CollectiveTimeoutError, PeerLostError, CollectiveError: as for `send`.
        MismatchError: the sender's tensor has another number of elements or dtype; the message is lost.
    """
    if src is None:
        return recv_async(tensor, src, tag, process_set, timeout_s).wait()
    ctx = context()
    call, name = _prepare(ctx, Collective.RECEIVE, "recv", tensor, src, tag, process_set)
    ctx.engine.run(call, name, lend(tensor), timeout_s)
    written((tensor,))
    return src


def _prepare(
    ctx: Context,
    collective: Collective,
    kind: str,
    tensor: Tensor,
    rank: int,
    tag: int,
    process_set: ProcessSet,
) -> tuple[Call, str]:
    number = set_id(process_set)
    name = ctx.name(kind, None, number)
    dtype = engine_dtype(name, tensor)
    if not tensor.is_cpu:
        raise InvalidArgumentError(
            f"{name}: the tensor is on {tensor.device}, but messages need tensors on the CPU. Copy it with .cpu()."
        )
    if collective is Collective.RECEIVE:
        require_contiguous(name, tensor)
    peer, chosen_tag = to_integer(rank), to_integer(tag)
    if peer is None or chosen_tag is None:
        raise InvalidArgumentError(
            f"{name}: the rank is {rank!r} and the tag {tag!r}; both must be integers."
        )
    call = ctx.engine.prepare(
        collective,
        [view(tensor, tensor)],
        dtype,
        process_set=number,
        root_rank=peer,
        numbers=(chosen_tag,),
    )
    return call, name
