"""Driver's side of an elastic job on Spark: one stage whose tasks are the slots of the ranks, and come and go.

The stage is no barrier stage: it has as many tasks as there may be ranks, and Spark starts each when a slot is free. The coordinator and the
tasks' port are here. The results come through that port when ranks end, so that the loss of an executor afterwards loses none.

**Threads**: the caller's decides, one waits for Spark, one has the coordinator and one the tasks. **Shutdown**: whatever ends the block lets the
tasks leave, and cancels what does not.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from sparkhvd.elastic import Coordinator, Invitation
from sparkhvd.errors import PreflightError, SparkhvdError
from sparkhvd.rendezvous import Listener
from sparkhvd.runner import driver_port, launching, spark_log, task
from sparkhvd.runner.admission import turn
from sparkhvd.runner.elastic.ends import Ends, Failure
from sparkhvd.runner.elastic.launcher import Event, Launcher, Refused, Stopped, Verdict
from sparkhvd.runner.elastic.options import ElasticOptions, RankRange
from sparkhvd.runner.elastic.stage import Future, Stages
from sparkhvd.runner.elastic.task import PURPOSE
from sparkhvd.runner.elastic.tasks import Tasks
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
from sparkhvd.runner.trainer import INTERRUPT_GRACE_S
from sparkhvd.spark import SparkShim, plain_interrupts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["launch_elastic"]

R = TypeVar("R")
# Numbers of processes of an attempt that have live output.
_NUMBERS = 1 << 14
# How long tasks may take to leave at the end, and interrupted ranks to be killed after their grace.
_LEAVE_S = 2.0
_MARGIN_S = 2.0
_STAGE_HAS_ENDED = "its Spark stage has ended"


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
    # Ranks tell by the driver's port alone.
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
        self._say = functools.partial(print_line, plan.options.verbose)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._refused = ""  # why the first task cannot take part
        self._submitted_at = time.time()
        self._stages: Stages | None = None

    def run(self) -> JobReport[Any] | Failure:
        """Run it to its end."""
        plan, named = self._plan, self._named
        live = plan.live_output(named)
        with contextlib.ExitStack() as stack:
            tasks, address = self._tasks()
            stack.enter_context(tasks)
            coordinator = stack.enter_context(self._coordinator())
            spec = plan.spec(_NUMBERS, named, address, live)
            stack.enter_context(live)
            self._stages = stages = self._prepare(stack, spec)
            stages.submit(self._limits.largest, lambda: self._retire(tasks))
            launcher = Launcher(
                self._limits,
                (),
                tasks,
                coordinator,
                functools.partial(self._invite, coordinator),
                self._say,
                plan.options.ranks_changed,
            )
            try:
                with plain_interrupts():
                    verdict = self._decide(launcher, tasks)
            finally:
                tasks.dismiss()
                stages.end(_LEAVE_S)
        live.show_rest(tuple(tasks.outcomes.values()))
        if verdict.has_finished:
            return self._report(verdict, tasks)
        return self._failure(verdict, tasks, stages)

    def _decide(self, launcher: Launcher, tasks: Tasks) -> Verdict:
        """Run the job to its end; Ctrl-C interrupts the ranks before Spark cancels their tasks."""
        try:
            return launcher.run(self._events)
        except KeyboardInterrupt:
            tasks.interrupt(INTERRUPT_GRACE_S + _MARGIN_S)
            raise

    def _tasks(self) -> tuple[Tasks, tuple[str, int]]:
        """Listen for tasks; return also the address at which they reach this process."""
        named, most = self._named, self._limits.first
        listening, host = driver_port.listen(self._plan.shim)
        proof = driver_port.proof_between(PURPOSE, named.key, named.job_id, named.number, 0, 2)
        wanted = min(most, self._plan.slots() or most)
        tasks = Tasks(
            listening, proof, wanted, self._events.put, self._refuse, self._replace, self._say
        )
        return tasks, (host, int(listening.getsockname()[1]))

    def _replace(self) -> None:
        if self._stages is not None:
            self._stages.add()

    def _retire(self, tasks: Tasks) -> None:
        """Let ranks leave whose executors Spark will take away."""
        if gone := self._plan.shim.decommissioned(tasks.executors()):
            tasks.retire(gone)

    def _refuse(self, problem: str) -> None:
        self._refused = problem
        self._events.put(Stopped(problem))

    def _coordinator(self) -> Coordinator:
        settings, events = self._plan.settings.values, self._events
        return Coordinator(
            bytes.fromhex(self._named.key),
            self._named.job_id,
            Listener.bind(self._plan.shim.own_addresses()[0], settings),
            self._limits.limits(settings.elastic_patience_s),
            on_formed=events.put,
            on_refused=lambda number, refusal: events.put(Refused(number, refusal)),
        )

    def _invite(self, coordinator: Coordinator, number: int) -> Invitation:
        key, patience_s = (
            bytes.fromhex(self._named.key),
            self._plan.settings.values.elastic_patience_s,
        )
        return self._limits.invitation(
            key, self._named.job_id, number, coordinator.endpoint, patience_s
        )

    def _prepare(self, stack: contextlib.ExitStack, spec: task.TaskSpec) -> Stages:
        """Prepare the stages; what they need ends with the stack."""
        plan, limits, job_id = self._plan, self._limits, self._named.job_id
        program = stack.enter_context(carried(plan.shim, plan.program))
        is_hidden = plan.options.verbose < SHOWS_SPARKS_LOG
        stack.enter_context(spark_log.hidden_failures(plan.shim, job_id, is_hidden=is_hidden))
        body = task.make_task(spec, program, b"", "sparkhvd.runner.elastic.task")

        def make(size: int) -> DataFrame:
            profile = plan.options.profile
            return plan.shim.stage(size, body, task.ROW_SCHEMA, profile, is_barrier=False)

        text = f"sparkhvd: {limits.smallest} to {limits.largest} ranks, attempt {spec.attempt + 1}"
        stopped = Stopped(_STAGE_HAS_ENDED)
        return Stages(
            plan.shim, make, f"sparkhvd-{job_id}", text, lambda: self._events.put(stopped)
        )

    # --- The end. ---

    def _report(self, verdict: Verdict, tasks: Tasks) -> JobReport[Any]:
        order = Ends(verdict, tasks.outcomes).order()
        outcomes = tuple(
            replace(tasks.outcomes[number], rank=rank) for rank, number in enumerate(order)
        )
        return JobReport(
            results=[launching.load_result(tasks.results[number]) for number in order],
            attempts=self._named.number + 1,
            launch_s=max(0.0, outcomes[0].started_at - self._submitted_at),
            run_s=max(outcome.run_s for outcome in outcomes),
            outcomes=outcomes,
        )

    def _failure(self, verdict: Verdict, tasks: Tasks, stages: Stages) -> Failure:
        if self._refused:
            return Failure(PreflightError(self._refused), is_lost=False)
        ends = Ends(verdict, tasks.outcomes)
        if verdict.problem == _STAGE_HAS_ENDED and ends.is_lost:
            cause = self._of_spark(stages.ended())
            return Failure(error_of(cause, ends.size), is_retryable(cause))
        if not verdict.has_begun:
            error = PreflightError(
                f"after {self._limits.start_timeout_s:g} s (start_timeout=) no task of the job has started. Free slots of the application, or raise "
                "start_timeout."
            )
            return Failure(error, is_lost=False)
        return ends.failure(verdict.problem.replace(_STAGE_HAS_ENDED, ""))

    def _of_spark(self, future: Future) -> Outcome:
        """Return what Spark, or the tasks, tell of the end of the stage."""
        if (error := future.exception()) is not None:
            if isinstance(error, SparkhvdError):  # Spark itself is gone
                raise error
            return from_spark_failure(str(error), self._plan.shim.worker_python())
        reasons = [bytes(row["data"]).decode() for row in future.result()]
        if not reasons:
            return Outcome(None, Kind.SPARK, message=f"{_STAGE_HAS_ENDED} early")
        return Outcome(
            None,
            Kind.PREFLIGHT,
            message=f"The tasks cannot reach the driver ({reasons[0]}). Open a way from the executors to this process, or let "
            "spark.driver.host name an address at which they reach it.",
        )
