"""`DistributedOptimizer(sharded=True)`: every rank steps its part of the parameters and keeps only this part's state.

Every rank gets the gradients of its part (by a reducescatter) and steps the part. Then the ranks exchange the stepped
parameters (by an allgather). Both together send as many bytes as an allreduce, with 1/N of the optimizer's state and
work per rank. With `share_parameters` the ranks of a host step one copy of the parameters and exchange nothing.

**How the user's optimizer steps parts.** During its `step` the groups hold this rank's parts, which are views of the
parameters, instead of the parameters. Outside of it the groups are unchanged for hooks and schedulers. The keys of
`optimizer.state` are the parts.

**Where the work is done.** `shards` divides the parameters, `ParameterExchange` sends them to the other ranks after a step,
`WholeGradients` gathers and clips gradients, `sharded_state` divides and gathers state.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, NoReturn, SupportsIndex, cast

import torch
from torch import Tensor

from sparkhvd.engine.library import ReduceOp
from sparkhvd.engine.work import Work
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.collectives import allreduce
from sparkhvd.torch.collectives.allgathers import gathered, start_allgather
from sparkhvd.torch.collectives.tensors import written
from sparkhvd.torch.context import Context
from sparkhvd.torch.optimizer.arguments import Configuration
from sparkhvd.torch.optimizer.distributed import Distributed
from sparkhvd.torch.optimizer.sharded_state import (
    OwnState,
    divide_state,
    gather_state,
    join_states,
    own_state,
)
from sparkhvd.torch.optimizer.shards import Gatherer, Shard, ShardLayout


def check_shardable(optimizer: torch.optim.Optimizer, configuration: Configuration) -> None:
    """Refuse optimizers and arguments without support for `sharded=True`.

    Raises:
        InvalidArgumentError: the optimizer or an argument does not support `sharded=True`.
    """
    what = "DistributedOptimizer(sharded=True): "
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidArgumentError(
            f"{what}LBFGS combines all parameters and cannot be divided. Leave sharded out."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise InvalidArgumentError(
            f"{what}SparseAdam needs sparse gradients, but sharded=True supports only dense gradients. Leave sharded out, or "
            "use Adam and sparse_as_dense=True."
        )
    if configuration.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise InvalidArgumentError(
            f"{what}op is {configuration.op.name.title()}. Use Average or Sum, or leave sharded out."
        )
    if configuration.as_views:
        raise InvalidArgumentError(
            f"{what}gradient_as_bucket_view=True needs all gradients, but each rank gets only its part of them. Leave sharded or "
            "gradient_as_bucket_view out."
        )
    if not isinstance(configuration.compression, type):
        raise InvalidArgumentError(
            f"{what}{configuration.compression!r} needs whole gradients. Use Compression.fp16 or .bf16, or leave "
            "compression or sharded out."
        )


class Sharded(Distributed):
    """Mixin to step only this rank's part of the parameters with the user's optimizer class."""

    # An elastic `TorchState` makes it follow, because only the state restores parts of lost ranks.
    _may_follow = False
    _division: ShardLayout | None = None  # None if this rank has no other ranks to communicate with
    _evaluations = 0  # number of calls of the closure in this step

    # --- Dividing. ---

    def _prepare(
        self,
        parameters: Mapping[Tensor, str],
        groups: int | Sequence[Sequence[Tensor]] | None = None,
    ) -> None:
        if self._division is None:
            kind = type(self).__bases__[1]
            self._division = ShardLayout(self._context, self._configuration, kind)
            self._exchange = ParameterExchange(self._division)
            self._whole_gradients = WholeGradients(self._division)
            # For each reducer the number of the cycle whose whole gradients were last requested.
            self._asked_cycles: tuple[int, ...] = ()
        self._division.add(parameters, groups)
        self._whole_gradients.clear()
        self._divide_state()

    def _reduce(
        self,
        named: list[tuple[str, Tensor]],
        groups: int | Sequence[Sequence[Tensor]] | None = None,
    ) -> None:
        assert self._division is not None
        for (some, some_groups), is_sharded in self._division.reduced_apart(named, groups):
            self._add_reducer(some, some_groups, sharded=is_sharded)

    @property
    def _shards(self) -> Mapping[Tensor, Shard]:
        return _NONE if self._division is None else self._division.shards

    def follow(self, current: Context) -> None:
        """Divide the parameters among the new ranks. See `Distributed.follow`.

        The state of parts is dropped; call `load_own_states` afterwards.
        """
        for shard in self._shards.values():
            if shard.part is not None:
                self.state.pop(shard.part, None)
        self._division = None
        super().follow(current)

    # --- One step. ---

    def _apply(self, *closure: Callable[[], float], **options: Any) -> Any:
        if not self._shards:
            return super()._apply(*closure, **options)
        self._evaluations = 0
        with self._hooks_around(closure, options):
            if not closure:
                self._begin_step()
            with self._parts_in_groups():
                result = super()._apply(*closure, **options)
            self._end_step()
        return result

    @contextmanager
    def _hooks_around(
        self, closure: tuple[Callable[[], float], ...], options: dict[str, Any]
    ) -> Iterator[None]:
        """Call the user's step hooks around the block, because they must see whole gradients and parameters."""
        before, after = self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks
        if before and not closure:
            self._whole_gradients.gather(self._cycles)
        for hook in list(before.values()):
            if hook(self, (self, *closure), options) is not None:
                raise InvalidArgumentError(
                    "DistributedOptimizer(sharded=True): a step hook returned other arguments for step(), which sharded=True "
                    "does not support. Call step() with these arguments, or leave sharded out."
                )
        self._optimizer_step_pre_hooks = type(before)()
        self._optimizer_step_post_hooks = type(after)()
        try:
            yield
        finally:
            self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = before, after
        for hook in list(after.values()):
            hook(self, (self, *closure), options)

    def _evaluate(self, closure: Callable[[], float]) -> Any:
        if not self._shards:
            return super()._evaluate(closure)
        self._evaluations += 1
        if self._evaluations > 1:
            raise InvalidArgumentError(
                f"DistributedOptimizer(sharded=True): {type(self).__name__} calls its closure more than once per step. This is "
                "not supported, because the ranks exchange their stepped parameters only after the step. Leave sharded out."
            )
        parts = [group["params"] for group in self.__dict__["param_groups"]]
        self._put_in_groups(self._whole)
        loss = super()._evaluate(closure)
        self._put_in_groups(parts)
        self._begin_step()
        return loss

    @contextmanager
    def _parts_in_groups(self) -> Iterator[None]:
        # Bypass the property, which would wait for whole gradients.
        self._whole = [group["params"] for group in self.__dict__["param_groups"]]
        shards = self._shards
        parts = [[shards[p].part for p in ps if p.numel() > 0] for ps in self._whole]
        self._put_in_groups([[part for part in ps if part is not None] for ps in parts])
        try:
            yield
        finally:
            self._put_in_groups(self._whole)

    def _put_in_groups(self, parameters: Sequence[list[Tensor]]) -> None:
        for group, ps in zip(self.__dict__["param_groups"], parameters, strict=True):
            group["params"] = ps

    def _begin_step(self) -> None:
        assert self._division is not None
        if self._division.shared is not None:
            self._division.shared.begin()
        for shard in self._shards.values():
            shard.follow()
            shard.take_gradient()

    def _end_step(self) -> None:
        assert self._division is not None
        for shard in self._shards.values():
            shard.drop_gradient()
        for reducer in self._reducers:
            if reducer.options.sharded and not self._has_whole_gradients:
                reducer.remember()  # to detect a later backward pass that adds to these gradients
        if self._division.shared is not None:
            self._division.shared.end()
        else:
            self._exchange.run(self._frozen)

    # --- Whole gradients, on request. ---

    @property
    def _cycles(self) -> tuple[int, ...]:
        """The number of ended cycles of every reducer."""
        return tuple(reducer.cycle.count for reducer in self._reducers)

    @property
    def _has_whole_gradients(self) -> bool:
        return self._whole_gradients.cycles == self._cycles

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups.

        Reading them between `backward()` and `step()` gathers whole gradients. Every rank must then read them.
        """
        is_new = self._shards and self._asked_cycles != self._cycles
        if any([r.in_flight or (is_new and r.is_reduced) for r in self._reducers]):
            self.wait_for_gradients()
        return cast("list[dict[str, Any]]", self.__dict__["param_groups"])

    @param_groups.setter
    def param_groups(self, value: list[dict[str, object]]) -> None:
        self.__dict__["param_groups"] = value

    def _finish_gradients(self) -> None:
        for shard in self._shards.values():
            shard.follow()
        if self._shards and not self._has_whole_gradients:
            self._refuse_changes()
        super()._finish_gradients()
        self._asked_cycles = self._cycles

    def _refuse_changes(self) -> None:
        """Raise an error if the user changed gradients with only this rank's part reduced."""
        for reducer in self._reducers:
            added_to = reducer.cycle.added_to_kept
            if added_to:
                raise InvalidArgumentError(
                    f"DistributedOptimizer(sharded=True): a backward pass added the gradient of {added_to!r} to the gradient of "
                    "the last step, but only this rank's part of that gradient is reduced. Call zero_grad() in every step, or "
                    "synchronize() before step()."
                )
            name = (
                reducer.find_changed() if reducer.is_reduced and reducer.options.sharded else None
            )
            if name is not None:
                raise InvalidArgumentError(
                    f"DistributedOptimizer(sharded=True): the gradient of {name!r} was changed between backward() and step(), "
                    "when only this rank's part of it is reduced. Clip with optimizer.clip_grad_norm_(max_norm), or "
                    "call optimizer.synchronize() on every rank before you read or change gradients."
                )

    def synchronize(self) -> None:
        """Wait as `wait_for_gradients()` does. Then `step()` needs no `skip_synchronize()`."""
        self.wait_for_gradients()

    def wait_for_gradients(self) -> None:
        """Allgather whole gradients into `.grad`. The next `step()` does not wait again.

        `clip_grad_norm_` of this optimizer needs no whole gradients.
        """
        super().wait_for_gradients()
        if self._shards:
            self._whole_gradients.gather(self._cycles)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the norm of all gradients and return it.

        Each rank reads and scales only its own part.
        """
        self._finish_gradients()
        if self._division is None or not self._shards or self._has_whole_gradients:
            return super().clip_grad_norm_(max_norm, norm_type)
        total = clip_parts_(self._division, max_norm, norm_type)
        for reducer in self._reducers:
            reducer.remember()
        return total

    # --- Parameters and state. ---

    def writing_parameters(self) -> AbstractContextManager[None]:
        """Allow writes to shared parameters in the block. Every rank must enter and leave it.

        Every rank must write the same values, or only one rank may write. Without `share_parameters` the block has no
        effect.
        """
        shared = None if self._division is None else self._division.shared
        return nullcontext() if shared is None else shared.writing()

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Add parameters. Every rank must add the same parameters. Not possible with `share_parameters`."""
        if self._division is not None and self._division.shared is not None:
            raise InvalidArgumentError(
                "DistributedOptimizer(share_parameters=True): add_param_group() is not supported, because the memory "
                "is allocated once. Build the optimizer with all parameters."
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Gather the plain optimizer's state. Every rank must call this.

        The state loads at any number of ranks. The gathered state is as large as without `sharded`.
        """
        if self._division is None or not self._shards:
            return super().state_dict()
        parts = self.state
        self.state = gather_state(parts, self._division)
        try:
            return super().state_dict()
        finally:
            self.state = parts

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Load this rank's part of a plain optimizer's state.

        The given state must be the same on every rank.
        """
        super().load_state_dict(state_dict)
        if self._shards:
            self._divide_state()

    @property
    def has_own_ranks(self) -> bool:
        """Whether the optimizer has only some of the ranks, or shares parameters among the ranks of a host."""
        return self._configuration.number != 0 or self._configuration.share_parameters

    def own_state(self) -> OwnState:
        """Collect this rank's part of the state, without a copy and without communication."""
        parts, self.state = self.state, type(self.state)(dict)
        try:
            groups = super().state_dict()["param_groups"]
        finally:
            self.state = parts
        return own_state(parts, groups, self._in_order(), self._shards)

    def load_own_states(self, states: Sequence[OwnState]) -> None:
        """Take this rank's part from the states of all former ranks. Pass the same states on every rank."""
        self.load_state_dict(join_states(states, self._in_order()))

    def _in_order(self) -> list[Tensor]:
        """List the parameters in the order of `state_dict()`."""
        return [p for group in self.__dict__["param_groups"] for p in group["params"]]

    def _divide_state(self) -> None:
        """Keep only this rank's part of the state."""
        self.state = divide_state(self.state, self._shards)
        plain = self._plain() if self._plain is not None else None
        if plain is not None:
            # A scheduler may keep the given optimizer, which would keep the whole state.
            plain.state = self.state

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        if self._shards:
            self._refuse_copy()
        return super().__reduce_ex__(protocol)

    def _refuse_copy(self) -> NoReturn:
        raise InvalidArgumentError(
            "DistributedOptimizer(sharded=True): this rank has only its part of the state, so the optimizer cannot be copied "
            "or pickled. Call state_dict() on every rank and copy the result."
        )


_NONE: Mapping[Tensor, Shard] = MappingProxyType({})


# ----------------------------------------------------------------------------------------------------
# Whole gradients of a sharded optimizer, gathered from the ranks' parts; and clipping of the parts.

# Limit of cached gatherers, one for each set of parameters with a gradient; a model may use new sets in every step.
_MAX_GATHERERS = 16


class WholeGradients:
    """Gathers whole gradients into `.grad`, once per cycle.

    Args:
        division: the optimizer's division of its parameters.

    Attributes:
        cycles: for each reducer the number of the cycle whose gradients are whole.
    """

    def __init__(self, division: ShardLayout) -> None:
        self._division = division
        self.cycles: tuple[int, ...] = ()
        self._gatherers: dict[tuple[int, ...], Gatherer] = {}
        self._num_gatherers = 0  # created so far

    def clear(self) -> None:
        """Forget the cached gatherers, because parameters were added."""
        self._gatherers = {}

    def gather(self, cycles: tuple[int, ...]) -> None:
        """Gather the gradients of these cycles. Every rank must call this."""
        if self.cycles != cycles:
            self._gather()
            self.cycles = cycles

    def _gather(self) -> None:
        division = self._division
        params = [s.param for s in division.shards.values() if s.is_cut]
        if division.gpu is not None:
            on_gpu = [p for p in params if not p.is_cpu]
            division.gpu.gather_cut({id(p): p.grad for p in on_gpu if p.grad is not None})
        grads = {i: p.grad for i, p in enumerate(p for p in params if p.is_cpu)}
        if not grads:
            return
        present = {i: grad for i, grad in grads.items() if grad is not None}
        indices, gradients = tuple(present), list(present.values())
        gatherer = self._gatherers.get(indices)
        if gatherer is None:
            if len(self._gatherers) >= _MAX_GATHERERS:
                self._gatherers.clear()
            self._num_gatherers += 1
            name = (
                f"{division.label}.gradients.{self._num_gatherers} (all ranks must call "
                "synchronize(), or use param_groups between backward() and step())"
            )
            gatherer = Gatherer(division.context, name, gradients, division.configuration.number)
            self._gatherers[indices] = gatherer
        gatherer.gather(gradients)


def clip_parts_(division: ShardLayout, max_norm: float, norm_type: float) -> Tensor:
    """Scale this rank's parts of the gradients as `torch.nn.utils.clip_grad_norm_` does. Every rank must call this.

    Returns:
        The norm of all gradients.
    """
    for shard in division.shards.values():
        shard.take_gradient()
    parts = [s.part.grad for s in division.shards.values() if s.part is not None]
    gradients = [grad for grad in parts if grad is not None]
    total = _total_norm(division, gradients, norm_type)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    for grad in gradients:
        grad.mul_(factor.to(grad.device, grad.dtype))
    return total


def _local_norm(gradients: list[Tensor], norm_type: float) -> Tensor:
    norm: Tensor
    # torch has this function since 2.6. On a GPU it processes many gradients per kernel.
    if get_total_norm := getattr(torch.nn.utils, "get_total_norm", None):
        norm = get_total_norm(gradients, norm_type)
    elif gradients:
        norms = [torch.linalg.vector_norm(grad, norm_type) for grad in gradients]
        norm = torch.linalg.vector_norm(
            torch.stack([each.to(norms[0].device) for each in norms]), norm_type
        )
    else:
        norm = torch.zeros(())
    return norm


def _total_norm(division: ShardLayout, gradients: list[Tensor], norm_type: float) -> Tensor:
    norm = _local_norm(gradients, norm_type).double()
    is_max = math.isinf(norm_type)
    # Reduce on the GPU if parameters are on a GPU, also on a rank without a part, because all ranks must do the same.
    place = next((p for p in division.shards if not p.is_cpu), None)
    if place is not None and norm.is_cpu:
        norm = place.new_empty((), dtype=norm.dtype).copy_(norm)
    total = allreduce(
        norm if is_max else norm.pow(norm_type),
        op=ReduceOp.MAX if is_max else ReduceOp.SUM,
        name=f"{division.label}.norm",
        process_set=division.configuration.process_set,
    )
    # Round to the common type of all gradients, as torch.nn.utils.get_total_norm does, so that every rank scales by the
    # same number.
    dtypes = [p.grad.dtype for p in division.shards if p.grad is not None]
    dtype = functools.reduce(torch.promote_types, dtypes or [torch.get_default_dtype()]).to_real()
    return (total if is_max else total.pow(1.0 / norm_type)).to(dtype)


# ----------------------------------------------------------------------------------------------------
# Exchange of the stepped parameters of a sharded optimizer.


class ParameterExchange:
    """Sends each rank's stepped parts to all other ranks.

    Args:
        division: the optimizer's division of its parameters.
    """

    def __init__(self, division: ShardLayout) -> None:
        self._division = division
        # Numbers of parameters and of frozen parameters for which the gatherer was made.
        self._gathered_kind = (-1, -1)
        self._gathered: list[Tensor] = []
        self._gatherer: Gatherer | None = None

    def run(self, frozen: Iterable[Tensor]) -> None:
        """Exchange all parameters except `frozen`. Every rank must call this."""
        ids = set(map(id, frozen))
        shards = self._division.shards
        stepped = [s for s in shards.values() if id(s.param) not in ids]
        works = self._start_gathering(stepped, len(ids))
        if self._division.gpu is not None:
            self._division.gpu.gather_parameters([s for s in stepped if not s.param.is_cpu])
        self._exchange_whole([s for s in stepped if s.param.is_cpu and not s.is_cut])
        for work in works:
            work.wait()
        written([p for p in shards if p.grad is not None])

    def _start_gathering(self, stepped: Sequence[Shard], num_frozen: int) -> list[Work]:
        """Start to gather cut parameters on the CPU from the parts of all ranks."""
        division = self._division
        kind = (len(division.shards), num_frozen)
        if self._gatherer is None or kind != self._gathered_kind:
            self._gathered = [s.param for s in stepped if s.is_cut and s.param.is_cpu]
            # Use a new name, because the engine remembers the shapes of the old name.
            name = f"{division.label}.parameters.{kind[0]}.{kind[1]}"
            number = division.configuration.number
            self._gatherer = Gatherer(division.context, name, self._gathered, number)
            self._gathered_kind = kind
        return self._gatherer.start(self._gathered)

    def _exchange_whole(self, whole: Sequence[Shard]) -> None:
        """Exchange whole parameters, with one operation per type."""
        division = self._division
        for dtype in dict.fromkeys(shard.param.dtype for shard in whole):
            # Sort by owner, because the received parameters are in this order.
            ordered = sorted((s for s in whole if s.param.dtype == dtype), key=lambda s: s.owner)
            owned = [s.param.detach().reshape(-1) for s in ordered if s.part is not None]
            flat = torch.cat(owned) if owned else torch.empty(0, dtype=dtype)
            name = f"{division.label}.whole.{dtype}"
            sent = torch.view_as_real(flat) if dtype.is_complex else flat
            work = start_allgather(division.context, name, sent, division.configuration.number)
            work.wait()
            joined = gathered(work, sent.dtype, sent.shape)[0].view(dtype).view(-1)
            pieces = joined.split([s.param.numel() for s in ordered])
            for shard, piece in zip(ordered, pieces, strict=True):
                if shard.part is None:
                    shard.param.detach().copy_(piece.view(shard.param.shape))
