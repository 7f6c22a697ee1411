"""`DistributedOptimizer(sharded=True)`: every rank steps its part of the parameters, and keeps state for that alone.

Instead of all gradients every rank gets its part of them (a reducescatter), steps, and the ranks give each other the
parameters they have stepped (an allgather): as many bytes as an allreduce, with 1/N of the optimizer's state and work
per rank. With `share_parameters` the ranks of a host step one copy, and nothing is given.

**How the user's optimizer steps parts.** During its `step` the groups hold this rank's parts, which are views of the
parameters, in place of these; hyperparameters, hooks and schedulers find the same groups as ever. `optimizer.state`
is kept by part.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor

from sparkhvd.engine.engine import ReduceOp, Work
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.broadcast import allgather_object
from sparkhvd.torch.collectives import allreduce
from sparkhvd.torch.collectives.allgathers import gathered, start_allgather
from sparkhvd.torch.collectives.tensors import written
from sparkhvd.torch.cuda import opened
from sparkhvd.torch.gradients.layout import cut_range, flat, is_dense
from sparkhvd.torch.gradients.plan import plan_buckets
from sparkhvd.torch.optimizer.cuda_shards import DeviceShards
from sparkhvd.torch.optimizer.distributed import Configuration, Distributed, group_numbers
from sparkhvd.torch.optimizer.shards import ELEMENTWISE, Gatherer, Shard, owners_of
from sparkhvd.torch.optimizer.shared_parameters import SharedParameters

__all__ = ["Sharded", "check_shardable"]

# For so many sets of parameters that have a gradient; a model may use others in every step.
_MAX_GATHERERS = 16


def check_shardable(optimizer: torch.optim.Optimizer, configuration: Configuration) -> None:
    """Raise an InvalidArgumentError if this cannot be sharded."""
    what = "DistributedOptimizer(sharded=True): "
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidArgumentError(
            f"{what}LBFGS looks at all parameters at once and cannot be divided. Leave sharded out."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise InvalidArgumentError(
            f"{what}SparseAdam needs sparse gradients, and only dense ones are divided. Leave sharded out, or use "
            "Adam and sparse_as_dense=True."
        )
    if configuration.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise InvalidArgumentError(
            f"{what}op is {configuration.op.name.title()}. Use Average or Sum, or leave sharded out."
        )
    if configuration.as_views:
        raise InvalidArgumentError(
            f"{what}gradient_as_bucket_view=True is for gradients that every rank gets. Leave one of them out."
        )
    if not isinstance(configuration.compression, type):
        raise InvalidArgumentError(
            f"{what}{configuration.compression!r} needs whole gradients. Use Compression.fp16 or .bf16, or leave "
            "one of them out."
        )


class Sharded(Distributed):
    """What a sharded optimizer does before its own class."""

    _shards: Mapping[Tensor, Shard] = MappingProxyType({})
    _shared: SharedParameters | None = None
    _on_gpu: DeviceShards | None = None
    _gathered_kind = (-1, -1)  # for how many parameters, and frozen ones, the gatherer is
    _num_gatherers = 0  # of gradients, that were ever made
    _evaluations = 0  # of the closure, in this step

    # --- Dividing. ---

    def _prepare(
        self,
        parameters: Iterable[Tensor],
        groups: int | Sequence[Sequence[Tensor]] | None = None,
    ) -> None:
        configuration = self._configuration
        if not self._shards:
            number = self._context.number("sharded", configuration.number)
            self._label = f"DistributedOptimizer.sharded.{number}"
            self._shards = {}
            # By reducer, the cycle whose gradients somebody has asked for, and the one whose gradients are whole.
            self._asked_cycles: tuple[int, ...] = ()
            self._whole_cycles: tuple[int, ...] = ()
        divided = [p for p in parameters if p.numel() > 0]
        for p in divided:
            if not p.is_cpu:
                self._open_gpu(p)
        if configuration.share_parameters and divided:
            self._share(divided)
        self._divide(divided, groups)
        self._gradient_gatherers: dict[tuple[int, ...], Gatherer] = {}
        self._divide_state()

    def _open_gpu(self, parameter: Tensor) -> None:
        configuration, name = self._configuration, self._parameter_names[parameter]
        if configuration.share_parameters:
            raise InvalidArgumentError(
                f"DistributedOptimizer(share_parameters=True): {name!r} is on {parameter.device}, and ranks share memory "
                "of the CPU only. Leave share_parameters out."
            )
        device = opened(self._context, f"DistributedOptimizer, {name!r}", parameter)
        if self._on_gpu is None:
            self._on_gpu = DeviceShards(
                self._context, device, self._label, configuration.number, configuration.ranks
            )

    def _share(self, parameters: list[Tensor]) -> None:
        named = [(self._parameter_names[p], p) for p in parameters]
        configuration = self._configuration
        self._shared = SharedParameters(
            self._context, self._label, named, configuration.number, configuration.ranks
        )

    def _is_cut(self, parameter: Tensor) -> bool:
        # A parameter of no dimension has state that cannot be told from numbers such as the step.
        is_elementwise = type(self).__bases__[1] in ELEMENTWISE
        return is_elementwise and parameter.dim() > 0 and is_dense(parameter)

    def _divide(
        self, parameters: list[Tensor], groups: int | Sequence[Sequence[Tensor]] | None
    ) -> None:
        ranks = self._configuration.ranks
        place = ranks.index(self._context.engine.topology.rank)
        whole = [p for p in parameters if not self._is_cut(p)]
        loads = [0] * len(ranks)
        for shard in self._shards.values():
            if not shard.is_cut:
                loads[shard.owner] += shard.param.numel()
        numbers = owners_of([p.numel() for p in whole], len(ranks), loads)
        owners = dict(zip(map(id, whole), numbers, strict=True))
        cut = [p for p in parameters if id(p) not in owners]
        own = {id(p): cut_range(p.numel(), len(ranks), place) for p in cut if p.is_cpu}
        own.update(self._divide_on_gpu([p for p in cut if not p.is_cpu], groups))
        for p in parameters:
            owner = owners.get(id(p), -1)
            part = own.get(id(p), (0, p.numel() if owner == place else 0))
            shard = Shard(p, self._parameter_names[p], part, owner=owner)
            self._shards[p] = shard  # type: ignore[index]  # a dictionary here

    def _divide_on_gpu(
        self, parameters: list[Tensor], groups: int | Sequence[Sequence[Tensor]] | None
    ) -> dict[int, tuple[int, int]]:
        """Into the buckets of their gradients; what is frozen for itself, because it may thaw alone."""
        gpu = self._on_gpu
        if gpu is None:
            return {}
        trained = [p for p in parameters if p.requires_grad]
        plan = plan_buckets(
            [p.nbytes for p in trained],
            [p.dtype for p in trained],
            list(reversed(range(len(trained)))),
            self._context.engine.settings.device_bucket_bytes,
            group_numbers(groups, trained),
        )
        buckets = [[trained[index] for index in indices] for indices in plan]
        buckets += [[p] for p in parameters if not p.requires_grad]
        found: dict[int, tuple[int, int]] = {}
        for bucket in buckets:
            found.update(zip(map(id, bucket), gpu.cut(bucket), strict=True))
        return found

    def _reduce(
        self,
        named: list[tuple[str, Tensor]],
        groups: int | Sequence[Sequence[Tensor]] | None = None,
    ) -> None:
        cut = [(name, p) for name, p in named if self._is_cut(p)]
        whole = [(name, p) for name, p in named if not self._is_cut(p)]
        there = [(name, p) for name, p in cut if not p.is_cpu]
        if there and self._on_gpu is not None:
            # As they were divided, whatever is sent for them.
            together = self._on_gpu.together(p for _, p in there)
            self._add_reducer(there, together, sharded=True)
        here = [(name, p) for name, p in cut if p.is_cpu]
        if here:
            self._add_reducer(here, groups, sharded=True)
        if whole:
            self._add_reducer(whole, groups)

    # --- One step. ---

    def _apply(self, *closure: Callable[[], Any]) -> Any:
        if not self._shards:
            return super()._apply(*closure)
        self._evaluations = 0
        with self._hooks_around(closure):
            if not closure:
                self._begin_step()
            with self._parts_in_groups():
                result = super()._apply(*closure)
            self._end_step()
        return result

    @contextmanager
    def _hooks_around(self, closure: tuple[Callable[[], Any], ...]) -> Iterator[None]:
        """Step hooks of the user come before and after, because they look at whole gradients and parameters."""
        before, after = self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks
        if before and not closure:
            self._make_gradients_whole()
        for hook in list(before.values()):
            if hook(self, (self, *closure), {}) is not None:
                raise InvalidArgumentError(
                    "DistributedOptimizer(sharded=True): a step hook returned other arguments for step(), which is not "
                    "possible here. Change what it is called with, or leave sharded out."
                )
        self._optimizer_step_pre_hooks = type(before)()
        self._optimizer_step_post_hooks = type(after)()
        try:
            yield
        finally:
            self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = before, after
        for hook in list(after.values()):
            hook(self, (self, *closure), {})

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        if not self._shards:
            return super()._evaluate(closure)
        self._evaluations += 1
        if self._evaluations > 1:
            raise InvalidArgumentError(
                f"DistributedOptimizer(sharded=True): {type(self).__name__} calls its closure more than once per "
                "step, between which ranks would have to exchange what they stepped. Leave sharded out."
            )
        parts = [group["params"] for group in self.__dict__["param_groups"]]
        self._put_in_groups(self._whole)
        loss = super()._evaluate(closure)
        self._put_in_groups(parts)
        self._begin_step()
        return loss

    @contextmanager
    def _parts_in_groups(self) -> Iterator[None]:
        # Not the property, which would wait for whole gradients.
        self._whole = [group["params"] for group in self.__dict__["param_groups"]]
        parts = [[self._shards[p].part for p in ps if p.numel() > 0] for ps in self._whole]
        self._put_in_groups([[part for part in ps if part is not None] for ps in parts])
        try:
            yield
        finally:
            self._put_in_groups(self._whole)

    def _put_in_groups(self, parameters: Sequence[list[Any]]) -> None:
        for group, ps in zip(self.__dict__["param_groups"], parameters, strict=True):
            group["params"] = ps

    def _begin_step(self) -> None:
        if self._shared is not None:
            self._shared.begin()
        for shard in self._shards.values():
            shard.follow()
            shard.take_gradient()

    def _end_step(self) -> None:
        for shard in self._shards.values():
            shard.drop_gradient()
        for reducer in self._reducers:
            if reducer.options.sharded and not self._has_whole_gradients:
                reducer.remember()  # to refuse gradients that are added to these
        if self._shared is not None:
            self._shared.end()
            return
        works = self._start_gathering()
        frozen = set(map(id, self._frozen))
        stepped = [s for s in self._shards.values() if id(s.param) not in frozen]
        if self._on_gpu is not None:
            self._on_gpu.gather_parameters([s for s in stepped if not s.param.is_cpu])
        self._exchange_whole([s for s in stepped if s.param.is_cpu and not s.is_cut])
        for work in works:
            work.wait()
        written([p for p in self._shards if p.grad is not None])

    def _start_gathering(self) -> list[Work]:
        """Every rank gives its parts of cut parameters, and gets the others', except of what is frozen."""
        kind = (len(self._shards), len(self._frozen))
        if kind != self._gathered_kind:
            frozen = set(map(id, self._frozen))
            cut = [s.param for s in self._shards.values() if s.is_cut and s.param.is_cpu]
            self._gathered = [p for p in cut if id(p) not in frozen]
            # A new name, because the old one means other shapes to the engine.
            name = f"{self._label}.parameters.{kind[0]}.{kind[1]}"
            number = self._configuration.number
            self._gatherer = Gatherer(self._context, name, self._gathered, number)
            self._gathered_kind = kind
        return self._gatherer.start(self._gathered)

    def _exchange_whole(self, whole: list[Shard]) -> None:
        """Every rank gets the parameters that others have stepped, of each type in one operation."""
        for dtype in dict.fromkeys(shard.param.dtype for shard in whole):
            # In the order in which they will come: by owner.
            ordered = sorted((s for s in whole if s.param.dtype == dtype), key=lambda s: s.owner)
            mine = [s.param.detach().reshape(-1) for s in ordered if s.part is not None]
            own = torch.cat(mine) if mine else torch.empty(0, dtype=dtype)
            name = f"{self._label}.whole.{dtype}"
            work = start_allgather(self._context, name, own, self._configuration.number)
            work.wait()
            joined = gathered(work, dtype, own.shape)[0]
            pieces = joined.split([s.param.numel() for s in ordered])
            for shard, piece in zip(ordered, pieces, strict=True):
                if shard.part is None:
                    shard.param.detach().copy_(piece.view(shard.param.shape))

    # --- Whole gradients, where they are asked for. ---

    @property
    def _cycles(self) -> tuple[int, ...]:
        """How many cycles every reducer has ended."""
        return tuple(reducer.cycle.count for reducer in self._reducers)

    @property
    def _has_whole_gradients(self) -> bool:
        return self._whole_cycles == self._cycles

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups; between `backward()` and `step()` with whole gradients, for which every rank must read them."""
        is_new = self._shards and self._asked_cycles != self._cycles
        if any([r.in_flight or (is_new and r.is_reduced) for r in self._reducers]):
            self.synchronize()
        return cast("list[dict[str, Any]]", self.__dict__["param_groups"])

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = value

    def _finish_gradients(self) -> None:
        for shard in self._shards.values():
            shard.follow()
        if self._shards and not self._has_whole_gradients:
            self._refuse_changes()
        super()._finish_gradients()
        self._asked_cycles = self._cycles

    def _refuse_changes(self) -> None:
        """Raise an InvalidArgumentError if gradients were changed of which only a part is reduced."""
        for reducer in self._reducers:
            if reducer.cycle.added_to_kept:
                raise InvalidArgumentError(
                    f"DistributedOptimizer(sharded=True): the gradient of {reducer.cycle.added_to_kept!r} was added to that of "
                    "the last step, of which each rank has its part only. Call zero_grad() in every step, or "
                    "synchronize() before step()."
                )
            name = (
                reducer.find_changed() if reducer.is_reduced and reducer.options.sharded else None
            )
            if name is not None:
                raise InvalidArgumentError(
                    f"DistributedOptimizer(sharded=True): the gradient of {name!r} was changed between backward() and step(), "
                    "where only this rank's part of it is reduced. Clip with optimizer.clip_grad_norm_(max_norm), or "
                    "call optimizer.synchronize() on every rank before you read or change gradients."
                )

    def synchronize(self) -> None:
        """As of every distributed optimizer: whole gradients in `.grad`, which here is an allgather more.

        `clip_grad_norm_` of this optimizer does without.
        """
        super().synchronize()
        if self._shards:
            self._make_gradients_whole()

    def _make_gradients_whole(self) -> None:
        if not self._has_whole_gradients:
            self._gather_gradients()
            self._whole_cycles = self._cycles

    def _gather_gradients(self) -> None:
        if self._on_gpu is not None:
            there = [s.param for s in self._shards.values() if s.is_cut and not s.param.is_cpu]
            self._on_gpu.gather_cut({id(p): p.grad for p in there if p.grad is not None})
        cut = [s.param for s in self._shards.values() if s.is_cut and s.param.is_cpu]
        if not cut:
            return
        found = [(i, p.grad) for i, p in enumerate(cut) if p.grad is not None]
        indices = tuple(i for i, _ in found)
        gradients = [grad for _, grad in found if grad is not None]
        gatherer = self._gradient_gatherers.get(indices)
        if gatherer is None:
            if len(self._gradient_gatherers) >= _MAX_GATHERERS:
                self._gradient_gatherers.clear()
            self._num_gatherers += 1
            name = (
                f"{self._label}.gradients.{self._num_gatherers} (all ranks must call "
                "synchronize(), or use param_groups between backward() and step())"
            )
            gatherer = Gatherer(self._context, name, gradients, self._configuration.number)
            self._gradient_gatherers[indices] = gatherer
        gatherer.gather(gradients)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As of every distributed optimizer; each rank looks at and scales its own part."""
        self._finish_gradients()
        if not self._shards or self._has_whole_gradients:
            return super().clip_grad_norm_(max_norm, norm_type)
        for shard in self._shards.values():
            shard.take_gradient()
        parts = [s.part.grad for s in self._shards.values() if s.part is not None]
        gradients = [grad for grad in parts if grad is not None]
        total = self._total_norm(gradients, norm_type)
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        for grad in gradients:
            grad.mul_(factor.to(grad.device, grad.dtype))
        for reducer in self._reducers:
            reducer.remember()
        return total

    def _total_norm(self, gradients: list[Tensor], norm_type: float) -> Tensor:
        norm = torch.nn.utils.get_total_norm(gradients, norm_type).double()
        is_max = math.isinf(norm_type)
        # Where every rank has one, also a rank without a part.
        place = next((p for p in self._shards if not p.is_cpu), None)
        if place is not None and norm.is_cpu:
            norm = place.new_empty((), dtype=norm.dtype).copy_(norm)
        mine = norm if is_max else norm.pow(norm_type)
        total = allreduce(
            mine,
            op=ReduceOp.MAX if is_max else ReduceOp.SUM,
            name=f"{self._label}.norm",
            process_set=self._configuration.process_set,
        )
        # Of all gradients, because every rank must scale by the same number; as torch.nn.utils.get_total_norm.
        dtypes = [p.grad.dtype for p in self._shards if p.grad is not None]
        dtype = functools.reduce(torch.promote_types, dtypes or [torch.get_default_dtype()])
        return (total if is_max else total.pow(1.0 / norm_type)).to(dtype)

    def writing_parameters(self) -> AbstractContextManager[None]:
        """Inside, parameters may be written other than by `step()`; every rank must enter and leave.

        With `share_parameters` every rank writes the same values, or one rank alone writes. Without it this does
        nothing.
        """
        return nullcontext() if self._shared is None else self._shared.writing()

    # --- State. ---

    def state_dict(self) -> dict[str, Any]:
        """The plain optimizer's state, for any number of ranks. Every rank must call this; all get it.

        It is gathered into this rank's memory, as large as without `sharded`.
        """
        if not self._shards:
            return super().state_dict()
        parts = self.state
        self.state = self._whole_state()
        try:
            return super().state_dict()
        finally:
            self.state = parts

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's part of a plain optimizer's state; every rank must be given the same."""
        super().load_state_dict(state_dict)
        if self._shards:
            self._divide_state()

    def _divide_state(self) -> None:
        """Keep of state by parameter this rank's part only."""
        kept: defaultdict[Any, Any] = defaultdict(dict)
        for key, values in self.state.items():
            shard = self._shards.get(key) if isinstance(key, Tensor) else None
            if shard is None:  # a part already, or what is nobody's
                kept[key] = values
            elif shard.part is not None:
                kept[shard.part] = {name: _part_of(shard, value) for name, value in values.items()}
        self.state = kept
        plain = self._plain() if self._plain is not None else None
        if plain is not None:
            plain.state = kept  # a scheduler may hold it, and it the whole state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of every distributed optimizer; not with `share_parameters`."""
        if self._shared is not None:
            raise InvalidArgumentError(
                "DistributedOptimizer(share_parameters=True): add_param_group() is not possible, because the memory "
                "is made at once. Build the optimizer with all parameters."
            )
        super().add_param_group(param_group)

    def _whole_state(self) -> defaultdict[Any, Any]:
        state: defaultdict[Any, Any] = defaultdict(dict)
        shards = list(self._shards.values())
        divided = {id(shard.part) for shard in shards if shard.part is not None}
        for key, values in self.state.items():
            if id(key) not in divided:
                state[key] = values
        self._add_whole(state, [shard for shard in shards if not shard.is_cut])
        self._add_cut(state, [shard for shard in shards if shard.is_cut])
        return state

    def _add_whole(self, state: dict[Any, Any], shards: list[Shard]) -> None:
        if not shards:
            return
        mine = {
            number: {name: _Sent.of(value) for name, value in self.state[shard.part].items()}
            for number, shard in enumerate(shards)
            if shard.part is not None and shard.part in self.state
        }
        process_set = self._configuration.process_set
        name = f"{self._label}.state_dict() (every rank must call it)"
        for theirs in allgather_object(mine, name, process_set=process_set):
            for number, values in theirs.items():
                param = shards[number].param
                state[param] = {name: sent.beside(param) for name, sent in values.items()}

    def _add_cut(self, state: dict[Any, Any], shards: list[Shard]) -> None:
        configuration = self._configuration
        # Of each parameter by the rank that has its first element.
        mine = {
            number: self._describe(shard)
            for number, shard in enumerate(shards)
            if shard.part is not None and shard.first == 0 and shard.part in self.state
        }
        name = f"{self._label}.state_dict() (every rank must call it)"
        described: dict[int, dict[str, tuple[torch.dtype | None, _Sent]]] = {}
        for theirs in allgather_object(mine, name, process_set=configuration.process_set):
            described.update(theirs)
        wholes: list[Tensor] = []
        # What is on the GPU, of each kind by the identity of its parameter.
        there: dict[tuple[str, torch.dtype], dict[int, Tensor]] = {}
        for number, entries in sorted(described.items()):
            shard, param = shards[number], shards[number].param
            for name, (dtype, sent) in entries.items():
                if dtype is None:
                    state[param][name] = sent.beside(param)
                    continue
                value = torch.empty_like(param, dtype=dtype, requires_grad=False)
                state[param][name] = value
                if shard.part is not None:
                    shard.of(value).copy_(self.state[shard.part][name])
                if param.is_cpu:
                    wholes.append(value)
                else:
                    there.setdefault((name, dtype), {})[id(param)] = value
        if wholes:
            name = f"{self._label}.state"
            Gatherer(self._context, name, wholes, configuration.number).gather(wholes)
        for values in there.values():
            assert self._on_gpu is not None
            self._on_gpu.gather_cut(values)

    def _describe(self, shard: Shard) -> dict[str, tuple[torch.dtype | None, _Sent]]:
        """What there is of state: the type of what has an element per element, the value of what has not."""
        assert shard.part is not None
        return {
            name: (value.dtype, _Sent()) if shard.is_own(value) else (None, _Sent.of(value))
            for name, value in self.state[shard.part].items()
        }

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._shards:
            self._refuse_copy()
        return super().__reduce_ex__(protocol)

    def _refuse_copy(self) -> NoReturn:
        raise InvalidArgumentError(
            "DistributedOptimizer(sharded=True): it holds a part of its state and cannot be copied or pickled. Call "
            "state_dict() on every rank and copy that."
        )


class _Sent(NamedTuple):
    """A piece of state on its way to other ranks, whose GPUs are others.

    Attributes:
        value: not on a GPU.
        was_on_gpu: where it belongs.
    """

    value: Any = None
    was_on_gpu: bool = False

    @classmethod
    def of(cls, value: Any) -> _Sent:
        """Any piece of state."""
        is_on_gpu = isinstance(value, Tensor) and not value.is_cpu
        return cls(value.cpu(), True) if is_on_gpu else cls(value)

    def beside(self, param: Tensor) -> Any:
        """The piece on the device of its parameter, if that is where it was."""
        if not self.was_on_gpu:
            return self.value
        return param.new_empty(self.value.shape, dtype=self.value.dtype).copy_(self.value)


def _part_of(shard: Shard, value: Any) -> Any:
    """This rank's part of a piece of state of a parameter."""
    param = shard.param
    if not (shard.is_cut and isinstance(value, Tensor) and value.shape == param.shape):
        return value
    laid_out = torch.empty_like(param, dtype=value.dtype, requires_grad=False).copy_(value)
    return flat(laid_out)[shard.first : shard.last].clone()
