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
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TextIO, TypeVar

from sparkhvd import processors
from sparkhvd.errors import InvalidArgumentError, PreflightError, RankError, SparkhvdError
from sparkhvd.rank_settings import JobSettings
from sparkhvd.runner import launching, placement, preflight, spark_log, task
from sparkhvd.runner.admission import Turn, turn
from sparkhvd.runner.gpu import decide
from sparkhvd.runner.gpu.profiles import check_profile, default_slots, plan_gpus, share_of, slots_of
from sparkhvd.runner.horovod_arguments import write_tails
from sparkhvd.runner.interrupts import Interrupter
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
from sparkhvd.runner.pickling import dumps, early_call
from sparkhvd.runner.preflight import SharedFiles
from sparkhvd.sessions import active_session
from sparkhvd.settings import Settings
from sparkhvd.spark import SparkShim

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import Row

__all__ = [
    "JobReport",
    "LaunchOptions",
    "Outcome",
    "SharedFiles",
    "SparkShim",
    "active_session",
    "launch",
]

R = TypeVar("R")

# From this `verbose` on Spark's own log of a failure is shown, too.
_SHOWS_SPARKS_LOG = 2


@dataclass(frozen=True)
class LaunchOptions:
    """Options of a launch.

    Attributes:
        env: environment variables of the ranks.
        settings: engine settings given in code; None means those of the Spark conf and of the environment; `JobSettings`
            are final.
        start_timeout_s: longest wait for enough task slots; None means the setting.
        max_retries: relaunches after a lost process, executor or host.
        verbose: 0 prints nothing on the driver; 1 prints waits and relaunches; 2 also leaves Spark's own log of a failed rank.
        threads_per_rank: threads of a rank; None means the task's cores, on `local[N]` N // num_proc.
        shared: files that the driver and every rank reach; checked to be shared, and outcomes are written there.
        run_dir: folder of this run in `shared`; needed with it.
        progress: returns the progress of the job, for example the newest checkpoint's number. Two losses in a row with
            an equal value are final.
        requirements: modules that the workers' Python must have, for example ("torch", "pyarrow").
        use_gpu: whether every rank gets a GPU of its own; None: if Spark gives tasks GPUs. See `gpu.decide`.
        profile: Spark resource profile of the stage; None: one that asks for a GPU per rank where that is needed.
        early: called in each rank's process before it imports more than a nursery has, and before it knows its rank, for example to
            begin reading in a thread; must return soon. Its exceptions are ignored.
        is_alone: whether ranks take GPUs by local rank on their own, so that two such launches at once would share them.
        timestamps: whether lines of ranks begin with the local time.
        stream: gets the last lines of every rank's output at the end of each attempt.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    settings: Settings | JobSettings | None = None
    start_timeout_s: float | None = None
    max_retries: int = 2
    verbose: int = 1
    threads_per_rank: int | None = None
    shared: SharedFiles | None = None
    run_dir: str | None = None
    progress: Callable[[], object] | None = None
    requirements: tuple[str, ...] = ()
    use_gpu: bool | None = None
    profile: ResourceProfile | None = None
    early: Callable[[int, int], object] | None = None
    is_alone: bool = False
    timestamps: bool = False
    stream: TextIO | None = None

    def __post_init__(self) -> None:
        retries = self.max_retries
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise InvalidArgumentError(
                f"max_retries is {retries!r}; it must be a whole number, 0 or more."
            )
        if self.start_timeout_s is not None and not self.start_timeout_s > 0:
            raise InvalidArgumentError(
                f"start_timeout is {self.start_timeout_s!r}; it must be more than 0 seconds."
            )
        if self.threads_per_rank is not None and self.threads_per_rank < 1:
            raise InvalidArgumentError(
                f"threads_per_rank is {self.threads_per_rank!r}; it must be at least 1."
            )
        if (self.shared is None) != (self.run_dir is None):
            raise InvalidArgumentError("shared and run_dir belong together; give both or neither.")


@dataclass(frozen=True)
class JobReport(Generic[R]):
    """Result of a launch.

    Attributes:
        results: results of the function, by rank.
        attempts: launches that were needed; 1 when nothing was lost.
        launch_s: seconds from the submission of the last attempt until every rank ran the function (by the clocks
            of the hosts).
        run_s: seconds that the slowest rank ran the function.
        outcomes: outcomes of the last attempt, by rank.
    """

    results: list[R]
    attempts: int
    launch_s: float
    run_s: float
    outcomes: tuple[Outcome, ...]


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
    _check_size(program, shim)
    env = launching.check_env(options.env)
    conf = shim.conf((*placement.CONF_KEYS, *preflight.CONF_KEYS))
    settings = _settings(shim, options.settings, env, conf.get("spark.master", ""))
    preflight.check_conf(conf)
    check_profile(options.profile, conf)
    gpu_plan, profile = plan_gpus(shim, conf, options.use_gpu, options.profile)
    if gpu_plan.leaves_gpus:
        _print(
            options.verbose, f"The executors have GPUs, and the ranks get none: {gpu_plan.reason}."
        )
    slots = slots_of(conf, gpu_plan, options.profile)
    if num_proc is None and gpu_plan.mode == decide.Mode.HOST:
        slots = default_slots(shim, conf, slots, settings.values.cuda_library, env)
    size = placement.choose_num_proc(num_proc, slots)
    plan = _Plan(
        shim=shim,
        program=program,
        size=size,
        options=replace(options, env=env, profile=profile),
        settings=settings,
        gpus=gpu_plan,
        fixed_threads=_fixed_threads(options, conf, size),
        configured_slots=slots.maximum,
        shared=b"" if options.shared is None else dumps(options.shared),
        is_local=placement.is_local(conf.get("spark.master", "")),
    )
    is_alone = options.is_alone or gpu_plan.mode == decide.Mode.HOST
    with turn(shim.application(), share_of(profile), size, is_alone=is_alone) as place:
        return _launch_until_done(plan, place)


@dataclass(frozen=True)
class _Plan:
    """Launch that has been checked; the same for all its attempts."""

    shim: SparkShim
    program: bytes = field(repr=False)
    size: int
    options: LaunchOptions
    settings: JobSettings
    gpus: decide.GpuPlan
    fixed_threads: int | None
    configured_slots: int | None
    shared: bytes = field(repr=False)
    is_local: bool

    def slots(self) -> int | None:
        """Return the slots of the registered executors, on Spark Connect the configured ones."""
        registered = self.shim.registered_slots(self.options.profile)
        return self.configured_slots if registered is None else registered


@dataclass(frozen=True)
class _Failure:
    """Failure of an attempt."""

    cause: Outcome
    outcomes: tuple[Outcome, ...]
    spark_text: str

    def error(self, size: int) -> SparkhvdError:
        """Return the exception for the caller."""
        return error_of(self.cause, size, others=self.outcomes, spark_text=self.spark_text)


def _launch_until_done(plan: _Plan, place: Turn) -> JobReport[Any]:
    options = plan.options
    limit_s = options.start_timeout_s or plan.settings.values.start_timeout_s
    last_progress: object = None
    for attempt in range(options.max_retries + 1):
        with place.slots(plan.slots, limit_s, functools.partial(_print, options.verbose)):
            ended = _attempt(plan, attempt)
        write_tails(options.stream, ended.outcomes)
        if isinstance(ended, JobReport):
            return ended
        error = ended.error(plan.size)
        if not is_retryable(ended.cause) or attempt == options.max_retries:
            raise error
        if options.progress is not None:
            progress = options.progress()
            if attempt > 0 and progress == last_progress:
                raise _no_progress(error, attempt + 1, progress)
            last_progress = progress
        _print(
            options.verbose,
            f"{describe(ended.cause, plan.size)}\nRelaunching ({attempt + 1} of {options.max_retries}).",
        )
    raise AssertionError("the last attempt returns or raises")


def _no_progress(error: SparkhvdError, losses: int, progress: object) -> SparkhvdError:
    text = f"{error}\nNot relaunched: {losses} losses without progress in between (still at {progress})."
    if not isinstance(error, RankError):
        return error
    return RankError(text, **vars(error), cause=error.__cause__)


# --- one attempt --------------------------------------------------------------------------------------------


def _attempt(plan: _Plan, attempt: int) -> JobReport[Any] | _Failure:
    """Run one barrier stage to its end."""
    options = plan.options
    job_id, key = secrets.token_hex(8), secrets.token_hex(32)
    if options.shared is not None and options.run_dir is not None:
        problem = preflight.write_token(options.shared, options.run_dir, attempt, None, job_id)
        if problem:
            raise PreflightError(f"The driver {problem}. Give a store that the driver can write.")
    interrupter = Interrupter.listen(plan.shim, key, job_id, attempt, plan.size)
    spec = task.TaskSpec(
        size=plan.size,
        attempt=attempt,
        job_id=job_id,
        key=key,
        settings=plan.settings.to_json(),
        env=dict(options.env),
        driver=preflight.rank_facts(()).to_dict(),
        requirements=options.requirements,
        preload=tuple(launching.preload(plan.program, options.requirements)),
        early=early_call(options.early),
        fixed_threads=plan.fixed_threads,
        run_dir=options.run_dir or "",
        gpu_mode=plan.gpus.mode,
        needs_gpu=plan.gpus.is_required,
        driver_at=None if interrupter is None else interrupter.address,
        is_local=plan.is_local,
        timestamps=options.timestamps,
    )
    submitted_at = time.time()
    tag = f"sparkhvd-{job_id}"
    description = f"sparkhvd: {plan.size} ranks, attempt {attempt + 1}"
    try:
        with (
            interrupter or contextlib.nullcontext(),
            carried(plan.shim, plan.program) as program,
            spark_log.hidden_failures(
                plan.shim, job_id, is_hidden=options.verbose < _SHOWS_SPARKS_LOG
            ),
        ):
            body = task.make_task(spec, program, plan.shared)
            stage = plan.shim.stage(plan.size, body, task.ROW_SCHEMA, options.profile)
            interrupt = None if interrupter is None else interrupter.interrupt
            rows = plan.shim.collect(stage, tag, description, interrupt)
    except SparkhvdError:  # Spark itself is gone
        raise
    except Exception as e:  # noqa: BLE001 - Spark raises Py4JJavaError or its own; only the text has the cause
        return _failure(plan, attempt, job_id, e)
    return _report(plan, attempt, rows, submitted_at)


def _report(plan: _Plan, attempt: int, rows: Sequence[Row], submitted_at: float) -> JobReport[Any]:
    parts: dict[int, dict[int, bytes]] = collections.defaultdict(dict)
    for row in rows:
        parts[row["rank"]][row["part"]] = bytes(row["data"])
    outcomes, results = [], []
    for rank in range(plan.size):
        own = parts.get(rank, {})
        if task.OUTCOME_PART not in own:
            raise RankError(f"Spark returned no row of rank {rank}.", rank=rank, exit="lost")
        outcomes.append(Outcome.from_json(own.pop(task.OUTCOME_PART).decode()))
        results.append(launching.load_result(b"".join(own[part] for part in sorted(own))))
    if not all_ok(outcomes, plan.size):
        raise AssertionError("a task with another outcome raises")
    for outcome in outcomes:
        for text in outcome.warnings:
            warnings.warn(text, stacklevel=2)
    started_at = max(outcome.started_at for outcome in outcomes)
    return JobReport(
        results=results,
        attempts=attempt + 1,
        launch_s=max(0.0, started_at - submitted_at),
        run_s=max(outcome.run_s for outcome in outcomes),
        outcomes=tuple(outcomes),
    )


def _failure(plan: _Plan, attempt: int, job_id: str, error: Exception) -> _Failure:
    """Find the root cause in the outcomes of the ranks and in Spark's error."""
    options = plan.options
    text = str(error)
    referred = find_referred(text)
    awaited = {outcome.rank for outcome in referred}
    run_dir = options.run_dir or ""
    written = task.await_outcomes(options.shared, run_dir, attempt, job_id, plan.size, awaited)
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


# --- before the stage ---------------------------------------------------------------------------------------


def _check_size(program: bytes, shim: SparkShim) -> None:
    if shim.closure_limit is not None and len(program) > shim.closure_limit:
        raise InvalidArgumentError(
            f"fn and its arguments are {len(program) / 2**20:.0f} MiB when pickled; Spark Connect takes "
            f"{shim.closure_limit / 2**20:.0f} MiB. Put large data in a file or table and load it inside fn."
        )


def _settings(
    shim: SparkShim, given: Settings | JobSettings | None, env: Mapping[str, str], master: str
) -> JobSettings:
    if isinstance(given, JobSettings):
        chosen = given
    else:
        conf = shim.conf(Settings.conf_keys()) if given is None else {}
        chosen = launching.choose_settings(given, env, conf)
    if chosen.values.nursery == "auto" and master.startswith(("yarn", "k8s")):
        # Its memory would count against the container, and nobody has tried how they end it.
        chosen = replace(chosen, values=replace(chosen.values, nursery="0"))
    return chosen


def _fixed_threads(options: LaunchOptions, conf: Mapping[str, str], size: int) -> int | None:
    """Return the threads per rank: the user's number, or on `local[N]` an equal share; None leaves it to the task."""
    if options.threads_per_rank is not None:
        return options.threads_per_rank
    threads = placement.local_slots(conf.get("spark.master", ""), processors.whole())
    return None if threads is None else max(1, threads // size)


def _print(verbose: int, text: str) -> None:
    if verbose > 0:
        sys.stderr.write(f"sparkhvd: {text}\n")
        sys.stderr.flush()
