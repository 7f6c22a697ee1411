"""`DistributedOptimizer`: converts the user's optimizer to step with reduced gradients."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor

from sparkhvd.elastic import ElasticRendezvous
from sparkhvd.engine.library import ReduceOp
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.arguments import check_compression, to_integer
from sparkhvd.torch.collectives import Adasum, Average
from sparkhvd.torch.collectives.tensors import to_op
from sparkhvd.torch.compression import Compression
from sparkhvd.torch.compressors import Compressor
from sparkhvd.torch.context import context
from sparkhvd.torch.gradients.powersgd import stateless
from sparkhvd.torch.optimizer.adasum import DistributedAdasum, check_size
from sparkhvd.torch.optimizer.arguments import Configuration, check_arguments, group_lists
from sparkhvd.torch.optimizer.distributed import Distributed
from sparkhvd.torch.optimizer.sharded import Sharded, check_shardable
from sparkhvd.torch.optimizer.shards import unshare
from sparkhvd.torch.process_sets import ProcessSet, global_process_set, members, set_id

_Made = TypeVar("_Made", bound=torch.optim.Optimizer)


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp | int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    gradient_as_bucket_view: bool = False,
    sharded: bool = False,
    share_parameters: bool = False,
    synchronize_in_backward: bool = True,
) -> torch.optim.Optimizer:
    """Wrap an optimizer to step with gradients reduced over all ranks.

    Every rank must build it, with the same parameters in the same order; ranks that differ get a
    `MismatchError` in their first backward pass. Gradients are reduced in place, in buckets of
    `Settings.bucket_bytes`: while backward runs if cores are idle or several hosts take part, else after it.
    `backward()` (the last of `backward_passes_per_step`) returns when they are reduced, on a GPU as soon as the current
    stream waits for them. So code that clips, scales or logs `.grad` works as with DDP, and `synchronize()` before it has
    no effect. In earlier passes `.grad` is this rank's own. A rank without a backward pass joins the reduction in `step()`,
    so it must not run other collectives before. With Average a further pass before `step()` adds to the reduced
    gradients, and the sums are reduced again, as with DDP; with other reductions and `sharded` that is an error.
    Changes by a hook of `register_post_accumulate_grad_hook` are reduced, too; if backward overlaps, the hook must be
    registered before the optimizer is built. On a GPU the memory of reduced gradients is reused by the next ones:
    clone gradients that you keep beyond `zero_grad()`.

    A parameter without gradient on this rank counts as zero. A parameter without gradient on any rank keeps
    `grad=None` with Sum and Average, as in one process (with other reductions it is zero). Gradients of
    several passes add up and are not divided, as in torch and Horovod. Complex parameters are reduced as pairs of real
    numbers: on the CPU, with Sum and Average, without compression.

    The result's class is a subclass of the optimizer's own with the same name. It shares parameter groups and
    state with the given optimizer, which should no longer be used. Its `state_dict` is the plain optimizer's.
    A pickle or copy is the plain optimizer (a sharded optimizer refuses). With one rank nothing is communicated.

    Args:
        optimizer: any torch optimizer. With LBFGS the closure's loss is averaged too.
        named_parameters: `model.named_parameters()`, for messages; must name every parameter.
        compression: `Compression.fp16` or `.bf16` send half the bytes; `Compression.powersgd(rank=4)`, one object per
            optimizer, sends a few percent and the rest later, but not with sparse gradients or Adasum.
        backward_passes_per_step: passes whose gradients add up before they are reduced.
        op: Average, Sum, Min, Max, Product, or Adasum: then every rank steps with its own gradients, and `step()`
            combines the ranks' updates (2, 4, 8, ... ranks; on GPUs through the host). Gradients stay a rank's own, so a
            step that `GradScaler` skips on one rank must be skipped on all: use bfloat16 there.
        gradient_predivide_factor: with Average, divide by this before and by size / this after the sum. Gradients on
            GPUs, sparse gradients and PowerSGD ignore it.
        num_groups: deprecated; give `groups`.
        groups: a number of buckets, or lists of parameters that share one.
        sparse_as_dense: send sparse gradients as dense ones. Without it every rank gets the rows of all ranks,
            not coalesced; the first step with a gradient decides whether it is sparse.
        process_set: the ranks whose gradients are combined. On other ranks the result behaves as the given
            optimizer. Ranks in several sets may build one optimizer for each.
        gradient_as_bucket_view: gradients are in memory that the ranks of a host share (on GPUs in NCCL's), and
            are reduced in place. Then they are never None: `zero_grad` sets them to zero, and a parameter without a
            gradient has zeros. Pays if gradients are kept between steps; not with compression.
        sharded: every rank steps its part of the parameters and keeps only their optimizer state: 1/size of the
            memory and of the work. Weights equal the unsharded optimizer's. Element-wise optimizers of torch cut inside
            tensors; others get whole parameters; LBFGS is an error. `state_dict()` must be called on every rank, returns
            the plain state, and loads at any number of ranks. After `backward()` only this rank's part of `.grad` is
            reduced: clip with `optimizer.clip_grad_norm_(max_norm)`, or call `optimizer.synchronize()` on every rank before
            other changes (or read `param_groups`, as `GradScaler` does), which completes `.grad`. Other changes are an
            error of `step()`. Call `zero_grad()` in every step. Not with `join()`, nor with third-party optimizers that
            combine several parameters. Give `sparse_as_dense=True` for sparse gradients.
        share_parameters: with `sharded`, all ranks on one host: one copy of the parameters, with rank 0's values, so
            that nothing is exchanged after the step. No rank continues before every rank has stepped. Writing a
            parameter outside of `step()` is an error of the next step (except through `.data`, which torch does not
            report); write inside `optimizer.writing_parameters()`, also for `load_state_dict`. `model.state_dict()` is
            live, as always in torch; `copy.deepcopy` and `torch.save` are private. The memory stays shared after the
            optimizer's end, and with forked processes. After an error the values are undefined: load them again.
        synchronize_in_backward: False: `backward()` returns while gradients are in flight, and `step()` waits. Between
            the two the contents of `.grad` are undefined, and changes are an error of `step()`: call `synchronize()`
            before. For programs that run other collectives between the two on ranks without a backward pass.

    Raises:
        InvalidArgumentError: an argument is wrong.
        NotInitializedError: `init()` was not called.

    Cost: 2 (N-1)/N times the gradients' bytes per rank between hosts; inside a host, shared memory.
    """
    if isinstance(optimizer, (Distributed, DistributedAdasum)):
        raise InvalidArgumentError(
            "DistributedOptimizer: the optimizer is already a DistributedOptimizer. Give the plain optimizer."
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgumentError(
            f"DistributedOptimizer: expected an optimizer of torch, got {type(optimizer).__name__}. Give for example "
            "torch.optim.SGD(model.parameters(), lr=0.1)."
        )
    op = to_op(op)
    number, ranks = set_id(process_set), members(process_set)
    passes, predivide = check_arguments(op, backward_passes_per_step, gradient_predivide_factor)
    check_compression("DistributedOptimizer", compression)
    if gradient_as_bucket_view and (op is Adasum or compression is not Compression.none):
        raise InvalidArgumentError(
            "DistributedOptimizer: gradient_as_bucket_view=True reduces gradients in place, so it does not support "
            "compression or Adasum. Leave one of them out."
        )
    if share_parameters and not sharded:
        raise InvalidArgumentError(
            "DistributedOptimizer: share_parameters=True needs sharded=True, because only one rank may step each element "
            "of a shared parameter. Give sharded=True, or leave share_parameters out."
        )
    if num_groups:
        warnings.warn("num_groups= is deprecated; give groups=.", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if groups is not None and to_integer(groups) is None:
        groups = group_lists(groups)  # lists, because a sharded optimizer iterates twice
    # An elastic job that has one rank now may have more ranks later.
    is_elastic = isinstance(context().rendezvous, ElasticRendezvous)
    is_combined = op is Adasum and not sharded and (len(ranks) > 1 or is_elastic)
    if is_combined and context().engine.topology.rank in ranks:
        check_size(len(ranks))
        unshare(p for group in optimizer.param_groups for p in group["params"])
        combining = _subclass_of(optimizer, DistributedAdasum)
        combining._combine(context(), stateless(compression), process_set, named_parameters, groups)
        return combining
    configuration = Configuration(
        op=op,
        predivide=predivide,
        compression=compression,
        passes=passes,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        number=number,
        ranks=tuple(ranks),
        as_views=gradient_as_bucket_view,
        share_parameters=share_parameters,
        wait_in_backward=synchronize_in_backward,
    )
    if sharded:
        check_shardable(optimizer, configuration)
    made = _subclass_of(optimizer, Sharded if sharded else Distributed)
    made._plain = weakref.ref(optimizer)
    made._distribute(named_parameters, groups, configuration)
    return made


def _subclass_of(optimizer: torch.optim.Optimizer, base: type[_Made]) -> _Made:
    """Create an object with the optimizer's attributes, of a subclass with the mixin `base`."""
    kind = cast("type[_Made]", _distributed_class(type(optimizer), base))  # type: ignore[arg-type]
    made = kind.__new__(kind)
    # Leave out a `step` that an earlier LR scheduler has set on the instance, because it would bypass our `step`.
    made.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    # A class that wraps another optimizer may have `param_groups` as a property.
    made.__dict__.setdefault("param_groups", optimizer.param_groups)
    return made


@functools.cache
def _distributed_class(
    kind: type[torch.optim.Optimizer], base: type[torch.optim.Optimizer]
) -> type[torch.optim.Optimizer]:
    """Create the class with the mixin. A cache gives every call the same class."""
    return type(
        kind.__name__, (base, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__}
    )
