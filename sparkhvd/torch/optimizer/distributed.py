"""Mixin to reduce gradients before every step of the user's optimizer."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, SupportsIndex, cast

import torch
from torch import Tensor

from sparkhvd.errors import InvalidArgumentError, NotInitializedError
from sparkhvd.observe.autotune import Tuner, knobs
from sparkhvd.torch.arguments import leave_untraced
from sparkhvd.torch.collectives import Average, allreduce
from sparkhvd.torch.context import Context, context
from sparkhvd.torch.gradients.dense import ReduceOptions
from sparkhvd.torch.gradients.plan import ParameterOwners
from sparkhvd.torch.gradients.reducer import Reducer, wait_for_all
from sparkhvd.torch.optimizer.arguments import (
    Configuration,
    check_arguments,
    group_numbers,
    parameter_names,
    placed,
)
from sparkhvd.torch.optimizer.shards import unshare
from sparkhvd.torch.process_sets import members, set_id

# Horovod's text of the warning, because programs filter the warning by its text.
_NOT_SKIPPED = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can cause training slowdown. "
    "You may want to consider using optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code."
)


class Distributed(torch.optim.Optimizer):
    """Mixin to reduce gradients before the `step()` of the user's optimizer class."""

    _reducers: tuple[Reducer, ...] = ()
    _tuner: Tuner | None = None
    # Whether it follows changes of the ranks; not if each rank has its own optimizer state.
    _may_follow = True
    # The optimizer that the user gave; a scheduler that was built before refers to it.
    _plain: weakref.ref[torch.optim.Optimizer] | None = None

    def _distribute(
        self,
        named_parameters: Iterable[tuple[str, Tensor]] | None,
        groups: int | Sequence[Sequence[Tensor]] | None,
        configuration: Configuration,
    ) -> None:
        self._context: Context = context()
        self._configuration = configuration
        self._should_synchronize = True
        self._was_synchronized = False
        self._parameter_names = parameter_names(
            placed(self.__dict__["param_groups"]), named_parameters
        )
        if not configuration.share_parameters:
            unshare(self._parameter_names)
        self._frozen: list[Tensor] = []
        # The parameters of each call (the constructor, `add_param_group`) with their `groups`.
        self._given = [(tuple(self._parameter_names), groups)]
        if self._may_follow:
            self._context.followers.append(weakref.ref(self))
        if not self._has_partners():
            group_numbers(groups, [])  # only a check
            return
        self._build(*self._given[0])
        self._tuner = _make_tuner(self)

    def _build(
        self,
        parameters: Sequence[Tensor],
        groups: int | Sequence[Sequence[Tensor]] | None,
    ) -> None:
        """Create reducers for the parameters of one call by the user."""
        named = {p: self._parameter_names[p] for p in parameters}
        self._prepare(named, groups)
        self._frozen += [p for p in named if not p.requires_grad]
        self._reduce([(name, p) for p, name in named.items() if p.requires_grad], groups)

    def follow(self, current: Context) -> None:
        """Reduce gradients on another engine from now on. A reduction in progress is dropped.

        Every rank of the process set must call this, for its optimizers in the order in which they were built.
        """
        configuration = self._configuration
        self.detach()
        self._reducers, self._frozen, self._tuner = (), [], None
        self._was_synchronized = False
        self._context = current
        configuration.number = set_id(configuration.process_set)
        configuration.ranks = tuple(members(configuration.process_set))
        if self._has_partners():
            for parameters, groups in self._given:
                self._build(parameters, groups)
            self._tuner = _make_tuner(self)

    def _prepare(
        self,
        parameters: Mapping[Tensor, str],
        groups: int | Sequence[Sequence[Tensor]] | None = None,
    ) -> None:
        """Prepare parameters before their gradients are reduced."""

    def _has_partners(self) -> bool:
        ranks = self._configuration.ranks
        return len(ranks) > 1 and self._context.engine.topology.rank in ranks

    def _reduce(
        self,
        named: list[tuple[str, Tensor]],
        groups: int | Sequence[Sequence[Tensor]] | None = None,
    ) -> None:
        """Reduce these parameters' gradients from now on."""
        self._add_reducer(named, groups)

    def _add_reducer(
        self,
        named: list[tuple[str, Tensor]],
        groups: int | Sequence[Sequence[Tensor]] | None,
        *,
        sharded: bool = False,
    ) -> None:
        # Skip tensors without elements.
        named = [(name, p) for name, p in named if p.numel() > 0]
        numbers = group_numbers(groups, [p for _, p in named])
        if not named:
            return
        configuration = self._configuration
        reducer = Reducer(
            self._context,
            named,
            ReduceOptions(
                op=configuration.op,
                predivide=configuration.predivide,
                compression=configuration.compression,
                passes=configuration.passes,
                sparse_as_dense=configuration.sparse_as_dense,
                bucket_bytes=self._context.engine.settings.bucket_bytes,
                device_bucket_bytes=self._context.engine.settings.device_bucket_bytes,
                groups=numbers,
                process_set=configuration.number,
                ranks=configuration.ranks,
                as_views=configuration.as_views,
                sharded=sharded,
                wait_in_backward=configuration.wait_in_backward,
            ),
        )
        # Weak, so that the hooks are removed when the user drops the optimizer.
        reference = weakref.ref(self)
        reducer.siblings = lambda: _all_reducers(reference())
        _take_over(self._context, reducer, [p for _, p in named])
        self._reducers += (reducer,)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups. Reading them waits for gradients in flight.

        The wait is necessary because `GradScaler.unscale_` and clipping by group read the gradients next.
        """
        for reducer in self._reducers:
            if reducer.in_flight:
                self.wait_for_gradients()
        if "param_groups" not in self.__dict__:  # a wrapper copies the class but not the attributes
            raise AttributeError("param_groups")
        return cast("list[dict[str, Any]]", self.__dict__["param_groups"])

    @param_groups.setter
    def param_groups(self, value: list[dict[str, object]]) -> None:
        self.__dict__["param_groups"] = value

    def synchronize(self) -> None:
        """Wait until all reduced gradients are in `.grad`.

        As with Horovod, then step in `with skip_synchronize()`. On ranks that ran the last backward pass the gradients
        are reduced already.

        Raises:
            MismatchError: ranks disagree on their parameters.
            CollectiveError: the set of ranks changed; the gradients are undefined.
        """
        self.wait_for_gradients()
        self._was_synchronized = True

    def wait_for_gradients(self) -> None:
        """Wait as `synchronize()` does. Then `step()` needs no `skip_synchronize()`."""
        self._finish_gradients()

    def _finish_gradients(self) -> None:
        """Reduce the remaining gradients."""
        self._include_thawed()
        waiting = [reducer for reducer in self._reducers if not reducer.is_reduced]
        for reducer in self._reducers:
            if not self._context.is_open:
                raise NotInitializedError(
                    "DistributedOptimizer: the optimizer was built before shutdown(). Build it again after init()."
                )
            if reducer.is_detached:
                raise InvalidArgumentError(
                    "DistributedOptimizer: a newer DistributedOptimizer was built over the same parameters, or this one was "
                    "detached. Use the newer one, or build it again."
                )
        wait_for_all(waiting)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Wait as `synchronize()` does, then clip the norm of all gradients as `torch.nn.utils.clip_grad_norm_`.

        Returns:
            The norm before clipping.
        """
        self._finish_gradients()
        return torch.nn.utils.clip_grad_norm_(self._parameter_names, max_norm, norm_type)

    def _include_thawed(self) -> None:
        """Create reducers for parameters frozen when the optimizer was built and trainable now."""
        thawed = [p for p in self._frozen if p.requires_grad]
        if thawed:
            self._frozen = [p for p in self._frozen if not p.requires_grad]
            self._reduce([(self._parameter_names[p], p) for p in thawed])

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step()` in the block skip the wait for gradients, after an explicit `synchronize()`."""
        before, self._should_synchronize = self._should_synchronize, False
        try:
            yield
        finally:
            self._should_synchronize = before

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes in the block only add to this rank's gradients, as `DistributedDataParallel.no_sync`.

        A later pass, or `step()`, reduces the sums. Every rank must use the block for the same passes. They do not
        count for `backward_passes_per_step`.
        """
        cycles = [(reducer.cycle, reducer.cycle.is_held) for reducer in self._reducers]
        for cycle, _ in cycles:
            cycle.is_held = True
        try:
            yield
        finally:
            for cycle, before in cycles:
                cycle.is_held = before

    def describe_buckets(self) -> list[dict[str, str | int]]:
        """Describe the buckets of gradients: `name` of the operation, `kind`, `parameters`, `bytes` on the wire."""
        return [facts for reducer in self._reducers for facts in reducer.buckets.describe()]

    def detach(self) -> None:
        """Stop reducing gradients. Later calls of `step()` raise an error.

        Later backward passes give this rank's own gradients.
        """
        for reducer in self._reducers:
            reducer.detach()

    def step(self, closure: Callable[[], float] | None = None, **options: Any) -> Any:
        """Wait for the reduced gradients, then step with `options`. Each call of a closure reduces its gradients."""
        self._opt_called = True  # LR schedulers read it
        plain = self._plain() if self._plain is not None else None
        if plain is not None:
            plain._opt_called = True  # type: ignore[attr-defined]
        if closure is not None:
            return self._apply(functools.partial(self._evaluate, closure), **options)
        if self._should_synchronize:
            if self._was_synchronized:
                warnings.warn(_NOT_SKIPPED, stacklevel=3)
            self._finish_gradients()
        self._was_synchronized = False
        self._use_gradients()
        result = self._apply(**options)
        if self._tuner is not None:
            self._tuner.step()
        return result

    # torch wraps the `step` of every class without this mark, to run step hooks and the profiler. The user's class is
    # wrapped already, so a second wrapper would run the hooks twice.
    step.hooked = True  # type: ignore[attr-defined]
    # This mark stops LR schedulers from wrapping `step` to record its calls, because `step` records them itself.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def _apply(self, *closure: Callable[[], float], **options: Any) -> Any:
        """Run the optimizer's own step."""
        return super().step(*closure, **options)

    def _use_gradients(self) -> None:
        """Mark the reduced gradients as used by this step. The next pass begins a new cycle."""
        for reducer in self._reducers:
            reducer.use()

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            loss = closure()
        # The closure need not run backward: it may only return the loss of gradients that are reduced already.
        self._finish_gradients()
        self._use_gradients()
        if isinstance(self, torch.optim.LBFGS) and self._reducers:
            # Average the loss, because the line search depends on it and every rank must decide alike.
            process_set = self._configuration.process_set
            # Send a Python number with 64 bits, as precise as in the line search of one process.
            dtype = None if isinstance(loss, Tensor) else torch.float64
            value = torch.as_tensor(loss, dtype=dtype).detach()
            return allreduce(value, op=Average, process_set=process_set)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Wait for gradients in flight, then drop all gradients or set them to zero.

        The results in flight are lost.
        """
        self._include_thawed()
        for reducer in self._reducers:
            reducer.discard()
        super().zero_grad(set_to_none or self._configuration.as_views)
        for reducer in self._reducers:
            reducer.zero()

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Add parameters, and reduce their gradients too.

        Every rank must add the same parameters.
        """
        super().add_param_group(param_group)
        if not hasattr(self, "_parameter_names"):
            return
        every = placed(self.__dict__["param_groups"])  # not the property, which would wait
        added = [entry for entry in every if entry[2] not in self._parameter_names]
        names = parameter_names(added, None)
        self._parameter_names.update(names)
        self._given.append((tuple(names), None))
        if self._has_partners():
            self._build(*self._given[-1])

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change `backward_passes_per_step`. Every rank must call this between the same steps."""
        passes, _ = check_arguments(self._configuration.op, passes, self._configuration.predivide)
        self._configuration.passes = passes
        for reducer in self._reducers:
            reducer.discard()
            reducer.cycle.set_passes(passes)

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        plain = self._plain() if self._plain is not None else None
        if plain is not None:
            # `load_state_dict` created new groups. A scheduler that refers to the given optimizer must find them there.
            plain.state, plain.param_groups = self.state, self.__dict__["param_groups"]

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        # Pickle the plain optimizer, because hooks and connections belong to this process.
        plain = type(self).__bases__[1]
        return plain_optimizer, (plain, self.__getstate__())


# A compiled training step calls these methods.
leave_untraced(Distributed)


def _make_tuner(distributed: Distributed) -> Tuner | None:
    """Create a tuner if `Settings.autotune` is set and this is the engine's first optimizer with all ranks."""
    engine = distributed._context.engine
    if not engine.settings.tuning or len(distributed._configuration.ranks) < engine.size:
        return None
    if distributed._context.number("autotune") > 0:
        return None
    # Weak, so that the hooks are removed when the user drops the optimizer.
    reference = weakref.ref(distributed)

    def apply(values: Mapping[str, int]) -> None:
        optimizer = reference()
        for reducer in optimizer._reducers if optimizer is not None else ():
            if "bucket_bytes" in values:
                reducer.set_bucket_bytes(values["bucket_bytes"])

    return Tuner(engine, knobs(engine), apply)


def _all_reducers(optimizer: Distributed | None) -> Sequence[Reducer]:
    if optimizer is None:
        return ()
    optimizer._include_thawed()
    return optimizer._reducers


def plain_optimizer(
    kind: type[torch.optim.Optimizer], state: dict[str, object]
) -> torch.optim.Optimizer:
    """Create a plain optimizer when a distributed optimizer is unpickled."""
    made = kind.__new__(kind)
    made.__setstate__(state)
    return made


def _take_over(ctx: Context, reducer: Reducer, parameters: list[Tensor]) -> None:
    """Assign parameters to the newest reducer, and detach older reducers now instead of at garbage collection."""
    owners = ctx.part(ParameterOwners).reducers
    for parameter in parameters:
        older = owners[parameter]() if parameter in owners else None
        if older is not None:
            older.detach()
        owners[parameter] = weakref.ref(reducer)
