"""Communication hooks for DDP: `ddp_hook` reduces in registered memory, `powersgd_hook` compresses.

Annotations here are not strings, because torch compares a hook's annotations with its own types.
"""

import ctypes
import weakref
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.utils.weak import WeakIdKeyDictionary

from sparkhvd.distributed.process_group import Group
from sparkhvd.distributed.work import OperationNames, Work, as_torch
from sparkhvd.engine.calls import Call
from sparkhvd.engine.engine import Engine
from sparkhvd.engine.library import Collective, ReduceOp
from sparkhvd.errors import CollectiveError, InvalidArgumentError
from sparkhvd.torch.compressors import NoneCompressor
from sparkhvd.torch.gradients.dense import GradientSlot, ReduceOptions
from sparkhvd.torch.gradients.powersgd import LowRankBucket, PowerSGD
from sparkhvd.torch.registered import over_buffer

# Number of reductions of each bucket in a group, by the bucket's first parameter. The buffer cannot be the key, because
# a rank that waits in torch's `Join` has other buffers for the bucket and must count alike.
_times: Any = WeakIdKeyDictionary()
# For each buffer of a bucket the group that owns its registered memory. DDP uses the same tensor as long as it keeps
# the bucket.
_homes: Any = WeakIdKeyDictionary()


def ddp_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket, in registered memory without copies if `gradient_as_bucket_view=True`.

    For `model.register_comm_hook(None, ddp_hook)` with `gradient_as_bucket_view=True`: buckets and gradients move to registered
    memory once, in the second step after DDP has created them. Gradients equal plain DDP's, up to the rounding of the division.

    Args:
        process_group: of the model; None = the default one. Its backend is "sparkhvd".
        bucket: DDP's, on the CPU; on a GPU it is reduced in place.

    Raises:
        InvalidArgumentError: the group's backend is not "sparkhvd", or there is not enough memory.
    """
    group, buffer = _ours("ddp_hook", process_group), bucket.buffer()
    if buffer.is_cpu and not buffer.is_sparse and buffer.numel():
        # Try to register in the steps 2, 3, 5, 9, ...: not in the first, because DDP rebuilds its buckets after it, and
        # in later steps for the buckets of a new DDP over the same parameters.
        times = _count(group, bucket)
        if times & (times - 1) == 0 and times > 0:
            try:
                _register(group, bucket)
            except CollectiveError as error:
                return _first(group.launcher.failed(error, [buffer]))
    work: Any = dist.all_reduce(buffer, dist.ReduceOp.AVG, group=group, async_op=True)
    return _first(work)


class PowerSGDState:
    """State of `powersgd_hook` for a model: low-rank matrices and the error of each gradient.

    Args:
        process_group: process group of the model; None means the default group.
        rank: columns of the two matrices that approximate a gradient.
        warm_up_steps: first steps whose gradients are sent uncompressed.

    Attributes:
        compression: has `state_dict()` and `load_state_dict()`, as of `hvd.Compression.powersgd`.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        rank: int = 4,
        warm_up_steps: int = 0,
    ) -> None:
        self.process_group = process_group
        self.compression = PowerSGD(rank=rank, warm_up_steps=warm_up_steps)
        # By id of the parameter; the entry keeps the parameter alive.
        self._entries: dict[int, GradientSlot] = {}
        self._buckets: dict[tuple[int, ...], LowRankBucket] = {}

    def entry(self, param: Tensor) -> GradientSlot:
        """Get or create a parameter's entry.

        Every rank must ask for parameters in the same order.
        """
        found = self._entries.get(id(param))
        if found is None:
            number = len(self._entries)
            found = GradientSlot(number, f"parameter.{number}", param, param.dtype)
            self.compression.claim([found])
            self._entries[id(param)] = found
        return found

    def low_rank(self, entries: list[GradientSlot], group: Group) -> LowRankBucket:
        """Get or create the bucket to reduce these parameters as two matrices each."""
        key = tuple([entry.index for entry in entries])
        if key not in self._buckets:
            team = group.launcher.team
            options = ReduceOptions(
                ReduceOp.AVERAGE,
                predivide=1.0,
                compression=NoneCompressor,
                passes=1,
                sparse_as_dense=False,
                bucket_bytes=0,
                process_set=team.process_set,
                ranks=team.ranks,
            )
            self._buckets[key] = LowRankBucket("", entries, options, self.compression, tuple)
        return self._buckets[key]


def powersgd_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket with PowerSGD, as thin matrices with error feedback. See `hvd.Compression.powersgd`.

    For `model.register_comm_hook(PowerSGDState(rank=4), powersgd_hook)`. Gradients of float32 and float64 with two dimensions
    or more are compressed if that makes them at least four times smaller. Others, and sparse gradients, are averaged uncompressed.

    Args:
        state: of this model alone.
        bucket: DDP's, on the CPU.

    Raises:
        InvalidArgumentError: the bucket is on a GPU, or the group's backend is not "sparkhvd".
    """
    group, buffer = _ours("powersgd_hook", state.process_group), bucket.buffer()
    passes = group.launcher.passes
    if not buffer.is_cpu:
        raise InvalidArgumentError(
            f"powersgd_hook: the gradients are on {buffer.device}, but the hook needs the CPU. Use torch's powerSGD_hook, "
            "which runs on any backend."
        )
    if buffer.is_sparse:  # a sparse bucket has a single parameter
        return ddp_hook(state.process_group, bucket)
    entries = [state.entry(param) for param in bucket.parameters()]
    plain, due = [], []
    for entry, grad in zip(entries, bucket.gradients(), strict=True):
        is_whole = grad.is_contiguous() and grad.dtype in (torch.float32, torch.float64)
        if is_whole and state.compression.is_due(entry):
            entry.grad = _alone(grad)
            due.append(entry)
        else:
            plain.append(grad)
    state.compression.count_step(entries)
    options: Any = dist.AllreduceCoalescedOptions()
    options.reduceOp = dist.ReduceOp.AVG
    rest: Any = group.allreduce_coalesced(plain, options)
    if not due:
        names = OperationNames(f"{group.launcher.name}.sgd")
        return _first(Work(rest.operations, [buffer], rest.wait, names, passes))
    low = state.low_rank(due, group)
    low.name = group.launcher.scope.name()
    engine = group.launcher.team.engine
    try:
        low.start(engine)
    except CollectiveError as error:
        return _first(group.launcher.failed(error, [buffer]))
    finish = partial(_second_round, low, engine, rest)
    first: Any = low.work
    names = OperationNames(low.name)
    return _first(Work([*rest.operations, first], [buffer], finish, names, passes))


def _second_round(low: LowRankBucket, engine: Engine, rest: Work) -> None:
    rest.wait()
    low.start_second_round(engine)
    low.wait()
    low.reset()


def _first(work: Any) -> torch.futures.Future[torch.Tensor]:
    """Make a future of a work's only tensor, as DDP expects it."""
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(
        lambda done: done.value()[0]
    )
    return future


def _ours(what: str, process_group: dist.ProcessGroup | None) -> Group:
    group: object = process_group if process_group is not None else dist.group.WORLD
    if not isinstance(group, Group):
        raise InvalidArgumentError(
            f"{what}: the process group is a {type(group).__name__}. Give the model's process group, with backend 'sparkhvd'."
        )
    return group


def _home(group: Group) -> tuple[weakref.ref[Engine], int]:
    return weakref.ref(group.launcher.team.engine), group.launcher.team.process_set


def _count(group: Group, bucket: GradBucket) -> int:
    """Count a reduction of this bucket and return the number of earlier reductions."""
    key, buffer = bucket.parameters()[0], bucket.buffer()
    kind = (_home(group), buffer.numel(), buffer.dtype)
    found, times = _times.get(key, (kind, 0))
    times = times if found == kind else 0
    _times[key] = kind, times + 1
    return times


def _register(group: Group, bucket: GradBucket) -> None:
    """Move a bucket to registered memory if its gradients are views of the bucket on every rank."""
    buffer, grads = bucket.buffer(), [param.grad for param in bucket.parameters()]
    old = buffer.untyped_storage().data_ptr()
    are_views = [
        grad is not None
        and grad.layout is torch.strided
        and grad.untyped_storage().data_ptr() == old
        for grad in grads
    ]
    is_elsewhere = _homes.get(buffer) != _home(group)
    agreed = torch.tensor(is_elsewhere and all(are_views) and buffer.storage_offset() == 0)
    dist.all_reduce(agreed, dist.ReduceOp.MIN, group=group)
    if not agreed:
        return
    # Allocate as `Engine.allocate` does, but with the group's timeout.
    team = group.launcher.team
    call = Call(Collective.REGISTER, process_set=team.process_set, numbers=(buffer.nbytes,))
    name, timeout_s = group.launcher.scope.name(), group.launcher.timeout_s
    try:
        work = team.engine.start(call, name, None, timeout_s)
        work.wait()
    except CollectiveError as error:
        raise as_torch(error) from None
    memory = over_buffer(work.buffer(), buffer.dtype, buffer.numel())
    memory.copy_(buffer)
    # Change the gradients' memory in place, because DDP checks at the end of the pass that they are its own tensors.
    for grad in grads:
        assert grad is not None
        grad.data = memory.as_strided(grad.size(), grad.stride(), grad.storage_offset())
    buffer.data = memory
    _homes[buffer] = _home(group)


def _alone(grad: Tensor) -> Tensor:
    """Wrap the memory in a tensor with its own storage object, to write results into it."""
    memory = (ctypes.c_char * grad.nbytes).from_address(grad.data_ptr())
    return torch.frombuffer(memory, dtype=grad.dtype).view(grad.shape)
