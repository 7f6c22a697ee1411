"""Driver's side of a launch: check, wait for slots, submit one barrier stage, collect, and relaunch after a loss.

**Threads**: the caller's thread waits. Ctrl-C interrupts it, and reaches the ranks first (`interrupts`).
**Ownership**: launches of one application share its slots in call order (`slots`). **Shutdown**:
leaving `launch` early cancels the Spark job by its tag; the tasks end with it, and the trainers with them.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import secrets
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from sparkhvd import cpus
from sparkhvd.errors import InvalidArgumentError, PreflightError, RankError, SparkhvdError
from sparkhvd.runner import launching, live_output, outcome_files, preflight, results, task
from sparkhvd.runner.gpu import decide
from sparkhvd.runner.gpu.decide import check_profile, default_slots, plan_gpus, share_of, slots_of
from sparkhvd.runner.interrupts import Interrupter
from sparkhvd.runner.live_output import Attempt, LiveOutput
from sparkhvd.runner.options import JobReport, LaunchOptions
from sparkhvd.runner.outcomes import (
    Outcome,
    OutcomeKind,
    all_ok,
    describe,
    error_of,
    find_embedded,
    find_referred,
    from_spark_failure,
    is_retryable,
    root_cause,
)
from sparkhvd.runner.prewarm import Prewarm
from sparkhvd.runner.protocol import carried, dumps
from sparkhvd.runner.results import LIMIT_KEY, ResultChunks, pieces_for
from sparkhvd.runner.slots import (
    SLOT_CONF_KEYS,
    LaunchTicket,
    Slots,
    choose_num_proc,
    is_local,
    launch_ticket,
    local_slots,
)
from sparkhvd.settings import ZYGOTE_STAYS_S, JobSettings, Settings, conf_keys
from sparkhvd.spark import SparkShim, running_tasks

if TYPE_CHECKING:
    from pyspark.sql import Row


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
            f"The executors have GPUs, but the ranks get no GPU: {plan.gpus.reason}.",
        )
    is_alone = options.is_alone or plan.gpus.mode == decide.GpuMode.HOST
    share = share_of(plan.options.profile)
    with launch_ticket(shim.application(), share, plan.size, is_alone=is_alone) as place:
        return _launch_until_done(plan, place)


def prewarm(
    shim: SparkShim, num_proc: int, options: LaunchOptions, *, is_barrier: bool = True
) -> Prewarm | None:
    """Prepare the early start of a launch's zygotes, or return None if zygotes are off.

    Tasks of an earlier Spark job call the result, so the zygotes import torch while that job runs.

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
    return Prewarm(
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
        return error_of(self.cause, size, others=self.outcomes, spark_text=self.spark_text)


def _launch_until_done(plan: LaunchPlan, place: LaunchTicket) -> JobReport[Any]:
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


def _attempt(plan: LaunchPlan, attempt: int) -> JobReport[Any] | _Failure:
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
    plan: LaunchPlan, spec: task.TaskSpec, interrupter: Interrupter | None
) -> JobReport[Any] | _Failure:
    options, attempt, job_id = plan.options, spec.attempt, spec.job_id
    submitted_at = time.time()
    description = f"sparkhvd: {plan.size} ranks, attempt {attempt + 1}"
    try:
        with (
            interrupter or contextlib.nullcontext(),
            carried(plan.shim, plan.program) as program,
            live_output.hidden_failures(
                plan.shim, job_id, is_hidden=options.verbose < SHOWS_SPARKS_LOG
            ),
        ):
            body = task.make_task(spec, program, plan.shared)
            stage = plan.shim.stage(plan.size, body, results.row_schema(), options.profile)
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


def _report(
    plan: LaunchPlan, attempt: int, rows: Sequence[Row], submitted_at: float
) -> JobReport[Any]:
    parts: dict[int, dict[int, bytes]] = collections.defaultdict(dict)
    for row in rows:
        parts[row["rank"]][row["part"]] = bytes(row["data"])
    outcomes, values = [], []
    for rank in range(plan.size):
        own = parts.get(rank, {})
        if results.OUTCOME_PART not in own:
            raise RankError(
                f"Spark returned no result of rank {rank}. See the log of its executor.",
                rank=rank,
                exit="lost",
            )
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


def _failure(plan: LaunchPlan, attempt: int, job_id: str, error: Exception) -> _Failure:
    """Find the root cause in the outcomes of the ranks and in Spark's error."""
    options = plan.options
    text = str(error)
    referred = find_referred(text)
    awaited = {outcome.rank for outcome in referred}
    run_dir = options.run_dir or ""
    written = outcome_files.await_outcomes(
        options.shared, run_dir, attempt, job_id, plan.size, awaited
    )
    of_spark = from_spark_failure(text, plan.shim.worker_python())
    known = {outcome.rank: outcome for outcome in (*referred, *find_embedded(text), *written)}
    # Spark's error counts if no rank has reported, or if it reports the loss of another rank.
    if not known or (of_spark.kind == OutcomeKind.LOST and of_spark.rank not in known):
        known[of_spark.rank] = replace(of_spark, attempt=attempt)
    outcomes = tuple(known.values())
    cause = root_cause(outcomes)
    if cause is None:  # every rank that has reported succeeded: the failure is Spark's
        cause = replace(of_spark, attempt=attempt)
    return _Failure(cause, outcomes, of_spark.message)


# ----------------------------------------------------------------------------------------------------
# Decisions of the driver before a launch under Spark, shared by its attempts.

# At this `verbose` and above Spark's own log of a failure is shown, too.
SHOWS_SPARKS_LOG = 2


@dataclass(frozen=True)
class LaunchPlan:
    """Checked launch, the same for all its attempts.

    Attributes:
        shim: session.
        program: the pickled call.
        size: number of ranks; for an elastic job the maximum.
        options: of the launch.
        settings: of the launch.
        gpus: decision on the ranks' GPUs.
        fixed_threads: threads per rank; None means the task's cores.
        configured_slots: the most that the configuration can reach; None if unknown.
        shared: the pickled shared files; empty without them.
        is_local: whether all tasks are children of one process.
        is_dynamic: whether dynamic allocation of executors is on.
        pieces: how results are cut into pieces.
    """

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
    is_dynamic: bool
    pieces: ResultChunks = ResultChunks()

    @property
    def is_terminal(self) -> bool:
        """Whether the tasks' stderr is this process's."""
        return self.is_local and self.shim.is_served_here()

    def slots(self) -> int | None:
        """Count the slots of the registered executors, or the configured slots if unknown.

        The registered executors are unknown on Spark Connect.
        """
        registered = self.shim.registered_slots(self.options.profile)
        return self.configured_slots if registered is None else registered

    def spec(
        self, size: int, attempt: Attempt, driver_at: tuple[str, int] | None, live: LiveOutput
    ) -> task.TaskSpec:
        """Make the specification for the tasks of an attempt.

        Args:
            size: range of rank numbers.
            attempt: its number and key.
            driver_at: a port of the driver; None without one.
            live: its output.
        """
        options = self.options
        return task.TaskSpec(
            size=size,
            attempt=attempt.number,
            job_id=attempt.job_id,
            key=attempt.key,
            settings=self.settings.to_json(),
            env=dict(options.env),
            driver=preflight.rank_facts(()).to_dict(),
            requirements=options.requirements,
            preload=tuple(launching.preload(self.program, options.requirements)),
            fixed_threads=self.fixed_threads,
            run_dir=options.run_dir or "",
            gpu_mode=self.gpus.mode,
            needs_gpu=self.gpus.is_required,
            driver_at=driver_at,
            is_local=self.is_local,
            timestamps=options.timestamps,
            live=None if live.way is None else live.way.to_dict(),
            is_quiet=self.is_terminal and options.verbose <= 0,
            piece_bytes=self.pieces.num_bytes,
        )

    def live_output(self, attempt: Attempt) -> LiveOutput:
        choice = self.settings.values.live_output
        return LiveOutput(self.shim, self.options, choice, attempt, on_terminal=self.is_terminal)


def make_plan(
    shim: SparkShim,
    num_proc: int | None,
    options: LaunchOptions,
    program: bytes,
    *,
    is_barrier: bool = True,
) -> LaunchPlan:
    """Make the plan for all attempts of a launch. See `launch` for the errors.

    Args:
        shim: session.
        num_proc: number of ranks; None for every slot.
        options: of the launch.
        program: the pickled call.
        is_barrier: whether all ranks start together; else there may be fewer slots than ranks.
    """
    keys = (*SLOT_CONF_KEYS, *preflight.PREFLIGHT_CONF_KEYS, *launching.THREAD_CONF_KEYS, LIMIT_KEY)
    conf = shim.conf(keys)
    env = {**launching.thread_variables(conf), **launching.check_env(options.env)}
    settings = _settings(shim, options.settings, env, conf.get("spark.master", ""))
    preflight.check_conf(conf, is_barrier=is_barrier)
    preflight.check_databricks(shim.is_connect)
    check_profile(options.profile, conf)
    gpu_plan, profile = plan_gpus(shim, conf, options.use_gpu, options.profile)
    slots = slots_of(conf, gpu_plan, options.profile)
    if num_proc is None and gpu_plan.mode == decide.GpuMode.HOST:
        slots = default_slots(shim, conf, slots, settings.values.cuda_library, env)
    waits_for_slots = num_proc is not None and not is_barrier
    size = choose_num_proc(num_proc, Slots(None, "", "") if waits_for_slots else slots)
    return LaunchPlan(
        shim=shim,
        program=program,
        size=size,
        options=replace(options, env=env, profile=profile),
        settings=settings,
        gpus=gpu_plan,
        fixed_threads=_fixed_threads(options, conf, size),
        configured_slots=slots.maximum,
        shared=b"" if options.shared is None else dumps(options.shared),
        is_local=is_local(conf.get("spark.master", "")),
        is_dynamic=preflight.is_dynamic(conf),
        # A launch with files keeps its important data there; persisting its rows would cost 30 ms.
        pieces=pieces_for(conf, size) if options.shared is None else ResultChunks(),
    )


def check_size(program: bytes, shim: SparkShim) -> None:
    """Reject a call too large for the session.

    Raises:
        InvalidArgumentError: it is too large.
    """
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
        conf = shim.conf(conf_keys()) if given is None else {}
        chosen = launching.choose_settings(given, env, conf)
    if chosen.values.nursery == "auto" and master.startswith(("yarn", "k8s")):
        # A zygote's memory would count against the container, and its shutdown is not tested there.
        chosen = replace(chosen, values=replace(chosen.values, nursery="0"))
    if (
        not chosen.values.nursery_idle_s
        and master.startswith("local")
        and not master.startswith("local-cluster")
    ):
        # On a local master the zygote ends with the driver's JVM, so it needs no short idle time. Pauses in a notebook are
        # longer than a minute.
        chosen = replace(chosen, values=replace(chosen.values, nursery_idle_s=ZYGOTE_STAYS_S))
    return chosen


def _fixed_threads(options: LaunchOptions, conf: Mapping[str, str], size: int) -> int | None:
    """Threads per rank: the user's number, or on `local[N]` an equal share. None if the task decides."""
    if options.threads_per_rank is not None:
        return options.threads_per_rank
    threads = local_slots(conf.get("spark.master", ""), cpus.jvm_processors())
    return None if threads is None else max(1, threads // size)


def print_line(verbose: int, text: str) -> None:
    """Print a line on the driver, unless `verbose` is 0."""
    if verbose > 0:
        launching.erase_line(sys.stderr)
        sys.stderr.write(f"sparkhvd: {text}\n")
        sys.stderr.flush()


def no_progress(error: SparkhvdError, losses: int, progress: object) -> SparkhvdError:
    """Add a line to the error about repeated losses at the same progress."""
    text = f"{error}\nNot relaunched: {losses} losses without progress in between (still at {progress})."
    if not isinstance(error, RankError):
        return error
    return RankError(text, **vars(error), cause=error.__cause__)


# ----------------------------------------------------------------------------------------------------
# Prints that a stage waits because other jobs of its application hold the task slots.
# **Threads**: one, which ends with the wait. **Failure**: without information from the session the line is omitted.

# Polling interval.
_LATE_S = 5.0


@contextlib.contextmanager
def announce_slot_wait(plan: LaunchPlan, tag: str) -> Iterator[None]:
    """Print once if Spark has not started the stage of this tag after some seconds while other jobs hold task slots."""
    over = threading.Event()

    def poll() -> None:
        while not over.wait(_LATE_S):
            begun, others = running_tasks(plan.shim.session, tag) or (0, 0)
            if begun:
                return
            if others:  # without them Spark is only slow, and a line would not help the user
                print_line(
                    plan.options.verbose,
                    f"Waiting for task slots: the ranks need {plan.size} at once. {others} task{'s' * (others != 1)} of other jobs "
                    f"of this application run{'s' * (others == 1)}.",
                )
                return

    if plan.options.verbose > 0 and not plan.shim.is_connect:  # a Connect client cannot see tasks
        with contextlib.suppress(RuntimeError):  # Python 3.12 starts no thread at exit
            threading.Thread(target=poll, name="sparkhvd-waits", daemon=True).start()
    try:
        yield
    finally:
        over.set()
