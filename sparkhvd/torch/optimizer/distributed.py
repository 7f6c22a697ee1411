"""The class that stands before the user's optimizer: reduced gradients before every step."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from sparkhvd.engine.engine import ReduceOp
from sparkhvd.errors import InvalidArgumentError, NotInitializedError
from sparkhvd.observe.autotune import Tuner, knobs
from sparkhvd.torch.arguments import to_factor, to_integer, to_list
from sparkhvd.torch.collectives import Average, allreduce
from sparkhvd.torch.compressors import Compressor
from sparkhvd.torch.context import Context, context
from sparkhvd.torch.gradients.reducer import ReduceOptions, Reducer, wait_for_all
from sparkhvd.torch.optimizer.shared_parameters import unshare
from sparkhvd.torch.process_sets import ProcessSet

__all__ = [
    "Configuration",
    "Distributed",
    "check_arguments",
    "group_lists",
    "group_numbers",
    "parameter_names",
    "placed",
    "plain_optimizer",
]


class Configuration:
    """What `DistributedOptimizer` was asked for."""

    def __init__(
        self,
        *,
        op: ReduceOp,
        predivide: float,
        compression: type[Compressor] | Compressor,
        passes: int,
        sparse_as_dense: bool,
        process_set: ProcessSet,
        number: int,
        ranks: tuple[int, ...],
        as_views: bool,
        share_parameters: bool,
        wait_in_backward: bool,
    ) -> None:
        self.op = op
        self.predivide = predivide
        self.compression = compression
        self.passes = passes
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        self.number = number
        self.ranks = ranks
        self.as_views = as_views
        self.share_parameters = share_parameters
        self.wait_in_backward = wait_in_backward


class Distributed(torch.optim.Optimizer):
    """What a distributed optimizer does before its own class."""

    _reducers: tuple[Reducer, ...] = ()
    _tuner: Tuner | None = None
    # The optimizer that was given: an LR scheduler made before may hold it.
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
        self._parameter_names = parameter_names(
            placed(self.__dict__["param_groups"]), named_parameters
        )
        if not configuration.share_parameters:
            unshare(self._parameter_names)
        self._frozen: list[Tensor] = []
        if not self._has_partners():
            group_numbers(groups, [])  # only checked
            return
        self._prepare(self._parameter_names, groups)
        trainable = [(name, p) for p, name in self._parameter_names.items() if p.requires_grad]
        self._frozen = [p for p in self._parameter_names if not p.requires_grad]
        self._reduce(trainable, groups)
        self._tuner = self._make_tuner()

    def _prepare(
        self,
        parameters: Iterable[Tensor],
        groups: int | Sequence[Sequence[Tensor]] | None = None,
    ) -> None:
        """Before gradients of these parameters are reduced."""

    def _make_tuner(self) -> Tuner | None:
        """For the first optimizer of all ranks on an engine, if `Settings.autotune` asks for it."""
        engine = self._context.engine
        if not engine.settings.tuning or len(self._configuration.ranks) < engine.size:
            return None
        if self._context.number("autotune") > 0:
            return None
        reference = weakref.ref(self)  # no cycle: a dropped optimizer takes its hooks with it

        def apply(values: Mapping[str, int]) -> None:
            optimizer = reference()
            for reducer in optimizer._reducers if optimizer is not None else ():
                if "bucket_bytes" in values:
                    reducer.set_bucket_bytes(values["bucket_bytes"])

        return Tuner(engine, knobs(engine), apply)

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
        # A tensor without elements has nothing to reduce.
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
        reference = weakref.ref(self)  # no cycle: a dropped optimizer takes its hooks with it
        reducer.siblings = lambda: _all_reducers(reference())
        _take_over(self._context, reducer, [p for _, p in named])
        self._reducers += (reducer,)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups. While gradients are in flight (`synchronize_in_backward=False`) this waits for
        them: `GradScaler.unscale_` and clipping by group are about to read the gradients.
        """
        for reducer in self._reducers:
            if reducer.in_flight:
                self.synchronize()
        return cast("list[dict[str, Any]]", self.__dict__["param_groups"])

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = value

    def synchronize(self) -> None:
        """Wait until all gradients are reduced and lie in `.grad`; the next `step()` does not wait again.

        After the last backward pass they are, on ranks that ran one.

        Raises:
            MismatchError: ranks disagree on their parameters.
            CollectiveError: the set of ranks changed; the gradients are undefined.
        """
        self._finish_gradients()

    def _finish_gradients(self) -> None:
        """Reduce the gradients that are not."""
        self._include_thawed()
        waiting = [reducer for reducer in self._reducers if not reducer.is_reduced]
        for reducer in self._reducers:
            if not self._context.is_open:
                raise NotInitializedError(
                    "DistributedOptimizer: it was built before shutdown(). Build it again after init()."
                )
            if reducer.is_detached:
                raise InvalidArgumentError(
                    "DistributedOptimizer: a newer DistributedOptimizer was built over the same parameters. "
                    "Use that one."
                )
        wait_for_all(waiting)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """`synchronize()` and `torch.nn.utils.clip_grad_norm_` over all parameters; gives the norm."""
        self._finish_gradients()
        return torch.nn.utils.clip_grad_norm_(self._parameter_names, max_norm, norm_type)

    def _include_thawed(self) -> None:
        """Make reducers for parameters that were frozen when the optimizer was built and are not any more."""
        thawed = [p for p in self._frozen if p.requires_grad]
        if thawed:
            self._frozen = [p for p in self._frozen if not p.requires_grad]
            self._reduce([(self._parameter_names[p], p) for p in thawed])

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, `step()` does not wait for gradients: for use after an explicit `synchronize()`."""
        before, self._should_synchronize = self._should_synchronize, False
        try:
            yield
        finally:
            self._should_synchronize = before

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the gradients, then step. A closure's gradients are reduced whenever it is called."""
        plain = self._plain() if self._plain is not None else None
        if plain is not None:
            plain._opt_called = True  # type: ignore[attr-defined]  # by this LR schedulers know
        if closure is not None:
            return self._apply(functools.partial(self._evaluate, closure))
        if self._should_synchronize:
            self._finish_gradients()
        self._use_gradients()
        result = self._apply()
        if self._tuner is not None:
            self._tuner.step()
        return result

    # torch wraps the `step` of every class that lacks this mark, to run step hooks and the profiler; the
    # class below does that already.
    step.hooked = True  # type: ignore[attr-defined]

    def _apply(self, *closure: Callable[[], Any]) -> Any:
        """The optimizer's own step."""
        return super().step(*closure)

    def _use_gradients(self) -> None:
        """The next pass begins a new cycle."""
        for reducer in self._reducers:
            reducer.use()

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            loss = closure()
        # A closure may only return a loss whose gradients were reduced before.
        self._finish_gradients()
        self._use_gradients()
        if isinstance(self, torch.optim.LBFGS) and self._reducers:
            # Its line search decides by the loss, and every rank must decide alike.
            process_set = self._configuration.process_set
            return allreduce(torch.as_tensor(loss).detach(), op=Average, process_set=process_set)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero the gradients; those in flight are waited for, and their result is forgotten."""
        self._include_thawed()
        for reducer in self._reducers:
            reducer.discard()
        super().zero_grad(set_to_none or self._configuration.as_views)
        for reducer in self._reducers:
            reducer.zero()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, on every rank alike; their gradients are reduced too."""
        super().add_param_group(param_group)
        if not hasattr(self, "_parameter_names"):
            return
        every = placed(self.__dict__["param_groups"])  # not the property, which would wait
        added = [entry for entry in every if entry[2] not in self._parameter_names]
        names = parameter_names(added, None)
        self._parameter_names.update(names)
        if self._has_partners():
            self._prepare(names)
            self._frozen += [p for p in names if not p.requires_grad]
            self._reduce([(name, p) for p, name in names.items() if p.requires_grad])

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change `backward_passes_per_step`, between steps and on every rank alike."""
        passes, _ = check_arguments(self._configuration.op, passes, self._configuration.predivide)
        self._configuration.passes = passes
        for reducer in self._reducers:
            reducer.discard()
            reducer.cycle.set_passes(passes)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        plain = self._plain() if self._plain is not None else None
        if plain is not None:
            # `load_state_dict` made new groups; those of a scheduler made before must be the same.
            plain.state, plain.param_groups = self.state, self.__dict__["param_groups"]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Hooks and connections belong to this process; what travels is the plain optimizer.
        plain = type(self).__bases__[1]
        return plain_optimizer, (plain, self.__getstate__())


def _all_reducers(optimizer: Distributed | None) -> Sequence[Reducer]:
    if optimizer is None:
        return ()
    optimizer._include_thawed()
    return optimizer._reducers


def placed(groups: Sequence[Mapping[str, Any]]) -> list[tuple[int, int, Tensor]]:
    """The parameters of an optimizer with the numbers of their group and of their place in it."""
    return [
        (number, index, parameter)
        for number, group in enumerate(groups)
        for index, parameter in enumerate(group["params"])
    ]


def plain_optimizer(kind: type[torch.optim.Optimizer], state: dict[str, Any]) -> Any:
    """What a pickle of a distributed optimizer becomes."""
    made = kind.__new__(kind)
    made.__setstate__(state)
    return made


def _take_over(ctx: Context, reducer: Reducer, parameters: list[Tensor]) -> None:
    """A parameter is reduced by the newest optimizer only; which one must not depend on garbage collection."""
    owners = ctx.owners
    if owners is None:
        owners = ctx.owners = WeakIdKeyDictionary()
    for parameter in parameters:
        older = owners[parameter]() if parameter in owners else None
        if older is not None:
            older.detach()
        owners[parameter] = weakref.ref(reducer)


def check_arguments(op: ReduceOp, passes: int, predivide: float) -> tuple[int, float]:
    """The last two as plain numbers.

    Raises:
        InvalidArgumentError: no optimizer can do this.
    """
    number = to_integer(passes)
    if number is None or number < 1:
        raise InvalidArgumentError(
            f"DistributedOptimizer: backward_passes_per_step is {passes!r}; it must be an integer of 1 or more."
        )
    factor = to_factor("DistributedOptimizer", "gradient_predivide_factor", predivide)
    if factor != 1.0 and op is not Average:
        raise InvalidArgumentError(
            f"DistributedOptimizer: gradient_predivide_factor={factor} needs op=Average, "
            f"got {op.name.title()}."
        )
    # Both it and its reciprocal are multiplied with gradients.
    if not (factor > 0 and math.isfinite(factor) and math.isfinite(1 / factor)):
        raise InvalidArgumentError(
            f"DistributedOptimizer: gradient_predivide_factor is {factor}; it must be more than 0 and finite, and so "
            "must be 1 divided by it."
        )
    return number, factor


def parameter_names(
    parameters: list[tuple[int, int, Tensor]],
    named_parameters: Iterable[tuple[str, Tensor]] | None,
) -> dict[Tensor, str]:
    """A name for every parameter of the optimizer, in the optimizer's order."""
    if named_parameters is None:
        return {p: f"allreduce.noname.{group}.{index}" for group, index, p in parameters}
    named = to_list(
        "DistributedOptimizer(named_parameters=...)", named_parameters, "(name, parameter) pairs"
    )
    for item in named:
        if not (
            isinstance(item, tuple)
            and len(item) == 2
            and isinstance(item[0], str)
            and isinstance(item[1], Tensor)
        ):
            raise InvalidArgumentError(
                f"DistributedOptimizer: named_parameters holds {_kind(item)}; it must hold "
                "(name, parameter) pairs, as model.named_parameters() gives them."
            )
    names = [name for name, _ in named]
    twice = (
        sorted({name for name in names if names.count(name) > 1})
        if len(set(names)) < len(names)
        else []
    )
    if twice:
        raise InvalidArgumentError(
            f"DistributedOptimizer: named_parameters uses {', '.join(map(repr, twice))} more than once. "
            "Every parameter needs a name of its own."
        )
    by_parameter = {p: name for name, p in named}
    unnamed = [f"{group}.{index}" for group, index, p in parameters if p not in by_parameter]
    if unnamed:
        raise InvalidArgumentError(
            f"DistributedOptimizer: {len(unnamed)} of the optimizer's {len(parameters)} parameters are not in "
            f"named_parameters (group.index {', '.join(unnamed[:5])}). Name all of them, or give None."
        )
    return {p: by_parameter[p] for _, _, p in parameters}


def group_numbers(
    groups: int | Sequence[Sequence[Tensor]] | None, parameters: list[Tensor]
) -> tuple[tuple[int, ...], ...]:
    """The argument `groups` as parameter numbers."""
    if groups is None:
        return ()
    wanted = to_integer(groups)
    if wanted is not None:
        if wanted < 1:
            raise InvalidArgumentError(
                f"DistributedOptimizer: groups is {groups}; give 1 or more, or None for buckets by size."
            )
        count = len(parameters)
        wanted = max(1, min(wanted, count))  # more would be empty
        bounds = [count * i // wanted for i in range(wanted + 1)]
        return tuple(tuple(range(a, b)) for a, b in zip(bounds, bounds[1:], strict=False) if a < b)
    numbers = {p: index for index, p in enumerate(parameters)}
    seen: set[Tensor] = set()
    lists = group_lists(groups)
    for group in lists:
        for parameter in group:
            if not isinstance(parameter, Tensor):
                raise _no_groups(f"holds {_kind(parameter)} in one of its lists")
            if parameter in seen:
                raise InvalidArgumentError(
                    f"DistributedOptimizer: a parameter of shape {tuple(parameter.shape)} is in groups twice."
                )
            seen.add(parameter)
    known = [tuple(numbers[p] for p in group if p in numbers) for group in lists]
    return tuple(group for group in known if group)


def _kind(value: Any) -> str:
    """What a value is, in words that stay short where it is a large tensor."""
    if isinstance(value, tuple):
        return f"({', '.join(type(item).__name__ for item in value)})"
    return type(value).__name__


def group_lists(groups: Any) -> list[list[Tensor]]:
    """Lists of parameters, which may be given as anything that can be gone through once."""
    if isinstance(groups, (bool, str, Tensor)) or not isinstance(groups, Iterable):
        raise _no_groups(f"is {groups!r}")
    lists: list[list[Tensor]] = []
    for group in groups:
        # A tensor can be gone through too: its rows are no parameters.
        if isinstance(group, (str, Tensor)) or not isinstance(group, Iterable):
            raise _no_groups(f"holds {_kind(group)}")
        lists.append(list(group))
    return lists


def _no_groups(found: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"DistributedOptimizer: groups {found}; it must be an integer of 1 or more, or lists of parameters. Give "
        "[[parameter, ...], ...], or None for buckets by size."
    )
