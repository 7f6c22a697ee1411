"""Launches of collectives in the order of a group: names, timeouts, waiting and asynchronous forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from sparkhvd.distributed.errors import as_torch
from sparkhvd.distributed.futures import Scope, current_scope
from sparkhvd.distributed.works import FINISHED, Passes, Work
from sparkhvd.engine.call import NO_REDUCTION
from sparkhvd.engine.engine import Call, Collective, DType, Engine, Reduction, TensorView
from sparkhvd.engine.engine import Work as Operation
from sparkhvd.errors import CollectiveError, InvalidArgumentError, MismatchError
from sparkhvd.torch.gradients.backward_end import in_backward, is_worth_overlapping

__all__ = ["Launcher", "Plan", "Team"]

_ALLREDUCE = Collective.ALLREDUCE  # looking up a member of an enumeration costs time


@dataclass(frozen=True)
class Team:
    """Ranks of a group in an engine.

    Attributes:
        engine: moves the bytes.
        process_set: the engine's number of these ranks.
        ranks: the engine's rank of each rank of the group.
        is_own: the engine is this group's alone, and ends with it.
        generation: of default groups in this engine, from 1. What a former one has left behind meets nothing of this one.
        number: of the group in its generation.
    """

    engine: Engine
    process_set: int
    ranks: tuple[int, ...]
    is_own: bool
    generation: int = 1
    number: int = 0


class Plan(NamedTuple):
    """A collective before its launch.

    Attributes:
        collective: its kind.
        views: memory of its tensors.
        dtype: their type.
        keep: owners of that memory, kept until the end.
        reduction: of the kinds that reduce.
        root: rank of the group.
        numbers: further arguments of the kind.
    """

    collective: Collective
    views: Sequence[TensorView]
    dtype: DType
    keep: object
    reduction: Reduction = NO_REDUCTION
    root: int = 0
    numbers: tuple[int, ...] = ()


# Moves results to where torch wants them; gets the engine's works where the launch asks for rows.
Finish = Callable[[Sequence[Operation]], object]


class Launcher:
    """Launches a group's collectives. They match across ranks by their place in the group's order, whatever their kind.

    So ranks that call different collectives get a `MismatchError` that names both.

    Attributes:
        overlaps: launch reductions of gradients while backward runs; None = not known yet whether that is worth it.
    """

    def __init__(self, team: Team, name: str, timeout: timedelta) -> None:
        self.team = team
        self.timeout_s = timeout.total_seconds()  # of operations that have none of their own
        self.name = f"torch{'' if team.generation == 1 else team.generation}.{name}"
        self.scope = Scope(self.name)
        self.passes = Passes()
        self._coalesced: list[Work] | None = None
        self.overlaps: bool | None = None

    def launch(
        self,
        plans: Sequence[Plan],
        opts: Any,
        outputs: Sequence[Tensor],
        finish: Finish | None = None,
        *,
        needs_rows: bool = False,
    ) -> Work:
        """Launch collectives that torch sees as one.

        Args:
            plans: equally many on every rank.
            opts: torch's options: `timeout`, and `asyncOp` False if the caller waits at once.
            outputs: result of an asynchronous work and of its future.
            finish: called after the last one.
            needs_rows: `finish` asks the engine's works for the rows of each rank.
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
            raise as_torch(error) from None
        last = None if finish is None else partial(finish, works)
        return self.noted(Work(works, outputs, last, Scope(names[0]), self.passes))

    def launch_one(self, plan: Plan, opts: Any, outputs: Sequence[Tensor]) -> Work:
        """Launch an asynchronous collective: in a backward pass at its end, where overlapping is not worth it."""
        if not in_backward() or self._coalesced is not None or self._is_overlapping():
            return self.launch((plan,), opts, outputs)
        name, timeout_s = (current_scope() or self.scope).name(), self._timeout_s(opts)
        engine = self.team.engine

        def start() -> Sequence[Operation]:
            return (engine.start(self._call(plan), name, plan.keep, timeout_s),)

        return Work((), outputs, None, Scope(name), self.passes, start)

    def _is_overlapping(self) -> bool:
        if self.overlaps is None:
            self.overlaps = is_worth_overlapping(self.team.engine, self.team.ranks)
        return self.overlaps

    def reduce_now(
        self, view: TensorView, dtype: DType, reduction: Reduction, keep: object, opts: Any
    ) -> None:
        """Reduce one tensor and wait: as `launch`, in less time."""
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
        """Note works from now on."""
        self._coalesced = []

    def noted(self, work: Work) -> Work:
        """Return a work, noted where works are coalesced."""
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def end_coalescing(self) -> Work:
        """Return the works since `start_coalescing` as one."""
        works, self._coalesced = self._coalesced or [], None

        def finish() -> None:
            for work in works:
                work.wait()

        outputs = [output for work in works for output in work.result()]
        return Work([each for work in works for each in work.operations], outputs, finish)

    def _call(self, plan: Plan) -> Call:
        team = self.team
        if not 0 <= plan.root < len(team.ranks):
            raise InvalidArgumentError(
                f"{plan.collective.name.lower()}: root rank {plan.root} is not in the group of {len(team.ranks)} ranks. Give one "
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
        if given is None or given.days < 0:  # torch's way to say that there is none
            return self.timeout_s
        return float(given.total_seconds())
