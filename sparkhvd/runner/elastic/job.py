"""Driver's side of an elastic job on Spark: one stage whose tasks are the slots of the ranks, and come and go.

The stage is no barrier stage: it has as many tasks as there may be ranks, and Spark starts each when a slot is free. The coordinator is here, or, for a
client of Spark Connect with a store, in the first task (`coordinators`). Results come to it when ranks end, so that the loss of another executor afterwards
loses none.

**Threads**: the caller's decides, or waits for the one that does; one waits for Spark. **Shutdown**: whatever ends the block lets the tasks leave, and
cancels what does not.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from sparkhvd.errors import ElasticError, PreflightError, SparkhvdError
from sparkhvd.runner import launching, spark_log, task
from sparkhvd.runner.admission import turn
from sparkhvd.runner.elastic.attempt_result import AttemptResult
from sparkhvd.runner.elastic.coordinators import (
    STAGE_HAS_ENDED,
    AttemptCoordinator,
    CoordinatorInDriver,
    CoordinatorInTask,
    not_started,
)
from sparkhvd.runner.elastic.ends import Ends, Failure
from sparkhvd.runner.elastic.options import ElasticOptions, RankRange, Terms
from sparkhvd.runner.elastic.stage import Future, Stages
from sparkhvd.runner.gpu import decide
from sparkhvd.runner.gpu.profiles import share_of
from sparkhvd.runner.live_output import Attempt
from sparkhvd.runner.options import JobReport, LaunchOptions
from sparkhvd.runner.outcomes import (
    Kind,
    Outcome,
    error_of,
    from_spark_failure,
    is_retryable,
    root_cause,
)
from sparkhvd.runner.payload import carried
from sparkhvd.runner.planning import (
    SHOWS_SPARKS_LOG,
    Plan,
    check_size,
    make_plan,
    no_progress,
    print_line,
)
from sparkhvd.spark import SparkShim, plain_interrupts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["launch_elastic"]

R = TypeVar("R")
# Numbers of processes of an attempt that have live output.
_NUMBERS = 1 << 14
# How long tasks may take to leave at the end.
_LEAVE_S = 2.0


def launch_elastic(
    shim: SparkShim,
    fn: Callable[..., R],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    ranks: RankRange,
    options: LaunchOptions,
) -> JobReport[R]:
    """Call `fn(*args, **kwargs)` on ranks that come and go, in one stage of a session.

    Raises:
        InvalidArgumentError: an argument is wrong, or `fn` cannot be pickled. Nothing has started.
        PreflightError: the cluster cannot run this job. `fn` has not started.
        ElasticError: too few ranks were there for too long, or the ranks have changed too often.
        RankError: `fn` failed on every rank, or all ranks were lost more often than `max_retries` allows.
    """
    if not shim.is_connect:  # all tell by the driver's port alone
        options = replace(options, shared=None, run_dir=None, mailbox=None)
    largest = ranks.largest()
    program = launching.dump_call(fn, args, kwargs)
    check_size(program, shim)
    plan = make_plan(shim, largest, options, program, is_barrier=False)
    limits = ranks.options(
        ranks.first(plan.configured_slots or ranks.least or plan.size),
        options.start_timeout_s or plan.settings.values.start_timeout_s,
    )
    slots = plan.configured_slots
    if slots is not None and limits.smallest > slots and not plan.is_dynamic:
        raise PreflightError(
            f"min_num_proc is {limits.smallest}, and the application can run {slots} tasks at once. Lower it, or give the application more cores."
        )

    def usable() -> int | None:
        """Return the slots; None where others may come, for which the job waits itself."""
        count = plan.slots()
        return None if count is None or count < limits.smallest else count

    say = functools.partial(print_line, options.verbose)
    is_alone = options.is_alone or plan.gpus.mode == decide.Mode.HOST
    share = share_of(plan.options.profile)
    application, most = shim.application(), limits.largest
    last_progress: object = None
    with turn(application, share, limits.smallest, is_alone=is_alone, most=most) as place:
        for attempt in range(options.max_retries + 1):
            with place.slots(usable, limits.start_timeout_s, say):
                ended = _Attempt(plan, limits, attempt).run()
            if isinstance(ended, JobReport):
                return ended
            if not ended.is_lost or attempt == options.max_retries:
                raise ended.error
            if options.progress is not None:
                progress = options.progress()
                if attempt > 0 and progress == last_progress:
                    raise no_progress(ended.error, attempt + 1, progress)
                last_progress = progress
            options.relaunched(str(ended.error))
            say(f"{ended.error}\nRelaunching ({attempt + 1} of {options.max_retries}).")
    raise AssertionError("the last attempt returns or raises")


class _Attempt:
    """One stage."""

    def __init__(self, plan: Plan, limits: ElasticOptions, number: int) -> None:
        self._plan = plan
        self._limits = limits
        self._named = Attempt(secrets.token_hex(32), secrets.token_hex(8), number, _NUMBERS)
        self._submitted_at = time.time()
        self._stages: Stages | None = None

    def run(self) -> JobReport[Any] | Failure:
        """Run it to its end."""
        plan, largest = self._plan, self._limits.largest
        live = plan.live_output(self._named)
        with contextlib.ExitStack() as stack:
            coordinator = stack.enter_context(self._coordinator())
            spec = plan.spec(_NUMBERS, self._named, coordinator.address, live)
            spec = replace(spec, elastic=self._terms().to_dict())
            coordinator.take(spec)
            stack.enter_context(live)
            self._stages = stages = self._prepare(stack, spec, coordinator)
            stages.submit(largest, coordinator.look)
            try:
                with plain_interrupts():
                    result = coordinator.run()
            finally:
                coordinator.dismiss()
                stages.end(_LEAVE_S)
        if result is None:
            return self._unreported(stages.ended())
        own = Outcome(_NUMBERS - 1, Kind.OK, unsent=result.unsent)
        live.show_rest((own, *result.outcomes.values()))
        for change in result.changes:
            plan.options.ranks_changed(change)
        if result.verdict.has_finished:
            return self._report(result)
        return self._failure(result, stages)

    def _coordinator(self) -> AttemptCoordinator:
        plan, options = self._plan, self._plan.options
        if options.shared is not None:
            return CoordinatorInTask(plan.shim, options, self._limits.largest)
        return CoordinatorInDriver(
            plan.shim, functools.partial(print_line, options.verbose), self._replace
        )

    def _replace(self) -> None:
        if self._stages is not None:
            self._stages.add()

    def _terms(self) -> Terms:
        first = self._limits.first
        return Terms(self._limits, min(first, self._plan.slots() or first))

    def _prepare(
        self, stack: contextlib.ExitStack, spec: task.TaskSpec, coordinator: AttemptCoordinator
    ) -> Stages:
        """Prepare the stages; what they need ends with the stack."""
        plan, limits, job_id = self._plan, self._limits, self._named.job_id
        program = stack.enter_context(carried(plan.shim, plan.program))
        is_hidden = plan.options.verbose < SHOWS_SPARKS_LOG
        stack.enter_context(spark_log.hidden_failures(plan.shim, job_id, is_hidden=is_hidden))
        body = task.make_task(spec, program, plan.shared, "sparkhvd.runner.elastic.entry")

        def make(size: int) -> DataFrame:
            profile = plan.options.profile
            return plan.shim.stage(size, body, task.ROW_SCHEMA, profile, is_barrier=False)

        text = f"sparkhvd: {limits.smallest} to {limits.largest} ranks, attempt {spec.attempt + 1}"
        return Stages(plan.shim, make, f"sparkhvd-{job_id}", text, coordinator.note_end)

    # --- The end. ---

    def _report(self, result: AttemptResult) -> JobReport[Any]:
        order = Ends(result.verdict, result.outcomes).order()
        outcomes = tuple(
            replace(result.outcomes[number], rank=rank) for rank, number in enumerate(order)
        )
        return JobReport(
            results=[launching.load_result(result.results[number]) for number in order],
            attempts=self._named.number + 1,
            launch_s=max(0.0, outcomes[0].started_at - self._submitted_at),
            run_s=max(outcome.run_s for outcome in outcomes),
            outcomes=outcomes,
        )

    def _failure(self, result: AttemptResult, stages: Stages) -> Failure:
        verdict = result.verdict
        if result.refused:
            return Failure(PreflightError(result.refused), is_lost=False)
        ends = Ends(verdict, result.outcomes)
        if verdict.problem == STAGE_HAS_ENDED and ends.is_lost:
            cause = self._of_spark(stages.ended())
            cause = cause or Outcome(None, Kind.SPARK, message=f"{STAGE_HAS_ENDED} early")
            return Failure(error_of(cause, ends.size), is_retryable(cause))
        if not verdict.has_begun:
            return Failure(not_started(self._limits.start_timeout_s), is_lost=False)
        return ends.failure(verdict.problem.replace(STAGE_HAS_ENDED, ""))

    def _unreported(self, future: Future) -> Failure:
        """Return the failure of an attempt whose coordinator, in a task, could not tell of it."""
        cause = self._of_spark(future)
        if future.exception() is None and (cause is None or cause.kind == Kind.LOST):
            where = "" if cause is None else f" ({cause.message})"
            text = f"its coordinator was lost with its Spark task{where}"
            return Failure(ElasticError(f"The elastic job cannot go on: {text}."), is_lost=True)
        assert cause is not None
        return Failure(error_of(cause, self._limits.first), is_retryable(cause))

    def _of_spark(self, future: Future) -> Outcome | None:
        """Return what Spark, or the tasks, tell of the end of the stage; None if they tell nothing."""
        if (error := future.exception()) is not None:
            if isinstance(error, SparkhvdError):  # Spark itself is gone
                raise error
            return from_spark_failure(str(error), self._plan.shim.worker_python())
        return root_cause(Outcome.from_json(bytes(row["data"]).decode()) for row in future.result())
