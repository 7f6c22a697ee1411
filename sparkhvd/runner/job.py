"""Driver's side of a launch: check, wait for slots, submit one barrier stage, collect, and relaunch after a loss.

**Threads**: the caller's thread waits and can be interrupted by Ctrl-C, which reaches the ranks first, see `interrupts`.
**Ownership**: launches of one application share its slots in the order of their calls, see `admission`. **Shutdown**:
leaving `launch` early cancels the Spark job by its tag; the tasks end with it, and the trainers with them.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import secrets
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from sparkhvd.errors import PreflightError, RankError, SparkhvdError
from sparkhvd.runner import launching, preflight, results, spark_log, stored, task
from sparkhvd.runner.admission import Turn, turn
from sparkhvd.runner.gpu import decide
from sparkhvd.runner.gpu.profiles import share_of
from sparkhvd.runner.head_start import HeadStart
from sparkhvd.runner.interrupts import Interrupter
from sparkhvd.runner.live_output import Attempt
from sparkhvd.runner.options import JobReport, LaunchOptions
from sparkhvd.runner.outcomes import (
    Kind,
    Outcome,
    all_ok,
    describe,
    error_of,
    find_embedded,
    find_referred,
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
from sparkhvd.runner.preflight import SharedFiles
from sparkhvd.runner.slot_wait import announce_slot_wait
from sparkhvd.sessions import active_session
from sparkhvd.spark import SparkShim

if TYPE_CHECKING:
    from pyspark.sql import Row

__all__ = [
    "JobReport",
    "LaunchOptions",
    "Outcome",
    "SharedFiles",
    "SparkShim",
    "active_session",
    "head_start",
    "launch",
]

R = TypeVar("R")


def launch(
    shim: SparkShim,
    fn: Callable[..., R],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    num_proc: int | None,
    options: LaunchOptions,
) -> JobReport[R]:
    """Call `fn(*args, **kwargs)` on `num_proc` ranks in one barrier stage of a session.

    Raises:
        InvalidArgumentError: an argument is wrong, or `fn` cannot be pickled. Nothing has started.
        PreflightError: the cluster or the store cannot run this job. `fn` has not started.
        RankError: `fn` failed on a rank, or ranks were lost more often than `max_retries` allows.
    """
    program = launching.dump_call(fn, args, kwargs)
    check_size(program, shim)
    plan = make_plan(shim, num_proc, options, program)
    if plan.gpus.leaves_gpus:
        print_line(
            options.verbose,
            f"The executors have GPUs, and the ranks get none: {plan.gpus.reason}.",
        )
    is_alone = options.is_alone or plan.gpus.mode == decide.Mode.HOST
    share = share_of(plan.options.profile)
    with turn(shim.application(), share, plan.size, is_alone=is_alone) as place:
        return _launch_until_done(plan, place)


def head_start(
    shim: SparkShim, num_proc: int, options: LaunchOptions, *, is_barrier: bool = True
) -> HeadStart | None:
    """Return the head start of a launch with this number of ranks and these options, for tasks before it; None without nurseries.

    Args:
        shim: of the session.
        num_proc: number of ranks.
        options: of the launch.
        is_barrier: see `make_plan`.

    Raises:
        InvalidArgumentError: see `launch`.
        PreflightError: see `launch`.
    """
    plan = make_plan(shim, num_proc, options, b"", is_barrier=is_barrier)
    if plan.settings.values.nursery == "0":
        return None
    return HeadStart(
        size=plan.size,
        settings=plan.settings.to_json(),
        env=dict(plan.options.env),
        fixed_threads=plan.fixed_threads,
        gpu_mode=plan.gpus.mode,
    )


@dataclass(frozen=True)
class _Failure:
    """Failure of an attempt."""

    cause: Outcome
    outcomes: tuple[Outcome, ...]
    spark_text: str

    def error(self, size: int) -> SparkhvdError:
        """Return the exception for the caller."""
        return error_of(self.cause, size, others=self.outcomes, spark_text=self.spark_text)


def _launch_until_done(plan: Plan, place: Turn) -> JobReport[Any]:
    options = plan.options
    limit_s = options.start_timeout_s or plan.settings.values.start_timeout_s
    last_progress: object = None
    for attempt in range(options.max_retries + 1):
        with place.slots(plan.slots, limit_s, functools.partial(print_line, options.verbose)):
            ended = _attempt(plan, attempt)
        if isinstance(ended, JobReport):
            return ended
        error = ended.error(plan.size)
        if not is_retryable(ended.cause) or attempt == options.max_retries:
            raise error
        if options.progress is not None:
            progress = options.progress()
            if attempt > 0 and progress == last_progress:
                raise no_progress(error, attempt + 1, progress)
            last_progress = progress
        cause = describe(ended.cause, plan.size)
        options.relaunched(cause)
        print_line(
            options.verbose,
            f"{cause}\nRelaunching ({attempt + 1} of {options.max_retries}).",
        )
    raise AssertionError("the last attempt returns or raises")


# --- one attempt --------------------------------------------------------------------------------------------


def _attempt(plan: Plan, attempt: int) -> JobReport[Any] | _Failure:
    """Run one barrier stage to its end."""
    options = plan.options
    job_id, key = secrets.token_hex(8), secrets.token_hex(32)
    if options.shared is not None and options.run_dir is not None:
        problem = preflight.write_token(options.shared, options.run_dir, attempt, None, job_id)
        if problem:
            raise PreflightError(f"The driver {problem}. Give a store that the driver can write.")
    interrupter = Interrupter.listen(plan.shim, key, job_id, attempt, plan.size)
    named = Attempt(key, job_id, attempt, plan.size)
    live = plan.live_output(named)
    spec = plan.spec(plan.size, named, None if interrupter is None else interrupter.address, live)
    with live:
        ended = _run_stage(plan, spec, interrupter)
    live.show_rest(ended.outcomes)
    return ended


def _run_stage(
    plan: Plan, spec: task.TaskSpec, interrupter: Interrupter | None
) -> JobReport[Any] | _Failure:
    options, attempt, job_id = plan.options, spec.attempt, spec.job_id
    submitted_at = time.time()
    description = f"sparkhvd: {plan.size} ranks, attempt {attempt + 1}"
    try:
        with (
            interrupter or contextlib.nullcontext(),
            carried(plan.shim, plan.program) as program,
            spark_log.hidden_failures(
                plan.shim, job_id, is_hidden=options.verbose < SHOWS_SPARKS_LOG
            ),
        ):
            body = task.make_task(spec, program, plan.shared)
            stage = plan.shim.stage(plan.size, body, task.ROW_SCHEMA, options.profile)
            interrupt = None if interrupter is None else interrupter.interrupt
            with announce_slot_wait(plan, spec.tag):
                rows = results.collect(
                    plan.shim, stage, plan.pieces, plan.size, spec.tag, description, interrupt
                )
    except SparkhvdError:  # Spark itself is gone
        raise
    except Exception as e:  # noqa: BLE001 - Spark raises Py4JJavaError or its own; only the text has the cause
        return _failure(plan, attempt, job_id, e)
    return _report(plan, attempt, rows, submitted_at)


def _report(plan: Plan, attempt: int, rows: Sequence[Row], submitted_at: float) -> JobReport[Any]:
    parts: dict[int, dict[int, bytes]] = collections.defaultdict(dict)
    for row in rows:
        parts[row["rank"]][row["part"]] = bytes(row["data"])
    outcomes, values = [], []
    for rank in range(plan.size):
        own = parts.get(rank, {})
        if results.OUTCOME_PART not in own:
            raise RankError(f"Spark returned no row of rank {rank}.", rank=rank, exit="lost")
        outcomes.append(Outcome.from_json(own.pop(results.OUTCOME_PART).decode()))
        values.append(launching.load_result(b"".join(own[part] for part in sorted(own))))
    if not all_ok(outcomes, plan.size):
        raise AssertionError("a task with another outcome raises")
    for outcome in outcomes:
        for text in outcome.warnings:
            warnings.warn(text, stacklevel=2)
    started_at = max(outcome.started_at for outcome in outcomes)
    return JobReport(
        results=values,
        attempts=attempt + 1,
        launch_s=max(0.0, started_at - submitted_at),
        run_s=max(outcome.run_s for outcome in outcomes),
        outcomes=tuple(outcomes),
    )


def _failure(plan: Plan, attempt: int, job_id: str, error: Exception) -> _Failure:
    """Find the root cause in the outcomes of the ranks and in Spark's error."""
    options = plan.options
    text = str(error)
    referred = find_referred(text)
    awaited = {outcome.rank for outcome in referred}
    run_dir = options.run_dir or ""
    written = stored.await_outcomes(options.shared, run_dir, attempt, job_id, plan.size, awaited)
    of_spark = from_spark_failure(text, plan.shim.worker_python())
    known = {outcome.rank: outcome for outcome in (*referred, *find_embedded(text), *written)}
    # Spark's error counts where no rank has reported, or where it tells of the loss of another rank.
    if not known or (of_spark.kind == Kind.LOST and of_spark.rank not in known):
        known[of_spark.rank] = replace(of_spark, attempt=attempt)
    outcomes = tuple(known.values())
    cause = root_cause(outcomes)
    if cause is None:  # every rank that has reported is well: the failure is Spark's
        cause = replace(of_spark, attempt=attempt)
    return _Failure(cause, outcomes, of_spark.message)
